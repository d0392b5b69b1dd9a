//! OLMo 2: Llama whose layers normalize the outputs of attention and MLP instead of their inputs, with an RMSNorm over all query heads
//! together and one over all key heads together.
//!
//! Defaults are those of transformers' `Olmo2Config`.
//! Not supported: the sliding windows of OLMo 3, which is a family of its own, and `attention_dropout`, which is ignored.

use super::keys::rope::rope;
use super::keys::{activation, bool_or, gated_mlp, head_dim_or_quotient, kv_heads, layer_count, model, size, size_or};
use crate::error::ArchError;
use crate::json::JsonObject;
use crate::mixer::{AttentionSpec, Mixer, QkNorm};
use crate::spec::{LayerNorms, LayerSpec, ModelSpec};

pub(super) fn spec(json: &JsonObject) -> Result<ModelSpec, ArchError> {
    let heads = size(json, "num_attention_heads")?;
    let head_dim = head_dim_or_quotient(json, heads)?;
    let max_position_embeddings = size_or(json, "max_position_embeddings", 2048)?;
    // One key for all four projections.
    let attention_bias = bool_or(json, "attention_bias", false)?;

    let attention = AttentionSpec {
        qk_norm: QkNorm::WholeProjection,
        qkv_bias: attention_bias,
        output_bias: attention_bias,
        ..AttentionSpec::new(heads, kv_heads(json, heads, heads)?, head_dim)
    };
    let mlp = gated_mlp(json, activation(json)?)?;
    let layers =
        vec![LayerSpec { mixer: Mixer::Attention(attention), mlp, norms: LayerNorms::Post }; layer_count(json)?];
    let ropes = vec![rope(json, head_dim, max_position_embeddings)?];
    model(json, layers, ropes, max_position_embeddings, 1e-5)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::config::ModelConfig;
    use crate::config::tests::{family_json, layout_5_of, parse};
    use crate::error::ArchError;

    fn olmo2(changes: &[(&str, Value)]) -> Result<ModelConfig, ArchError> {
        parse(&family_json("Olmo2ForCausalLM", "olmo2", changes))
    }

    #[test]
    fn norms_follow_the_group_whose_output_they_normalize() {
        let tensors = olmo2(&[]).unwrap().spec.tensors();
        let names: Vec<_> = tensors.iter().filter(|tensor| tensor.layer == Some(0)).map(|t| t.name.as_str()).collect();
        let expected = [
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.q_norm",
            "self_attn.k_norm",
            "self_attn.o_proj",
            "post_attention_layernorm",
            "mlp.gate_proj",
            "mlp.up_proj",
            "mlp.down_proj",
            "post_feedforward_layernorm",
        ];
        assert_eq!(names, expected.map(|name| format!("model.layers.0.{name}.weight")));
    }

    #[test]
    fn the_norms_of_queries_and_keys_have_the_widths_of_their_projections() {
        let spec = olmo2(&[]).unwrap().spec;
        let shape = |name: &str| spec.tensors().into_iter().find(|tensor| tensor.name.contains(name)).unwrap().shape;
        assert_eq!((shape("q_norm"), shape("k_norm")), (vec![8], vec![4]));
    }

    #[test]
    fn absent_keys_default_as_transformers_does() {
        let absent = ["rms_norm_eps", "num_key_value_heads", "max_position_embeddings"];
        let spec = olmo2(&absent.map(|key| (key, Value::Null))).unwrap().spec;
        assert_eq!((spec.rms_norm_eps, spec.attentions().next().unwrap().kv_heads), (1e-5, 4));
        assert_eq!(spec.max_position_embeddings, 2048);
    }

    #[test]
    fn both_layouts_give_one_spec() {
        let changes = [("attention_bias", json!(true))];
        let new = layout_5_of("Olmo2ForCausalLM", "olmo2", &changes).unwrap();
        assert_eq!(new.spec, olmo2(&changes).unwrap().spec);
    }
}
