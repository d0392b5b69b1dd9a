//! The content of a checkpoint: everything that the rest of the run depends on, so that resuming continues bit for bit.
//!
//! ```text
//! step-N/  adapter/ (PEFT) or model/ (HF, f32), with tokenizer files  optimizer.safetensors  state.json  config.toml  plan.toml  manifest.json
//! ```
//!
//! `checkpoint_folder` makes the folder complete or absent; this file defines its content.

use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{env, fs, thread};

use firebrick_arch::LoraConfig;
use firebrick_data::Cursor;
use firebrick_kernels::Kernels;
use firebrick_model::{CollectedWeights, Companions, Decoder, HfFolder};
use firebrick_optim::{LossScaleState, Optimizer};
use firebrick_precision::FloatType;
use serde::{Deserialize, Serialize};

use crate::error::RunError;
use crate::metrics::Evaluation;
use crate::plan::DecidedMemory;
use crate::state::best::Best;
use crate::state::checkpoint_folder::{CheckpointWriter, Keep, make_room};
use crate::state::guard::Guard;
use crate::state::identity::{RunIdentity, RunSettings};
use crate::state::manifest::list;
use crate::state::optimizer_file::{read_optimizer, state_bytes, write_from_device, write_held};
use crate::state::reference_identity::ReferenceIdentity;
use crate::storage::StorageError;

pub(crate) const ADAPTER: &str = "adapter";
pub(crate) const MODEL: &str = "model";
const OPTIMIZER: &str = "optimizer.safetensors";
/// Prefix of the file names of other ranks, if ranks divide the optimizer's state.
const OPTIMIZER_PART: &str = "optimizer-";
const STATE: &str = "state.json";

/// The progress of a run, in addition to its tensors.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RunState {
    /// Optimizer steps taken so far.
    pub step: u64,
    /// The next row that training reads.
    pub cursor: Cursor,
    /// Tokens that counted in the loss so far.
    pub loss_tokens: u64,
    /// When the run began, in seconds since 1970: the date that chat templates see, also after resuming on another day.
    pub date: i64,
    /// Seconds of training so far, over all resumed parts.
    pub wall_s: f64,
    /// The part of `wall_s` spent in steps.
    pub step_s: f64,
    /// Input tokens of those steps over all ranks, without padding.
    pub step_tokens: u64,
    /// What rounds took so far, in learning from rewards.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rounds: Option<RoundTimes>,
    /// The state of dynamic loss scaling; `None` without it.
    pub loss_scale: Option<LossScaleState>,
    /// What is remembered of the numbers of earlier steps, to judge those of the next ones.
    #[serde(default, skip_serializing_if = "Guard::is_empty")]
    pub guard: Guard,
    /// Mean losses of the last steps, oldest first: the summary's training loss.
    pub last_losses: Vec<f64>,
    /// The evaluation before the first step.
    pub before: Evaluation,
    /// Whether the evaluation after `step` is still due, because the run was stopped before it.
    pub evaluation_is_due: bool,
    /// The best evaluation so far; `None` without `[best]`, and before the first one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub best: Option<Best>,
    /// The sample answers before the first step.
    pub samples_before: Vec<String>,
    /// The prompts that they answer; none in older checkpoints.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sample_prompts: Vec<String>,
    /// Hash of the base model's weights; `None` if the weights were drawn from the seed.
    pub base_hash: Option<u64>,
    /// The reference of a preference loss, if it was computed before training.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reference: Option<ReferenceIdentity>,
    /// What the plan decided about memory, which a continued run keeps where its recipe leaves it open.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decided: Option<DecidedMemory>,
    /// Unpacked rows of similar length that are shown in succession, which a continued run keeps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub length_group: Option<usize>,
    /// Settings that a continued run must share.
    pub identity: RunIdentity,
    /// Settings that may change when a run continues.
    pub settings: RunSettings,
}

/// What the rounds of a run took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RoundTimes {
    /// Tokens that all ranks have sampled.
    pub sampled_tokens: u64,
    /// Seconds of sampling.
    pub sampling_s: f64,
    /// Seconds of steps before their passes: sampling, rewards and log-probabilities.
    pub all_s: f64,
}

/// The weights that train, and so are saved, with the files that are saved next to them.
#[derive(Clone, Debug)]
pub struct SavedWeights {
    /// The adapter whose LoRA pairs are saved in PEFT's format; `None`: every weight, in Hugging Face's format.
    pub adapter: Option<LoraConfig>,
    /// Tokenizer, chat template, generation settings and license.
    pub companions: Companions,
}

