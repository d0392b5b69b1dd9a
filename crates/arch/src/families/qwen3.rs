//! Qwen3, dense: Llama with an RMSNorm on each query and key head, a head width independent of the hidden size, and an optional sliding window.
//!
//! Defaults are those of transformers' `Qwen3Config`: a head of 128 columns whatever the hidden size.
//! Not supported: `attention_dropout`, which is ignored.

use super::keys::{Base, Defaults, activation, gated_mlp, windows_by_layer};
use crate::error::ArchError;
use crate::json::JsonObject;
use crate::mixer::QkNorm;
use crate::spec::{LayerNorms, ModelSpec};

pub(super) fn spec(json: &JsonObject) -> Result<ModelSpec, ArchError> {
    let defaults =
        Defaults { head_dim: Some(128), kv_heads: Some(32), max_position_embeddings: 32_768, rms_norm_eps: 1e-6 };
    let mut base = Base::read(json, defaults)?.with_bias(false)?;
    base.attention.qk_norm = QkNorm::PerHead;
    let mlp = gated_mlp(json, activation(json)?)?;
    let layers = base.layers(&mlp, LayerNorms::Pre, windows_by_layer(json, base.count)?);
    base.model(layers, vec![base.rope()?])
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::families::tests::model;

    #[test]
    fn the_head_width_is_128_unless_given() {
        let head_dim = |changes: &[_]| model("qwen3", changes).attentions().next().unwrap().head_dim;
        assert_eq!(head_dim(&[]), 128);
        assert_eq!(head_dim(&[("head_dim", json!(6))]), 6);
        assert_eq!(model("qwen3", &[("head_dim", json!(6))]).ropes[0].rotary_dim, 6);
    }

    #[test]
    fn queries_and_keys_have_norms_of_the_head_width() {
        let spec = model("qwen3", &[("head_dim", json!(6))]);
        let norms: Vec<_> = spec
            .tensors()
            .into_iter()
            .filter(|tensor| tensor.name.contains("self_attn.") && tensor.name.contains("_norm"))
            .collect();
        let names: Vec<_> = norms.iter().map(|tensor| tensor.name.as_str()).collect();
        assert_eq!(names[..2], ["model.layers.0.self_attn.q_norm.weight", "model.layers.0.self_attn.k_norm.weight"]);
        assert!(norms.len() == 4 && norms.iter().all(|tensor| tensor.shape == [6]));
    }

    #[test]
    fn attention_has_biases_only_where_the_key_asks_for_them() {
        let biases = |changes: &[_]| {
            let attention = model("qwen3", changes).attentions().next().unwrap().clone();
            (attention.qkv_bias, attention.output_bias)
        };
        assert_eq!(biases(&[]), (false, false));
        assert_eq!(biases(&[("attention_bias", json!(true))]), (true, true));
    }
}
