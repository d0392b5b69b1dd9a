//! What settings of an adapter become.

use toml::{Table, Value};

use crate::convert::setting::{Outcome, Setting, is_true, left, needless, number, number_of, set};

/// Returns what becomes of a setting of an adapter that depends on others, or has another form; `None` for any other.
pub(super) fn outcome(setting: &Setting, all: &[Setting]) -> Option<Outcome> {
    let Setting { value, .. } = setting;
    let text = value.as_str().unwrap_or_default();
    match setting.name() {
        "pissa_init" if value.as_bool() == Some(true) => {
            let niter = number_of(all, "pissa_iter").unwrap_or(16.0);
            set("lora.init_lora_weights", if niter < 0.0 { "pissa".to_owned() } else { format!("pissa_niter_{niter}") })
        }
        "pissa_iter" if is_true(all, "pissa_init") => needless("it is in lora.init_lora_weights"),
        "lora_target_modules" if is_true(all, "lora_target_linear") => {
            let names = value.to_string();
            match ["embed", "lm_head"].iter().any(|name| names.contains(name)) {
                true => left("embedding and head are trained whole, by lora.modules_to_save"),
                false => needless("all linear modules are trained"),
            }
        }
        "lora_target_modules" | "lora_target" | "target_modules" => set("lora.target", targets(value)),
        "additional_target" | "lora_modules_to_save" | "modules_to_save" => {
            set("lora.modules_to_save", names_of(value))
        }
        "init_weights" if text.starts_with("pissa_niter_") => set("lora.init_lora_weights", text),
        "scale" => set("lora.alpha", number(value)? * number_of(all, "rank").unwrap_or(8.0)),
        "_component_" if setting.path == "model._component_" => Some(model_of_torchtune(text)),
        "lora_attn_modules" => set("lora.target", modules_of_torchtune(value, is_true(all, "apply_lora_to_mlp"))),
        _ => None,
    }
}

/// Returns the class of a model in torchtune as the mode that it is.
fn model_of_torchtune(text: &str) -> Outcome {
    let name = text.rsplit('.').next().unwrap_or_default();
    let sections: &[&str] = match name.split('_').next() {
        Some("qlora") => &["lora", "bnb_4bit"],
        Some("lora") => &["lora"],
        _ => return Outcome::Set(vec![("mode".to_owned(), "full".into())]),
    };
    Outcome::Set(sections.iter().map(|section| ((*section).to_owned(), Table::new().into())).collect())
}

/// Returns the modules of torchtune's adapters under the names that they have in checkpoints.
fn modules_of_torchtune(value: &Value, has_mlp: bool) -> Value {
    let attention = value.as_array().into_iter().flatten().filter_map(Value::as_str);
    let names = attention.map(|name| if name == "output_proj" { "o_proj" } else { name });
    let mlp = ["gate_proj", "up_proj", "down_proj"].into_iter().filter(|_| has_mlp);
    Value::Array(names.chain(mlp).map(Value::from).collect())
}

fn targets(value: &Value) -> Value {
    let is_all = |name: &str| name == "all" || name.eq_ignore_ascii_case("all-linear");
    match names_of(value) {
        Value::Array(names) if matches!(&names[..], [Value::String(name)] if is_all(name)) => "all-linear".into(),
        target => target,
    }
}

/// Returns a text with names of modules as a list of them. A regular expression stays a text.
fn names_of(value: &Value) -> Value {
    let is_in_names = |letter: char| letter.is_alphanumeric() || "_-., ".contains(letter);
    match value {
        Value::String(text) if !text.is_empty() && text.chars().all(is_in_names) => {
            Value::Array(text.split(',').map(str::trim).filter(|name| !name.is_empty()).map(Value::from).collect())
        }
        other => other.clone(),
    }
}
