//! The rotary embedding of a `config.json`, in both layouts: `rope_theta` and `rope_scaling`, or `rope_parameters`.
//!
//! Keys, defaults and precedence are those of transformers' `modeling_rope_utils.py`.
//! Not supported: scalings that change during a run (dynamic).

use serde_json::Value;

use super::{Base, positive_or};
use crate::error::ArchError;
use crate::json::JsonObject;
use crate::rope::{QueryScale, Rope, RopeScaling};
use crate::spec::ModelSpec;

/// The base when a config names none, as in transformers.
pub(super) const DEFAULT_THETA: f64 = 10_000.0;
/// The key of the growth of queries with their position.
const QUERY_SCALE: &str = "llama_4_scaling_beta";

/// Reads the rotary embedding that covers whole heads of `head_dim` columns: `rope_scaling` and `rope_theta` (transformers 4) or
/// `rope_parameters` (transformers 5). A top-level `original_max_position_embeddings` takes precedence over the nested one. The base is
/// `default_theta` if the config names none.
///
/// # Errors
/// Ill-typed keys, scalings that are not supported, rotation of a part of the head, and one rotary embedding per layer type.
pub(in crate::families) fn rope_with_theta(
    json: &JsonObject,
    base: &Base<'_>,
    default_theta: f64,
) -> Result<Rope, ArchError> {
    let nested = nested(json)?;
    if let Some(rope) = &nested {
        refuse_query_scale(rope)?;
    }
    whole(json, nested.as_ref(), base, default_theta)
}

/// Reads a [`rope_with_theta`] with queries that grow with their position (Ministral 3); without any key the embedding of the published models.
///
/// # Errors
/// Those of [`rope_with_theta`], and an embedding without the growth of queries, which transformers does not load.
pub(in crate::families) fn rope_with_query_scale(json: &JsonObject, base: &Base<'_>) -> Result<Rope, ArchError> {
    let Some(nested) = nested(json)? else { return published_ministral3(json, base.attention.head_dim) };
    let rope = whole(json, Some(&nested), base, DEFAULT_THETA)?;
    let beta = nested.required(QUERY_SCALE, nested.f64(QUERY_SCALE)?, "a number")?;
    let original_max_position_embeddings = original_max(json, &nested, base.max_position_embeddings)?;
    let query_scale = (beta != 0.0).then_some(QueryScale { beta, original_max_position_embeddings });
    Ok(Rope { query_scale, ..rope })
}

fn published_ministral3(json: &JsonObject, head_dim: usize) -> Result<Rope, ArchError> {
    refuse_partial(json)?;
    let original_max_position_embeddings = 16_384;
    let scaling = RopeScaling::Yarn {
        factor: 16.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        original_max_position_embeddings,
        attention_factor: 1.0,
        truncate: true,
    };
    let query_scale = Some(QueryScale { beta: 0.1, original_max_position_embeddings });
    Ok(Rope { query_scale, ..Rope::new(1e6, scaling, head_dim) })
}

/// Reads a [`rope_with_theta`] over the first `partial_rotary_factor * head_dim` columns of each head (Phi-4-mini, GLM-4).
///
/// # Errors
/// Those of [`rope_with_theta`], and a share that is not above 0 and at most 1, or that gives an odd number of columns.
pub(in crate::families) fn partial_rope(
    json: &JsonObject,
    base: &Base<'_>,
    default_factor: f64,
) -> Result<Rope, ArchError> {
    let head_dim = base.attention.head_dim;
    let key = "partial_rotary_factor";
    let nested = nested(json)?;
    if let Some(rope) = &nested {
        refuse_query_scale(rope)?;
    }
    let factor = match nested.as_ref().map(|rope| rope.f64(key)).transpose()?.flatten() {
        Some(factor) => factor,
        None => json.f64(key)?.unwrap_or(default_factor),
    };
    let rotary_dim = (head_dim as f64 * factor) as usize;
    if !(factor > 0.0 && factor <= 1.0) || rotary_dim < 2 || rotary_dim % 2 == 1 {
        let rule = format!("it must be above 0 and at most 1, and an even number of a head's {head_dim} columns");
        return Err(json.bad(key, factor, rule));
    }
    read(json, nested.as_ref(), rotary_dim, base.max_position_embeddings, DEFAULT_THETA)
}

/// Reads the two rotary embeddings of a family that has one per layer type (Gemma 3): full attention, then sliding attention. transformers 4 writes
/// `rope_theta` and `rope_scaling` for the first and `rope_local_base_freq` for the second; transformers 5 writes `rope_parameters` by type.
///
/// # Errors
/// Those of [`rope_with_theta`], and `rope_parameters` that are not nested by type.
pub(in crate::families) fn ropes_by_layer_type(
    json: &JsonObject,
    base: &Base<'_>,
    default_thetas: [f64; 2],
) -> Result<Vec<Rope>, ArchError> {
    ropes_of_heads(json, base, default_thetas, [base.attention.head_dim; 2])
}

