//! LoRA adapters in PEFT's format: `adapter_config.json` here, the tensors in `peft/adapter.rs`.
//!
//! What is written loads in PEFT unchanged, and plain LoRA adapters for Llama that PEFT wrote load here. Variants that
//! need other arithmetic (DoRA, trained embeddings, per-module ranks, ...) are refused by the name of the setting that
//! asks for them, never loaded approximately.

mod adapter;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::{Value, json, to_string_pretty};

pub use self::adapter::{read_adapter, read_adapter_config, tensor_names, write_adapter};
use crate::config::{LlamaConfig, PROJECTIONS};
use crate::error::ModelError;
use crate::json::{JsonObject, parse_object};
pub use crate::weights::TensorF32;

/// PEFT's name of the file that holds a [`LoraConfig`].
pub const ADAPTER_CONFIG_FILE: &str = "adapter_config.json";
/// PEFT's name of the file that holds the matrices.
pub const ADAPTER_WEIGHTS_FILE: &str = "adapter_model.safetensors";

/// The PEFT release whose set of keys is written.
const PEFT_VERSION: &str = "0.21.2";
/// How PEFT says "every linear layer but the head".
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
/// Ways of initialising that leave the base weights as they were.
const HARMLESS_INITS: [&str; 3] = ["gaussian", "orthogonal", "eva"];

/// The settings of a LoRA adapter. Fields carry PEFT's names.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraConfig {
    /// Rank: rows of A, columns of B.
    pub r: usize,
    /// Numerator of the scaling.
    pub lora_alpha: f64,
    /// Whether the scaling divides by the square root of the rank (<https://arxiv.org/abs/2312.03732>).
    pub use_rslora: bool,
    /// Which projections carry LoRA.
    pub target_modules: TargetModules,
    /// The base model: a Hub id or a folder.
    pub base_model_name_or_path: Option<String>,
}

impl LoraConfig {
    /// What `B A x` is multiplied by: `lora_alpha / r`, or `lora_alpha / sqrt(r)` with rsLoRA.
    pub fn scaling(&self) -> f64 {
        let rank = self.r as f64;
        self.lora_alpha / if self.use_rslora { rank.sqrt() } else { rank }
    }

    /// The text of `adapter_config.json`: every key that PEFT writes, sorted, indented by two.
    pub fn to_json(&self) -> String {
        let mut keys = BTreeMap::from([
            ("auto_mapping", Value::Null),
            ("base_model_name_or_path", json!(self.base_model_name_or_path)),
            ("bias", json!("none")),
            ("inference_mode", json!(true)),
            ("init_lora_weights", json!(true)),
            ("lora_alpha", whole_if_whole(self.lora_alpha)),
            ("lora_dropout", json!(0.0)),
            ("megatron_core", json!("megatron.core")),
            ("peft_type", json!("LORA")),
            ("peft_version", json!(PEFT_VERSION)),
            ("qalora_group_size", json!(16)),
            ("r", json!(self.r)),
            ("target_modules", json!(self.target_modules.names())),
            ("task_type", json!("CAUSAL_LM")),
            ("use_rslora", json!(self.use_rslora)),
        ]);
        let off = ["ensure_weight_tying", "fan_in_fan_out", "lora_bias", "use_dora", "use_qalora"];
        keys.extend(off.map(|key| (key, json!(false))));
        keys.extend(["alpha_pattern", "loftq_config", "rank_pattern"].map(|key| (key, json!({}))));
        let unused = [
            "alora_invocation_tokens",
            "arrow_config",
            "corda_config",
            "eva_config",
            "exclude_modules",
            "kasa_config",
            "layer_replication",
            "layers_pattern",
            "layers_to_transform",
            "lora_ga_config",
            "megatron_config",
            "modules_to_save",
            "monteclora_config",
            "revision",
            "target_parameters",
            "trainable_token_indices",
            "use_bdlora",
            "velora_config",
        ];
        keys.extend(unused.map(|key| (key, Value::Null)));
        to_string_pretty(&keys).expect("a JSON object prints")
    }

