//! Mistral 7B and models of the same shape: Llama without biases, with a sliding window over all layers.
//!
//! Defaults are those of transformers' `MistralConfig`: a null `sliding_window` means none, an absent one means 4096 tokens.
//! Not supported: a window on some layers only (Ministral), and `attention_dropout`, which is ignored.

use super::keys::{Base, Defaults, activation, gated_mlp, layer_types, sliding_window};
use crate::error::ArchError;
use crate::json::JsonObject;
use crate::spec::{LayerNorms, ModelSpec};

pub(super) fn spec(json: &JsonObject) -> Result<ModelSpec, ArchError> {
    let defaults = Defaults { head_dim: None, kv_heads: Some(8), max_position_embeddings: 131_072, rms_norm_eps: 1e-6 };
    let mut base = Base::read(json, defaults)?;
    base.attention.window = sliding_window(json, 4096)?;
    refuse_other_layer_types(json, base.count, base.attention.window)?;
    let layers = base.equal_layers(gated_mlp(json, activation(json)?)?, LayerNorms::Pre);
    base.model(layers, vec![base.rope()?])
}

/// Refuses `layer_types` that differ from a window on all layers: transformers ignores the key for Mistral and Ministral 3 and applies the window
/// everywhere.
pub(super) fn refuse_other_layer_types(
    json: &JsonObject,
    layers: usize,
    window: Option<usize>,
) -> Result<(), ArchError> {
    let types = layer_types(json, layers)?.unwrap_or_default();
    if types.iter().any(|&sliding| sliding != window.is_some()) {
        let advice =
            "All layers of a Mistral have the window of `sliding_window`; choose a model without `layer_types`";
        return Err(json.unsupported("layer_types", "different from `sliding_window` for some layers", advice));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::config::tests::{family_json, parse, refusal_of};
    use crate::families::tests::{model, read};

    #[test]
    fn every_layer_has_the_window_and_null_means_none() {
        let window = |value: Option<Value>| {
            let text = family_json("MistralForCausalLM", "mistral", &[]);
            let mut map: serde_json::Map<String, Value> = serde_json::from_str(&text).unwrap();
            map.extend(value.map(|value| ("sliding_window".to_owned(), value)));
            let spec = parse(&Value::from(map).to_string()).unwrap().spec;
            assert!(spec.attentions().all(|attention| attention == spec.attentions().next().unwrap()));
            spec.attentions().next().unwrap().window
        };
        assert_eq!(window(Some(json!(16))), Some(16));
        assert_eq!(window(Some(Value::Null)), None);
        assert_eq!(window(None), Some(4096));
    }

    #[test]
    fn absent_keys_default_as_transformers_does() {
        let absent = ["num_key_value_heads", "max_position_embeddings"].map(|key| (key, Value::Null));
        let changes = [&absent[..], &[("num_attention_heads", json!(16)), ("hidden_size", json!(32))]].concat();
        let spec = model("mistral", &changes);
        assert_eq!((spec.attentions().next().unwrap().kv_heads, spec.max_position_embeddings), (8, 131_072));
        assert_eq!(model("mistral", &[("head_dim", json!(6))]).attentions().next().unwrap().query_size(), 24);
    }

    #[test]
    fn layer_types_that_contradict_the_window_are_refused() {
        let types = |kinds: [&str; 2]| read("mistral", &[("sliding_window", json!(16)), ("layer_types", json!(kinds))]);
        types(["sliding_attention", "sliding_attention"]).unwrap();
        let message = refusal_of(types(["sliding_attention", "full_attention"]));
        assert!(message.contains("`layer_types`"), "{message}");
    }
}
