//! What a checkpoint holds: everything that the rest of the run depends on, so that resuming continues bit for bit.
//!
//! ```text
//! step-N/  adapter/ (PEFT) or model/ (Hugging Face, f32)  optimizer.safetensors  state.json  config.toml  plan.toml  DONE
//! ```
//!
//! `checkpoint_files` makes the folder whole or absent; this file knows what is in it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use firebrick_data::Cursor;
use firebrick_kernels::Kernels;
use firebrick_model::{HfFolder, LoraConfig, SavedDtype};
use firebrick_optim::{HostTensor, StateData};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde::{Deserialize, Serialize};

use crate::checkpoint_files::CheckpointWriter;
use crate::config::RunConfig;
use crate::error::RunError;
use crate::evaluate::Evaluation;
use crate::step::Trainer;

const ADAPTER: &str = "adapter";
const MODEL: &str = "model";
const OPTIMIZER: &str = "optimizer.safetensors";
const STATE: &str = "state.json";

/// Where a run stands, beside its tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunState {
    /// Steps taken.
    pub step: u64,
    /// The next row.
    pub cursor: Cursor,
    /// Trained tokens so far.
    pub trained_tokens: u64,
    /// When the run began, in seconds since 1970: the date that chat templates see, also after resuming on another day.
    /// Absent in checkpoints from before it was kept.
    #[serde(default)]
    pub date: Option<i64>,
    /// Seconds of training so far, over all resumed parts.
    pub wall_s: f64,
    /// The evaluation before the first step.
    pub before: Evaluation,
    /// The sample answers before the first step.
    pub samples_before: Vec<String>,
    /// Identifies the packed rows: a cursor means nothing in others.
    pub data_fingerprint: u64,
    /// The settings that make two runs the same run, by recipe key.
    pub settings: BTreeMap<String, String>,
}

/// The settings of a recipe that a resumed run must share with the run it continues.
pub fn settings(config: &RunConfig) -> BTreeMap<String, String> {
    let text = |value: &dyn std::fmt::Debug| format!("{value:?}");
    [
        ("model", text(&config.model)),
        ("init", text(&config.init)),
        ("seed", text(&config.seed)),
        ("pack", text(&config.pack)),
        ("train.bf16 or bnb_4bit.compute_dtype", text(&config.compute_dtype())),
        ("max_seq_len", text(&config.max_seq_len)),
        ("bnb_4bit", text(&config.bnb_4bit)),
        ("lora", text(&config.lora)),
        ("train.optimizer", text(&config.train.optimizer)),
        ("train.micro_batch_size", text(&config.train.micro_batch_size)),
        ("train.gradient_accumulation", text(&config.train.gradient_accumulation)),
        ("train.learning_rate", text(&config.train.learning_rate)),
        ("train.schedule", text(&config.train.schedule)),
        ("train.weight_decay", text(&config.train.weight_decay)),
        ("train.adam_beta1", text(&config.train.adam_beta1)),
        ("train.adam_beta2", text(&config.train.adam_beta2)),
        ("train.adam_epsilon", text(&config.train.adam_epsilon)),
        ("train.max_grad_norm", text(&config.train.max_grad_norm)),
        ("train.steps or train.epochs", text(&config.length())),
        ("train.warmup_steps or train.warmup_ratio", text(&config.warmup())),
    ]
    .map(|(key, value)| (key.to_owned(), value))
    .into()
}

/// What of the model trains, and so is saved.
#[derive(Clone, Debug)]
pub enum Saved {
    /// LoRA pairs, in PEFT's format.
    Adapter(LoraConfig),
    /// Every weight, in Hugging Face's format, with the tokenizer files of this folder.
    Model(PathBuf),
}

impl Saved {
    /// Writes what trains into `folder`: `adapter/` or `model/`.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn write<B: Kernels>(
        &self,
        trainer: &mut Trainer<B>,
        folder: &Path,
        dtype: SavedDtype,
    ) -> Result<PathBuf, RunError> {
        let path = match self {
            Self::Adapter(config) => {
                let path = folder.join(ADAPTER);
                trainer.model.save_adapter(&path, config)?;
                path
            }
            Self::Model(companions) => {
                let path = folder.join(MODEL);
                trainer.model.save_model(&path, dtype, Some(companions))?;
                path
            }
        };
        Ok(path)
    }
}