    /// Reads the settings. `modules` are the module paths that the adapter has matrices for: where PEFT would choose
    /// the targets by a regular expression or by layer number, they say what was chosen.
    fn from_json(json: &JsonObject, modules: &[String]) -> Result<Self, ModelError> {
        check_supported(json)?;
        let r = json.required("r", json.usize("r")?, "a whole number")?;
        if r == 0 {
            return Err(json.bad("r", r, "the rank must be at least 1"));
        }
        let lora_alpha = json.required("lora_alpha", json.f64("lora_alpha")?, "a number")?;
        let chosen_by_rule =
            ["layers_to_transform", "exclude_modules"].iter().any(|key| json.get(key).is_some_and(is_on));
        let target_modules = match json.get("target_modules") {
            Some(Value::String(name)) if name.eq_ignore_ascii_case(ALL_LINEAR) && !chosen_by_rule => {
                TargetModules::AllLinear
            }
            Some(Value::Array(names)) if !chosen_by_rule => {
                let name = |name: &Value| name.as_str().map(str::to_owned);
                let wrong = || json.wrong_type("target_modules", "a list of strings", &json!(names));
                TargetModules::from_names(names.iter().map(name).collect::<Option<_>>().ok_or_else(wrong)?)?
            }
            Some(Value::Array(_) | Value::String(_)) | None => TargetModules::Named(modules.to_vec()),
            Some(other) => return Err(json.wrong_type("target_modules", "a string or a list of strings", other)),
        };
        Ok(Self {
            r,
            lora_alpha,
            use_rslora: json.bool("use_rslora")?.unwrap_or(false),
            target_modules,
            base_model_name_or_path: json.str("base_model_name_or_path")?.map(str::to_owned),
        })
    }
}

/// Which projections carry LoRA.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TargetModules {
    /// The seven projections of every layer, never the head: PEFT's "all-linear".
    AllLinear,
    /// Modules whose path is one of these or ends in a dot and one of these, as PEFT matches a list.
    Named(Vec<String>),
}

impl TargetModules {
    /// Targets by name: `q_proj`, `self_attn.q_proj`, or a whole path such as `model.layers.3.self_attn.q_proj`. A list
    /// that is just "all-linear", or that names all seven projections, is [`TargetModules::AllLinear`].
    ///
    /// # Errors
    /// A name that no projection of a Llama layer ends in, `lm_head` and `embed_tokens` among them.
    pub fn from_names(names: Vec<String>) -> Result<Self, ModelError> {
        if let [only] = names.as_slice()
            && only.eq_ignore_ascii_case(ALL_LINEAR)
        {
            return Ok(Self::AllLinear);
        }
        if let Some(name) = names.iter().find(|name| !names_a_projection(name)) {
            return Err(ModelError::UnknownTarget { name: name.clone() });
        }
        let given = names.iter().map(String::as_str).collect::<BTreeSet<_>>();
        if given == PROJECTIONS.map(leaf).into() { Ok(Self::AllLinear) } else { Ok(Self::Named(names)) }
    }

    /// Whether the projection at a path such as `model.layers.0.self_attn.q_proj` carries LoRA.
    pub fn matches(&self, module_path: &str) -> bool {
        match self {
            Self::AllLinear => names_a_projection(module_path),
            Self::Named(names) => names.iter().any(|name| path_ends_in(module_path, name)),
        }
    }

    /// The paths of all modules of a model that carry LoRA, layer by layer in the order of [`PROJECTIONS`].
    pub fn module_paths(&self, config: &LlamaConfig) -> Vec<String> {
        let layers = 0..config.num_hidden_layers;
        let all = layers.flat_map(|layer| PROJECTIONS.map(|projection| format!("model.layers.{layer}.{projection}")));
        all.filter(|path| self.matches(path)).collect()
    }

    /// As a list for PEFT. "all-linear" is spelled out, since readers other than PEFT may not know it.
    fn names(&self) -> Vec<String> {
        match self {
            Self::AllLinear => PROJECTIONS.map(|projection| leaf(projection).to_owned()).to_vec(),
            Self::Named(names) => names.clone(),
        }
    }
}

fn names_a_projection(name: &str) -> bool {
    PROJECTIONS.iter().any(|projection| name == leaf(projection) || path_ends_in(name, projection))
}

