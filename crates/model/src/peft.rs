//! LoRA adapters in PEFT's format: `adapter_config.json` here, the tensors in `peft/adapter.rs`.
//!
//! Adapters written here load in PEFT unchanged, and adapters that PEFT wrote load here: patterns, excluded modules, layers and modules that train
//! whole included.
//! Not supported: variants that need other arithmetic (QALoRA, aLoRA, ...). They are refused by the name of the setting, never approximated.

mod adapter;
mod start;
mod wrapper;

use std::collections::BTreeMap;
use std::path::Path;

use firebrick_arch::ArchError;
pub use firebrick_arch::folder::{ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE};
use firebrick_arch::json::{JsonObject, parse_object};
use firebrick_arch::{ByPattern, LoraInit};
pub use firebrick_arch::{LoraConfig, TargetModules};
use serde::de::DeserializeOwned;
use serde_json::{Value, json, to_string_pretty};

pub use self::adapter::{check_adapter, grow_for_adapter, read_adapter, read_adapter_config};
pub(crate) use self::adapter::{check_layers, leave_ignored, of_base, without_ignored, write_adapter};
pub(crate) use self::start::{add_start, read_start, take_start};
pub use crate::checkpoint::TensorF32;

/// Settings that change the arithmetic; a value that switches one on is refused.
const REFUSED: &str = "bias lora_bias fan_in_fan_out layer_replication use_qalora use_bdlora alora_invocation_tokens arrow_config \
                       kasa_config monteclora_config megatron_config ensure_weight_tying";
/// As in recipes, no module is as wide; and an alpha that no scale needs.
const MAX_RANK: usize = 1 << 16;
const MAX_ALPHA: f64 = 1e6;
/// Description of a valid `rank_pattern` or `alpha_pattern`, for messages.
const PATTERNS: &str = "an object of names or regular expressions and numbers";
/// Initializations that leave the base weights unchanged.
const HARMLESS_INITS: [&str; 3] = ["gaussian", "orthogonal", "eva"];

/// Returns the text of `adapter_config.json`, sorted, indented by two. Only keys that differ from PEFT's defaults are written: PEFT refuses keys
/// that it does not know, and these are known to all its versions. `targets` are the module names that the adapter has matrices for:
/// "all-linear" is spelled out, because readers other than PEFT may not know it.
fn config_json(config: &LoraConfig, targets: &[String]) -> String {
    let target_modules = match &config.target_modules {
        TargetModules::Matching(pattern) => json!(pattern.as_str()),
        TargetModules::AllLinear | TargetModules::Named(_) => json!(targets),
    };
    let mut keys = BTreeMap::from([
        ("base_model_name_or_path", json!(config.base_model_name_or_path)),
        ("inference_mode", json!(true)),
        ("lora_alpha", whole_if_whole(config.lora_alpha)),
        ("peft_type", json!("LORA")),
        ("r", json!(config.r)),
        ("target_modules", target_modules),
        ("task_type", json!("CAUSAL_LM")),
    ]);
    keys.extend(config.exclude_modules.as_ref().map(|excluded| ("exclude_modules", json!(excluded))));
    keys.extend(config.target_parameters.as_ref().map(|names| ("target_parameters", json!(names))));
    keys.extend(config.layers_to_transform.as_ref().map(|layers| ("layers_to_transform", json!(layers))));
    if !config.rank_pattern.is_empty() {
        keys.insert("rank_pattern", json!(config.rank_pattern));
    }
    if !config.alpha_pattern.is_empty() {
        let alphas = config.alpha_pattern.iter().map(|(key, alpha)| (key.to_owned(), whole_if_whole(alpha)));
        keys.insert("alpha_pattern", Value::Object(alphas.collect()));
    }
    keys.extend((config.lora_dropout > 0.0).then(|| ("lora_dropout", json!(config.lora_dropout))));
    keys.extend(config.modules_to_save.as_ref().map(|modules| ("modules_to_save", json!(modules))));
    keys.extend(config.trainable_token_indices.as_ref().map(|indices| ("trainable_token_indices", json!(indices))));
    keys.extend(config.use_rslora.then(|| ("use_rslora", json!(true))));
    keys.extend(config.use_dora.then(|| ("use_dora", json!(true))));
    to_string_pretty(&keys).expect("a JSON object prints") + "\n"
}

