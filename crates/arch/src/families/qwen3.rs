//! Qwen3, dense: Llama with an RMSNorm on each query and key head, a head width independent of the hidden size, and an optional sliding window.
//!
//! Defaults are those of transformers' `Qwen3Config`: a head of 128 columns whatever the hidden size.
//! Not supported: `attention_dropout`, which is ignored.

use super::keys::rope::rope;
use super::keys::{
    activation, bool_or, gated_mlp, head_dim_or, kv_heads, layer_count, model, size, size_or, windows_by_layer,
};
use crate::error::ArchError;
use crate::json::JsonObject;
use crate::mixer::{AttentionSpec, Mixer, QkNorm};
use crate::spec::{LayerNorms, LayerSpec, ModelSpec};

pub(super) fn spec(json: &JsonObject) -> Result<ModelSpec, ArchError> {
    let heads = size(json, "num_attention_heads")?;
    let head_dim = head_dim_or(json, 128)?;
    let max_position_embeddings = size_or(json, "max_position_embeddings", 32_768)?;
    let windows = windows_by_layer(json, layer_count(json)?)?;
    // One key for all four projections.
    let attention_bias = bool_or(json, "attention_bias", false)?;

    let attention = AttentionSpec {
        qk_norm: QkNorm::PerHead,
        qkv_bias: attention_bias,
        output_bias: attention_bias,
        ..AttentionSpec::new(heads, kv_heads(json, heads, 32)?, head_dim)
    };
    let mlp = gated_mlp(json, activation(json)?)?;
    let layer = |window| {
        let attention = AttentionSpec { window, ..attention.clone() };
        LayerSpec { mixer: Mixer::Attention(attention), mlp: mlp.clone(), norms: LayerNorms::Pre }
    };
    let layers = windows.into_iter().map(layer).collect();
    let ropes = vec![rope(json, head_dim, max_position_embeddings)?];
    model(json, layers, ropes, max_position_embeddings, 1e-6)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::config::ModelConfig;
    use crate::config::tests::{family_json, layout_5_of, parse};
    use crate::error::ArchError;

    fn qwen3(changes: &[(&str, Value)]) -> Result<ModelConfig, ArchError> {
        parse(&family_json("Qwen3ForCausalLM", "qwen3", changes))
    }

    #[test]
    fn the_head_width_is_128_unless_given() {
        let head_dim = |changes: &[_]| qwen3(changes).unwrap().spec.attentions().next().unwrap().head_dim;
        assert_eq!(head_dim(&[]), 128);
        assert_eq!(head_dim(&[("head_dim", json!(6))]), 6);
        assert_eq!(qwen3(&[("head_dim", json!(6))]).unwrap().spec.ropes[0].rotary_dim, 6);
    }

    #[test]
    fn queries_and_keys_have_one_norm_per_layer_each_of_the_head_width() {
        let spec = qwen3(&[("head_dim", json!(6))]).unwrap().spec;
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
            let attention = qwen3(changes).unwrap().spec.attentions().next().unwrap().clone();
            (attention.qkv_bias, attention.output_bias)
        };
        assert_eq!(biases(&[]), (false, false));
        assert_eq!(biases(&[("attention_bias", json!(true))]), (true, true));
    }

    #[test]
    fn both_layouts_give_one_spec() {
        let changes = [("head_dim", json!(6))];
        let new = layout_5_of("Qwen3ForCausalLM", "qwen3", &changes).unwrap();
        assert_eq!(new.spec, qwen3(&changes).unwrap().spec);
    }
}
