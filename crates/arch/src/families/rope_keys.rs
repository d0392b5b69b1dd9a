//! The rotary embedding of a `config.json`, in both layouts: `rope_theta` and `rope_scaling`, or `rope_parameters`.
//!
//! Keys, defaults and precedence are those of transformers' `modeling_rope_utils.py`.
//! Not supported: scalings that change during a run (dynamic, longrope), rotation of a part of the head, one embedding per layer type.

use crate::error::ArchError;
use crate::json::JsonObject;
use crate::rope::{Rope, RopeScaling};

/// The base when a config names none, as in transformers.
const DEFAULT_THETA: f64 = 10_000.0;

/// Reads the rotary embedding that covers whole heads of `head_dim` columns: `rope_scaling` and `rope_theta` (transformers 4) or
/// `rope_parameters` (transformers 5). A top-level `original_max_position_embeddings` takes precedence over the nested one.
///
/// # Errors
/// Ill-typed keys, scalings that are not supported, rotation of a part of the head, and one rotary embedding per layer type.
pub(super) fn rope(json: &JsonObject, head_dim: usize, max_position_embeddings: usize) -> Result<Rope, ArchError> {
    refuse_partial(json)?;
    let nested = match json.object("rope_scaling")? {
        Some(rope) => Some(rope),
        None => json.object("rope_parameters")?,
    };
    let (theta, scaling) = match nested {
        Some(rope) => {
            refuse_partial(&rope)?;
            refuse_layer_types(&rope)?;
            let original_max = json.usize("original_max_position_embeddings")?;
            (rope.f64("rope_theta")?, scaling(&rope, original_max, max_position_embeddings)?)
        }
        None => (None, RopeScaling::Default),
    };
    let theta = match theta {
        Some(theta) => theta,
        None => json.f64("rope_theta")?.unwrap_or(DEFAULT_THETA),
    };
    if !theta.is_finite() || theta <= 0.0 {
        return Err(json.bad("rope_theta", theta, "it must be greater than zero"));
    }
    Ok(Rope { theta, scaling, rotary_dim: head_dim })
}

fn refuse_partial(json: &JsonObject) -> Result<(), ArchError> {
    match json.f64("partial_rotary_factor")?.filter(|&factor| factor != 1.0) {
        Some(factor) => {
            let advice = "Rotary embedding covers the whole head here; choose a model where it is 1 or absent";
            Err(json.unsupported("partial_rotary_factor", factor, advice))
        }
        None => Ok(()),
    }
}

fn refuse_layer_types(rope: &JsonObject) -> Result<(), ArchError> {
    match ["full_attention", "sliding_attention"].into_iter().find(|key| rope.get(key).is_some()) {
        Some(key) => {
            let advice = "One rotary embedding serves all layers of this family; choose a model whose rope_parameters are not nested";
            Err(rope.unsupported(key, "an embedding for one type of layers", advice))
        }
        None => Ok(()),
    }
}

fn scaling(
    rope: &JsonObject,
    original_max: Option<usize>,
    max_position_embeddings: usize,
) -> Result<RopeScaling, ArchError> {
    let original_max = match original_max {
        Some(tokens) => tokens,
        None => rope.usize("original_max_position_embeddings")?.unwrap_or(max_position_embeddings),
    };
    if original_max == 0 {
        return Err(rope.bad("original_max_position_embeddings", 0, "it must be at least 1"));
    }
    match rope.str("rope_type")?.or(rope.str("type")?).unwrap_or("default") {
        "default" => Ok(RopeScaling::Default),
        "linear" => Ok(RopeScaling::Linear { factor: positive(rope, "factor")? }),
        "llama3" => llama3(rope, original_max),
        "yarn" => yarn(rope, original_max, max_position_embeddings),
        other => {
            let advice = "Supported: \"default\", \"linear\", \"llama3\", \"yarn\"; choose a model with one of these";
            Err(rope.unsupported("rope_type", format!("\"{other}\""), advice))
        }
    }
}

