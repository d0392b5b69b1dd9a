//! GLM-4-0414, the dense models: RMSNorms of inputs and outputs, one fused module for gate and up, and rotation of neighboring columns in a half of
//! each head.
//!
//! Defaults are those of transformers' `Glm4Config`. `attention_bias` is about queries, keys and values; the output projection has no bias.
//! Not supported: the mixtures from GLM-4.5 on, and `attention_dropout`, which is ignored.

use super::keys::rope::partial_rope;
use super::keys::{activation, bool_or, head_dim_or, kv_heads, layer_count, model, size, size_or};
use crate::error::ArchError;
use crate::json::JsonObject;
use crate::mixer::{AttentionSpec, Mixer};
use crate::rope::Rope;
use crate::spec::{LayerNorms, LayerSpec, MlpSpec, ModelSpec};

pub(super) fn spec(json: &JsonObject) -> Result<ModelSpec, ArchError> {
    let heads = size(json, "num_attention_heads")?;
    let head_dim = head_dim_or(json, 128)?;
    let max_position_embeddings = size_or(json, "max_position_embeddings", 131_072)?;

    let attention = AttentionSpec {
        qkv_bias: bool_or(json, "attention_bias", true)?,
        ..AttentionSpec::new(heads, kv_heads(json, heads, 2)?, head_dim)
    };
    let mlp = MlpSpec::Gated {
        intermediate_size: size(json, "intermediate_size")?,
        activation: activation(json)?,
        fused: true,
        bias: false,
    };
    let layers = vec![
        LayerSpec { mixer: Mixer::Attention(attention), mlp, norms: LayerNorms::PreAndPostGlm };
        layer_count(json)?
    ];
    let rope = partial_rope(json, head_dim, max_position_embeddings, 0.5)?;
    let ropes = vec![Rope { interleaved: true, ..rope }];
    model(json, layers, ropes, max_position_embeddings, 1.5625e-7)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::config::ModelConfig;
    use crate::config::tests::{family_json, layout_5_of, parse};
    use crate::error::ArchError;

    fn glm4(changes: &[(&str, Value)]) -> Result<ModelConfig, ArchError> {
        parse(&family_json("Glm4ForCausalLM", "glm4", changes))
    }

    #[test]
    fn absent_keys_default_as_transformers_does() {
        let absent = ["num_key_value_heads", "max_position_embeddings", "rms_norm_eps"];
        let spec = glm4(&absent.map(|key| (key, Value::Null))).unwrap().spec;
        let attention = spec.attentions().next().unwrap();
        assert_eq!((attention.head_dim, attention.kv_heads), (128, 2));
        assert!(attention.qkv_bias && !attention.output_bias);
        assert_eq!((spec.ropes[0].rotary_dim, spec.ropes[0].interleaved), (64, true));
        assert_eq!((spec.max_position_embeddings, spec.rms_norm_eps), (131_072, 1.5625e-7));
    }

    #[test]
    fn both_norms_of_each_half_have_names_of_their_own() {
        let tensors = glm4(&[("attention_bias", json!(false))]).unwrap().spec.tensors();
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

    #[test]
    fn both_layouts_give_one_spec() {
        let old = glm4(&[("partial_rotary_factor", json!(0.25))]).unwrap().spec;
        assert_eq!(old.ropes[0].rotary_dim, 32);
        let parameters = json!({"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25});
        let new = layout_5_of("Glm4ForCausalLM", "glm4", &[("rope_parameters", parameters)]).unwrap();
        assert_eq!(new.spec, old);
    }
}