/// Does the same as [`ropes_by_layer_type`] for heads whose width depends on the type as well.
pub(in crate::families) fn ropes_of_heads(
    json: &JsonObject,
    base: &Base<'_>,
    [default_theta, default_local_theta]: [f64; 2],
    [head_dim, local_head_dim]: [usize; 2],
) -> Result<Vec<Rope>, ArchError> {
    let max_position_embeddings = base.max_position_embeddings;
    refuse_partial(json)?;
    let by_type = json.object("rope_parameters")?;
    let full = by_type.as_ref().map(|types| types.object("full_attention")).transpose()?.flatten();
    let sliding = by_type.as_ref().map(|types| types.object("sliding_attention")).transpose()?.flatten();
    if by_type.is_some() && full.is_none() && sliding.is_none() {
        let rule = "it must have keys `full_attention` and `sliding_attention`: this family has an embedding for each";
        return Err(json.bad("rope_parameters", "without a type of layers", rule));
    }
    let full = match full {
        Some(full) => Some(full),
        None => json.object("rope_scaling")?,
    };
    for nested in [&full, &sliding].into_iter().flatten() {
        refuse_partial(nested)?;
        refuse_query_scale(nested)?;
    }
    let local_theta = positive_or(json, "rope_local_base_freq", default_local_theta)?;
    let full = read(json, full.as_ref(), head_dim, max_position_embeddings, default_theta)?;
    let sliding = match sliding {
        Some(nested) => {
            let theta = positive_or(&nested, "rope_theta", local_theta)?;
            let original_max = original_max(&nested, &nested, max_position_embeddings)?;
            let scaling = scaling(&nested, local_head_dim, original_max, max_position_embeddings)?;
            Rope::new(theta, scaling, local_head_dim)
        }
        None => Rope::new(local_theta, RopeScaling::Default, local_head_dim),
    };
    Ok(vec![full, sliding])
}

/// Indices into the ropes of [`ropes_by_layer_type`].
pub(in crate::families) const FULL: usize = 0;
pub(in crate::families) const SLIDING: usize = 1;

/// Gives each layer the rotary embedding of its type.
pub(in crate::families) fn by_layer_type(mut spec: ModelSpec) -> ModelSpec {
    for attention in spec.attentions_mut() {
        attention.rope = Some(if attention.window.is_some() { SLIDING } else { FULL });
    }
    spec
}

/// Returns `rope_scaling`, or `rope_parameters` if that is absent or null.
fn nested<'a>(json: &JsonObject<'a>) -> Result<Option<JsonObject<'a>>, ArchError> {
    match json.object("rope_scaling")? {
        Some(rope) => Ok(Some(rope)),
        None => json.object("rope_parameters"),
    }
}

/// Reads a rotary embedding of whole heads.
fn whole(
    json: &JsonObject,
    nested: Option<&JsonObject>,
    base: &Base<'_>,
    default_theta: f64,
) -> Result<Rope, ArchError> {
    for object in [Some(json), nested].into_iter().flatten() {
        refuse_partial(object)?;
    }
    read(json, nested, base.attention.head_dim, base.max_position_embeddings, default_theta)
}

fn read(
    json: &JsonObject,
    nested: Option<&JsonObject>,
    rotary_dim: usize,
    max_position_embeddings: usize,
    default_theta: f64,
) -> Result<Rope, ArchError> {
    let (theta, scaling) = match nested {
        Some(rope) => {
            if let Some(key) = ["full_attention", "sliding_attention"].into_iter().find(|key| rope.get(key).is_some()) {
                let advice = "One rotary embedding serves all layers of this family; choose a model whose rope_parameters are not nested";
                return Err(rope.unsupported(key, "an embedding for one type of layers", advice));
            }
            let original_max = original_max(json, rope, max_position_embeddings)?;
            (rope.f64("rope_theta")?, scaling(rope, rotary_dim, original_max, max_position_embeddings)?)
        }
        None => (None, RopeScaling::Default),
    };
    let theta = match theta {
        Some(theta) if theta.is_finite() && theta > 0.0 => theta,
        Some(theta) => return Err(json.bad("rope_theta", theta, "it must be greater than zero")),
        None => positive_or(json, "rope_theta", default_theta)?,
    };
    Ok(Rope::new(theta, scaling, rotary_dim))
}

fn refuse_partial(json: &JsonObject) -> Result<(), ArchError> {
    if json.str("rope_type")? == Some("proportional") {
        return Ok(());
    }
    match json.f64("partial_rotary_factor")?.filter(|&factor| factor != 1.0) {
        Some(factor) => {
            let advice = "Rotary embedding covers the whole head here; choose a model where it is 1 or absent";
            Err(json.unsupported("partial_rotary_factor", factor, advice))
        }
        None => Ok(()),
    }
}

