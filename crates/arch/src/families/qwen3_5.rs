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
    model(json, DeltaProjections::Joined, |base| Ok(vec![mlp.clone(); base.count]))
}

pub(super) fn moe_spec(json: &JsonObject) -> Result<ModelSpec, ArchError> {
    model(json, DeltaProjections::Joined, |base| {
        let mlp = of_experts(json, base.count, [256, 8, 512], true)?;
        Ok(vec![mlp; base.count])
    })
}

pub(super) fn next_spec(json: &JsonObject) -> Result<ModelSpec, ArchError> {
    let normalizes = bool_or(json, "norm_topk_prob", true)?;
    model(json, DeltaProjections::ByKeyHead, |base| {
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
    let mut mlp = mixture(json, layers, absent, Some(SharedExpertSpec { intermediate_size, gated: true }))?;
    if let MlpSpec::Experts { router, .. } = &mut mlp {
        *router = RouterSpec::softmax(normalizes);
    }
    Ok(mlp)
}

/// Reads a model with these MLPs.
fn model(
    json: &JsonObject,
    projections: DeltaProjections,
    mlps: impl Fn(&Base<'_>) -> Result<Vec<MlpSpec>, ArchError>,
) -> Result<ModelSpec, ArchError> {
    if !bool_or(json, "attn_output_gate", true)? {
        let advice = "Attention has its gate here, as in the published models";
        return Err(json.unsupported("attn_output_gate", false, advice));
    }
    let defaults =
        Defaults { head_dim: Some(256), kv_heads: Some(2), max_position_embeddings: 32_768, rms_norm_eps: 1e-6 };
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

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::families::tests::{model, refused};

    /// Returns the keys of a model of these layers.
    fn of_layers(count: usize) -> Vec<(&'static str, Value)> {
        vec![("num_hidden_layers", json!(count)), ("head_dim", json!(8)), ("linear_key_head_dim", json!(4))]
    }

    #[test]
    fn every_fourth_layer_has_attention_unless_a_list_says_which() {
        let has_attention = |more: &[(&str, Value)]| -> Vec<bool> {
            let spec = model("qwen3_next", &[&of_layers(5)[..], more].concat());
            spec.layers.iter().map(|layer| layer.mixer.attention().is_some()).collect()
        };
        assert_eq!(has_attention(&[]), [false, false, false, true, false]);
        let types = ["full_attention", "linear_attention", "linear_attention", "linear_attention", "full_attention"];
        assert_eq!(has_attention(&[("layer_types", json!(types))]), [true, false, false, false, true]);
    }

    #[test]
    fn sizes_that_do_not_fit_and_a_missing_gate_are_refused() {
        let heads = [("linear_num_key_heads", json!(2)), ("linear_num_value_heads", json!(3))];
        assert!(refused("qwen3_5_text", &heads).contains("linear_num_value_heads"));
        for (key, most) in [("linear_key_head_dim", "65536"), ("linear_conv_kernel_dim", "8")] {
            let message = refused("qwen3_5_text", &[(key, json!(100_000_000))]);
            assert!(message.contains(key) && message.contains(&format!("at most {most}")), "{message}");
        }
        assert!(refused("qwen3_5_text", &[("attn_output_gate", json!(false))]).contains("attn_output_gate"));
    }

    #[test]
    fn modules_have_the_names_of_both_spellings() {
        let names = |model_type: &str| model(model_type, &of_layers(4)).linear_module_names();
        let both = ["out_proj", "q_proj", "k_proj", "v_proj", "o_proj"];
        for (model_type, own) in [
            ("qwen3_5_text", &["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"][..]),
            ("qwen3_next", &["in_proj_qkvz", "in_proj_ba"]),
        ] {
            let names = names(model_type);
            assert!(own.iter().chain(&both).all(|name| names.iter().any(|found| found == name)), "{names:?}");
        }
    }
}
