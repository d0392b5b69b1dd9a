//! Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and an optional sliding window on the upper layers.
//!
//! Defaults are those of transformers' `Qwen2Config`.
//! Not supported: `attention_dropout`, which is ignored.

use super::keys::{Base, Defaults, activation, gated_mlp, windows_by_layer};
use crate::error::ArchError;
use crate::json::JsonObject;
use crate::spec::{LayerNorms, ModelSpec};

pub(super) fn spec(json: &JsonObject) -> Result<ModelSpec, ArchError> {
    let defaults = Defaults { head_dim: None, kv_heads: Some(32), max_position_embeddings: 32_768, rms_norm_eps: 1e-6 };
    let mut base = Base::read(json, defaults)?;
    base.attention.qkv_bias = true;
    let mlp = gated_mlp(json, activation(json)?)?;
    let layers = base.layers(&mlp, LayerNorms::Pre, windows_by_layer(json, base.count)?);
    base.model(layers, vec![base.rope()?])
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::families::tests::{model, refused};

    fn windows(changes: &[(&str, Value)]) -> Vec<Option<usize>> {
        model("qwen2", changes).attentions().map(|attention| attention.window).collect()
    }

    #[test]
    fn queries_keys_and_values_have_biases_and_nothing_else_has() {
        let spec = model("qwen2", &[("attention_bias", json!(false))]);
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
        let message = refused("qwen2", &[("layer_types", json!(types))]);
        assert!(message.contains("`layer_types`") && message.contains("use_sliding_window"), "{message}");
        let message = refused("qwen2", &[("layer_types", json!(["full_attention"]))]);
        assert!(message.contains("a list of 1 layers") && message.contains("num_hidden_layers is 2"), "{message}");
        let message = refused("qwen2", &[("layer_types", json!(["full_attention", "chunked_attention"]))]);
        assert!(message.contains("chunked_attention"), "{message}");
    }

    #[test]
    fn key_and_value_heads_default_as_transformers_does() {
        let absent = ("num_key_value_heads", Value::Null);
        let wide = [absent.clone(), ("num_attention_heads", json!(64)), ("hidden_size", json!(128))];
        assert_eq!(model("qwen2", &wide).attentions().next().unwrap().kv_heads, 32);
        let message = refused("qwen2", &[absent]);
        assert!(message.contains("`num_key_value_heads` is 32"), "{message}");
    }
}