fn positive(rope: &JsonObject, key: &str) -> Result<f64, ArchError> {
    let value = rope.required(key, rope.f64(key)?, "a number")?;
    if value.is_finite() && value > 0.0 { Ok(value) } else { Err(rope.bad(key, value, "it must be greater than zero")) }
}

fn llama3(rope: &JsonObject, original_max: usize) -> Result<RopeScaling, ArchError> {
    let (low_freq_factor, high_freq_factor) = (positive(rope, "low_freq_factor")?, positive(rope, "high_freq_factor")?);
    if high_freq_factor <= low_freq_factor {
        let rule = format!("it must be above low_freq_factor ({low_freq_factor})");
        return Err(rope.bad("high_freq_factor", high_freq_factor, rule));
    }
    let factor = positive(rope, "factor")?;
    Ok(RopeScaling::Llama3 {
        factor,
        low_freq_factor,
        high_freq_factor,
        original_max_position_embeddings: original_max,
    })
}

fn yarn(rope: &JsonObject, original_max: usize, max_position_embeddings: usize) -> Result<RopeScaling, ArchError> {
    let factor = match rope.get("factor") {
        Some(_) => positive(rope, "factor")?,
        None => max_position_embeddings as f64 / original_max as f64,
    };
    let growth = |mscale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 };
    let given = |key| Ok::<_, ArchError>(rope.f64(key)?.filter(|&value| value != 0.0));
    let attention_factor = match (rope.f64("attention_factor")?, given("mscale")?, given("mscale_all_dim")?) {
        (Some(attention_factor), ..) => attention_factor,
        (None, Some(mscale), Some(all_dim)) => growth(mscale) / growth(all_dim),
        (None, ..) => growth(1.0),
    };
    Ok(RopeScaling::Yarn {
        factor,
        beta_fast: given("beta_fast")?.unwrap_or(32.0),
        beta_slow: given("beta_slow")?.unwrap_or(1.0),
        original_max_position_embeddings: original_max,
        attention_factor,
        truncate: rope.bool("truncate")?.unwrap_or(true),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::config::tests::{rope, tiny};
    use crate::rope::RopeScaling;

    #[test]
    fn top_level_original_length_wins_over_the_nested_one() {
        let nested = json!({
            "rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4,
            "original_max_position_embeddings": 8192
        });
        let top = tiny(&[("rope_scaling", nested), ("original_max_position_embeddings", json!(32))]).unwrap();
        let RopeScaling::Llama3 { original_max_position_embeddings, .. } = top.spec.ropes[0].scaling else {
            panic!("llama3")
        };
        assert_eq!(original_max_position_embeddings, 32);
    }

    #[test]
    fn scalings_that_change_during_a_run_are_refused_by_name() {
        for name in ["dynamic", "longrope"] {
            let message = rope(json!({"rope_type": name, "factor": 2.0})).unwrap_err().to_string();
            assert!(message.contains(name) && message.contains("rope_parameters.rope_type"), "{message}");
        }
        let message = rope(json!({"rope_type": "linear"})).unwrap_err().to_string();
        assert!(message.contains("no key `rope_parameters.factor`"), "{message}");
    }

    #[test]
    fn rotation_of_a_part_of_the_head_is_refused_at_either_level() {
        let message = rope(json!({"rope_type": "default", "partial_rotary_factor": 0.5})).unwrap_err().to_string();
        assert!(message.contains("`rope_parameters.partial_rotary_factor` is 0.5"), "{message}");
        let message = tiny(&[("partial_rotary_factor", json!(0.25))]).unwrap_err().to_string();
        assert!(message.contains("`partial_rotary_factor` is 0.25"), "{message}");
        tiny(&[("partial_rotary_factor", json!(1.0))]).unwrap();
    }

    #[test]
    fn one_rotary_embedding_per_layer_type_is_refused() {
        let message = rope(json!({"full_attention": {"rope_type": "default"}})).unwrap_err().to_string();
        assert!(message.contains("`rope_parameters.full_attention`"), "{message}");
    }
}
