//! LFM2 and LFM2.5: gated short convolutions in most layers, attention in the others; and LFM2-MoE, with mixtures of experts in all layers but the
//! first ones.
//!
//! Defaults are those of transformers' `Lfm2Config` and `Lfm2MoeConfig`. `hidden_act` is no key of either: the activation is SiLU.
//! Not supported: biases of convolutions (`conv_bias`), which no published model has.

use super::keys::rope::rope_with_theta;
use super::keys::{
    Base, Defaults, bool_or, experts, filter_width, is_second_kind, layer_numbers, positive_or, size, size_or,
};
use crate::error::ArchError;
use crate::json::JsonObject;
use crate::mixer::{Mixer, QkNorm, ShortConvSpec};
use crate::naming::Naming;
use crate::router::{RouterScores, RouterSpec};
use crate::spec::{Activation, ExpertNames, LayerNorms, LayerSpec, MlpSpec, ModelSpec};

const DEFAULT_THETA: f64 = 1_000_000.0;

pub(super) fn spec(json: &JsonObject) -> Result<ModelSpec, ArchError> {
    let mlp = gated(dense_width(json)?);
    model(json, |_, _| Ok(mlp.clone()))
}

pub(super) fn moe_spec(json: &JsonObject) -> Result<ModelSpec, ArchError> {
    let (dense, dense_layers) = (gated(size_or(json, "intermediate_size", 7168)?), json.usize("num_dense_layers")?);
    let is_dense = |layer| layer < dense_layers.unwrap_or(2);
    model(json, |layer, layers| if is_dense(layer) { Ok(dense.clone()) } else { mixture(json, layers) })
}

/// Reads a model whose layers have these MLPs, by their number and the number of all.
fn model(json: &JsonObject, mlp: impl Fn(usize, usize) -> Result<MlpSpec, ArchError>) -> Result<ModelSpec, ArchError> {
    let defaults = Defaults { head_dim: None, kv_heads: Some(8), max_position_embeddings: 128_000, rms_norm_eps: 1e-5 };
    let mut base = Base::read(json, defaults)?;
    base.attention.qk_norm = QkNorm::PerHead;
    let conv = conv(json, 3)?;
    let layer = |(index, is_attention): (usize, bool)| {
        let layer = base.layer(mlp(index, base.count)?, LayerNorms::Pre, None);
        let mixer = if is_attention { layer.mixer } else { Mixer::ShortConv(conv.clone()) };
        Ok(LayerSpec { mixer, ..layer })
    };
    let kinds = attention_layers(json, base.count)?;
    let layers = kinds.into_iter().enumerate().map(layer).collect::<Result<_, ArchError>>()?;
    let theta = positive_or(json, "theta", DEFAULT_THETA)?;
    let spec = base.model(layers, vec![rope_with_theta(json, &base, theta)?])?;
    let tie = if json.get("tie_embedding").is_some() { "tie_embedding" } else { "tie_word_embeddings" };
    Ok(ModelSpec {
        naming: Naming::Lfm2,
        rms_norm_eps: positive_or(json, "norm_eps", 1e-5)?,
        tie_word_embeddings: bool_or(json, tie, true)?,
        ..spec
    })
}

/// Reads the convolution; filters cover `absent` tokens where no key says it.
pub(super) fn conv(json: &JsonObject, absent: usize) -> Result<ShortConvSpec, ArchError> {
    if bool_or(json, "conv_bias", false)? {
        return Err(json.unsupported("conv_bias", true, "Convolutions have no biases here; choose a model without"));
    }
    Ok(ShortConvSpec { channels: size(json, "hidden_size")?, width: filter_width(json, "conv_L_cache", absent)? })
}

/// Returns whether each layer has attention: by `layer_types`, or by the list `full_attn_idxs`; without both all of them have it.
fn attention_layers(json: &JsonObject, layers: usize) -> Result<Vec<bool>, ArchError> {
    if let Some(by_types) = is_second_kind(json, layers, &["conv", "full_attention"])? {
        return Ok(by_types);
    }
    let numbers = layer_numbers(json, "full_attn_idxs")?;
    Ok((0..layers).map(|layer| numbers.as_ref().is_none_or(|numbers| numbers.contains(&layer))).collect())
}

/// Reads the width of an MLP, which transformers adjusts unless `block_auto_adjust_ff_dim` is false: two thirds, times a factor, up to a multiple.
fn dense_width(json: &JsonObject) -> Result<usize, ArchError> {
    let key = if json.get("block_ff_dim").is_some() { "block_ff_dim" } else { "intermediate_size" };
    let width = size_or(json, key, 12_288)?;
    if !bool_or(json, "block_auto_adjust_ff_dim", true)? {
        return Ok(width);
    }
    let width = 2 * width / 3;
    let multiple = size_or(json, "block_multiple_of", 256)?;
    let factor = if json.is_null("block_ffn_dim_multiplier") {
        None
    } else {
        Some(positive_or(json, "block_ffn_dim_multiplier", 1.0)?)
    };
    Ok(factor.map_or(width, |factor| ((factor * width as f64) as usize).next_multiple_of(multiple)).max(1))
}

fn gated(intermediate_size: usize) -> MlpSpec {
    MlpSpec::Gated { intermediate_size, activation: Activation::Silu, fused: false, bias: false }
}

fn mixture(json: &JsonObject, layers: usize) -> Result<MlpSpec, ArchError> {
    let (count, top_k) = experts(json, ["num_experts", "num_local_experts"], [32, 4], layers)?;
    let sizes = [count, top_k, size_or(json, "moe_intermediate_size", 1792)?];
    let router = RouterSpec {
        scores: RouterScores::Sigmoid,
        normalizes: bool_or(json, "norm_topk_prob", true)?,
        epsilon: 1e-6,
        scale: positive_or(json, "routed_scaling_factor", 1.0)?,
        corrects: bool_or(json, "use_expert_bias", true)?,
        ..RouterSpec::softmax(true)
    };
    Ok(MlpSpec::experts(ExpertNames::Lfm2, sizes, Activation::Silu, router, None))
}
