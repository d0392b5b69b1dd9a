//! Finds the family of a `config.json`; for an unsupported model, what it waits for, if that is known.
//!
//! Trade-off: differences are recognized by keys that are common on the Hub. A model may differ in ways that no key shows, so no message guesses
//! a family that it is like.

use serde_json::Value;

use super::{FAMILIES, Family};
use crate::error::ArchError;
use crate::json::JsonObject;

/// Keys that few families or none here support, and the arithmetic that they stand for.
const DIFFERENCES: [(&str, &str); 16] = [
    ("num_local_experts", "a mixture of experts"),
    ("num_experts", "a mixture of experts"),
    ("n_routed_experts", "a mixture of experts"),
    ("kv_lora_rank", "latent attention"),
    ("attn_logit_softcapping", "soft caps on attention scores"),
    ("final_logit_softcapping", "soft caps on logits"),
    ("query_pre_attn_scalar", "its own scale of attention scores"),
    ("use_bidirectional_attention", "attention to later tokens"),
    ("partial_rotary_factor", "rotation of a part of each head"),
    ("attention_multiplier", "its own scale of attention scores"),
    ("embedding_multiplier", "a factor on the embedding"),
    ("logits_scaling", "a divisor of the logits"),
    ("residual_multiplier", "a factor on the residual stream"),
    ("ssm_cfg", "state-space layers"),
    ("vision_config", "a vision encoder"),
    ("n_embd", "the layout of GPT-2"),
];

/// Models that users train and that are not there yet, by the start of their `model_type`, and what they need. Of two that fit, the longer is first.
const POSTPONED: [(&str, &str); 17] = [
    ("qwen3_vl_moe", "experts with fused weights"),
    ("gemma3n", "per-layer embeddings and keys and values that layers share"),
    ("llama4", "attention in chunks and a shared expert"),
    ("muse_glimmer", "an output gate, norms without weights and a rope theta per layer"),
    ("glm4_moe_lite", "latent attention, a sigmoid router and shared experts"),
    ("deepseek_v", "latent attention and shared experts"),
    ("kimi_k2", "latent attention, a sigmoid router and shared experts"),
    ("minimax_m2", "a sigmoid router with a bias, and heads that are partly rotated"),
    ("qwen4_exp", "several residual streams, n-gram embeddings and indexed sparse attention"),
    ("kimi_linear", "latent attention and a decay per key channel"),
    ("glm5_next", "a decay per key channel"),
    ("bailing_hybrid", "latent attention and a decay per key channel"),
    ("nemotron_h", "Mamba 2 layers"),
    ("falcon_h1", "Mamba 2 layers"),
    ("granitemoehybrid", "Mamba 2 layers"),
    ("granitemoe", "experts with fused weights"),
    ("mistral4", "latent attention and shared experts"),
];

/// Returns the family of a `config.json`: by `architectures` and `model_type`, which must agree where both are given.
///
/// # Errors
/// A model that no family reads, and two names that contradict each other.
pub fn family_of(json: &JsonObject) -> Result<&'static Family, ArchError> {
    let model_type = json.str("model_type")?;
    let by_type = |name: &str| FAMILIES.iter().find(|family| family.model_type == name);
    let names = match json.get("architectures") {
        Some(Value::Array(names)) => names,
        Some(other) => return Err(json.wrong_type("architectures", "a list of strings", other)),
        None => {
            let Some(name) = model_type else {
                return Err(unsupported(json, "a model without `architectures` and `model_type`".to_owned()));
            };
            return by_type(name).ok_or_else(|| unsupported(json, format!("`model_type` \"{name}\"")));
        }
    };
    let known = |name: &Value| FAMILIES.iter().find(|family| name == family.architecture);
    let Some(family) = names.iter().find_map(known) else {
        return Err(unsupported(json, format!("`architectures` {}", Value::from(names.clone()))));
    };
    match model_type {
        Some(name) if name != family.model_type => {
            let (architecture, expected) = (family.architecture, family.model_type);
            let rule = format!("{architecture} in `architectures` has \"{expected}\"; correct one of the two keys");
            Err(json.bad("model_type", format!("\"{name}\""), rule))
        }
        _ => Ok(family),
    }
}

/// Returns the error for a model with `found`.
fn unsupported(json: &JsonObject, found: String) -> ArchError {
    // The model type of a known family, whose layers another architecture has, is not what is unknown.
    let is_unknown = |name: &&str| FAMILIES.iter().all(|family| family.model_type != *name);
    let model_type = json.get("model_type").and_then(Value::as_str).filter(is_unknown);
    let found = model_type.map_or(found, |name| format!("`model_type` \"{name}\""));
    let needs = |name: &str| POSTPONED.iter().find(|(start, _)| name.starts_with(start)).map(|(_, needs)| needs);
    let own_code = if json.get("auto_map").is_some() { "; the code that comes with a model is never run" } else { "" };
    let advice = match model_type.and_then(needs) {
        Some(needs) => format!("It is not there yet: it needs {needs}"),
        None => format!("docs/models.md lists the families; choose a model of one of them{own_code}"),
    };
    ArchError::UnsupportedArchitecture { path: json.path.to_path_buf(), found, advice }
}

/// Refuses keys for arithmetic that this family does not support, unless their value is neutral.
pub(super) fn refuse_foreign_keys(json: &JsonObject, family: &Family) -> Result<(), ArchError> {
    let is_neutral = |value: &Value| match value {
        Value::Bool(flag) => !flag,
        other => matches!(other.as_f64(), Some(0.0 | 1.0)),
    };
    let foreign = DIFFERENCES.iter().filter(|(key, _)| !family.special_keys.contains(key));
    for (key, meaning) in foreign {
        if let Some(value) = json.get(key).filter(|value| !is_neutral(value)) {
            let advice =
                format!("It stands for {meaning}, which a {} does not have; remove the key", family.architecture);
            return Err(json.unsupported(key, value, advice));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn postponed_families_are_found_and_not_registered() {
        for (at, (start, _)) in POSTPONED.iter().enumerate() {
            assert!(POSTPONED[..at].iter().all(|(other, _)| !start.starts_with(other)), "{start} is hidden");
            assert!(FAMILIES.iter().all(|family| !family.model_type.starts_with(start)), "{start} is there");
        }
    }
}
