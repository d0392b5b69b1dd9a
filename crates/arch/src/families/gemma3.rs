//! Gemma 3, the text model: Gemma 2 without soft caps on attention scores, with RMSNorms of query and key heads, and with separate rotary embeddings
//! for layers with a sliding window and for layers without.
//!
//! Defaults are those of transformers' `Gemma3TextConfig`. `attn_logit_softcapping` is refused, because transformers reads it and does
//! not apply it.
//! Not supported: bidirectional attention, and `attention_dropout`, which is ignored.

use super::keys::rope::ropes_by_layer_type;
use super::keys::{
    activation_or, bool_or, gated_mlp, head_dim_or, kv_heads, layer_count, model, positive_or, size, size_or, soft_cap,
    windows_by_pattern,
};
use crate::error::ArchError;
use crate::json::JsonObject;
use crate::mixer::{AttentionSpec, Mixer, QkNorm};
use crate::spec::{Activation, LayerNorms, LayerSpec, ModelSpec};

/// Indices into the ropes of a model.
const FULL: usize = 0;
const SLIDING: usize = 1;

pub(super) fn spec(json: &JsonObject) -> Result<ModelSpec, ArchError> {
    let hidden_size = size(json, "hidden_size")?;
    let heads = size(json, "num_attention_heads")?;
    let head_dim = head_dim_or(json, 256)?;
    let max_position_embeddings = size_or(json, "max_position_embeddings", 131_072)?;
    let windows = windows_by_pattern(json, layer_count(json)?, size_or(json, "sliding_window_pattern", 6)?)?;
    // One key for all four projections.
    let attention_bias = bool_or(json, "attention_bias", false)?;

    let attention = AttentionSpec {
        rope: Some(FULL),
        qk_norm: QkNorm::PerHead,
        qkv_bias: attention_bias,
        output_bias: attention_bias,
        scale: 1.0 / positive_or(json, "query_pre_attn_scalar", 256.0)?.sqrt(),
        ..AttentionSpec::new(heads, kv_heads(json, heads, 4)?, head_dim)
    };
    let mlp = gated_mlp(json, activation_or(json, "hidden_activation", Activation::GeluTanh)?)?;
    let layer = |window: Option<usize>| {
        let rope = Some(if window.is_some() { SLIDING } else { FULL });
        let attention = AttentionSpec { window, rope, ..attention.clone() };
        LayerSpec { mixer: Mixer::Attention(attention), mlp: mlp.clone(), norms: LayerNorms::PreAndPost }
    };
    let layers = windows.into_iter().map(layer).collect();
    let ropes = ropes_by_layer_type(json, head_dim, max_position_embeddings, [1e6, 1e4])?.into();
    Ok(ModelSpec {
        norm_offset: 1.0,
        embedding_scale: Some((hidden_size as f64).sqrt()),
        logit_soft_cap: soft_cap(json, "final_logit_softcapping", None)?,
        tie_word_embeddings: bool_or(json, "tie_word_embeddings", true)?,
        ..model(json, layers, ropes, max_position_embeddings, 1e-6)?
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{FULL, SLIDING};
    use crate::config::ModelConfig;
    use crate::config::tests::{family_json, layout_5_of, parse, refusal_of};
    use crate::error::ArchError;
    use crate::rope::RopeScaling;

    fn gemma3(changes: &[(&str, Value)]) -> Result<ModelConfig, ArchError> {
        parse(&family_json("Gemma3ForCausalLM", "gemma3_text", changes))
    }

    #[test]
    fn every_sixth_layer_sees_everything_and_has_the_rope_of_that() {
        let spec = gemma3(&[("num_hidden_layers", json!(7)), ("rope_theta", Value::Null)]).unwrap().spec;
        for (index, layer) in spec.layers.iter().enumerate() {
            let expected = if index == 5 { (None, Some(FULL)) } else { (Some(4096), Some(SLIDING)) };
            let attention = layer.mixer.attention().unwrap();
            assert_eq!((attention.window, attention.rope), expected, "layer {index}");
        }
        assert_eq!((spec.ropes[FULL].theta, spec.ropes[SLIDING].theta), (1e6, 1e4));
        let pattern = gemma3(&[("sliding_window_pattern", json!(2))]).unwrap().spec;
        assert_eq!(pattern.attentions().nth(1).unwrap().window, None);
    }

    #[test]
    fn both_layouts_give_one_spec() {
        let scaling = json!({"rope_type": "linear", "factor": 8.0});
        let old = [
            ("sliding_window_pattern", json!(2)),
            ("rope_theta", json!(1e6)),
            ("rope_local_base_freq", json!(12_345.0)),
            ("rope_scaling", scaling),
        ];
        let by_type = json!({
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 12_345.0}
        });
        let types = ("layer_types", json!(["sliding_attention", "full_attention"]));
        let new = layout_5_of("Gemma3ForCausalLM", "gemma3_text", &[types, ("rope_parameters", by_type)]).unwrap();
        let old = gemma3(&old).unwrap();
        assert_eq!(new.spec, old.spec);
        assert_eq!(old.spec.ropes[FULL].scaling, RopeScaling::Linear { factor: 8.0 });
        assert_eq!(old.spec.ropes[SLIDING].scaling, RopeScaling::Default);
    }

    #[test]
    fn what_has_no_arithmetic_here_is_refused_by_key() {
        let message = refusal_of(gemma3(&[("attn_logit_softcapping", json!(50.0))]));
        assert!(message.contains("`attn_logit_softcapping`"), "{message}");
        let flat = json!({"rope_type": "default", "rope_theta": 1e6});
        let message = refusal_of(gemma3(&[("rope_parameters", flat)]));
        assert!(message.contains("`rope_parameters`") && message.contains("sliding_attention"), "{message}");
        let local = gemma3(&[("rope_local_base_freq", json!(0))]);
        assert!(refusal_of(local).contains("`rope_local_base_freq`"));
    }
}
