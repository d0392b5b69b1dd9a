//! The run loop: evaluate, step, log, evaluate, save, until the plan's last step or a signal.
//!
//! Numbers of a step are read from the device one step late, so that the device never waits for the log. Everything that a
//! resumed run needs is in the checkpoint; the loop itself keeps nothing else.

use std::path::{Path, PathBuf};
use std::time::Instant;

use firebrick_data::{Batch, Cursor, Loader};
use firebrick_kernels::Kernels;
use firebrick_model::{Llama, Sampler, SavedDtype};

use crate::assemble;
use crate::backend::{catch_failure, self_test};
use crate::checkpoint::{self, RunState, Saved};
use crate::config::{self, RunConfig};
use crate::error::RunError;
use crate::evaluate::Evaluation;
use crate::failure::FailureReport;
use crate::generate::{continue_prompts, encode_prompt};
use crate::interrupt::Interrupt;
use crate::memory_meter::MemoryMeter;
use crate::metrics::{EvalMetrics, JsonLines, MetricSink, MetricSinks, StepMetrics};
use crate::plan::{DataShape, PlanInputs};
use crate::prepare::{Prepared, now, prepare_on};
use crate::progress::Progress;
use crate::report::{Outcome, Summary, Voice};
use crate::run_folder::RunFolder;
use crate::step::{StepOutcome, Trainer, scalar};
use crate::storage::StorageError;
use crate::tensorboard::EventWriter;
use crate::with_backend;

/// How to run a recipe.
#[derive(Clone, Debug)]
pub struct RunOptions {
    /// The recipe.
    pub config: RunConfig,
    /// Continue the run of this name from its newest checkpoint.
    pub resume: bool,
    /// Whether to print.
    pub voice: Voice,
    /// How the run is told to end early.
    pub interrupt: Interrupt,
}

/// Runs a recipe from start, or from its newest checkpoint, to its end or to a signal.
///
/// # Errors
/// Whatever stops it; everything that was saved stays.
pub fn run(options: RunOptions) -> Result<Outcome, RunError> {
    let started = Instant::now();
    let mut earlier = if options.resume { Some(Earlier::open(&options.config)?) } else { None };
    let date = earlier.as_ref().and_then(|earlier| earlier.state.date).unwrap_or_else(now);
    let prepared = prepare_on(options.config.clone(), date)?;
    if let Some(earlier) = &mut earlier {
        // Other rows than those that it was trained on are refused before anything is written.
        earlier.state.check_data(prepared.train.fingerprint())?;
        // A checkpoint from before dates were kept has one from now on.
        earlier.state.date.get_or_insert(prepared.date);
    }
    for note in &prepared.data_notes {
        options.voice.say(note);
    }
    options.voice.plan(&prepared.config.name, &prepared.plan);
    let (folder, earlier) = match earlier {
        Some(Earlier { folder, checkpoint, state }) => (folder, Some((checkpoint, state))),
        None => (RunFolder::create(Path::new(&prepared.config.output_dir), &prepared.config.name, false)?, None),
    };
    if let Some(notice) = folder.notice() {
        options.voice.say(notice);
    }
    let report = failure_report(&prepared, &folder);
    with_backend!(prepared.plan.backend.value, B => {
        catch_failure(|| Run::<B>::begin(prepared, folder, earlier, &options, started)?.go())
    })
    .unwrap_or_else(|failure| Err(report.error(failure)))
}

/// A run that is to be resumed: its folder, its newest checkpoint, and where it stood there.
struct Earlier {
    folder: RunFolder,
    checkpoint: PathBuf,
    state: RunState,
}

impl Earlier {
    /// Refuses another recipe than the saved one before its data is read.
    fn open(config: &RunConfig) -> Result<Self, RunError> {
        let folder = RunFolder::create(Path::new(&config.output_dir), &config.name, true)?;
        let Some((_, checkpoint)) = folder.latest_checkpoint()? else {
            let (path, found) = (folder.path().to_path_buf(), "its checkpoints were removed a moment ago");
            return Err(StorageError::NothingToResume { path, found }.into());
        };
        let state = checkpoint::read_state(&checkpoint)?;
        state.check_settings(config)?;
        Ok(Self { folder, checkpoint, state })
    }
}

