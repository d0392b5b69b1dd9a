//! Qwen3, dense: Llama with an RMSNorm on each query and key head, a head width of its own, and an optional sliding window.
//!
//! Defaults are those of transformers' `Qwen3Config`: a head of 128 columns whatever the hidden size.
//! Not supported: `attention_dropout`, which is ignored.

use super::keys::{
    activation, bool_or, head_dim_or, kv_heads, layer_count, positive_or, refuse_quantized, size, size_or,
    windows_by_layer,
};
use super::rope_keys::rope;
use crate::error::ArchError;
use crate::json::JsonObject;
use crate::spec::{AttentionSpec, LayerNorms, LayerSpec, MlpSpec, ModelSpec, QkNorm};

pub(super) fn spec(json: &JsonObject) -> Result<ModelSpec, ArchError> {
    refuse_quantized(json)?;
    let hidden_size = size(json, "hidden_size")?;
    let heads = size(json, "num_attention_heads")?;
    let head_dim = head_dim_or(json, 128)?;
    let max_position_embeddings = size_or(json, "max_position_embeddings", 32_768)?;
    let windows = windows_by_layer(json, layer_count(json)?)?;
    // One key for all four projections.
    let attention_bias = bool_or(json, "attention_bias", false)?;

    let attention = AttentionSpec {
        heads,
        kv_heads: kv_heads(json, heads, 32)?,
        head_dim,
        rope: Some(0),
        qk_norm: QkNorm::PerHead,
        fused_qkv: false,
        qkv_bias: attention_bias,
        output_bias: attention_bias,
        window: None,
        scale: AttentionSpec::default_scale(head_dim),
        soft_cap: None,
    };
    let mlp = MlpSpec::Gated {
        intermediate_size: size(json, "intermediate_size")?,
        activation: activation(json)?,
        fused: false,
        bias: false,
    };
    let layer = |window| {
        let attention = AttentionSpec { window, ..attention.clone() };
        LayerSpec { attention, mlp: mlp.clone(), norms: LayerNorms::Pre }
    };
    Ok(ModelSpec {
        vocab_size: size(json, "vocab_size")?,
        hidden_size,
        layers: windows.into_iter().map(layer).collect(),
        ropes: vec![rope(json, head_dim, max_position_embeddings)?],
        rms_norm_eps: positive_or(json, "rms_norm_eps", 1e-6)?,
        norm_offset: 0.0,
        embedding_scale: None,
        logit_soft_cap: None,
        tie_word_embeddings: bool_or(json, "tie_word_embeddings", false)?,
        max_position_embeddings,
        initializer_range: positive_or(json, "initializer_range", 0.02)?,
    })
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
        let head_dim = |changes: &[_]| qwen3(changes).unwrap().spec.layers[0].attention.head_dim;
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
            let attention = qwen3(changes).unwrap().spec.layers[0].attention.clone();
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