impl SavedWeights {
    /// Writes the trained weights into `folder`: `adapter/` or `model/`. `collected` contains those that ranks divide. A text model of a larger
    /// checkpoint is written with the other parts of `base`, if there is one. Returns the path.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn write<B: Kernels>(
        &self,
        model: &Decoder<B>,
        collected: CollectedWeights,
        folder: &Path,
        dtype: FloatType,
        base: Option<&HfFolder>,
    ) -> Result<PathBuf, RunError> {
        let companions = Some(&self.companions);
        let path = self.path_in(folder);
        let written = match &self.adapter {
            Some(config) => model.save_adapter(&path, config, companions),
            None => model.save_model(collected, &path, dtype, companions, base),
        };
        written.map_err(|error| RunError::from(error).of_disk(folder))?;
        Ok(path)
    }

    pub(crate) fn path_in(&self, folder: &Path) -> PathBuf {
        folder.join(if self.adapter.is_some() { ADAPTER } else { MODEL })
    }

    /// Gives a model the weights of a checkpoint.
    ///
    /// # Errors
    /// A checkpoint whose tensors do not fit this model.
    pub fn restore<B: Kernels>(&self, folder: &Path, model: &mut Decoder<B>) -> Result<(), RunError> {
        match self.adapter {
            Some(_) => model.load_adapter(&folder.join(ADAPTER))?,
            None => model.load_model(&HfFolder::open(&folder.join(MODEL))?)?,
        }
        Ok(())
    }
}

/// The parts of a checkpoint.
pub struct Snapshot<'a, B: Kernels> {
    /// The model.
    pub model: &'a Decoder<B>,
    /// The weights to save.
    pub weights: &'a SavedWeights,
    /// Those of the weights that ranks divide.
    pub collected: CollectedWeights,
    /// The optimizer.
    pub optimizer: &'a Optimizer<B>,
    /// The progress of the run.
    pub state: &'a RunState,
    /// Text files: name and content.
    pub texts: &'a [(&'a str, String)],
    /// Whether what steps will change is held on the device until it is copied, if they go on.
    pub holds: bool,
}

/// Writes what is left of a checkpoint that has begun; other ranks may add their parts before it is committed. Any thread can call it. After an error
/// nothing of the checkpoint is left.
pub type Finish = Box<dyn FnOnce() -> Result<CheckpointWriter, RunError> + Send>;

impl<B: Kernels> Snapshot<'_, B> {
    /// Begins a checkpoint. `keep` are those that stay until it is complete. If steps go on, what they will change is copied to host memory, or held
    /// on the device until [`Finish`] copies it, except for optimizer state of which a part waits in host memory already: it is written now, as all is
    /// if steps wait, with one tensor in host memory at a time.
    ///
    /// # Errors
    /// A disk that is full or refuses; nothing of the checkpoint is left then.
    pub fn begin(self, run_folder: &Path, keep: Keep, steps_go_on: bool) -> Result<Finish, RunError> {
        let parameters = self.model.parameters();
        let parameter_bytes: usize = parameters.iter().map(|parameter| 4 * parameter.elements()).sum();
        let bytes = state_bytes(self.optimizer) + parameter_bytes as u64;
        make_room(run_folder, bytes, keep)?;
        let writer = CheckpointWriter::begin(run_folder, self.state.step, bytes)?;
        let SavedWeights { adapter, companions } = self.weights;
        let weights = steps_go_on.then(|| self.model.snapshot(adapter.as_ref(), companions, self.holds));
        if !steps_go_on {
            self.weights.write(self.model, self.collected, &writer.file(""), FloatType::F32, None)?;
        }
        let read = (steps_go_on && self.optimizer.paged_bytes() == 0).then(|| self.optimizer.hold());
        if read.is_none() {
            write_from_device(&writer.file(OPTIMIZER), self.optimizer)?;
        }
        let (held, copied) = if self.holds { (read, None) } else { (None, read.map(|read| read())) };
        let path = self.weights.path_in(&writer.file(""));
        let state = serde_json::to_string_pretty(self.state).expect("a state of plain fields is expressible as JSON");
        let texts = self.texts.iter().map(|(name, text)| ((*name).to_owned(), text.clone()));
        let texts: Vec<_> = texts.chain([(STATE.to_owned(), state)]).collect();
        Ok(Box::new(move || -> Result<CheckpointWriter, RunError> {
            // Nothing is written until nothing is held on the device.
            let copied = copied.or_else(|| held.map(|read| read()));
            if let Some(write) = weights {
                write(&path).map_err(|error| RunError::from(error).of_disk(&writer.file("")))?;
            }
            // Tests imitate a slow disk, which takes these milliseconds.
            if let Some(delay) = env::var("FIREBRICK_SAVE_DELAY_MS").ok().and_then(|delay| delay.parse().ok()) {
                thread::sleep(Duration::from_millis(delay));
            }
            if let Some(state) = copied {
                write_held(&writer.file(OPTIMIZER), &state)?;
            }
            for (name, text) in texts {
                writer.write(&name, text.as_bytes())?;
            }
            Ok(writer)
        }))
    }
}

