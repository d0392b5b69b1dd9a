//! LoRA adapters in PEFT's format: `adapter_config.json` here, the tensors in `peft/adapter.rs`.
//!
//! What is written loads in PEFT unchanged, and plain LoRA adapters that PEFT wrote load here.
//! Not supported: variants that need other arithmetic (DoRA, trained embeddings, per-module ranks, ...). They are refused by the name
//! of the setting, never loaded approximately.

mod adapter;

use std::collections::BTreeMap;
use std::path::Path;

use firebrick_arch::ArchError;
use firebrick_arch::json::{JsonObject, parse_object};
pub use firebrick_arch::{LoraConfig, TargetModules};
use serde_json::{Value, json, to_string_pretty};

pub use self::adapter::{check_adapter, read_adapter, read_adapter_config, write_adapter};
pub use crate::weights::TensorF32;

/// PEFT's name of the file that holds a [`LoraConfig`].
pub const ADAPTER_CONFIG_FILE: &str = "adapter_config.json";
/// PEFT's name of the file that holds the matrices.
pub const ADAPTER_WEIGHTS_FILE: &str = "adapter_model.safetensors";

/// PEFT's word for every linear layer but the head.
const ALL_LINEAR: &str = "all-linear";
/// Settings that change the arithmetic; a value that switches one on is refused.
const REFUSED: [&str; 18] = [
    "use_dora",
    "modules_to_save",
    "bias",
    "lora_bias",
    "rank_pattern",
    "alpha_pattern",
    "fan_in_fan_out",
    "target_parameters",
    "trainable_token_indices",
    "layer_replication",
    "use_qalora",
    "use_bdlora",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "megatron_config",
    "ensure_weight_tying",
];
/// Ways of initializing that leave the base weights as they were.
const HARMLESS_INITS: [&str; 3] = ["gaussian", "orthogonal", "eva"];

/// The text of `adapter_config.json`, sorted, indented by two. Only keys that differ from PEFT's defaults are written: PEFT refuses keys
/// that it does not know, and these are known to all its versions. `targets` are the module names that the adapter has matrices for:
/// "all-linear" is spelled out, because readers other than PEFT may not know it.
fn config_json(config: &LoraConfig, targets: &[String]) -> String {
    let mut keys = BTreeMap::from([
        ("base_model_name_or_path", json!(config.base_model_name_or_path)),
        ("inference_mode", json!(true)),
        ("lora_alpha", whole_if_whole(config.lora_alpha)),
        ("peft_type", json!("LORA")),
        ("r", json!(config.r)),
        ("target_modules", json!(targets)),
        ("task_type", json!("CAUSAL_LM")),
    ]);
    if config.use_rslora {
        keys.insert("use_rslora", json!(true));
    }
    to_string_pretty(&keys).expect("a JSON object prints") + "\n"
}

/// Reads the settings. `modules` are the module paths that the adapter has matrices for: where PEFT would choose
/// the targets by a regular expression or by layer number, they say what was chosen.
fn config_from(json: &JsonObject, modules: &[String]) -> Result<LoraConfig, ArchError> {
    check_supported(json)?;
    let r = json.required("r", json.usize("r")?, "a whole number")?;
    if r == 0 {
        return Err(json.bad("r", r, "the rank must be at least 1"));
    }
    let lora_alpha = json.required("lora_alpha", json.f64("lora_alpha")?, "a number")?;
    let chosen_by_rule = ["layers_to_transform", "exclude_modules"].iter().any(|key| json.get(key).is_some_and(is_on));
    let target_modules = match json.get("target_modules") {
        Some(Value::String(name)) if name.eq_ignore_ascii_case(ALL_LINEAR) && !chosen_by_rule => {
            TargetModules::AllLinear
        }
        Some(Value::Array(names)) if !chosen_by_rule => {
            let name = |name: &Value| name.as_str().map(str::to_owned);
            let wrong = || json.wrong_type("target_modules", "a list of strings", &json!(names));
            TargetModules::from_names(names.iter().map(name).collect::<Option<_>>().ok_or_else(wrong)?)
        }
        Some(Value::Array(_) | Value::String(_)) | None => TargetModules::Named(modules.to_vec()),
        Some(other) => return Err(json.wrong_type("target_modules", "a string or a list of strings", other)),
    };
    Ok(LoraConfig {
        r,
        lora_alpha,
        use_rslora: json.bool("use_rslora")?.unwrap_or(false),
        target_modules,
        base_model_name_or_path: json.str("base_model_name_or_path")?.map(str::to_owned),
    })
}

