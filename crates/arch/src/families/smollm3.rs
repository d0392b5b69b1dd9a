//! SmolLM3: Llama in which some layers do not rotate queries and keys, every fourth one by default.
//!
//! Defaults are those of transformers' `SmolLM3Config`: a sliding window without `layer_types` is on the layers without rotation.
//! Not supported: `attention_dropout`, which is ignored.

use serde_json::Value;

use super::keys::rope::rope_with_theta;
use super::keys::{
    activation, bool_or, head_dim_or_quotient, kv_heads, layer_count, layer_types, model, size, size_or, sliding_window,
};
use crate::error::ArchError;
use crate::json::JsonObject;
use crate::mixer::{AttentionSpec, Mixer};
use crate::spec::{LayerNorms, LayerSpec, MlpSpec, ModelSpec};

/// The base of the frequencies when a config names none.
const DEFAULT_THETA: f64 = 2_000_000.0;

pub(super) fn spec(json: &JsonObject) -> Result<ModelSpec, ArchError> {
    let heads = size(json, "num_attention_heads")?;
    let head_dim = head_dim_or_quotient(json, heads)?;
    let max_position_embeddings = size_or(json, "max_position_embeddings", 32_768)?;
    // One key for all four projections.
    let attention_bias = bool_or(json, "attention_bias", false)?;
    let rotated = rotated_layers(json, layer_count(json)?)?;
    let windows = windows(json, &rotated)?;

    let attention = AttentionSpec {
        rope: None,
        qkv_bias: attention_bias,
        output_bias: attention_bias,
        ..AttentionSpec::new(heads, kv_heads(json, heads, 4)?, head_dim)
    };
    let mlp = MlpSpec::Gated {
        intermediate_size: size(json, "intermediate_size")?,
        activation: activation(json)?,
        fused: false,
        bias: bool_or(json, "mlp_bias", false)?,
    };
    let layer = |(&rotated, window): (&bool, Option<usize>)| {
        let attention = AttentionSpec { rope: rotated.then_some(0), window, ..attention.clone() };
        LayerSpec { mixer: Mixer::Attention(attention), mlp: mlp.clone(), norms: LayerNorms::Pre }
    };
    let layers = rotated.iter().zip(windows).map(layer).collect();
    let ropes = vec![rope_with_theta(json, head_dim, max_position_embeddings, DEFAULT_THETA)?];
    Ok(ModelSpec {
        tie_word_embeddings: bool_or(json, "tie_word_embeddings", true)?,
        ..model(json, layers, ropes, max_position_embeddings, 1e-6)?
    })
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

/// Returns the window of each layer; `None` for all unless `use_sliding_window`.
fn windows(json: &JsonObject, rotated: &[bool]) -> Result<Vec<Option<usize>>, ArchError> {
    let has_window = bool_or(json, "use_sliding_window", false)? && json.get("sliding_window").is_some();
    // The default is never used: the key is there.
    let window = if has_window { sliding_window(json, 1)? } else { None };
    let Some(types) = layer_types(json, rotated.len())? else {
        return Ok(rotated.iter().map(|rotated| window.filter(|_| !rotated)).collect());
    };
    if window.is_none() && types.contains(&true) {
        let rule = "`use_sliding_window` is not true or `sliding_window` is null, so such layers have no window";
        return Err(json.bad("layer_types", "\"sliding_attention\" for some layers", rule));
    }
    Ok(types.into_iter().map(|sliding| window.filter(|_| sliding)).collect())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::config::ModelConfig;
    use crate::config::tests::{family_json, layout_5_of, parse, refusal_of};
    use crate::error::ArchError;

    fn smollm3(changes: &[(&str, Value)]) -> Result<ModelConfig, ArchError> {
        parse(&family_json("SmolLM3ForCausalLM", "smollm3", changes))
    }

    fn rotated(changes: &[(&str, Value)]) -> Vec<bool> {
        let more = [&[("num_hidden_layers", json!(5))], changes].concat();
        smollm3(&more).unwrap().spec.attentions().map(|attention| attention.rope.is_some()).collect()
    }

    #[test]
    fn every_fourth_layer_is_not_rotated_unless_the_config_says_otherwise() {
        assert_eq!(rotated(&[]), [true, true, true, false, true]);
        assert_eq!(rotated(&[("no_rope_layer_interval", json!(2))]), [true, false, true, false, true]);
        assert_eq!(rotated(&[("no_rope_layers", json!([0, 1, 1, 0, 1]))]), [false, true, true, false, true]);
    }

    #[test]
    fn a_window_is_on_the_layers_without_rotation_or_where_layer_types_say() {
        let windows = |changes: &[(&str, Value)]| -> Vec<_> {
            let on = [("no_rope_layers", json!([1, 0])), ("sliding_window", json!(7))];
            let spec = smollm3(&[&on[..], changes].concat()).unwrap().spec;
            spec.attentions().map(|attention| attention.window).collect()
        };
        let on = ("use_sliding_window", json!(true));
        assert_eq!(windows(&[]), [None, None]);
        assert_eq!(windows(std::slice::from_ref(&on)), [None, Some(7)]);
        let types = ("layer_types", json!(["sliding_attention", "full_attention"]));
        assert_eq!(windows(&[on, types.clone()]), [Some(7), None]);
        let message = refusal_of(smollm3(&[types]));
        assert!(message.contains("`layer_types`") && message.contains("use_sliding_window"), "{message}");
    }

    #[test]
    fn absent_keys_default_as_transformers_does() {
        let absent = ["rope_theta", "num_key_value_heads", "tie_word_embeddings", "max_position_embeddings"];
        let spec = smollm3(&absent.map(|key| (key, Value::Null))).unwrap().spec;
        assert_eq!((spec.ropes[0].theta, spec.tie_word_embeddings), (2_000_000.0, true));
        assert_eq!((spec.attentions().next().unwrap().kv_heads, spec.max_position_embeddings), (4, 32_768));
    }

    #[test]
    fn both_layouts_give_one_spec() {
        let changes = [("no_rope_layers", json!([1, 0])), ("attention_bias", json!(true))];
        let new = layout_5_of("SmolLM3ForCausalLM", "smollm3", &changes).unwrap();
        assert_eq!(new.spec, smollm3(&changes).unwrap().spec);
    }

    #[test]
    fn a_list_of_another_length_or_of_other_values_is_refused() {
        let refusal = |value| refusal_of(smollm3(&[("no_rope_layers", value)]));
        assert!(refusal(json!([1])).contains("a list of 1 layers"));
        assert!(refusal(json!([1, 2])).contains("a list of 0 and 1"));
        assert!(refusal_of(smollm3(&[("no_rope_layer_interval", json!(0))])).contains("at least 1"));
    }
}
