//! Gemma 3, the text model: Gemma 2 without soft caps on attention scores, with RMSNorms of query and key heads, and with separate rotary embeddings
//! for layers with a sliding window and for layers without.
//!
//! Defaults are those of transformers' `Gemma3TextConfig`. `attn_logit_softcapping` is refused, because transformers reads it and does
//! not apply it.
//! Not supported: bidirectional attention, and `attention_dropout`, which is ignored.

use super::keys::rope::{by_layer_type, ropes_by_layer_type};
use super::keys::{
    Base, Defaults, activation_or, bool_or, gated_mlp, positive_or, size_or, soft_cap, windows_by_pattern,
};
use crate::error::ArchError;
use crate::json::JsonObject;
use crate::mixer::QkNorm;
use crate::spec::{Activation, LayerNorms, ModelSpec};

pub(super) fn spec(json: &JsonObject) -> Result<ModelSpec, ArchError> {
    let defaults =
        Defaults { head_dim: Some(256), kv_heads: Some(4), max_position_embeddings: 131_072, rms_norm_eps: 1e-6 };
    let mut base = Base::read(json, defaults)?.with_bias(false)?;
    base.attention.qk_norm = QkNorm::PerHead;
    base.attention.scale = 1.0 / positive_or(json, "query_pre_attn_scalar", 256.0)?.sqrt();
    let mlp = gated_mlp(json, activation_or(json, "hidden_activation", Activation::GeluTanh)?)?;
    let windows = windows_by_pattern(json, base.count, size_or(json, "sliding_window_pattern", 6)?, 4096)?;
    let layers = base.layers(&mlp, LayerNorms::PreAndPost, windows);
    let spec = base.model(layers, ropes_by_layer_type(json, &base, [1e6, 1e4])?)?;
    Ok(ModelSpec {
        norm_offset: 1.0,
        embedding_scale: Some((spec.hidden_size as f64).sqrt()),
        logit_soft_cap: soft_cap(json, "final_logit_softcapping", None)?,
        tie_word_embeddings: bool_or(json, "tie_word_embeddings", true)?,
        ..by_layer_type(spec)
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::config::tests::refusal_of;
    use crate::families::keys::rope::{FULL, SLIDING};
    use crate::families::tests::{model, read, refused};
    use crate::rope::RopeScaling;

    #[test]
    fn every_sixth_layer_sees_everything_and_has_the_rope_of_that() {
        let spec = model("gemma3_text", &[("num_hidden_layers", json!(7)), ("rope_theta", Value::Null)]);
        for (index, layer) in spec.layers.iter().enumerate() {
            let expected = if index == 5 { (None, Some(FULL)) } else { (Some(4096), Some(SLIDING)) };
            let attention = layer.mixer.attention().unwrap();
            assert_eq!((attention.window, attention.rope), expected, "layer {index}");
        }
        assert_eq!((spec.ropes[FULL].theta, spec.ropes[SLIDING].theta), (1e6, 1e4));
        let linear = json!({"rope_type": "linear", "factor": 8.0});
        let ropes = model("gemma3_text", &[("rope_scaling", linear)]).ropes;
        assert_eq!(
            [&ropes[FULL].scaling, &ropes[SLIDING].scaling],
            [&RopeScaling::Linear { factor: 8.0 }, &RopeScaling::Default]
        );
        let pattern = model("gemma3_text", &[("sliding_window_pattern", json!(2))]);
        assert_eq!(pattern.attentions().nth(1).unwrap().window, None);
    }

    #[test]
    fn what_has_no_arithmetic_here_is_refused_by_key() {
        let message = refused("gemma3_text", &[("attn_logit_softcapping", json!(50.0))]);
        assert!(message.contains("`attn_logit_softcapping`"), "{message}");
        let flat = json!({"rope_type": "default", "rope_theta": 1e6});
        let message = refused("gemma3_text", &[("rope_parameters", flat)]);
        assert!(message.contains("`rope_parameters`") && message.contains("sliding_attention"), "{message}");
        let local = read("gemma3_text", &[("rope_local_base_freq", json!(0))]);
        assert!(refusal_of(local).contains("`rope_local_base_freq`"));
    }
}
