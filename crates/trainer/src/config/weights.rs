//! The weights that train, and the form of the others: `mode`, `base`, `[bnb_4bit]` and `[lora]`.
//!
//! A saved adapter names its base by a Hub id only if that is known to be one. Other programs resolve a text such as `models/SmolLM2` as a Hub id, so
//! a folder is named by its absolute path, which is not a valid id.
//! Trade-off: that path holds only on this machine; `lora.base_model_name_or_path` sets an id.

use std::path::{Path, absolute};

use firebrick_arch::{LoraConfig, TargetModules};
use firebrick_hub::{HubId, RepoKind};
use firebrick_precision::{FloatType, QuantFormat};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::config::error::ConfigError;
use crate::config::section::{AboveZero, BelowOne, FACTOR, Limited, Rule, Whole, rule, rules, section};
use crate::config::source::Source;
use crate::config::{Init, RunConfig, compute};

/// `mode`: which weights train.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Every weight.
    Full,
    /// Adapters on a base that stays as stored.
    Lora,
    /// Adapters on a quantized base.
    Qlora,
}

section! {
    /// `[bnb_4bit]`: the frozen base in 4 bits, byte for byte as bitsandbytes quantizes it.
    pub struct Bnb4bitSection in "bnb_4bit." {
        /// Number format. Default "nf4".
        quant_type: QuantType = QuantType::Nf4;
        /// Quantize the block scales too. Default true.
        double_quant: bool = true;
        /// The older name of `compute`; it may be written as long as the two agree. Default: absent.
        #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "compute::deserialize_format")]
        #[schemars(schema_with = "compute::format_schema")]
        compute_dtype: Option<FloatType> = None;
    }
}

impl Bnb4bitSection {
    /// Returns the format that the section describes.
    pub fn format(&self) -> QuantFormat {
        match self.quant_type {
            QuantType::Nf4 => QuantFormat::Nf4 { double_quant: self.double_quant },
        }
    }
}

/// `bnb_4bit.quant_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum QuantType {
    /// 4-bit NormalFloat.
    Nf4,
}

impl RunConfig {
    /// Returns which weights train.
    pub fn mode(&self) -> Mode {
        match (self.mode, self.quantized_base(), &self.lora) {
            (Some(mode), ..) => mode,
            (None, Some(_), _) => Mode::Qlora,
            (None, None, Some(_)) => Mode::Lora,
            (None, None, None) => Mode::Full,
        }
    }

    /// Returns the format that the frozen base is quantized to, from whichever key sets it; `None` if none does.
    pub fn quantized_base(&self) -> Option<QuantFormat> {
        self.base.or_else(|| self.bnb_4bit.as_ref().map(Bnb4bitSection::format))
    }

    /// Returns the adapter on the base in the folder `model`, without where it starts and how fast it learns, which are separate decisions; `None` if
    /// every weight trains.
    pub fn adapter(&self, model: &Path) -> Option<LoraConfig> {
        let lora = self.lora.clone()?;
        let base = lora.base_model_name_or_path.unwrap_or_else(|| base_name(model));
        Some(LoraConfig { base_model_name_or_path: Some(base), init_from: None, loraplus_lr_ratio: None, ..lora })
    }
}

/// Returns the keys of `[lora]` that have limits; the struct is that of PEFT's file. No module of a model is as wide as the largest rank.
pub(super) fn lora_limits(lora: Option<&LoraConfig>) -> Vec<Limited> {
    const RANK: u64 = 1 << 16;
    let real = |key, value: fn(&LoraConfig) -> Option<f64>, limit| Limited::new(key, lora.and_then(value), limit);
    let mut limits = vec![
        Limited::new("lora.r", lora.map(|lora| lora.r), Whole(1, RANK)),
        real("lora.alpha", |lora| Some(lora.lora_alpha), AboveZero(FACTOR)),
        real("lora.dropout", |lora| Some(lora.lora_dropout), BelowOne),
        real("lora.loraplus_lr_ratio", |lora| lora.loraplus_lr_ratio, AboveZero(FACTOR)),
    ];
    let ranks = lora.into_iter().flat_map(|lora| lora.rank_pattern.iter());
    limits.extend(ranks.map(|(_, rank)| Limited::new("lora.rank_pattern", rank, Whole(0, RANK))));
    let alphas = lora.into_iter().flat_map(|lora| lora.alpha_pattern.iter());
    limits.extend(alphas.map(|(_, alpha)| Limited::new("lora.alpha_pattern", alpha, AboveZero(FACTOR))));
    limits
}

/// Refuses a recipe that does not say which weights train: training all of a pretrained model by omission would be an accident.
pub(super) fn refuse_missing_mode(config: &RunConfig, source: &Source<'_>) -> Result<(), ConfigError> {
    let is_said = config.mode.is_some() || config.lora.is_some() || config.quantized_base().is_some();
    if is_said || config.init == Init::Random {
        return Ok(());
    }
    let help = "add [lora] (adapters), [bnb_4bit] or base = \"nvfp4\" (adapters on a quantized base), or mode = \"full\" at the \
                top of the file to train every weight";
    Err(ConfigError::missing(source.file_place(), "mode", help))
}

