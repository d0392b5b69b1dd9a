//! Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and an optional sliding window on the upper layers.
//!
//! Defaults are those of transformers' `Qwen2Config`.
//! Not supported: `attention_dropout`, which is ignored.

use super::keys::rope::rope;
use super::keys::{
    activation, gated_mlp, head_dim_or_quotient, kv_heads, layer_count, model, size, size_or, windows_by_layer,
};
use crate::error::ArchError;
use crate::json::JsonObject;
use crate::mixer::{AttentionSpec, Mixer};
use crate::spec::{LayerNorms, LayerSpec, ModelSpec};

pub(super) fn spec(json: &JsonObject) -> Result<ModelSpec, ArchError> {
    let heads = size(json, "num_attention_heads")?;
    let head_dim = head_dim_or_quotient(json, heads)?;
    let max_position_embeddings = size_or(json, "max_position_embeddings", 32_768)?;
    let windows = windows_by_layer(json, layer_count(json)?)?;

    let attention = AttentionSpec { qkv_bias: true, ..AttentionSpec::new(heads, kv_heads(json, heads, 32)?, head_dim) };
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
    use crate::config::tests::{family_json, layout_5_of, parse, refusal_of};
    use crate::error::ArchError;

    fn qwen2(changes: &[(&str, Value)]) -> Result<ModelConfig, ArchError> {
        parse(&family_json("Qwen2ForCausalLM", "qwen2", changes))
    }

    fn windows(changes: &[(&str, Value)]) -> Vec<Option<usize>> {
        qwen2(changes).unwrap().spec.attentions().map(|attention| attention.window).collect()
    }

    #[test]
    fn queries_keys_and_values_have_biases_and_nothing_else_has() {
        let spec = qwen2(&[("attention_bias", json!(false))]).unwrap().spec;
        let biased: Vec<_> = spec.tensors().into_iter().filter(|tensor| tensor.name.ends_with(".bias")).collect();
        let names: Vec<_> = biased.iter().map(|tensor| tensor.name.rsplit('.').nth(1).unwrap()).collect();
        assert_eq!(names, ["q_proj", "k_proj", "v_proj", "q_proj", "k_proj", "v_proj"]);
    }

    #[test]
    fn the_window_needs_its_switch_and_begins_at_max_window_layers() {
        let upper = [("sliding_window", json!(16)), ("max_window_layers", json!(1))];
        assert_eq!(windows(&upper), [None, None]);
        let on = [&upper[..], &[("use_sliding_window", json!(true))]].concat();
        assert_eq!(windows(&on), [None, Some(16)]);
        assert_eq!(windows(&[("use_sliding_window", json!(true))]), [None, None]);
    }

    #[test]
    fn layer_types_decide_before_max_window_layers() {
        let types = ["sliding_attention", "full_attention"];
        let changes =
            [("use_sliding_window", json!(true)), ("max_window_layers", json!(1)), ("layer_types", json!(types))];
        assert_eq!(windows(&changes), [Some(4096), None]);
        let message = refusal_of(qwen2(&[("layer_types", json!(types))]));
        assert!(message.contains("`layer_types`") && message.contains("use_sliding_window"), "{message}");
        let message = refusal_of(qwen2(&[("layer_types", json!(["full_attention"]))]));
        assert!(message.contains("a list of 1 layers") && message.contains("num_hidden_layers is 2"), "{message}");
        let message = refusal_of(qwen2(&[("layer_types", json!(["full_attention", "chunked_attention"]))]));
        assert!(message.contains("chunked_attention"), "{message}");
    }

    #[test]
    fn both_layouts_give_one_spec() {
        let changes =
            [("use_sliding_window", json!(true)), ("sliding_window", json!(16)), ("max_window_layers", json!(1))];
        let types = [&changes[..], &[("layer_types", json!(["full_attention", "sliding_attention"]))]].concat();
        let new = layout_5_of("Qwen2ForCausalLM", "qwen2", &types).unwrap();
        assert_eq!(new.spec, qwen2(&changes).unwrap().spec);
    }

    #[test]
    fn key_and_value_heads_default_as_transformers_does() {
        let absent = ("num_key_value_heads", Value::Null);
        let wide = [absent.clone(), ("num_attention_heads", json!(64)), ("hidden_size", json!(128))];
        assert_eq!(qwen2(&wide).unwrap().spec.attentions().next().unwrap().kv_heads, 32);
        let message = refusal_of(qwen2(&[absent]));
        assert!(message.contains("`num_key_value_heads` is 32"), "{message}");
    }
}