fn failure_report(prepared: &Prepared, folder: &RunFolder) -> FailureReport {
    let Prepared { config, profile, model, plan, train, .. } = prepared;
    let inputs = PlanInputs { config, profile, model, data: &DataShape::from(&**train) };
    let saved = (folder.path().to_path_buf(), folder.name().to_owned());
    FailureReport::new(&inputs, plan.backend.value, Some(saved))
}

struct Run<B: Kernels> {
    prepared: Prepared,
    folder: RunFolder,
    voice: Voice,
    interrupt: Interrupt,
    trainer: Trainer<B>,
    saved: Saved,
    loader: Loader,
    sinks: MetricSinks,
    meter: MemoryMeter,
    state: RunState,
    started: Instant,
    wall_before: f64,
    /// Seconds spent in steps by this process, and the tokens they took.
    step_s: f64,
    step_tokens: u64,
    last_losses: Vec<f64>,
    pending: Option<Pending<B>>,
}

/// A step whose numbers are still on the device.
struct Pending<B: Kernels> {
    outcome: StepOutcome<B>,
    /// Of the run up to this step.
    trained_tokens: u64,
    tokens: u64,
    seconds: f64,
}

impl<B: Kernels> Run<B> {
    /// `earlier` is the checkpoint to go on from, and its state.
    fn begin(
        prepared: Prepared,
        folder: RunFolder,
        earlier: Option<(PathBuf, RunState)>,
        options: &RunOptions,
        started: Instant,
    ) -> Result<Self, RunError> {
        let config = &prepared.config;
        folder.write(&folder.config_toml(), &config.to_toml())?;
        folder.write(&folder.plan_toml(), &plan_toml(&prepared))?;
        let device = B::Device::default();
        let saved = saved(&prepared)?;
        let Prepared { plan, model, .. } = &prepared;
        let dtype = assemble::compute_dtype(plan);
        if let Some(seconds) = self_test::<B>(plan.backend.value, &device, dtype, model.head_dim)? {
            options.voice.say(&format!("self-test: every operation agrees with its reference ({seconds:.2} s)"));
        }
        let mut trainer = assemble::trainer::<B>(config, plan, model, config.init, &device)?;
        let resumed = earlier.as_ref().map(|(_, state)| state.step);
        let state = match earlier {
            Some((path, state)) => {
                checkpoint::restore(&path, &mut trainer, &saved, state.step)?;
                options.voice.say(&format!("resumed after step {} from {}", state.step, path.display()));
                state
            }
            None => first_state(&prepared, &trainer, options.voice)?,
        };
        let mut sinks = MetricSinks(vec![
            Box::new(JsonLines::open(&folder.metrics_jsonl(), resumed)?),
            Box::new(EventWriter::create(&folder.tensorboard(), resumed)?),
        ]);
        if resumed.is_none() {
            report_evaluation(&mut sinks, 0, &state.before)?;
        }
        if options.voice == Voice::Aloud {
            sinks.0.push(Box::new(Progress::start(prepared.plan.steps.value, state.step)));
        }
        Ok(Self {
            loader: assemble::loader(&prepared, state.cursor),
            voice: options.voice,
            interrupt: options.interrupt.clone(),
            wall_before: state.wall_s,
            meter: MemoryMeter::new(prepared.plan.backend.value),
            prepared,
            folder,
            trainer,
            saved,
            sinks,
            state,
            started,
            step_s: 0.0,
            step_tokens: 0,
            last_losses: Vec::new(),
            pending: None,
        })
    }

    fn go(mut self) -> Result<Outcome, RunError> {
        let total = self.prepared.plan.steps.value;
        while self.state.step < total {
            self.step()?;
            let step = self.state.step;
            let is_due = |every: u64| every > 0 && step.is_multiple_of(every) && step < total;
            if is_due(self.prepared.config.eval.every_steps) {
                self.flush()?;
                let evaluation = self.prepared.evaluation.evaluate(&self.trainer.model, &self.prepared.tokenizer)?;
                report_evaluation(&mut self.sinks, step, &evaluation)?;
            }
            if self.interrupt.is_requested() && step < total {
                self.save()?;
                self.sinks.0.clear();
                return Ok(Outcome::Interrupted { step, name: self.folder.name().to_owned() });
            }
            if is_due(self.prepared.config.checkpoint.every_steps) {
                self.save()?;
            }
        }
        self.save()?;
        self.finish()
    }

