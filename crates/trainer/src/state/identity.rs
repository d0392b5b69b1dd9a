//! What makes two runs the same run, and what may change between a checkpoint and the run that resumes it.
//!
//! Both are structs whose serialized field names are the recipe's keys, compared value by value. The model itself is compared by
//! the content of its weight files, once they are loaded.
//! Trade-off: `micro_batch_size` and `gradient_accumulation` may change as long as their product stays; sums are then rounded in
//! another order, so the result is equal up to rounding, not bit for bit.

use firebrick_arch::LoraConfig;
use firebrick_kernels::{BaseStorage, GemmFormat, Recompute};
use firebrick_model::HASHED_PIECE;
use firebrick_optim::{OptimizerKind, ScheduleKind};
use firebrick_precision::Format;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::config::{Init, PreferenceSection, ZeroStage};
use crate::error::RunError;
use crate::plan::Plan;

/// What a resumed run must share with the run it continues.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunIdentity {
    /// Where the weights came from.
    pub init: Init,
    /// Seed of shuffling and of new weights.
    pub seed: u64,
    /// Seed of the order of rows, where it is another.
    #[serde(rename = "data.data_seed", default)]
    pub data_seed: Option<u64>,
    /// Whether rows are shuffled.
    #[serde(rename = "data.shuffle", default = "yes")]
    pub shuffle: bool,
    /// Maximum tokens of a document, and of a packed row.
    pub max_seq_len: usize,
    /// Whether rows hold several documents.
    pub pack: bool,
    /// The adapter; `None` if every weight trains.
    pub lora: Option<LoraConfig>,
    /// Tokens that the tokenizer got in addition to the model's.
    #[serde(rename = "data.new_tokens", default)]
    pub new_tokens: Vec<String>,
    /// How the base weights are stored.
    pub base: BaseStorage,
    /// Format of activations and GEMMs.
    pub compute: Format,
    /// What the GEMMs of the layers multiply.
    #[serde(default)]
    pub gemms: GemmFormat,
    /// Rule and state format of the optimizer.
    #[serde(rename = "train.optimizer")]
    pub optimizer: OptimizerKind,
    /// What pairs of answers are trained for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preference: Option<PreferenceSection>,
    /// Rows per step over all ranks.
    #[serde(rename = "train.micro_batch_size x train.gradient_accumulation")]
    pub rows_per_step: usize,
    /// Fingerprint of the packed rows, hexadecimal.
    pub data: String,
}

fn yes() -> bool {
    true
}

fn one() -> usize {
    1
}

/// Of an adapter's settings those that a run which continues must share.
pub(super) fn adapter_identity(lora: &LoraConfig) -> LoraConfig {
    let lora = lora.clone();
    LoraConfig { lora_dropout: 0.0, loraplus_lr_ratio: None, init_from: None, base_model_name_or_path: None, ..lora }
}

/// What may change when a run is resumed. Each change is reported.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunSettings {
    /// Processes that train together. Checkpoints of versions without them had one.
    #[serde(rename = "ranks", default = "one")]
    pub world_size: usize,
    /// What is divided over them.
    #[serde(rename = "train.zero_stage", default)]
    pub zero_stage: ZeroStage,
    /// Rows per forward and backward pass.
    #[serde(rename = "train.micro_batch_size")]
    pub micro_batch_size: usize,
    /// Micro-batches per step.
    #[serde(rename = "train.gradient_accumulation")]
    pub gradient_accumulation: usize,
    /// What layers save for their backward.
    #[serde(rename = "train.recompute")]
    pub recompute: Recompute,
    /// Highest learning rate.
    #[serde(rename = "train.learning_rate")]
    pub learning_rate: f64,
    /// Probability with which values that adapters read are dropped.
    #[serde(rename = "lora.dropout", default)]
    pub adapter_dropout: f64,
    /// How many times the learning rate of A that of B is.
    #[serde(rename = "lora.loraplus_lr_ratio", default)]
    pub loraplus_lr_ratio: Option<f64>,
    /// Shape of the learning rate.
    #[serde(rename = "train.schedule")]
    pub schedule: ScheduleKind,
    /// Learning rate that the decay leads to. Checkpoints of versions without it had 0.
    #[serde(rename = "train.min_lr", default)]
    pub min_lr: f64,
    /// Steps of increasing learning rate.
    #[serde(rename = "train.warmup_steps")]
    pub warmup_steps: u64,
    /// Steps of the run.
    #[serde(rename = "train.steps")]
    pub steps: u64,
    /// Decoupled weight decay.
    #[serde(rename = "train.weight_decay")]
    pub weight_decay: f64,
    /// Global norm that gradients are scaled down to.
    #[serde(rename = "train.max_grad_norm")]
    pub max_grad_norm: f64,
    /// Decay of the first moment.
    #[serde(rename = "train.adam_beta1")]
    pub adam_beta1: f64,
    /// Decay of the second moment.
    #[serde(rename = "train.adam_beta2")]
    pub adam_beta2: f64,
    /// Added to the root of the second moment.
    #[serde(rename = "train.adam_epsilon")]
    pub adam_epsilon: f64,
    /// Rows of logits that exist at a time.
    #[serde(rename = "train.loss_chunk_tokens")]
    pub loss_chunk_tokens: usize,
    /// Steps between two lines of metrics.
    #[serde(rename = "train.log_every")]
    pub log_every: u64,
    /// Steps between two evaluations.
    #[serde(rename = "eval.every_steps")]
    pub eval_every_steps: u64,
    /// Steps between two checkpoints.
    #[serde(rename = "checkpoint.every_steps")]
    pub checkpoint_every_steps: u64,
    /// Newest checkpoints to keep.
    #[serde(rename = "checkpoint.keep")]
    pub checkpoints_kept: usize,
}