/// Reads the settings. `modules` are the module paths of the adapter's matrices: the targets if the file has an expression that only Python reads.
fn config_from(json: &JsonObject, modules: &[String]) -> Result<LoraConfig, ArchError> {
    check_supported(json)?;
    let r = json.required("r", json.usize("r")?, "a whole number")?;
    let rank_pattern: ByPattern<usize> = read(json, "rank_pattern", PATTERNS)?.unwrap_or_default();
    for (key, rank) in [("r", r)].into_iter().chain(rank_pattern.iter().map(|(_, rank)| ("rank_pattern", rank))) {
        if !(1..=MAX_RANK).contains(&rank) {
            return Err(json.bad(key, rank, format!("the rank must be at least 1 and at most {MAX_RANK}")));
        }
    }
    let lora_alpha = json.required("lora_alpha", json.f64("lora_alpha")?, "a number")?;
    let alpha_pattern: ByPattern<f64> = read(json, "alpha_pattern", PATTERNS)?.unwrap_or_default();
    let lora_dropout = json.f64("lora_dropout")?.unwrap_or(0.0);
    let alphas = alpha_pattern.iter().map(|(_, alpha)| ("alpha_pattern", alpha, MAX_ALPHA));
    for (key, value, most) in
        [("lora_alpha", lora_alpha, MAX_ALPHA), ("lora_dropout", lora_dropout, 1.0)].into_iter().chain(alphas)
    {
        if value.is_nan() || value.abs() > most {
            return Err(json.bad(key, value, format!("it must be at most {most}")));
        }
    }
    let is_set = |key: &str| json.get(key).is_some_and(is_on);
    Ok(LoraConfig {
        r,
        lora_alpha,
        use_rslora: json.bool("use_rslora")?.unwrap_or(false),
        use_dora: json.bool("use_dora")?.unwrap_or(false),
        target_modules: module_names(json, "target_modules")?.unwrap_or_else(|| TargetModules::Named(modules.to_vec())),
        target_parameters: read(json, "target_parameters", "a list of strings")?,
        exclude_modules: if is_set("exclude_modules") { module_names(json, "exclude_modules")? } else { None },
        layers_to_transform: match json.get("layers_to_transform") {
            Some(layer @ Value::Number(_)) => Some(typed(json, "layers_to_transform", "a layer", &json!([layer]))?),
            _ => read(json, "layers_to_transform", "a list of layers")?,
        },
        rank_pattern,
        alpha_pattern,
        lora_dropout,
        modules_to_save: read(json, "modules_to_save", "a list of strings")?,
        trainable_token_indices: read(
            json,
            "trainable_token_indices",
            "a list of ids, or an object of names and such lists",
        )?,
        init_lora_weights: LoraInit::Uniform,
        loraplus_lr_ratio: None,
        init_from: None,
        base_model_name_or_path: json.str("base_model_name_or_path")?.map(str::to_owned),
    })
}

fn typed<T: DeserializeOwned>(
    json: &JsonObject,
    key: &str,
    expected: &'static str,
    value: &Value,
) -> Result<T, ArchError> {
    T::deserialize(value).map_err(|_| json.wrong_type(key, expected, value))
}

/// Reads the value of a key that is on, or `None`.
fn read<T: DeserializeOwned>(json: &JsonObject, key: &str, expected: &'static str) -> Result<Option<T>, ArchError> {
    json.get(key).filter(|value| is_on(value)).map(|value| typed(json, key, expected, value)).transpose()
}

/// Reads a list of names or an expression; `None` if it is absent, or an expression that cannot be read here.
fn module_names(json: &JsonObject, key: &str) -> Result<Option<TargetModules>, ArchError> {
    match json.get(key) {
        Some(Value::String(text)) => match TargetModules::from_text(text) {
            Err(ArchError::BadPattern { .. }) if key == "target_modules" => Ok(None),
            read => read.map(Some),
        },
        Some(Value::Array(names)) => {
            let name = |name: &Value| name.as_str().map(str::to_owned);
            let wrong = || json.wrong_type(key, "a list of strings", &json!(names));
            Ok(Some(TargetModules::from_names(names.iter().map(name).collect::<Option<_>>().ok_or_else(wrong)?)))
        }
        None | Some(Value::Null) => Ok(None),
        Some(other) => Err(json.wrong_type(key, "a string or a list of strings", other)),
    }
}

fn whole_if_whole(value: f64) -> Value {
    if value.fract() == 0.0 && value.abs() < 1e15 { json!(value as i64) } else { json!(value) }
}