    fn step(&mut self) -> Result<(), RunError> {
        let started = Instant::now();
        let (micro_batches, cursor) = self.next_micro_batches();
        let outcome = self.trainer.step(&micro_batches)?;
        self.state.step = outcome.step;
        self.state.cursor = cursor;
        self.state.trained_tokens += outcome.trained_tokens;
        let tokens = micro_batches.iter().map(|batch| batch.tokens() as u64).sum();
        let previous = self.pending.take();
        // The previous step's numbers are ready by now; reading them here keeps at most one step in flight.
        if let Some(previous) = previous {
            self.log(previous)?;
        }
        let seconds = started.elapsed().as_secs_f64();
        self.step_s += seconds;
        self.step_tokens += tokens;
        self.pending = Some(Pending { outcome, trained_tokens: self.state.trained_tokens, tokens, seconds });
        Ok(())
    }

    fn next_micro_batches(&mut self) -> (Vec<Batch>, Cursor) {
        let count = self.prepared.plan.gradient_accumulation.value;
        let mut cursor = self.state.cursor;
        let batches = (0..count)
            .map(|_| {
                let (batch, after) = self.loader.next_batch().expect("the loader repeats its epochs without end");
                cursor = after;
                batch
            })
            .collect();
        (batches, cursor)
    }

    /// Reads the numbers of the step in flight.
    fn flush(&mut self) -> Result<(), RunError> {
        match self.pending.take() {
            Some(pending) => self.log(pending),
            None => Ok(()),
        }
    }

    fn log(&mut self, pending: Pending<B>) -> Result<(), RunError> {
        let Pending { outcome, trained_tokens, tokens, seconds } = pending;
        let loss = scalar(outcome.loss_sum) / outcome.trained_tokens as f32;
        let grad_norm = scalar(outcome.grad_norm);
        if !loss.is_finite() || !grad_norm.is_finite() {
            return Err(RunError::NotFinite { step: outcome.step, loss, grad_norm });
        }
        let kept = (self.prepared.plan.steps.value as usize / 10).max(1);
        self.last_losses.push(f64::from(loss));
        if self.last_losses.len() > kept {
            self.last_losses.remove(0);
        }
        if outcome.step.is_multiple_of(self.prepared.config.train.log_every) {
            self.sinks.step(&StepMetrics {
                step: outcome.step,
                loss: f64::from(loss),
                learning_rate: outcome.learning_rate,
                grad_norm: f64::from(grad_norm),
                trained_tokens,
                tokens_per_s: tokens as f64 / seconds,
                ms: 1e3 * seconds,
                memory_bytes: self.meter.sample(),
            })?;
        }
        Ok(())
    }

    fn save(&mut self) -> Result<(), RunError> {
        // A step that is not finite must be found before it replaces a good checkpoint.
        self.flush()?;
        self.sinks.flush()?;
        self.state.wall_s = self.wall_s();
        let texts = [("config.toml", self.prepared.config.to_toml()), ("plan.toml", plan_toml(&self.prepared))];
        let keep = self.prepared.config.checkpoint.keep;
        checkpoint::save(self.folder.path(), &mut self.trainer, &self.saved, &self.state, &texts, keep)?;
        Ok(())
    }

