//! OLMo 3: OLMo 2 with a sliding window on three of four layers, and with a separate rotary embedding for those, which is not scaled.
//!
//! Defaults are those of transformers' `Olmo3Config`. transformers 4 writes one `rope_theta`, and `rope_scaling` for the layers without a window.
//! Not supported: another `rope_theta` than 500,000 in that layout if some layers have a window, because transformers 5 then rotates those by
//! 500,000 all the same and other programs do not; `attention_dropout`, which is ignored.

use super::keys::rope::ropes_by_layer_type;
use super::keys::{
    activation, bool_or, gated_mlp, head_dim_or_quotient, kv_heads, layer_count, model, size, size_or,
    windows_by_pattern,
};
use crate::error::ArchError;
use crate::json::JsonObject;
use crate::mixer::{AttentionSpec, Mixer, QkNorm};
use crate::spec::{LayerNorms, LayerSpec, ModelSpec};

/// Indices into the ropes of a model.
const FULL: usize = 0;
const SLIDING: usize = 1;

/// The base where a config names none.
const THETA: f64 = 500_000.0;

pub(super) fn spec(json: &JsonObject) -> Result<ModelSpec, ArchError> {
    let heads = size(json, "num_attention_heads")?;
    let head_dim = head_dim_or_quotient(json, heads)?;
    let max_position_embeddings = size_or(json, "max_position_embeddings", 2048)?;
    let windows = windows_by_pattern(json, layer_count(json)?, 4)?;
    // One key for all four projections.
    let attention_bias = bool_or(json, "attention_bias", false)?;
    if windows.iter().any(Option::is_some) {
        refuse_other_theta(json)?;
    }

    let attention = AttentionSpec {
        qk_norm: QkNorm::WholeProjection,
        qkv_bias: attention_bias,
        output_bias: attention_bias,
        ..AttentionSpec::new(heads, kv_heads(json, heads, heads)?, head_dim)
    };
    let mlp = gated_mlp(json, activation(json)?)?;
    let layer = |window: Option<usize>| {
        let rope = Some(if window.is_some() { SLIDING } else { FULL });
        let attention = AttentionSpec { window, rope, ..attention.clone() };
        LayerSpec { mixer: Mixer::Attention(attention), mlp: mlp.clone(), norms: LayerNorms::Post }
    };
    let layers = windows.into_iter().map(layer).collect();
    let ropes = ropes_by_layer_type(json, head_dim, max_position_embeddings, [THETA; 2])?.into();
    model(json, layers, ropes, max_position_embeddings, 1e-5)
}

fn refuse_other_theta(json: &JsonObject) -> Result<(), ArchError> {
    let Some(theta) = json.f64("rope_theta")?.filter(|&theta| theta != THETA) else { return Ok(()) };
    let by_type = json.object("rope_parameters")?;
    let sliding = by_type.as_ref().map(|types| types.object("sliding_attention")).transpose()?.flatten();
    if sliding.is_some_and(|sliding| sliding.get("rope_theta").is_some()) {
        return Ok(());
    }
    let advice = "It is not clear whether layers with a window rotate by it too; write `rope_parameters` with \
                  `full_attention` and `sliding_attention`";
    Err(json.unsupported("rope_theta", theta, advice))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{FULL, SLIDING};
    use crate::config::ModelConfig;
    use crate::config::tests::{family_json, layout_5_of, parse, refusal_of};
    use crate::error::ArchError;
    use crate::rope::RopeScaling;

    fn olmo3(changes: &[(&str, Value)]) -> Result<ModelConfig, ArchError> {
        let changes = [&[("rope_theta", json!(500_000.0))], changes].concat();
        parse(&family_json("Olmo3ForCausalLM", "olmo3", &changes))
    }

    fn yarn() -> Value {
        json!({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "attention_factor": 1.2})
    }

    #[test]
    fn every_fourth_layer_sees_everything_and_alone_has_the_scaled_rope() {
        let changes = [("num_hidden_layers", json!(8)), ("rope_scaling", yarn()), ("rope_theta", Value::Null)];
        let spec = olmo3(&changes).unwrap().spec;
        for (index, layer) in spec.layers.iter().enumerate() {
            let expected = if index % 4 == 3 { (None, Some(FULL)) } else { (Some(4096), Some(SLIDING)) };
            let attention = layer.mixer.attention().unwrap();
            assert_eq!((attention.window, attention.rope), expected, "layer {index}");
        }
        assert!(matches!(spec.ropes[FULL].scaling, RopeScaling::Yarn { attention_factor: 1.2, .. }));
        assert_eq!(spec.ropes[SLIDING].scaling, RopeScaling::Default);
        assert_eq!((spec.ropes[FULL].theta, spec.ropes[SLIDING].theta), (5e5, 5e5));
    }

    #[test]
    fn both_layouts_give_one_spec() {
        let types = ("layer_types", json!(["sliding_attention", "full_attention"]));
        let old = olmo3(&[types.clone(), ("rope_scaling", yarn())]).unwrap().spec;
        let mut full = yarn();
        full["rope_theta"] = json!(500_000.0);
        let by_type = json!({
            "full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 500_000.0}
        });
        let new = layout_5_of("Olmo3ForCausalLM", "olmo3", &[types, ("rope_parameters", by_type)]).unwrap();
        assert_eq!(new.spec, old);
    }

    #[test]
    fn one_theta_that_may_or_may_not_hold_for_windows_is_refused() {
        let theta = ("rope_theta", json!(10_000.0));
        let message = refusal_of(olmo3(std::slice::from_ref(&theta)));
        assert!(message.contains("`rope_theta`") && message.contains("sliding_attention"), "{message}");
        let full = ("layer_types", json!(["full_attention", "full_attention"]));
        assert_eq!(olmo3(&[theta, full]).unwrap().spec.ropes[FULL].theta, 10_000.0);
    }
}
