//! Finds the family of a `config.json`; for an unsupported model, the nearest family and the differences that the keys show.
//!
//! Trade-off: differences are recognized by keys that are common on the Hub. A model may differ in ways that no key shows, so the
//! message never claims that two architectures are the same.

use serde_json::Value;
use strsim::jaro_winkler;

use super::{FAMILIES, Family};
use crate::error::ArchError;
use crate::json::JsonObject;

/// Keys that few families or none here support, and the arithmetic that they stand for.
const DIFFERENCES: [(&str, &str); 15] = [
    ("num_local_experts", "a mixture of experts"),
    ("num_experts", "a mixture of experts"),
    ("n_routed_experts", "a mixture of experts"),
    ("kv_lora_rank", "latent attention"),
    ("attn_logit_softcapping", "soft caps on attention scores"),
    ("final_logit_softcapping", "soft caps on logits"),
    ("query_pre_attn_scalar", "its own scale of attention scores"),
    ("use_bidirectional_attention", "attention to later tokens"),
    ("partial_rotary_factor", "rotation of a part of each head"),
    ("embedding_multiplier", "a factor on the embedding"),
    ("logits_scaling", "a divisor of the logits"),
    ("residual_multiplier", "a factor on the residual stream"),
    ("ssm_cfg", "state-space layers"),
    ("vision_config", "a vision encoder"),
    ("n_embd", "the layout of GPT-2"),
];

/// Returns the family of a `config.json`: by `architectures` and `model_type`, which must agree where both are given.
///
/// # Errors
/// A model that no family reads, with the nearest supported one, and two names that contradict each other.
pub fn family_of(json: &JsonObject) -> Result<&'static Family, ArchError> {
    let model_type = json.str("model_type")?;
    let by_type = |name: &str| FAMILIES.iter().find(|family| family.model_type == name);
    let names = match json.get("architectures") {
        Some(Value::Array(names)) => names,
        Some(other) => return Err(json.wrong_type("architectures", "a list of strings", other)),
        None => {
            let Some(name) = model_type else {
                return Err(unsupported(json, "neither `architectures` nor `model_type`".to_owned(), ""));
            };
            return by_type(name).ok_or_else(|| unsupported(json, format!("`model_type` \"{name}\""), name));
        }
    };
    let known = |name: &Value| FAMILIES.iter().find(|family| name == family.architecture);
    let Some(family) = names.iter().find_map(known) else {
        let first = names.iter().find_map(Value::as_str).unwrap_or_default();
        return Err(unsupported(json, format!("`architectures` {}", Value::from(names.clone())), first));
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

/// Returns the error for a model with `found`, whose architecture or model type is `name` (empty: none).
fn unsupported(json: &JsonObject, found: String, name: &str) -> ArchError {
    let supported = FAMILIES.map(|family| format!("{} (`model_type` \"{}\")", family.architecture, family.model_type));
    let nearest = match nearest(name) {
        Some(family) => nearest_and_differences(json, family),
        None => "Give a config.json that names its architecture".to_owned(),
    };
    ArchError::UnsupportedArchitecture {
        path: json.path.to_path_buf(),
        found,
        supported: supported.join(", "),
        nearest,
    }
}

/// Refuses keys for arithmetic that this family does not support, unless their value is neutral.
///
/// # Errors
/// The first such key.
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

fn nearest(name: &str) -> Option<&'static Family> {
    let likeness = |family: &Family| jaro_winkler(name, family.architecture).max(jaro_winkler(name, family.model_type));
    let families = FAMILIES.iter().filter(|_| !name.is_empty());
    families.max_by(|a, b| likeness(a).total_cmp(&likeness(b)))
}

fn nearest_and_differences(json: &JsonObject, family: &Family) -> String {
    let mut differences: Vec<String> = DIFFERENCES
        .iter()
        .filter(|(key, _)| json.get(key).is_some() && !family.special_keys.contains(key))
        .map(|(key, meaning)| format!("`{key}` ({meaning})"))
        .collect();
    if let Some(activation) = json.get("hidden_act").filter(|name| *name != "silu") {
        differences.push(format!("`hidden_act` {activation}"));
    }
    let name = family.architecture;
    if differences.is_empty() {
        format!(
            "The nearest is {name}, but no key shows what differs. Choose a supported model, or add a family as \
             docs/adding-a-model.md describes"
        )
    } else {
        format!("The nearest is {name}, which does not have {}. Choose a supported model", differences.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::config::tests::{parse, refusal_of, tiny};

    fn refusal(changes: &[(&str, Value)]) -> String {
        refusal_of(tiny(changes))
    }

    #[test]
    fn a_family_is_recognized_by_either_name_alone() {
        for family in FAMILIES {
            let sizes = json!({
                "vocab_size": 11, "hidden_size": 64, "intermediate_size": 12, "num_hidden_layers": 2,
                "num_attention_heads": 32, "num_key_value_heads": 2,
            });
            for (key, name) in
                [("architectures", json!([family.architecture])), ("model_type", json!(family.model_type))]
            {
                let mut config = sizes.clone();
                config[key] = name;
                assert_eq!(parse(&config.to_string()).unwrap().model_type, family.model_type);
            }
        }
    }

    #[test]
    fn another_architecture_is_named_with_the_nearest_supported_one_and_what_differs() {
        let message = refusal(&[
            ("architectures", json!(["DeepseekV3ForCausalLM"])),
            ("model_type", json!("deepseek_v3")),
            ("n_routed_experts", json!(256)),
        ]);
        for part in ["DeepseekV3ForCausalLM", "The nearest is ", "`n_routed_experts` (a mixture of experts)"] {
            assert!(message.contains(part), "{message}");
        }
        assert!(FAMILIES.iter().all(|family| message.contains(family.architecture)), "{message}");
        let message = refusal(&[
            ("architectures", json!(["Gemma3ForConditionalGeneration"])),
            ("model_type", json!("gemma3")),
            ("vision_config", json!({})),
            ("query_pre_attn_scalar", json!(256)),
        ]);
        let nearest =
            "The nearest is Gemma3ForCausalLM, which does not have `vision_config` (a vision encoder). Choose";
        assert!(message.contains(nearest), "{message}");
        let message = refusal(&[("architectures", Value::Null), ("model_type", json!("ministral"))]);
        assert!(message.contains("`model_type` \"ministral\""), "{message}");
        assert!(message.contains("MistralForCausalLM, but no key shows what differs"), "{message}");
    }

    #[test]
    fn arithmetic_that_a_family_does_not_have_is_refused_by_key() {
        let message = refusal(&[("final_logit_softcapping", json!(30.0))]);
        for part in ["`final_logit_softcapping` is 30.0", "soft caps on logits", "a LlamaForCausalLM does not have"] {
            assert!(message.contains(part), "{message}");
        }
        for neutral in [Value::Null, json!(false), json!(1.0), json!(0)] {
            tiny(&[("logits_scaling", neutral)]).unwrap();
        }
    }

    #[test]
    fn names_that_contradict_each_other_or_are_missing_are_refused() {
        let message = refusal(&[("model_type", json!("qwen2"))]);
        let rule = "key `model_type` is \"qwen2\", but LlamaForCausalLM in `architectures` has \"llama\"";
        assert!(message.contains(rule), "{message}");
        let neither = tiny(&[("model_type", Value::Null), ("architectures", Value::Null)]).unwrap_err();
        assert!(matches!(neither, ArchError::UnsupportedArchitecture { .. }));
        assert!(matches!(tiny(&[("architectures", json!("x"))]), Err(ArchError::WrongType { .. })));
    }
}