/// Adds the optimizer's state of a rank other than 0 to the checkpoint of `step` that rank 0 has begun.
///
/// # Errors
/// A disk that is full or refuses, or a run folder that this rank does not see.
pub fn save_part<B: Kernels>(
    run_folder: &Path,
    step: u64,
    rank: usize,
    optimizer: &Optimizer<B>,
) -> Result<(), RunError> {
    let file = CheckpointWriter::unfinished(run_folder, step).join(format!("{OPTIMIZER_PART}{rank}.safetensors"));
    Ok(write_from_device(&file, optimizer)?)
}

/// Reads a checkpoint's state.
///
/// # Errors
/// [`StorageError::Damaged`] if it cannot be read.
pub fn read_state(folder: &Path) -> Result<RunState, StorageError> {
    let path = folder.join(STATE);
    let damaged = |problem: String| StorageError::Damaged { path: path.clone(), problem };
    let text = fs::read_to_string(&path).map_err(|error| damaged(format!("cannot be read: {error}")))?;
    let state: RunState =
        serde_json::from_str(&text).map_err(|error| damaged(format!("is not a run's state: {error}")))?;
    state.check_numbers(folder).map_err(damaged)?;
    Ok(state)
}

impl RunState {
    /// Checks that the numbers can be those of the run's checkpoint in `folder`.
    fn check_numbers(&self, folder: &Path) -> Result<(), String> {
        const COUNT: u64 = 1 << 60;
        let name = folder.file_name().and_then(|name| name.to_str()?.strip_prefix("step-")?.parse().ok());
        let of_best = self.best.as_ref().map_or(0, |best| best.step.max(best.compared));
        let rows = self.decided.map_or(1, |decided| decided.micro_batch_size) as u64;
        let counts = [
            ("step", self.step, 0, 1 << 32),
            ("step", self.step, name.unwrap_or(0), name.unwrap_or(COUNT)),
            ("cursor.epoch", self.cursor.epoch, 0, 1 << 31),
            ("cursor.row", self.cursor.row, 0, 1 << 32),
            ("loss_tokens", self.loss_tokens, 0, COUNT),
            ("step_tokens", self.step_tokens, 0, COUNT),
            ("best.step", of_best, 0, self.step),
            ("decided.micro_batch_size", rows, 1, 1 << 16),
            ("date", self.date.unsigned_abs(), 0, 1 << 37),
            ("wall_s", self.wall_s as u64, 0, 1 << 37),
            ("step_s", self.step_s as u64, 0, 1 << 37),
        ];
        let outside = counts.into_iter().find(|(_, value, least, most)| !(least..=most).contains(&value));
        let scale = self.loss_scale.as_ref().map_or(1.0, |state| state.scale);
        match outside {
            Some((key, value, least, most)) => {
                Err(format!("has {key} = {value}, and only {least} to {most} is possible there"))
            }
            None if !(scale.is_finite() && scale > 0.0) => Err(format!("has the loss scale {scale}")),
            None => Ok(()),
        }
    }

    /// Checks that the next row is one of `rows` rows of an epoch.
    ///
    /// # Errors
    /// [`StorageError::Damaged`] names the state's file in `folder`.
    pub fn check_cursor(&self, folder: &Path, rows: usize) -> Result<(), StorageError> {
        if self.cursor.row < rows as u64 {
            return Ok(());
        }
        let problem = format!("has cursor.row = {}, and an epoch has {rows} rows", self.cursor.row);
        Err(StorageError::Damaged { path: folder.join(STATE), problem })
    }
}

/// Gives model and optimizer the tensors and the loss scale of a checkpoint whose state is `state`.
///
/// # Errors
/// A checkpoint whose tensors do not fit this model and optimizer.
pub fn restore<B: Kernels>(
    folder: &Path,
    weights: &SavedWeights,
    model: &mut Decoder<B>,
    optimizer: &mut Optimizer<B>,
    state: &RunState,
) -> Result<(), RunError> {
    weights.restore(folder, model)?;
    let mut tensors = read_optimizer(&folder.join(OPTIMIZER))?;
    let is_part = |path: &PathBuf| {
        path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with(OPTIMIZER_PART))
    };
    // The files of other ranks.
    let mut parts: Vec<PathBuf> = list(folder)?.into_iter().filter(is_part).collect();
    parts.sort();
    for part in parts {
        tensors.extend(read_optimizer(&part)?);
    }
    optimizer.load(&model.parameters(), tensors, state.step)?;
    // A run in another format was refused earlier.
    if let Some(loss_scale) = state.loss_scale {
        optimizer.restore_loss_scale(loss_scale);
    }
    Ok(())
}