/// A value that differs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The recipe's key.
    pub key: String,
    /// The checkpoint's value.
    pub saved: String,
    /// The value now.
    pub now: String,
}

impl RunIdentity {
    /// The identity of a planned run on packed rows with this fingerprint.
    pub fn new(plan: &Plan, data_fingerprint: u64) -> Self {
        let lora = plan.lora.value.as_ref().map(adapter_identity);
        Self {
            init: plan.init.value,
            seed: plan.seed.value,
            data_seed: Some(plan.data_seed.value).filter(|&seed| seed != plan.seed.value),
            shuffle: plan.shuffle.value,
            max_seq_len: plan.max_seq_len.value,
            pack: plan.pack.value,
            lora,
            new_tokens: plan.new_tokens.as_ref().map(|tokens| tokens.value.clone()).unwrap_or_default(),
            base: plan.base.value,
            compute: plan.compute.value,
            gemms: plan.gemms.value,
            optimizer: plan.optimizer.value,
            preference: plan.preference.as_ref().map(|preference| preference.value.clone()),
            rows_per_step: plan.rows_per_step(),
            data: format!("rows {data_fingerprint:016x}"),
        }
    }

    /// Compares a saved identity with that of the run that wants to continue.
    ///
    /// # Errors
    /// [`RunError::Changed`] with the first key that differs.
    pub fn check(&self, now: &Self) -> Result<(), RunError> {
        match differences(self, now).into_iter().next() {
            Some(Difference { key, saved, now }) => Err(RunError::Changed { key, saved, now }),
            None => Ok(()),
        }
    }
}

impl RunSettings {
    /// The settings of a planned run.
    pub fn new(plan: &Plan) -> Self {
        Self {
            world_size: plan.world_size.value,
            zero_stage: plan.zero_stage.value,
            micro_batch_size: plan.micro_batch_size.value,
            gradient_accumulation: plan.gradient_accumulation.value,
            recompute: plan.recompute.value,
            learning_rate: plan.learning_rate.value,
            adapter_dropout: plan.adapter_dropout.as_ref().map_or(0.0, |dropout| dropout.value),
            loraplus_lr_ratio: plan.loraplus_lr_ratio.as_ref().map(|ratio| ratio.value),
            schedule: plan.schedule.value,
            min_lr: plan.min_lr.value,
            warmup_steps: plan.warmup_steps.value,
            steps: plan.steps.value,
            weight_decay: plan.weight_decay.value,
            max_grad_norm: plan.max_grad_norm.value,
            adam_beta1: plan.adam_beta1.value,
            adam_beta2: plan.adam_beta2.value,
            adam_epsilon: plan.adam_epsilon.value,
            loss_chunk_tokens: plan.loss_chunk_tokens.value,
            log_every: plan.log_every.value,
            eval_every_steps: plan.eval_every_steps.value,
            checkpoint_every_steps: plan.checkpoint_every_steps.value,
            checkpoints_kept: plan.checkpoints_kept.value,
        }
    }

    /// What changed between these saved settings and those of the run that continues, as a sentence; `None` if nothing did.
    pub fn changes(&self, now: &Self) -> Option<String> {
        let changes: Vec<String> = differences(self, now)
            .into_iter()
            .map(|Difference { key, saved, now }| format!("{key} {saved} -> {now}"))
            .collect();
        (!changes.is_empty()).then(|| format!("changed since the checkpoint: {}", changes.join(", ")))
    }
}

