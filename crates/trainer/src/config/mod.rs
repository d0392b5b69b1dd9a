//! The recipe: what the user typed, read from a TOML or YAML file and `--set` overrides into [`RunConfig`].
//!
//! Everything that can be refused without knowing the machine is refused here, with the file and line, the key, and the remedy. The plan decides what
//! depends on the machine (does it fit, is the backend available). The doc comments of keys are the descriptions in docs/config.schema.json. Values
//! have the types of the crates that use them, so a number format, an optimizer or a schedule has one type in the whole workspace.
//! Trade-off: all unknown keys are reported together, but only the first of other problems. A library's settings use the recipe's names for their
//! keys.

mod auto;
mod check;
pub mod compute;
mod data_section;
mod data_source;
mod error;
mod eval_section;
mod grpo_section;
mod language;
pub mod other_names;
mod preference_section;
mod recipe;
mod schema;
mod section;
mod source;
mod train_section;
mod weights;
pub mod yaml;
mod zero_stage;

use firebrick_arch::LoraConfig;
use firebrick_precision::QuantFormat;
use schemars::JsonSchema;
use serde::de::{DeserializeOwned, IntoDeserializer};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::metrics::{MlflowSection, WandbSection};
use compute::Compute;
use section::{Limited, SEED, TOKENS, Whole, section};

pub use crate::extraction::Extraction;
pub use auto::{Auto, BackendChoice, Choice, Share};
pub use data_section::DataConfig;
pub use data_source::SourceConfig;
pub use error::{ConfigError, RecipePlace};
pub use eval_section::{BestMetric, BestMode, BestSection, CheckpointConfig, EvalConfig};
pub use grpo_section::GrpoSection;
pub use preference_section::{LossType, PreferenceLoss, PreferenceSection};
pub use schema::{KnownKeys, instead_of_option, json_schema, known_keys};
pub use train_section::{Interval, OnNonfinite, PlannedTrain, TrainConfig, Warmup};
pub use weights::{Bnb4bitSection, Mode, QuantType};
pub use zero_stage::ZeroStage;

section! {
    /// A whole recipe. Every key has a default except `model` and `data`.
    pub struct RunConfig in "" {
        /// Name of the run and of its folder. Default "": the recipe's file name without `.toml`.
        name: String = String::new();
        /// Where tensors live and operations run: "auto", "cuda", "wgpu", "candle" or "flex". Default "auto": CUDA if there is an
        /// NVIDIA card, otherwise the fastest of the others.
        backend: BackendChoice = Auto::Auto;
        /// Folder of the model (config.json, safetensors, tokenizer.json), relative to the working directory, or an id of the Hub:
        /// "owner/name" or "owner/name@revision". A folder wins over an id.
        model: String = String::new();
        /// Where the weights come from: "pretrained" reads them from the model folder, "random" needs only config.json and
        /// tokenizer.json there. Default "pretrained".
        init: Init = Init::Pretrained;
        /// Which weights train: "full" (all of them), "lora" (adapters on a base that stays as stored) or "qlora" (adapters on a
        /// quantized base). Default: what the recipe says otherwise. `base` or `[bnb_4bit]` is "qlora", `[lora]` alone is "lora"; a
        /// recipe with none of them and pretrained weights has to say `mode = "full"`.
        mode: Option<Mode> = None;
        /// Number format of activations and matrix multiplications: "float32", "bfloat16" or "float16" (also "f32", "fp32", "bf16",
        /// "f16", "fp16"), or "fp8": the matrix multiplications of the layers in 8-bit floats with a scale per row, everything else in
        /// bfloat16; from compute capability 8.9 on (L4, H100, B200, RTX 40). CPU backends compute in float32 whatever this says, and so
        /// does wgpu but for products: anything but float32 lets them use matrix units in float16, if the device has them. On CUDA, float16 trains
        /// with dynamic loss scaling. Default "bfloat16".
        compute: Option<Compute> = None;
        /// Fill each row with several documents, which do not see each other. Default true.
        pack: bool = true;
        /// Tokens per row; `data.overflow` says what happens to longer documents. Default: documents have at most 2048, and so have packed
        /// rows; those of small data are shorter, so that an epoch has about 50, unless pairs, rewards or new weights are trained.
        max_seq_len: Option<usize> = None, Whole(2, TOKENS);
        /// Folder that holds the run folders. Default "runs".
        output_dir: String = "runs".to_owned();
        /// Seed of shuffling (see also `data.data_seed`), of adapter and random weights, and of sampling. Default 0.
        seed: u64 = 0, Whole(0, SEED);
        /// Quantize the frozen base while it is read and train adapters on it (QLoRA), those of `[lora]` or else its defaults: "nvfp4"
        /// (E2M1, 16 values per E4M3 scale), "mxfp4" (E2M1, 32 values per power of two), "fp8" (E4M3, a scale per row), or "nf4" and
        /// "nf4_double_quant", which are what `[bnb_4bit]` says. Weights are dequantized where they are multiplied, on every backend; with
        /// `compute = "fp8"` they become its 8-bit floats. Default: absent, what `[bnb_4bit]` says, or else the base stays as stored.
        base: Option<QuantFormat> = None;
        /// Keep the frozen base in 4 bits as bitsandbytes does, like `base`, and train adapters on it. Default: absent.
        bnb_4bit: Option<Bnb4bitSection> = None;
        /// Train low-rank adapters on a frozen base. Default: absent; see `mode`.
        lora: Option<LoraConfig> = None;
        /// Train on pairs of a chosen and a rejected answer (DPO, ORPO). Default: absent, every document is trained on by itself.
        preference: Option<PreferenceSection> = None;
        /// Learn from the model's own completions and their rewards (GRPO). Default: absent.
        grpo: Option<GrpoSection> = None;
        /// What to train and evaluate on.
        data: DataConfig = DataConfig::default();
        /// The training step and the number of steps.
        train: TrainConfig = TrainConfig::default();
        /// Evaluation before, during and after training.
        eval: EvalConfig = EvalConfig::default();
        /// When to save, and how many checkpoints to keep.
        checkpoint: CheckpointConfig = CheckpointConfig::default();
        /// Keep the best weights instead of the last ones, and end early. Default: absent, the last step is the result.
        best: Option<BestSection> = None;
        /// An MLflow tracking server that gets parameters and metrics too. Default: absent, nothing leaves the machine.
        mlflow: Option<MlflowSection> = None;
        /// A run of Weights & Biases that gets the plan's decisions and the metrics too. Default: absent, nothing leaves the machine.
        wandb: Option<WandbSection> = None;
    }
}