fn whole_if_whole(value: f64) -> Value {
    if value.fract() == 0.0 && value.abs() < 1e15 { json!(value as i64) } else { json!(value) }
}

/// Whether a setting is anything but "off" in one of the ways that PEFT writes it.
fn is_on(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Bool(on) => *on,
        Value::String(text) => !text.is_empty() && text != "none",
        Value::Array(items) => !items.is_empty(),
        Value::Object(items) => !items.is_empty(),
        Value::Number(_) => true,
    }
}

fn check_supported(json: &JsonObject) -> Result<(), ArchError> {
    let kind = json.required("peft_type", json.str("peft_type")?, "a string")?;
    let advice = "Only plain LoRA adapters load here. Merge this adapter into its base with PEFT (merge_and_unload, \
                  then save_pretrained) and give the merged folder as the model";
    if kind != "LORA" {
        return Err(json.unsupported("peft_type", format!("\"{kind}\""), advice));
    }
    for key in REFUSED {
        if let Some(value) = json.get(key).filter(|value| is_on(value)) {
            return Err(json.unsupported(key, value, advice));
        }
    }
    match json.get("init_lora_weights") {
        Some(Value::String(name)) if !HARMLESS_INITS.contains(&name.as_str()) => {
            let advice = "It belongs to changed base weights. Convert the adapter with PEFT: save_pretrained with \
                          path_initial_model_for_weight_conversion";
            Err(json.unsupported("init_lora_weights", format!("\"{name}\""), advice))
        }
        _ => Ok(()),
    }
}

/// Parses the settings from the text of the file at `path`; see [`config_from`].
fn parse_config(text: &str, path: &Path, modules: &[String]) -> Result<LoraConfig, ArchError> {
    config_from(&JsonObject::new(path, &parse_object(text, path)?), modules)
}

#[cfg(test)]
mod tests {
    use std::fs::read_to_string;

    use serde_json::from_str;

    use super::*;
    use crate::test_config::tiny;

    fn lora(target_modules: TargetModules) -> LoraConfig {
        let base_model_name_or_path = Some("meta-llama/Llama-3.1-8B".to_owned());
        LoraConfig { r: 16, lora_alpha: 32.0, use_rslora: false, target_modules, base_model_name_or_path }
    }

    /// The names of the seven projections.
    fn seven() -> Vec<String> {
        tiny(&[]).unwrap().spec.linear_module_names()
    }

    fn parse(text: &str) -> Result<LoraConfig, ArchError> {
        parse_config(text, Path::new("adapter_config.json"), &["model.layers.1.mlp.up_proj".to_owned()])
    }

    /// What is written, with one key changed.
    fn with(key: &str, value: Value) -> Result<LoraConfig, ArchError> {
        let mut json = from_str::<Value>(&config_json(&lora(TargetModules::AllLinear), &seven())).unwrap();
        json[key] = value;
        parse(&json.to_string())
    }

    #[test]
    fn settings_read_back_as_written() {
        let spec = tiny(&[]).unwrap().spec;
        let some = TargetModules::from_names(vec!["q_proj".to_owned(), "mlp.up_proj".to_owned()]);
        let rank_stabilized = LoraConfig { lora_alpha: 0.5, use_rslora: true, ..lora(TargetModules::AllLinear) };
        for config in [lora(TargetModules::AllLinear), lora(some), rank_stabilized] {
            let read = parse(&config_json(&config, &config.target_modules.names(&spec))).unwrap();
            let target_modules = read.target_modules.resolve(&spec).unwrap();
            assert_eq!(LoraConfig { target_modules, ..read }, config);
        }
    }