/// Compares the base model of a checkpoint with the one that was loaded, by the hash of its weights, which is of pieces of `piece_bytes`.
/// Returns a note where they cannot be compared: in pieces of another size, weights above it have other hashes, and before there were
/// pieces they were hashed whole.
///
/// # Errors
/// [`RunError::Changed`] if they differ.
pub fn check_model(
    saved: Option<u64>,
    piece_bytes: Option<usize>,
    now: Option<u64>,
) -> Result<Option<&'static str>, RunError> {
    if saved == now {
        return Ok(None);
    }
    if saved.is_some() && now.is_some() && piece_bytes != Some(HASHED_PIECE) {
        return Ok(Some(
            "the hash of the base model is not that of the checkpoint, whose version may have hashed the same weights in another way: it is \
             taken to be the same model",
        ));
    }
    let shown = |hash: Option<u64>| hash.map_or("random weights".to_owned(), |hash| format!("weights {hash:016x}"));
    Err(RunError::Changed { key: "model".to_owned(), saved: shown(saved), now: shown(now) })
}

/// The fields whose values differ, in the order of the struct.
pub(super) fn differences<T: Serialize>(saved: &T, now: &T) -> Vec<Difference> {
    let fields = |value: &T| match serde_json::to_value(value) {
        Ok(Value::Object(fields)) => fields,
        other => unreachable!("a struct of plain fields is a JSON object: {other:?}"),
    };
    let saved = fields(saved);
    let shown = |value: Option<&Value>| match value {
        None | Some(Value::Null) => "nothing".to_owned(),
        Some(Value::String(text)) => text.clone(),
        Some(value) => value.to_string(),
    };
    let now = fields(now).into_iter();
    now.filter(|(key, now)| saved.get(key) != Some(now))
        .map(|(key, now)| Difference { saved: shown(saved.get(&key)), now: shown(Some(&now)), key })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity() -> RunIdentity {
        RunIdentity {
            init: Init::Pretrained,
            seed: 0,
            data_seed: None,
            shuffle: true,
            max_seq_len: 64,
            pack: true,
            lora: Some(LoraConfig { r: 4, ..LoraConfig::default() }),
            new_tokens: Vec::new(),
            base: BaseStorage::Frozen(Format::Bf16),
            compute: Format::F32,
            gemms: GemmFormat::Compute,
            optimizer: OptimizerKind::AdamW,
            preference: None,
            rows_per_step: 8,
            data: "rows 1".to_owned(),
        }
    }

    #[test]
    fn identity_survives_json_and_equals_itself() {
        let text = serde_json::to_string(&identity()).unwrap();
        let read: RunIdentity = serde_json::from_str(&text).unwrap();
        assert_eq!(read, identity());
        read.check(&identity()).unwrap();
    }

    #[test]
    fn the_first_difference_is_named_by_its_recipe_key_in_plain_values() {
        let changed = |change: fn(&mut RunIdentity)| {
            let mut now = identity();
            change(&mut now);
            identity().check(&now).unwrap_err().to_string()
        };
        let message = changed(|now| now.optimizer = OptimizerKind::AdamW8bit);
        assert!(message.contains("made with train.optimizer = adamw, now it is adamw_8bit"), "{message}");
        let message = changed(|now| now.rows_per_step = 4);
        assert!(message.contains("train.micro_batch_size x train.gradient_accumulation = 8, now it is 4"), "{message}");
        let message = changed(|now| now.lora = None);
        assert!(message.contains("made with lora = {\"r\":4") && message.contains("now it is nothing"), "{message}");
        assert!(changed(|now| now.data = "rows 2".to_owned()).contains("data = rows 1, now it is rows 2"));
    }

    #[test]
    fn models_are_compared_by_content() {
        let as_now = Some(HASHED_PIECE);
        for piece_bytes in [None, Some(1), as_now] {
            assert_eq!(check_model(Some(7), piece_bytes, Some(7)).unwrap(), None);
            assert_eq!(check_model(None, piece_bytes, None).unwrap(), None);
            check_model(None, piece_bytes, Some(7)).unwrap_err();
            check_model(Some(7), piece_bytes, None).unwrap_err();
        }
        for piece_bytes in [None, Some(1)] {
            assert!(check_model(Some(7), piece_bytes, Some(8)).unwrap().unwrap().contains("in another way"));
        }
        let message = check_model(Some(7), as_now, Some(8)).unwrap_err().to_string();
        assert!(message.contains("made with model = weights 0000000000000007"), "{message}");
    }
}