/// Writes a checkpoint and removes the oldest beyond `keep`. Returns its folder.
///
/// # Errors
/// A disk that is full or refuses; all earlier checkpoints are then as they were.
pub fn save<B: Kernels>(
    run_folder: &Path,
    trainer: &mut Trainer<B>,
    saved: &Saved,
    state: &RunState,
    texts: &[(&str, String)],
    keep: usize,
) -> Result<PathBuf, RunError> {
    let optimizer = optimizer_bytes(&trainer.optimizer.save());
    let parameters: usize = trainer.model.parameters_mut().iter().map(|parameter| 4 * parameter.elements()).sum();
    let expected = (optimizer.len() + parameters) as u64;
    let writer = CheckpointWriter::begin(run_folder, state.step, expected)?;
    saved.write(trainer, &writer.file(""), SavedDtype::F32)?;
    writer.write(OPTIMIZER, &optimizer)?;
    let state = serde_json::to_string_pretty(state).expect("a state of plain fields prints as JSON");
    writer.write(STATE, state.as_bytes())?;
    for (name, text) in texts {
        writer.write(name, text.as_bytes())?;
    }
    Ok(writer.commit(keep)?)
}

/// Reads a checkpoint's state.
///
/// # Errors
/// A state that cannot be read.
pub fn read_state(folder: &Path) -> Result<RunState, RunError> {
    let path = folder.join(STATE);
    let bad = |problem: String| RunError::BadCheckpoint { path: path.clone(), problem };
    let text = fs::read_to_string(&path).map_err(|error| bad(format!("cannot be read: {error}")))?;
    serde_json::from_str(&text).map_err(|error| bad(format!("is damaged: {error}")))
}

impl RunState {
    /// Compares the recipe of a run that wants to continue with the one that was saved.
    ///
    /// # Errors
    /// [`RunError::Changed`] with the first key that differs.
    pub fn check_settings(&self, config: &RunConfig) -> Result<(), RunError> {
        for (key, now) in settings(config) {
            match self.settings.get(&key) {
                Some(saved) if *saved == now => {}
                saved => {
                    let saved = saved.cloned().unwrap_or_else(|| "nothing".to_owned());
                    return Err(RunError::Changed { key, saved, now });
                }
            }
        }
        Ok(())
    }

    /// Compares the packed rows of a run that wants to continue with those that were saved.
    ///
    /// # Errors
    /// [`RunError::Changed`] if they are others.
    pub fn check_data(&self, fingerprint: u64) -> Result<(), RunError> {
        if self.data_fingerprint == fingerprint {
            return Ok(());
        }
        let hex = |fingerprint| format!("rows {fingerprint:016x}");
        let (saved, now) = (hex(self.data_fingerprint), hex(fingerprint));
        Err(RunError::Changed { key: "data".to_owned(), saved, now })
    }
}

/// Gives the trainer the tensors of a checkpoint.
///
/// # Errors
/// A checkpoint that is damaged or belongs to another recipe.
pub fn restore<B: Kernels>(folder: &Path, trainer: &mut Trainer<B>, saved: &Saved, step: u64) -> Result<(), RunError> {
    match saved {
        Saved::Adapter(_) => trainer.model.load_adapter(&folder.join(ADAPTER))?,
        Saved::Model(_) => trainer.model.load_model(&HfFolder::open(&folder.join(MODEL))?)?,
    }
    let state = read_optimizer(&folder.join(OPTIMIZER))?;
    trainer.optimizer.load(&trainer.model.parameters_mut(), state, step)?;
    Ok(())
}

fn optimizer_bytes(state: &HostTensor) -> Vec<u8> {
    let bytes: Vec<(&String, Dtype, usize, Vec<u8>)> = state
        .iter()
        .map(|(name, data)| match data {
            StateData::F32(values) => {
                (name, Dtype::F32, values.len(), values.iter().flat_map(|value| value.to_le_bytes()).collect())
            }
            StateData::U8(values) => (name, Dtype::U8, values.len(), values.clone()),
        })
        .collect();
    let views = bytes.iter().map(|(name, dtype, length, bytes)| {
        (name, TensorView::new(*dtype, vec![*length], bytes).expect("the bytes were made for this dtype and length"))
    });
    safetensors::serialize(views, None).expect("views of plain vectors serialise")
}

fn read_optimizer(path: &Path) -> Result<HostTensor, RunError> {
    let bad = |problem: String| RunError::BadCheckpoint { path: path.to_owned(), problem };
    let bytes = fs::read(path).map_err(|error| bad(format!("cannot be read: {error}")))?;
    let file = SafeTensors::deserialize(&bytes).map_err(|error| bad(format!("is damaged: {error}")))?;
    file.tensors()
        .into_iter()
        .map(|(name, view)| match view.dtype() {
            Dtype::F32 => {
                let floats = view.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().expect("four bytes")));
                Ok((name, StateData::F32(floats.collect())))
            }
            Dtype::U8 => Ok((name, StateData::U8(view.data().to_vec()))),
            other => Err(bad(format!("holds `{name}` as {other:?}, which no optimizer of ours writes"))),
        })
        .collect()
}