    /// The keys that PEFT 0.3 of 2023 knows; later versions know them too. rsLoRA came with 0.7.
    const OLDEST_KEYS: [&str; 14] = [
        "base_model_name_or_path",
        "bias",
        "fan_in_fan_out",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_dropout",
        "modules_to_save",
        "peft_type",
        "r",
        "target_modules",
        "task_type",
    ];

    #[test]
    fn what_is_written_agrees_with_pefts_own_file_and_leaves_out_its_defaults() {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/tiny-llama-rslora/adapter_config.json");
        let text = read_to_string(file).unwrap();
        let config = parse(&text).unwrap();
        let targets = config.target_modules.names(&tiny(&[]).unwrap().spec);
        let [mut peft, mut ours] =
            [&text, &config_json(&config, &targets)].map(|text| from_str::<Value>(text).unwrap());
        // PEFT writes a list of targets in no fixed order, so values are compared and not bytes.
        for json in [&mut peft, &mut ours] {
            json["target_modules"].as_array_mut().unwrap().sort_by_key(Value::to_string);
        }
        for (key, value) in ours.as_object().unwrap() {
            assert_eq!(peft[key], *value, "{key}");
            assert!(OLDEST_KEYS.contains(&key.as_str()) || key == "use_rslora", "{key} is not known to old versions");
        }
        let left_out = peft.as_object().unwrap().iter().filter(|(key, _)| ours.get(key.as_str()).is_none());
        let set: Vec<_> = left_out.filter(|(_, value)| is_on(value)).map(|(key, _)| key.as_str()).collect();
        // Defaults of PEFT, and its version.
        let defaults = ["init_lora_weights", "lora_dropout", "megatron_core", "peft_version", "qalora_group_size"];
        assert_eq!(set, defaults);
    }

    #[test]
    fn the_smallest_config_that_peft_accepts_needs_rank_and_alpha_here() {
        let error = parse(r#"{"peft_type": "LORA", "target_modules": ["q_proj"]}"#).unwrap_err().to_string();
        assert!(error.contains("no key `r`"), "{error}");
    }

    #[test]
    fn settings_with_other_arithmetic_are_refused_by_name() {
        let cases = [
            ("use_dora", json!(true)),
            ("modules_to_save", json!(["embed_tokens"])),
            ("bias", json!("lora_only")),
            ("rank_pattern", json!({"q_proj": 4})),
            ("alpha_pattern", json!({"q_proj": 4})),
            ("lora_bias", json!(true)),
            ("fan_in_fan_out", json!(true)),
            ("peft_type", json!("LOHA")),
            ("init_lora_weights", json!("pissa_niter_4")),
        ];
        for (key, value) in cases {
            let error = with(key, value).unwrap_err();
            assert!(matches!(error, ArchError::Unsupported { .. }), "{error}");
            assert!(error.to_string().contains(&format!("`{key}`")) && error.to_string().contains("PEFT"), "{error}");
        }
        with("init_lora_weights", json!("gaussian")).unwrap();
    }

    #[test]
    fn a_rule_for_targets_becomes_the_modules_that_the_adapter_has() {
        let resolved = TargetModules::Named(vec!["model.layers.1.mlp.up_proj".to_owned()]);
        assert_eq!(with("target_modules", json!(".*layers.1.*up_proj")).unwrap().target_modules, resolved);
        assert_eq!(with("layers_to_transform", json!([1])).unwrap().target_modules, resolved);
        assert_eq!(with("target_modules", json!("all-linear")).unwrap().target_modules, TargetModules::AllLinear);
    }
}
