//! Ministral 3, the text model: Mistral with YaRN, and with queries that grow with their position.
//!
//! Defaults are those of transformers' `Ministral3Config`: no window, heads of 128 columns, and the rotary embedding of the published models if the
//! config describes none.
//! Not supported: `attention_dropout`, which is ignored.

use super::keys::rope::rope_with_query_scale;
use super::keys::{Base, Defaults, activation, gated_mlp, given_window};
use super::mistral::refuse_other_layer_types;
use crate::error::ArchError;
use crate::json::JsonObject;
use crate::spec::{LayerNorms, ModelSpec};

pub(super) fn spec(json: &JsonObject) -> Result<ModelSpec, ArchError> {
    let head_dim = (!json.is_null("head_dim")).then_some(128);
    let defaults = Defaults { head_dim, kv_heads: Some(8), max_position_embeddings: 262_144, rms_norm_eps: 1e-5 };
    let mut base = Base::read(json, defaults)?;
    base.attention.window = given_window(json)?;
    refuse_other_layer_types(json, base.count, base.attention.window)?;
    let layers = base.equal_layers(gated_mlp(json, activation(json)?)?, LayerNorms::Pre);
    base.model(layers, vec![rope_with_query_scale(json, &base)?])
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::config::ModelConfig;
    use crate::config::tests::refusal_of;
    use crate::error::ArchError;
    use crate::families::tests::{model, read};
    use crate::rope::{QueryScale, RopeScaling};

    fn with_rope(more: Value) -> Result<ModelConfig, ArchError> {
        let mut parameters = json!({"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 16});
        parameters.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        read("ministral3", &[("rope_theta", Value::Null), ("rope_parameters", parameters)])
    }

    #[test]
    fn queries_are_scaled_by_the_nested_key() {
        let rope = &with_rope(json!({"llama_4_scaling_beta": 0.1})).unwrap().spec.ropes[0];
        assert_eq!(rope.query_scale, Some(QueryScale { beta: 0.1, original_max_position_embeddings: 16 }));
        assert!(matches!(rope.scaling, RopeScaling::Yarn { factor: 4.0, attention_factor: 1.0, .. }));
        assert_eq!(with_rope(json!({"llama_4_scaling_beta": 0})).unwrap().spec.ropes[0].query_scale, None);
        let message = refusal_of(with_rope(json!({})));
        assert!(message.contains("no key `rope_parameters.llama_4_scaling_beta`"), "{message}");
    }

    #[test]
    fn absent_keys_default_as_transformers_does() {
        let absent = ["rope_theta", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps"];
        let heads = [("num_attention_heads", json!(16)), ("hidden_size", json!(32))];
        let changes = [&absent.map(|key| (key, Value::Null))[..], &heads].concat();
        let spec = model("ministral3", &changes);
        let attention = &spec.attentions().next().unwrap();
        assert_eq!((attention.head_dim, attention.kv_heads, attention.window), (128, 8, None));
        assert_eq!((spec.max_position_embeddings, spec.rms_norm_eps), (262_144, 1e-5));
        let rope = &spec.ropes[0];
        let scale = QueryScale { beta: 0.1, original_max_position_embeddings: 16_384 };
        assert_eq!((rope.theta, rope.query_scale), (1e6, Some(scale)));
        assert!(matches!(rope.scaling, RopeScaling::Yarn { factor: 16.0, attention_factor: 1.0, .. }));
    }

    #[test]
    fn other_families_refuse_the_scale_of_queries() {
        let parameters = json!({"rope_type": "default", "llama_4_scaling_beta": 0.1});
        let message = refusal_of(crate::config::tests::tiny(&[("rope_parameters", parameters)]));
        assert!(message.contains("`rope_parameters.llama_4_scaling_beta`"), "{message}");
    }
}