fn refuse_query_scale(rope: &JsonObject) -> Result<(), ArchError> {
    match rope.f64(QUERY_SCALE)?.filter(|&beta| beta != 0.0) {
        Some(beta) => {
            let advice =
                "It stands for queries that grow with their position, which this family does not have; remove the key";
            Err(rope.unsupported(QUERY_SCALE, beta, advice))
        }
        None => Ok(()),
    }
}

/// Reads the old context in tokens: from the top level, then from the nested object, then the whole context.
fn original_max(json: &JsonObject, rope: &JsonObject, max_position_embeddings: usize) -> Result<usize, ArchError> {
    let key = "original_max_position_embeddings";
    let tokens = json.usize(key)?.or(rope.usize(key)?).unwrap_or(max_position_embeddings);
    if tokens == 0 { Err(rope.bad(key, 0, "it must be at least 1")) } else { Ok(tokens) }
}

fn scaling(
    rope: &JsonObject,
    rotary_dim: usize,
    original_max: usize,
    max_position_embeddings: usize,
) -> Result<RopeScaling, ArchError> {
    match rope.str("rope_type")?.or(rope.str("type")?).unwrap_or("default") {
        // Text alone has the same position in all sections of a multimodal embedding.
        "default" | "mrope" => Ok(RopeScaling::Default),
        "proportional" => {
            let factor = rope.f64("partial_rotary_factor")?.unwrap_or(1.0);
            if !(0.0..=1.0).contains(&factor) {
                return Err(rope.bad("partial_rotary_factor", factor, "it must be at least 0 and at most 1"));
            }
            if let Some(factor) = rope.f64("factor")?.filter(|&factor| factor != 1.0) {
                return Err(rope.unsupported("factor", factor, "Proportional frequencies are not divided here"));
            }
            Ok(RopeScaling::Proportional { rotated: (factor * rotary_dim as f64 / 2.0) as usize })
        }
        "linear" => Ok(RopeScaling::Linear { factor: positive(rope, "factor")? }),
        "llama3" => llama3(rope, original_max),
        "yarn" => yarn(rope, original_max, max_position_embeddings),
        // "su" is the name in the first files of Phi-3.
        "longrope" | "su" => {
            let factor = growth_factor(rope, original_max, max_position_embeddings)?;
            let attention_factor = match rope.f64("attention_factor")? {
                Some(attention_factor) => attention_factor,
                None if factor <= 1.0 => 1.0,
                None => (1.0 + factor.ln() / (original_max as f64).ln()).sqrt(),
            };
            Ok(RopeScaling::LongRope {
                short_factor: divisors(rope, "short_factor", rotary_dim / 2)?,
                long_factor: divisors(rope, "long_factor", rotary_dim / 2)?,
                original_max_position_embeddings: original_max,
                attention_factor,
            })
        }
        other => {
            let advice = "Supported: \"default\", \"proportional\", \"linear\", \"llama3\", \"yarn\", \"longrope\"; choose a model with one of these";
            Err(rope.unsupported("rope_type", format!("\"{other}\""), advice))
        }
    }
}

fn positive(rope: &JsonObject, key: &str) -> Result<f64, ArchError> {
    let value = rope.required(key, rope.f64(key)?, "a number")?;
    positive_or(rope, key, value)
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

/// Reads how many times longer the context is than the old one.
fn growth_factor(rope: &JsonObject, original_max: usize, max_position_embeddings: usize) -> Result<f64, ArchError> {
    match rope.get("factor") {
        Some(_) => positive(rope, "factor"),
        None => Ok(max_position_embeddings as f64 / original_max as f64),
    }
}

fn yarn(rope: &JsonObject, original_max: usize, max_position_embeddings: usize) -> Result<RopeScaling, ArchError> {
    let factor = growth_factor(rope, original_max, max_position_embeddings)?;
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

/// Reads a list of `count` numbers above zero.
fn divisors(rope: &JsonObject, key: &str, count: usize) -> Result<Vec<f64>, ArchError> {
    let expected = "a list of numbers";
    let values = match rope.required(key, rope.get(key), expected)? {
        Value::Array(values) => values,
        other => return Err(rope.wrong_type(key, expected, other)),
    };
    let number = |value: &Value| value.as_f64().ok_or_else(|| rope.wrong_type(key, expected, value));
    let numbers = values.iter().map(number).collect::<Result<Vec<_>, _>>()?;
    if numbers.len() != count || numbers.iter().any(|&number| !number.is_finite() || number <= 0.0) {
        let got = format!("a list of {} numbers", numbers.len());
        return Err(rope.bad(key, got, format!("it must have {count} of them, all greater than zero")));
    }
    Ok(numbers)
}
