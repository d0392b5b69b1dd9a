//! Qwen3-MoE: a Qwen3 whose MLPs are mixtures of experts, in all layers or in some.
//!
//! Defaults are those of transformers' `Qwen3MoeConfig`. A layer is a mixture unless `mlp_only_layers` lists it or
//! `decoder_sparse_step` skips it.
//! Not supported: `attention_dropout`, which is ignored.

use super::keys::{Base, Defaults, activation, bool_or, experts, layer_numbers, size_or, sliding_window};
use crate::error::ArchError;
use crate::json::JsonObject;
use crate::mixer::QkNorm;
use crate::router::{RouterSpec, SharedExpertSpec};
use crate::spec::{ExpertNames, LayerNorms, MlpSpec, ModelSpec};

pub(super) fn spec(json: &JsonObject) -> Result<ModelSpec, ArchError> {
    let defaults = Defaults { head_dim: None, kv_heads: Some(4), max_position_embeddings: 32_768, rms_norm_eps: 1e-6 };
    let mut base = Base::read(json, defaults)?.with_bias(false)?;
    base.attention.qk_norm = QkNorm::PerHead;
    // One window for all layers.
    let window = if bool_or(json, "use_sliding_window", false)? { sliding_window(json, 4096)? } else { None };
    let layer = |is_mixture: bool| {
        let mlp = if is_mixture { mixture(json, base.count, [128, 8, 768], None)? } else { dense(json, 6144)? };
        Ok(base.layer(mlp, LayerNorms::Pre, window))
    };
    let layers = mixture_layers(json, base.count)?.into_iter().map(layer).collect::<Result<_, ArchError>>()?;
    base.model(layers, vec![base.rope()?])
}

/// Reads a mixture under Qwen's names. Absent keys mean these numbers of experts and of experts per token, and this width of one.
pub(super) fn mixture(
    json: &JsonObject,
    layers: usize,
    [count, top_k, width]: [usize; 3],
    shared: Option<SharedExpertSpec>,
) -> Result<MlpSpec, ArchError> {
    let (count, top_k) = experts(json, ["num_experts", "num_local_experts"], [count, top_k], layers)?;
    let (sizes, activation) = ([count, top_k, size_or(json, "moe_intermediate_size", width)?], activation(json)?);
    let router = RouterSpec::softmax(bool_or(json, "norm_topk_prob", false)?);
    Ok(MlpSpec::experts(ExpertNames::Qwen, sizes, activation, router, shared))
}

/// Reads the MLP of a layer that is no mixture; an absent key means this width.
pub(super) fn dense(json: &JsonObject, width: usize) -> Result<MlpSpec, ArchError> {
    let intermediate_size = size_or(json, "intermediate_size", width)?;
    Ok(MlpSpec::Gated { intermediate_size, activation: activation(json)?, fused: false, bias: false })
}

/// Returns whether each layer is a mixture: every `decoder_sparse_step`-th one that `mlp_only_layers` does not list.
pub(super) fn mixture_layers(json: &JsonObject, layers: usize) -> Result<Vec<bool>, ArchError> {
    let step = size_or(json, "decoder_sparse_step", 1)?;
    let dense = layer_numbers(json, "mlp_only_layers")?.unwrap_or_default();
    Ok((0..layers).map(|layer| !dense.contains(&layer) && (layer + 1).is_multiple_of(step)).collect())
}
