//! Qwen3.5, 3.6 and 3.8, dense and with experts, and Qwen3-Next: Gated DeltaNet in most layers, in the others attention with an output gate and a
//! quarter of each head rotated.
//!
//! Defaults are those of transformers' `Qwen3_5TextConfig`, `Qwen3_5MoeTextConfig` and `Qwen3NextConfig`. Layers that predict more tokens (`mtp`)
//! are not read, as in transformers.
//! Not supported: attention without the gate (`attn_output_gate`), which no published model has; `attention_dropout`, which is ignored.

use super::keys::rope::partial_rope;
use super::keys::{Base, Defaults, bool_or, filter_width, gated_mlp, is_second_kind, size_or};
use super::qwen3_moe::{dense, mixture, mixture_layers};
use crate::error::ArchError;
use crate::json::JsonObject;
use crate::mixer::{DeltaNetSpec, DeltaProjections, Mixer, OutputGate, QkNorm};
use crate::router::{RouterSpec, SharedExpertSpec};
use crate::spec::{Activation, LayerNorms, LayerSpec, MlpSpec, ModelSpec};

/// The largest width of a head of a delta rule.
const MAX_HEAD_WIDTH: usize = 1 << 16;
/// The types of layers.
const KINDS: [&str; 2] = ["linear_attention", "full_attention"];

pub(super) fn spec(json: &JsonObject) -> Result<ModelSpec, ArchError> {
    let mlp = gated_mlp(json, Activation::Silu)?;
    model(json, 4, DeltaProjections::Joined, |base| Ok(vec![mlp.clone(); base.count]))
}

pub(super) fn moe_spec(json: &JsonObject) -> Result<ModelSpec, ArchError> {
    model(json, 2, DeltaProjections::Joined, |base| {
        let mlp = of_experts(json, base.count, [256, 8, 512], true)?;
        Ok(vec![mlp; base.count])
    })
}

pub(super) fn next_spec(json: &JsonObject) -> Result<ModelSpec, ArchError> {
    let normalizes = bool_or(json, "norm_topk_prob", true)?;
    model(json, 2, DeltaProjections::ByKeyHead, |base| {
        let mlp = |is_mixture| match is_mixture {
            true => of_experts(json, base.count, [512, 10, 512], normalizes),
            false => dense(json, 5632),
        };
        mixture_layers(json, base.count)?.into_iter().map(mlp).collect()
    })
}

/// Reads a mixture with a shared expert behind a gate; absent keys mean these experts, experts per token, and width.
fn of_experts(json: &JsonObject, layers: usize, absent: [usize; 3], normalizes: bool) -> Result<MlpSpec, ArchError> {
    let intermediate_size = size_or(json, "shared_expert_intermediate_size", 512)?;
    let shared = SharedExpertSpec { intermediate_size, gated: true, normed: false };
    let mut mlp = mixture(json, layers, absent, Some(shared))?;
    if let MlpSpec::Experts { router, .. } = &mut mlp {
        *router = RouterSpec::softmax(normalizes);
    }
    Ok(mlp)
}

/// Reads a model with these MLPs; an absent key means `kv_heads` heads of keys and values.
fn model(
    json: &JsonObject,
    kv_heads: usize,
    projections: DeltaProjections,
    mlps: impl Fn(&Base<'_>) -> Result<Vec<MlpSpec>, ArchError>,
) -> Result<ModelSpec, ArchError> {
    if !bool_or(json, "attn_output_gate", true)? {
        let advice = "Attention has its gate here, as in the published models";
        return Err(json.unsupported("attn_output_gate", false, advice));
    }
    let defaults =
        Defaults { head_dim: Some(256), kv_heads: Some(kv_heads), max_position_embeddings: 32_768, rms_norm_eps: 1e-6 };
    let mut base = Base::read(json, defaults)?.with_bias(false)?;
    (base.attention.qk_norm, base.attention.gate) = (QkNorm::PerHead, OutputGate::PerValue);
    let absent = DeltaNetSpec {
        key_heads: 16,
        value_heads: 32,
        key_head_dim: 128,
        value_head_dim: 128,
        conv_width: 4,
        projections,
        doubles_beta: false,
        norm_epsilon: None,
    };
    let delta = delta_net(json, absent)?;
    let layer = |(is_attention, mlp): (bool, MlpSpec)| {
        let layer = base.layer(mlp, LayerNorms::Pre, None);
        let mixer = if is_attention { layer.mixer } else { Mixer::DeltaNet(delta.clone()) };
        LayerSpec { mixer, ..layer }
    };
    let layers = attention_layers(json, base.count)?.into_iter().zip(mlps(&base)?).map(layer).collect();
    Ok(ModelSpec { norm_offset: 1.0, ..base.model(layers, vec![partial_rope(json, &base, 0.25)?])? })
}

/// Reads the sizes of a delta rule, in place of those for absent keys.
pub(super) fn delta_net(json: &JsonObject, absent: DeltaNetSpec) -> Result<DeltaNetSpec, ArchError> {
    let delta = DeltaNetSpec {
        key_heads: size_or(json, "linear_num_key_heads", absent.key_heads)?,
        value_heads: size_or(json, "linear_num_value_heads", absent.value_heads)?,
        key_head_dim: head_width(json, "linear_key_head_dim", absent.key_head_dim)?,
        value_head_dim: head_width(json, "linear_value_head_dim", absent.value_head_dim)?,
        conv_width: filter_width(json, "linear_conv_kernel_dim", absent.conv_width)?,
        ..absent
    };
    if delta.value_heads.is_multiple_of(delta.key_heads) {
        return Ok(delta);
    }
    let rule = format!("it must be a multiple of linear_num_key_heads ({})", delta.key_heads);
    Err(json.bad("linear_num_value_heads", delta.value_heads, rule))
}

/// Reads the width of a head. A state has as many values as the product of two, which must not overflow.
fn head_width(json: &JsonObject, key: &str, absent: usize) -> Result<usize, ArchError> {
    let width = size_or(json, key, absent)?;
    if width <= MAX_HEAD_WIDTH {
        Ok(width)
    } else {
        Err(json.bad(key, width, format!("it must be at most {MAX_HEAD_WIDTH}")))
    }
}

/// Returns whether each layer has attention: by `layer_types`, or every `full_attention_interval`-th.
pub(super) fn attention_layers(json: &JsonObject, layers: usize) -> Result<Vec<bool>, ArchError> {
    if let Some(by_types) = is_second_kind(json, layers, &KINDS)? {
        return Ok(by_types);
    }
    let interval = size_or(json, "full_attention_interval", 4)?;
    Ok((1..=layers).map(|layer| layer.is_multiple_of(interval)).collect())
}
