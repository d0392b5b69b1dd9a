//! Mistral 7B and models of the same shape: Llama without biases, with a sliding window over all layers.
//!
//! Defaults are those of transformers' `MistralConfig`: a null `sliding_window` means none, an absent one means 4096 tokens.
//! Not supported: a window on some layers only (Ministral), and `attention_dropout`, which is ignored.

use super::keys::rope::rope;
use super::keys::{
    activation, gated_mlp, head_dim_or_quotient, kv_heads, layer_count, layer_types, model, size, size_or,
    sliding_window,
};
use crate::error::ArchError;
use crate::json::JsonObject;
use crate::mixer::{AttentionSpec, Mixer};
use crate::spec::{LayerNorms, LayerSpec, ModelSpec};

pub(super) fn spec(json: &JsonObject) -> Result<ModelSpec, ArchError> {
    let heads = size(json, "num_attention_heads")?;
    let head_dim = head_dim_or_quotient(json, heads)?;
    let layers = layer_count(json)?;
    let max_position_embeddings = size_or(json, "max_position_embeddings", 131_072)?;
    let window = sliding_window(json, 4096)?;
    refuse_other_layer_types(json, layers, window)?;

    let attention = AttentionSpec { window, ..AttentionSpec::new(heads, kv_heads(json, heads, 8)?, head_dim) };
    let mlp = gated_mlp(json, activation(json)?)?;
    let layers = vec![LayerSpec { mixer: Mixer::Attention(attention), mlp, norms: LayerNorms::Pre }; layers];
    let ropes = vec![rope(json, head_dim, max_position_embeddings)?];
    model(json, layers, ropes, max_position_embeddings, 1e-6)
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

    use crate::config::ModelConfig;
    use crate::config::tests::{family_json, layout_5_of, parse, refusal_of};
    use crate::error::ArchError;

    fn mistral(changes: &[(&str, Value)]) -> Result<ModelConfig, ArchError> {
        parse(&family_json("MistralForCausalLM", "mistral", changes))
    }

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
        let spec = mistral(&changes).unwrap().spec;
        assert_eq!((spec.attentions().next().unwrap().kv_heads, spec.max_position_embeddings), (8, 131_072));
        assert_eq!(mistral(&[("head_dim", json!(6))]).unwrap().spec.attentions().next().unwrap().query_size(), 24);
    }

    #[test]
    fn both_layouts_give_one_spec() {
        let changes = [("sliding_window", json!(16))];
        let new = layout_5_of("MistralForCausalLM", "mistral", &changes).unwrap();
        assert_eq!(new.spec, mistral(&changes).unwrap().spec);
    }

    #[test]
    fn layer_types_that_contradict_the_window_are_refused() {
        let types = |kinds: [&str; 2]| mistral(&[("sliding_window", json!(16)), ("layer_types", json!(kinds))]);
        types(["sliding_attention", "sliding_attention"]).unwrap();
        let message = refusal_of(types(["sliding_attention", "full_attention"]));
        assert!(message.contains("`layer_types`"), "{message}");
    }
}
