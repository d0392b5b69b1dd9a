//! SmolLM3: Llama in which some layers do not rotate queries and keys, every fourth one by default.
//!
//! Defaults are those of transformers' `SmolLM3Config`: a sliding window without `layer_types` is on the layers without rotation.
//! Not supported: `attention_dropout`, which is ignored.

use serde_json::Value;

use super::keys::rope::rope_with_theta;
use super::keys::{Base, Defaults, activation, bool_or, given_window, size, size_or, windows_by_types};
use crate::error::ArchError;
use crate::json::JsonObject;
use crate::spec::{LayerNorms, MlpSpec, ModelSpec};

/// The base of the frequencies when a config names none.
const DEFAULT_THETA: f64 = 2_000_000.0;

pub(super) fn spec(json: &JsonObject) -> Result<ModelSpec, ArchError> {
    let defaults = Defaults { head_dim: None, kv_heads: Some(4), max_position_embeddings: 32_768, rms_norm_eps: 1e-6 };
    let base = Base::read(json, defaults)?.with_bias(false)?;
    let rotated = rotated_layers(json, base.count)?;
    let mlp = MlpSpec::Gated {
        intermediate_size: size(json, "intermediate_size")?,
        activation: activation(json)?,
        fused: false,
        bias: bool_or(json, "mlp_bias", false)?,
    };
    let window = if bool_or(json, "use_sliding_window", false)? { given_window(json)? } else { None };
    let windows = windows_by_types(json, window, rotated.iter().map(|rotated| !rotated).collect())?;
    let layers = base.layers(&mlp, LayerNorms::Pre, windows);
    let mut spec = base.model(layers, vec![rope_with_theta(json, &base, DEFAULT_THETA)?])?;
    spec.attentions_mut().zip(rotated).for_each(|(attention, rotated)| attention.rope = rotated.then_some(0));
    Ok(ModelSpec { tie_word_embeddings: bool_or(json, "tie_word_embeddings", true)?, ..spec })
}

/// Returns whether each layer rotates queries and keys: by `no_rope_layers` (in spite of its name, 1 means that the layer rotates), otherwise all but
/// every `no_rope_layer_interval`-th.
fn rotated_layers(json: &JsonObject, layers: usize) -> Result<Vec<bool>, ArchError> {
    let key = "no_rope_layers";
    let flags = match json.get(key) {
        None => {
            let interval = size_or(json, "no_rope_layer_interval", 4)?;
            return Ok((1..=layers).map(|layer| layer % interval != 0).collect());
        }
        Some(Value::Array(flags)) => flags,
        Some(other) => return Err(json.wrong_type(key, "a list of 0 and 1", other)),
    };
    if flags.len() < layers {
        let got = format!("a list of {} layers", flags.len());
        return Err(json.bad(key, got, format!("num_hidden_layers is {layers}")));
    }
    let is_rotated = |flag: &Value| match flag.as_u64() {
        Some(flag @ 0..=1) => Ok(flag == 1),
        _ => Err(json.wrong_type(key, "a list of 0 and 1", flag)),
    };
    flags[..layers].iter().map(is_rotated).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::families::tests::{model, refused};

    fn rotated(changes: &[(&str, Value)]) -> Vec<bool> {
        let more = [&[("num_hidden_layers", json!(5))], changes].concat();
        model("smollm3", &more).attentions().map(|attention| attention.rope.is_some()).collect()
    }

    #[test]
    fn by_default_every_fourth_layer_is_not_rotated() {
        assert_eq!(rotated(&[]), [true, true, true, false, true]);
        assert_eq!(rotated(&[("no_rope_layer_interval", json!(2))]), [true, false, true, false, true]);
        assert_eq!(rotated(&[("no_rope_layers", json!([0, 1, 1, 0, 1]))]), [false, true, true, false, true]);
    }

    #[test]
    fn windows_are_on_unrotated_layers_or_as_types_say() {
        let windows = |changes: &[(&str, Value)]| -> Vec<_> {
            let on = [("no_rope_layers", json!([1, 0])), ("sliding_window", json!(7))];
            let spec = model("smollm3", &[&on[..], changes].concat());
            spec.attentions().map(|attention| attention.window).collect()
        };
        let on = ("use_sliding_window", json!(true));
        assert_eq!(windows(&[]), [None, None]);
        assert_eq!(windows(std::slice::from_ref(&on)), [None, Some(7)]);
        let types = ("layer_types", json!(["sliding_attention", "full_attention"]));
        assert_eq!(windows(&[on, types.clone()]), [Some(7), None]);
        let message = refused("smollm3", &[types]);
        assert!(message.contains("`layer_types`") && message.contains("use_sliding_window"), "{message}");
    }

    #[test]
    fn absent_keys_default_as_transformers_does() {
        let absent = ["rope_theta", "num_key_value_heads", "tie_word_embeddings", "max_position_embeddings"];
        let spec = model("smollm3", &absent.map(|key| (key, Value::Null)));
        assert_eq!((spec.ropes[0].theta, spec.tie_word_embeddings), (2_000_000.0, true));
        assert_eq!((spec.attentions().next().unwrap().kv_heads, spec.max_position_embeddings), (4, 32_768));
    }

    #[test]
    fn a_list_of_another_length_or_of_other_values_is_refused() {
        let refusal = |value| refused("smollm3", &[("no_rope_layers", value)]);
        assert!(refusal(json!([1])).contains("a list of 1 layers"));
        assert!(refusal(json!([1, 2])).contains("a list of 0 and 1"));
        assert!(refused("smollm3", &[("no_rope_layer_interval", json!(0))]).contains("at least 1"));
    }
}