    fn finish(mut self) -> Result<Outcome, RunError> {
        let after = self.prepared.evaluation.evaluate(&self.trainer.model, &self.prepared.tokenizer)?;
        report_evaluation(&mut self.sinks, self.state.step, &after)?;
        self.sinks.flush()?;
        self.sinks.0.clear();
        let prompts = self.prepared.config.eval.prompts.clone();
        let samples = sample(&self.prepared, &self.trainer.model)?;
        self.voice.samples("before", &prompts, &self.state.samples_before);
        self.voice.samples("after ", &prompts, &samples);

        let weights = self.write_final()?;
        let summary = Summary {
            steps: self.state.step,
            train_loss: mean(&self.last_losses),
            eval_loss_before: self.state.before.loss,
            eval_loss_after: after.loss,
            exact_match_before: self.state.before.exact_match,
            exact_match_after: after.exact_match,
            trained_tokens: self.state.trained_tokens,
            tokens_per_s: if self.step_s > 0.0 { self.step_tokens as f64 / self.step_s } else { 0.0 },
            wall_s: self.wall_s(),
            backend: self.prepared.plan.backend.value.to_string(),
            adapter: weights.display().to_string(),
        };
        let text = serde_json::to_string_pretty(&summary).expect("a summary of plain fields prints as JSON");
        self.folder.write(&self.folder.summary_json(), &(text + "\n"))?;
        let is_adapter = matches!(self.saved, Saved::Adapter(_));
        self.voice.summary(&summary, &self.prepared.config.model, prompts.first().map(String::as_str), is_adapter);
        Ok(Outcome::Finished(summary))
    }

    /// The trained weights where a user looks for them. A whole model takes the number format of the one it came from.
    fn write_final(&mut self) -> Result<PathBuf, RunError> {
        let dtype = match self.prepared.model.dtype.as_deref() {
            Some("bfloat16") => SavedDtype::Bf16,
            _ => SavedDtype::F32,
        };
        // The last checkpoint holds the same weights, so an earlier copy from a resumed run may go.
        let earlier = self.folder.path().join("model");
        if earlier.exists() {
            std::fs::remove_dir_all(&earlier)
                .map_err(|error| crate::storage::StorageError::io("replace", &earlier, error))?;
        }
        self.saved.write(&mut self.trainer, self.folder.path(), dtype)
    }

    fn wall_s(&self) -> f64 {
        self.wall_before + self.started.elapsed().as_secs_f64()
    }
}

fn plan_toml(prepared: &Prepared) -> String {
    toml::to_string(&prepared.plan).expect("a plan of plain fields prints as TOML")
}

fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

fn saved(prepared: &Prepared) -> Result<Saved, RunError> {
    Ok(match assemble::adapter(&prepared.config)? {
        Some(lora) => Saved::Adapter(lora),
        None => Saved::Model(prepared.config.model_folder()?),
    })
}

/// The state before the first step: evaluated and sampled.
fn first_state<B: Kernels>(prepared: &Prepared, trainer: &Trainer<B>, voice: Voice) -> Result<RunState, RunError> {
    let before = prepared.evaluation.evaluate(&trainer.model, &prepared.tokenizer)?;
    voice.evaluation("before training", &before);
    let samples_before = sample(prepared, &trainer.model)?;
    voice.samples("before", &prepared.config.eval.prompts, &samples_before);
    Ok(RunState {
        step: 0,
        cursor: Cursor::default(),
        trained_tokens: 0,
        date: Some(prepared.date),
        wall_s: 0.0,
        before,
        samples_before,
        data_fingerprint: prepared.train.fingerprint(),
        settings: checkpoint::settings(&prepared.config),
    })
}

/// Greedy answers to the recipe's sample prompts.
fn sample<B: Kernels>(prepared: &Prepared, model: &Llama<B>) -> Result<Vec<String>, RunError> {
    let chat = prepared.tokenizer.chat_template().is_ok() && prepared.config.train_on() != config::TrainOn::All;
    let prompts = &prepared.config.eval.prompts;
    let encoded: Vec<Vec<u32>> =
        prompts.iter().map(|text| encode_prompt(&prepared.tokenizer, text, chat)).collect::<Result<_, _>>()?;
    continue_prompts(model, &prepared.tokenizer, &encoded, prepared.config.eval.max_new_tokens, Sampler::greedy())
}

fn report_evaluation(sinks: &mut MetricSinks, step: u64, evaluation: &Evaluation) -> Result<(), RunError> {
    if let Some(loss) = evaluation.loss {
        sinks.eval(&EvalMetrics::new(step, loss, evaluation.exact_match))?;
    }
    Ok(())
}
