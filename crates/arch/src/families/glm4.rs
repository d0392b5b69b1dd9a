//! GLM-4-0414, the dense models: RMSNorms of inputs and outputs, one fused module for gate and up, and rotation of neighboring columns in a half of
//! each head.
//!
//! Defaults are those of transformers' `Glm4Config`. `attention_bias` is about queries, keys and values; the output projection has no bias.
//! Not supported: the mixtures from GLM-4.5 on, and `attention_dropout`, which is ignored.

use super::keys::rope::partial_rope;
use super::keys::{Base, Defaults, activation, bool_or, size};
use crate::error::ArchError;
use crate::json::JsonObject;
use crate::rope::Rope;
use crate::spec::{LayerNorms, MlpSpec, ModelSpec};

pub(super) fn spec(json: &JsonObject) -> Result<ModelSpec, ArchError> {
    let defaults =
        Defaults { head_dim: Some(128), kv_heads: Some(2), max_position_embeddings: 131_072, rms_norm_eps: 1.5625e-7 };
    let mut base = Base::read(json, defaults)?;
    base.attention.qkv_bias = bool_or(json, "attention_bias", true)?;
    let mlp = MlpSpec::Gated {
        intermediate_size: size(json, "intermediate_size")?,
        activation: activation(json)?,
        fused: true,
        bias: false,
    };
    let rope = partial_rope(json, &base, 0.5)?;
    base.model(base.equal_layers(mlp, LayerNorms::PreAndPostGlm), vec![Rope { interleaved: true, ..rope }])
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::families::tests::model;

    #[test]
    fn absent_keys_default_as_transformers_does() {
        let absent = ["num_key_value_heads", "max_position_embeddings", "rms_norm_eps"];
        let spec = model("glm4", &absent.map(|key| (key, Value::Null)));
        let attention = spec.attentions().next().unwrap();
        assert_eq!((attention.head_dim, attention.kv_heads), (128, 2));
        assert!(attention.qkv_bias && !attention.output_bias);
        assert_eq!((spec.ropes[0].rotary_dim, spec.ropes[0].interleaved), (64, true));
        assert_eq!((spec.max_position_embeddings, spec.rms_norm_eps), (131_072, 1.5625e-7));
    }

    #[test]
    fn both_norms_of_each_half_have_names_of_their_own() {
        let tensors = model("glm4", &[("attention_bias", json!(false))]).tensors();
        let names: Vec<_> = tensors.iter().filter(|tensor| tensor.layer == Some(1)).map(|t| t.name.as_str()).collect();
        let expected = [
            "input_layernorm",
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.o_proj",
            "post_self_attn_layernorm",
            "post_attention_layernorm",
            "mlp.gate_up_proj",
            "mlp.down_proj",
            "post_mlp_layernorm",
        ];
        assert_eq!(names, expected.map(|name| format!("model.layers.1.{name}.weight")));
    }
}