/// Returns whether a setting is anything but one of PEFT's spellings of "off".
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
    let advice = "Only LoRA, rsLoRA and DoRA adapters load here. Merge this adapter into its base with PEFT (merge_and_unload, \
                  then save_pretrained) and give the merged folder as the model";
    if kind != "LORA" {
        return Err(json.unsupported("peft_type", format!("\"{kind}\""), advice));
    }
    for key in REFUSED.split(' ') {
        if let Some(value) = json.get(key).filter(|value| is_on(value)) {
            return Err(json.unsupported(key, value, advice));
        }
    }
    if let Some(pattern) = json.get("layers_pattern").filter(|pattern| is_on(pattern)) {
        // This is the only name in the paths of layers.
        if ![json!("layers"), json!(["layers"])].contains(pattern) {
            return Err(json.unsupported("layers_pattern", pattern, advice));
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
        LoraConfig { target_modules, base_model_name_or_path, ..LoraConfig::default() }
    }

    fn parse(text: &str) -> Result<LoraConfig, ArchError> {
        parse_config(text, Path::new("adapter_config.json"), &["model.layers.1.mlp.up_proj".to_owned()])
    }

    /// Parses what we write, with one key changed.
    fn with(key: &str, value: Value) -> Result<LoraConfig, ArchError> {
        let names = tiny(&[]).unwrap().spec.linear_module_names();
        let mut json = from_str::<Value>(&config_json(&lora(TargetModules::AllLinear), &names)).unwrap();
        json[key] = value;
        parse(&json.to_string())
    }

    #[test]
    fn settings_read_back_as_written() {
        let spec = tiny(&[]).unwrap().spec;
        let some = TargetModules::from_names(vec!["q_proj".to_owned(), "mlp.up_proj".to_owned()]);
        let rank_stabilized = LoraConfig { lora_alpha: 0.5, use_rslora: true, ..lora(TargetModules::AllLinear) };
        let dora = LoraConfig { use_dora: true, ..lora(TargetModules::AllLinear) };
        let patterns = LoraConfig {
            exclude_modules: Some(TargetModules::from_text(".*o_proj").unwrap()),
            layers_to_transform: Some(vec![0, 1]),
            rank_pattern: ByPattern::new([("z_proj|q_proj".to_owned(), 4), ("0.self_attn.q_proj".to_owned(), 2)])
                .unwrap(),
            alpha_pattern: ByPattern::new([("q_proj".to_owned(), 0.5)]).unwrap(),
            modules_to_save: Some(vec!["lm_head".to_owned()]),
            lora_dropout: 0.05,
            ..lora(TargetModules::Named(vec!["q_proj".to_owned(), "o_proj".to_owned()]))
        };
        for config in [lora(TargetModules::AllLinear), lora(some), rank_stabilized, dora, patterns] {
            let read = parse(&config_json(&config, &config.target_modules.names(&spec))).unwrap();
            let target_modules = read.target_modules.resolve(&spec).unwrap();
            assert_eq!(LoraConfig { target_modules, ..read }, config);
        }
    }

    /// The keys that PEFT 0.3 of 2023 knows; later versions know them too. rsLoRA came with 0.7.
    const OLDEST_KEYS: &str = "base_model_name_or_path bias fan_in_fan_out inference_mode init_lora_weights layers_pattern \
                               layers_to_transform lora_alpha lora_dropout modules_to_save peft_type r target_modules task_type";

    #[test]
    fn written_settings_agree_with_pefts() {
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
            assert!(
                OLDEST_KEYS.split(' ').any(|known| known == key) || key == "use_rslora",
                "{key} is not known to old versions"
            );
        }
        let left_out = peft.as_object().unwrap().iter().filter(|(key, _)| ours.get(key.as_str()).is_none());
        let set: Vec<_> = left_out.filter(|(_, value)| is_on(value)).map(|(key, _)| key.as_str()).collect();
        // Defaults of PEFT, and its version.
        let defaults = ["init_lora_weights", "lora_dropout", "megatron_core", "peft_version", "qalora_group_size"];
        assert_eq!(set, defaults);
    }

    #[test]
    fn the_smallest_config_of_peft_needs_rank_and_alpha() {
        let error = parse(r#"{"peft_type": "LORA", "target_modules": ["q_proj"]}"#).unwrap_err().to_string();
        assert!(error.contains("no key `r`"), "{error}");
    }

    #[test]
    fn settings_with_other_arithmetic_are_refused_by_name() {
        let cases = [
            ("use_qalora", json!(true)),
            ("layers_pattern", json!("blocks")),
            ("bias", json!("lora_only")),
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
    fn rules_for_targets_are_read_or_resolved() {
        let read = |key, value| with(key, value).unwrap();
        let expression = TargetModules::from_text(".*layers.1.*up_proj").unwrap();
        assert_eq!(read("target_modules", json!(".*layers.1.*up_proj")).target_modules, expression);
        let resolved = TargetModules::Named(vec!["model.layers.1.mlp.up_proj".to_owned()]);
        assert_eq!(read("target_modules", json!("(?(1)a|b)[")).target_modules, resolved);
        assert_eq!(read("target_modules", json!("all-linear")).target_modules, TargetModules::AllLinear);
        for layers in [json!(1), json!([1])] {
            assert_eq!(read("layers_to_transform", layers).layers_to_transform, Some(vec![1]));
        }
        let config = read("rank_pattern", json!({"up_proj": 4, "1.mlp.up_proj": 2}));
        assert_eq!(config.rank_of("model.layers.1.mlp.up_proj"), 4, "the first that matches");
        let off = [("exclude_modules", json!(null)), ("modules_to_save", json!([])), ("alpha_pattern", json!({}))];
        for (key, value) in off {
            assert_eq!(read(key, value), with("lora_dropout", json!(0.0)).unwrap(), "{key}");
        }
    }
}