/// `init`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Init {
    /// Weights are read from the model folder.
    #[default]
    Pretrained,
    /// Weights are drawn from the seed: pretraining from scratch.
    Random,
}

const MAX_SEQ_LEN: usize = 2048;

impl RunConfig {
    /// Returns the most tokens of a document and of a row.
    pub fn max_seq_len(&self) -> usize {
        self.max_seq_len.unwrap_or(MAX_SEQ_LEN)
    }

    fn all_limits(&self) -> Vec<Limited> {
        let sections = [self.data.limits(), self.train.limits(), self.eval.limits(), self.checkpoint.limits()];
        let optional = self.preference.iter().map(PreferenceSection::limits);
        let optional = optional.chain(self.bnb_4bit.iter().map(Bnb4bitSection::limits));
        let optional = optional.chain(self.grpo.iter().map(GrpoSection::limits));
        let optional = optional.chain(self.best.iter().map(BestSection::limits));
        let own = [self.limits(), weights::lora_limits(self.lora.as_ref())];
        own.into_iter().chain(optional).chain(sections).flatten().collect()
    }

    /// Returns this recipe with nothing but what it trains: model, data, and which weights in which form. Other keys have their defaults.
    pub fn with_default_keys(&self) -> RunConfig {
        let RunConfig { name, pack, max_seq_len, output_dir, seed, train, eval, checkpoint, .. } = RunConfig::default();
        let mut plain =
            RunConfig { name, pack, max_seq_len, output_dir, seed, train, eval, checkpoint, ..self.clone() };
        (plain.data.data_seed, plain.data.shuffle) = (None, true);
        plain
    }
}

/// Returns the name of a value such as `Recompute::Full`: "full". If the variant holds a value, that value's name follows.
pub fn to_name(value: &impl Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(value) => plain(&value),
        Err(error) => unreachable!("an enum of plain values is expressible as JSON: {error}"),
    }
}

fn plain(value: &Value) -> String {
    match value {
        Value::String(name) => name.clone(),
        Value::Object(map) if map.len() == 1 => {
            map.iter().map(|(name, value)| format!("{name} {}", plain(value))).collect()
        }
        other => other.to_string(),
    }
}

/// Parses the name of a value, for command lines.
///
/// # Errors
/// A sentence with the allowed names.
pub fn from_name<T: DeserializeOwned>(name: &str) -> Result<T, String> {
    let deserializer: serde::de::value::StrDeserializer<'_, serde::de::value::Error> = name.into_deserializer();
    T::deserialize(deserializer).map_err(|error| {
        let message = error.to_string().replace('`', "");
        // Every message about a command line contains the name already.
        message.split_once(", expected ").map_or(message.clone(), |(_, names)| format!("expected {names}"))
    })
}

#[cfg(test)]
mod keys_page;
#[cfg(test)]
mod tests;