fn path_ends_in(path: &str, end: &str) -> bool {
    path.strip_suffix(end).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

/// The last part of a dotted path.
fn leaf(path: &str) -> &str {
    path.rsplit_once('.').map_or(path, |(_, leaf)| leaf)
}

fn whole_if_whole(value: f64) -> Value {
    if value.fract() == 0.0 && value.abs() < 1e15 { json!(value as i64) } else { json!(value) }
}

/// Whether a setting says anything but "off" in one of the ways that PEFT writes it.
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

fn check_supported(json: &JsonObject) -> Result<(), ModelError> {
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

/// Parses the settings from the text of the file at `path`; see [`LoraConfig::from_json`].
fn parse_config(text: &str, path: &Path, modules: &[String]) -> Result<LoraConfig, ModelError> {
    LoraConfig::from_json(&JsonObject::new(path, &parse_object(text, path)?), modules)
}

#[cfg(test)]
mod tests {
    use std::fs::read_to_string;

    use serde_json::from_str;

    use super::*;
    use crate::config::tests::tiny;

    fn lora(target_modules: TargetModules) -> LoraConfig {
        let base_model_name_or_path = Some("meta-llama/Llama-3.1-8B".to_owned());
        LoraConfig { r: 16, lora_alpha: 32.0, use_rslora: false, target_modules, base_model_name_or_path }
    }

    fn parse(text: &str) -> Result<LoraConfig, ModelError> {
        parse_config(text, Path::new("adapter_config.json"), &["model.layers.1.mlp.up_proj".to_owned()])
    }

    /// What is written, with one key changed.
    fn with(key: &str, value: Value) -> Result<LoraConfig, ModelError> {
        let mut json = from_str::<Value>(&lora(TargetModules::AllLinear).to_json()).unwrap();
        json[key] = value;
        parse(&json.to_string())
    }

    #[test]
    fn settings_read_back_as_written() {
        let some = TargetModules::from_names(vec!["q_proj".to_owned(), "mlp.up_proj".to_owned()]).unwrap();
        for config in [lora(TargetModules::AllLinear), lora(some)] {
            assert_eq!(parse(&config.to_json()).unwrap(), config);
        }
        let config = LoraConfig { lora_alpha: 0.5, use_rslora: true, ..lora(TargetModules::AllLinear) };
        assert_eq!(parse(&config.to_json()).unwrap(), config);
    }

    #[test]
    fn what_is_written_equals_pefts_own_file() {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/tiny-llama-rslora/adapter_config.json");
        let text = read_to_string(file).unwrap();
        let config = parse(&text).unwrap();
        assert!(config.use_rslora);
        // PEFT writes a list of targets in no fixed order, so values are compared and not bytes.
        let [mut peft, mut ours] = [&text, &config.to_json()].map(|text| from_str::<Value>(text).unwrap());
        for json in [&mut peft, &mut ours] {
            json["target_modules"].as_array_mut().unwrap().sort_by_key(Value::to_string);
        }
        assert_eq!(ours, peft);
    }

    #[test]
    fn the_smallest_config_that_peft_accepts_needs_rank_and_alpha_here() {
        let error = parse(r#"{"peft_type": "LORA", "target_modules": ["q_proj"]}"#).unwrap_err().to_string();
        assert!(error.contains("no key `r`"), "{error}");
    }

    #[test]
    fn scaling_divides_by_the_rank_or_by_its_root() {
        assert_eq!(lora(TargetModules::AllLinear).scaling(), 2.0);
        assert_eq!(LoraConfig { use_rslora: true, ..lora(TargetModules::AllLinear) }.scaling(), 8.0);
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
            assert!(matches!(error, ModelError::Unsupported { .. }), "{error}");
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

    #[test]
    fn targets_match_whole_parts_of_a_path() {
        let named = |name: &str| TargetModules::from_names(vec![name.to_owned()]);
        assert!(named("q_proj").unwrap().matches("model.layers.0.self_attn.q_proj"));
        assert!(named("model.layers.1.self_attn.q_proj").unwrap().matches("model.layers.1.self_attn.q_proj"));
        assert!(!named("1.self_attn.q_proj").unwrap().matches("model.layers.11.self_attn.q_proj"));
        assert!(!named("model.layers.1.self_attn.q_proj").unwrap().matches("model.layers.11.self_attn.q_proj"));
        for name in ["lm_head", "embed_tokens", "proj", "xq_proj", "qkv_proj"] {
            assert!(named(name).unwrap_err().to_string().contains(&format!("`{name}`")));
        }
    }

    #[test]
    fn all_linear_is_the_seven_projections_of_each_layer() {
        let paths = TargetModules::AllLinear.module_paths(&tiny(&[]).unwrap());
        assert_eq!(paths.len(), 14);
        assert_eq!(
            (paths[0].as_str(), paths[13].as_str()),
            ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj")
        );
        let spelled_out = PROJECTIONS.iter().rev().map(|path| leaf(path).to_owned()).collect();
        assert_eq!(TargetModules::from_names(spelled_out).unwrap(), TargetModules::AllLinear);
    }
}
