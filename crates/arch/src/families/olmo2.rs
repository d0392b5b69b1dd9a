//! OLMo 2: Llama whose layers normalize the outputs of attention and MLP instead of their inputs, with an RMSNorm over all query heads
//! together and one over all key heads together.
//!
//! Defaults are those of transformers' `Olmo2Config`.
//! Not supported: the sliding windows of OLMo 3, which is a family of its own, and `attention_dropout`, which is ignored.

use super::keys::{Base, Defaults, activation, gated_mlp};
use crate::error::ArchError;
use crate::json::JsonObject;
use crate::mixer::QkNorm;
use crate::spec::{LayerNorms, ModelSpec};

pub(super) fn spec(json: &JsonObject) -> Result<ModelSpec, ArchError> {
    let defaults = Defaults { head_dim: None, kv_heads: None, max_position_embeddings: 2048, rms_norm_eps: 1e-5 };
    let mut base = Base::read(json, defaults)?.with_bias(false)?;
    base.attention.qk_norm = QkNorm::WholeProjection;
    let mlp = gated_mlp(json, activation(json)?)?;
    base.model(base.equal_layers(mlp, LayerNorms::Post), vec![base.rope()?])
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use crate::families::tests::model;

    #[test]
    fn norms_follow_the_group_whose_output_they_normalize() {
        let tensors = model("olmo2", &[]).tensors();
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
    fn norms_of_queries_and_keys_are_as_wide_as_they_are() {
        let spec = model("olmo2", &[]);
        let shape = |name: &str| spec.tensors().into_iter().find(|tensor| tensor.name.contains(name)).unwrap().shape;
        assert_eq!((shape("q_norm"), shape("k_norm")), (vec![8], vec![4]));
    }

    #[test]
    fn absent_keys_default_as_transformers_does() {
        let absent = ["rms_norm_eps", "num_key_value_heads", "max_position_embeddings"];
        let spec = model("olmo2", &absent.map(|key| (key, Value::Null)));
        assert_eq!((spec.rms_norm_eps, spec.attentions().next().unwrap().kv_heads), (1e-5, 4));
        assert_eq!(spec.max_position_embeddings, 2048);
    }
}