pub(super) fn rules(config: &RunConfig, source: &Source<'_>) -> Vec<Rule> {
    let typed = |section: &str| source.is_typed(section);
    let quantized = ["bnb_4bit", "base"].into_iter().find(|key| typed(key));
    let frozen_base = Some("lora").filter(|section| typed(section)).or(quantized);
    let of = |key: &str| {
        let written = if key == "base" { key.to_owned() } else { format!("[{key}]") };
        format!("{written} ({})", source.place(key))
    };
    let key = if typed("init") { "init" } else { frozen_base.unwrap_or("mode") };
    let mut rules = rules! {
        key: config.init == Init::Pretrained || config.mode() == Mode::Full,
            "init = \"random\" makes an untrained base, and adapters would leave it frozen" =>
            "train all weights (remove [lora], [bnb_4bit] and base) or start from init = \"pretrained\"";
    };
    rules.extend(config.lora.iter().flat_map(|lora| of_lora(config, lora)));
    if let (Some(Mode::Full), Some(section)) = (config.mode, frozen_base) {
        let problem = format!("\"full\" trains every weight, and {} trains adapters on a frozen base", of(section));
        let help = "remove one of the two; on the command line, `--set lora= --set bnb_4bit= --set base=`";
        rules.push(rule(false, "mode", problem, help));
    }
    if let (Some(Mode::Lora), Some(key)) = (config.mode, quantized) {
        let problem = format!("\"lora\" keeps the base as stored, and {} quantizes it", of(key));
        rules.push(rule(false, "mode", problem, "write mode = \"qlora\", or remove [bnb_4bit] and base"));
    }
    rules
}

/// Returns the rules of `[lora]`: names that must exist, and settings that exclude an adapter that starts as a part of its base.
fn of_lora(config: &RunConfig, lora: &LoraConfig) -> Vec<Rule> {
    let divides_weights = config.train.zero_stage.divides_weights();
    let is_whole = lora.modules_to_save.as_ref().is_some_and(|names| !names.is_empty());
    let is_path = lora.base_model_name_or_path.as_ref().is_some_and(|name| Path::new(name).exists());
    let is_pissa = !lora.init_lora_weights.is_uniform();
    let key = "lora.init_lora_weights";
    let without = |what: &str| format!("is \"{}\", and {what}", lora.init_lora_weights);
    rules! {
        "lora.target": lora.target_modules != TargetModules::Named(Vec::new()) || lora.adapts_parameters(),
            "names no module" => "write \"all-linear\", or module names such as [\"q_proj\", \"v_proj\"]";
        "lora.base_model_name_or_path": !is_path,
            "is a file or folder here, and others would read it as a Hub id" =>
            "write the id of the base on the Hub, such as \"HuggingFaceTB/SmolLM2-135M-Instruct\", or leave the key \
             out";
        "train.zero_stage": !(divides_weights && is_whole),
            "is 3, and modules that train whole next to adapters (lora.modules_to_save) are not divided" =>
            "write 2, or adapt those modules";
        key: !is_pissa || lora.init_from.is_none(),
            without("lora.init_from has matrices of its own") =>
            "remove one of the two; an adapter that was saved continues on the original base";
        key: !is_pissa || !lora.use_dora,
            without("with lora.use_dora it is not there yet") => "remove one of the two";
        key: !is_pissa || !divides_weights,
            without("with train.zero_stage = 3 no rank has all weights") =>
            "write train.zero_stage = 2, or remove the key";
    }
}

/// Returns the Hub id if the text is one or the folder is a repository of a Hub cache (`models--ORG--NAME`) or a snapshot of one
/// (`models--ORG--NAME/snapshots/HASH`); otherwise the folder's absolute path.
fn base_name(folder: &Path) -> String {
    let is_here = folder.exists() || folder.parent().is_some_and(Path::is_dir);
    let id = folder.to_str().filter(|_| !is_here).and_then(|text| HubId::parse(RepoKind::Model, text, None));
    if let Some(id) = id {
        return id.name;
    }
    let path = absolute(folder).unwrap_or_else(|_| folder.to_path_buf());
    hub_id(&path).unwrap_or_else(|| path.display().to_string())
}

fn hub_id(snapshot: &Path) -> Option<String> {
    let snapshots = snapshot.parent().filter(|parent| parent.ends_with("snapshots"));
    let is_repository = snapshot.join("snapshots").is_dir();
    let repository = snapshots.and_then(Path::parent).or(is_repository.then_some(snapshot))?;
    let repository = repository.file_name()?.to_str()?.strip_prefix("models--")?;
    // Hub ids contain no double hyphen, so the cache writes `/` as one.
    Some(repository.replacen("--", "/", 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_id_or_what_is_in_a_hub_cache_is_named_by_an_id() {
        let snapshot = "cache/hub/models--HuggingFaceTB--SmolLM2-135M/snapshots/93efa2f0";
        assert_eq!(base_name(Path::new(snapshot)), "HuggingFaceTB/SmolLM2-135M");
        assert_eq!(base_name(Path::new("hub/models--gpt2/snapshots/607a30d7")), "gpt2");
        assert_eq!(base_name(Path::new("HuggingFaceTB/SmolLM2-135M@main")), "HuggingFaceTB/SmolLM2-135M");
        let cache = tempfile::tempdir().unwrap();
        let root = cache.path().join("models--a--b");
        std::fs::create_dir_all(root.join("snapshots")).unwrap();
        assert_eq!(base_name(&root), "a/b");
        for folder in ["src/SmolLM2-135M", "./tiny", "models--a--b", "a/snapshots/b"] {
            let name = base_name(Path::new(folder));
            assert!(Path::new(&name).is_absolute() && name.ends_with(folder.trim_start_matches("./")), "{name}");
        }
    }
}
