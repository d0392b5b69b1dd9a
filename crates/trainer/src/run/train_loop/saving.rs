//! The files of a run: checkpoints, and at its end the trained weights, the summary and the line of the report.
//!
//! A checkpoint from which the run goes on is copied to host memory, and a thread writes it, if the plan has room for the copy; the next one waits. The
//! thread makes the copy, too, where the plan has room on the card for what it copies.
//! Trade-off: the trained weights are written once more next to the last checkpoint, which contains them too.

use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::thread::Builder;
use std::time::{Duration, Instant};

use firebrick_files::AtomicFolder;
use firebrick_kernels::Kernels;
use firebrick_model::{CollectedWeights, HfFolder, ModelError, float_type_of};

use super::Run;
use super::background::Background;
use super::numbers::report_evaluation;
use super::trace::SAVE;
use crate::config::to_name;
use crate::console::{Outcome, SampleAnswer, Summary, date_and_time};
use crate::error::RunError;
use crate::metrics::{Evaluation, RunEnd};
use crate::run::prepare::now;
use crate::run::step::{Trainer, scalar};
use crate::run::train_loop::start::sample;
use crate::state::best::Best;
use crate::state::checkpoint::{Snapshot, save_part};
use crate::state::checkpoint_folder::{Keep, checkpoint_of};
use crate::state::manifest::Manifest;
use crate::storage::StorageError;

/// A shorter wait for a checkpoint is not worth a line.
const NOTABLE_WAIT: Duration = Duration::from_millis(100);

impl<B: Kernels> Run<B> {
    /// Saves the last step after another rank was lost, if the loss cannot have affected that step.
    pub(super) fn save_after_loss(&mut self) {
        let ranks = &self.trainer.ranks;
        let is_whole = self.state.step > 0 && self.trainer.optimizer.steps() == self.state.step;
        let is_here = ranks.is_main() && !self.trainer.optimizer.is_partial();
        if ranks.check("saving").is_err() && is_here && ranks.is_exact_after_loss() && is_whole {
            match self.save() {
                Ok(()) => self.console.print(&format!("saved step {} before ending", self.state.step)),
                Err(error) => self.console.print(&format!("step {} could not be saved: {error}", self.state.step)),
            }
        }
    }

    /// Ends a run that was stopped and saved.
    pub(super) fn interrupted(mut self) -> Outcome {
        self.sinks.close(RunEnd::Interrupted);
        self.write_report(None).iter().for_each(|line| self.console.print(line));
        Outcome::Interrupted {
            step: self.state.step,
            status: self.interrupt.exit_status(),
            name: self.folder.name().to_owned(),
            folder: self.folder.path().to_owned(),
        }
    }

    /// Saves the last step; returns when it is on the disk.
    pub(super) fn save(&mut self) -> Result<(), RunError> {
        self.settle()?;
        self.begin_save(None)
    }

    /// Saves a step from which the run goes on. If it `may_fail`, a full disk does not end the run: earlier saves stay, and the next one tries
    /// again.
    pub(super) fn save_on_the_way(&mut self, may_fail: bool) -> Result<(), RunError> {
        let started = Instant::now();
        self.settle()?;
        let begun = self.begin_save(Some(may_fail));
        self.waited_for_saves += started.elapsed();
        self.note(SAVE, self.state.step, started);
        self.unless_full(self.state.step, may_fail, begun)
    }

    /// Saves the last step. If steps go on after it, a thread may write it, and `goes_on` says whether it may fail.
    fn begin_save(&mut self, goes_on: Option<bool>) -> Result<(), RunError> {
        // A step that is not finite must be found before it replaces a good checkpoint.
        self.flush()?;
        // Nor may weights that the last update has ruined: its step's loss and gradient norm come from before it. All ranks reach the same result.
        let Trainer { model, ranks, optimizer, .. } = &self.trainer;
        let values: Vec<_> = model.parameters().iter().map(|parameter| parameter.value.clone()).collect();
        let mut squares = B::squared_norm(&values);
        if model.is_divided() {
            squares = ranks.all_reduce_scalar(squares)?;
        }
        let norm = scalar(squares).sqrt();
        if !norm.is_finite() {
            return Err(RunError::WrongNumbers(format!(
                "step {}: its update left weights whose norm is {norm}: training has diverged and was stopped. Nothing of \
                 this step is saved, and earlier checkpoints are untouched. Lower train.learning_rate, or raise \
                 train.warmup_steps",
                self.state.step
            )));
        }
        let collected = model.collect_weights();
        if !ranks.is_main() {
            // The others add their shares of the optimizer's state, if ranks divide it.
            if optimizer.is_partial() {
                self.where_all_have_room(Ok(()))?;
                self.where_all_have_room(save_part(self.folder.path(), self.state.step, ranks.rank(), optimizer))?;
            }
            return Ok(());
        }
        self.sinks.flush();
        self.state.wall_s = self.wall_s();
        self.state.loss_scale = self.trainer.optimizer.loss_scale_state();
        self.is_saving.store(true, Ordering::Relaxed);
        let written = self.write_checkpoint(collected, goes_on);
        if self.background.is_none() {
            self.is_saving.store(false, Ordering::Relaxed);
        }
        written
    }

    /// Waits for the checkpoint that a thread writes, if there is one, and says so if that takes long.
    pub(super) fn settle(&mut self) -> Result<(), RunError> {
        let Some(earlier) = self.background.take() else { return Ok(()) };
        let (step, best, may_fail, started) = (earlier.step, earlier.best, earlier.may_fail, Instant::now());
        let written = earlier.wait();
        let waited = started.elapsed();
        if waited > NOTABLE_WAIT {
            let (now, waited) = (self.state.step, waited.as_secs_f64());
            self.console.print(&format!(
                "step {now} waited {waited:.1} s until the checkpoint of step {step} was written: save less often, or to a faster disk"
            ));
        }
        if written.is_ok() {
            self.best_saved = best;
        }
        self.unless_full(step, may_fail, written)
    }

    /// Returns `written`; if the disk was full and the save may fail, warns that the step was not saved instead.
    fn unless_full(&self, step: u64, may_fail: bool, written: Result<(), RunError>) -> Result<(), RunError> {
        let error = match written {
            Err(error) if may_fail && error.is_disk_full() => error,
            written => return written,
        };
        let problem = match &error {
            RunError::Storage(error) => error.problem(),
            other => other.to_string(),
        };
        let plan = &self.prepared.plan;
        let next = (step + plan.checkpoint_every_steps.value).min(plan.steps.value);
        self.console.print(&format!(
            "warning: step {step} was not saved: {problem}. The run goes on, and saves after step {next} if there is \
             room by then"
        ));
        Ok(())
    }

    /// Writes a checkpoint on rank 0, or lets a thread write it; the other ranks add their shares of the optimizer's state if they divide it.
    fn write_checkpoint(&mut self, collected: CollectedWeights, goes_on: Option<bool>) -> Result<(), RunError> {
        let copies = self.prepared.plan.snapshot_bytes.value > 0 && !self.trainer.optimizer.is_partial();
        let goes_on = goes_on.filter(|_| copies);
        let held = self.prepared.plan.held_bytes.as_ref().filter(|_| goes_on.is_some());
        if let Some(held) = held.filter(|held| held.value == 0 && self.waited_for_saves.is_zero()) {
            self.console.print(&format!("step {}: {}", self.state.step, held.reason));
        }
        let snapshot = Snapshot {
            model: &self.trainer.model,
            weights: &self.weights,
            collected,
            optimizer: &self.trainer.optimizer,
            state: &self.state,
            texts: &self.texts,
            holds: held.is_some_and(|held| held.value > 0),
        };
        let folder = self.folder.path();
        // The best so far is the best until a better one is complete.
        let (count, best) = (self.prepared.plan.checkpoints_kept.value, self.best_step());
        let (before, after) = (Keep { count, best: self.best_saved }, Keep { count, best });
        let begun = snapshot.begin(folder, before, goes_on.is_some());
        if let Some(may_fail) = goes_on {
            let (finish, is_saving) = (begun?, self.is_saving.clone());
            let write = move || {
                let written = finish().and_then(|writer| Ok(writer.commit(after)?));
                is_saving.store(false, Ordering::Relaxed);
                written.map(|_| ())
            };
            let thread = Builder::new().name("checkpoint".to_owned()).spawn(write);
            let thread = Some(thread.map_err(|source| StorageError::io("start a thread for", folder, source))?);
            self.background = Some(Background { step: self.state.step, best, may_fail, thread });
            return Ok(());
        }
        // Now the others find the folder, and after the second exchange it contains their parts.
        let begun = self.where_all_have_room(begun.and_then(|finish| finish()))?;
        self.where_all_have_room(Ok(begun))?.commit(after)?;
        self.best_saved = best;
        Ok(())
    }

    fn best_step(&self) -> Option<u64> {
        self.state.best.as_ref().map(|best| best.step)
    }

    /// Gives the model the best weights, if the run keeps them and they are not those of the last step. Returns their step and evaluation; `None` also
    /// if their checkpoint was damaged: the last weights are the result then. Ranks that do not write results do not need the weights.
    fn restore_best(&mut self, takes_part: bool) -> Result<Option<(u64, Evaluation)>, RunError> {
        let Some(Best { step, evaluation, .. }) = self.state.best.clone().filter(|_| self.prepared.plan.best.is_some())
        else {
            return Ok(None);
        };
        let checkpoint = checkpoint_of(self.folder.path(), step);
        let restores = takes_part && step != self.state.step;
        let damage = restores.then(|| Manifest::check(&checkpoint).err()).flatten();
        if self.trainer.ranks.all_reduce_count(u64::from(damage.is_some()))? > 0 {
            let problem = damage.map_or_else(|| "another rank cannot read it".to_owned(), |damage| damage.problem());
            self.console.print(&format!(
                "warning: the best checkpoint, of step {step}, is damaged ({problem}): the result has the weights of the last step, {}",
                self.state.step
            ));
            return Ok(None);
        }
        if restores {
            self.weights.restore(&checkpoint, &mut self.trainer.model)?;
        }
        Ok(Some((step, evaluation)))
    }

    /// Returns a sentence about a run that has ended early.
    fn early_end(&self) -> Option<String> {
        let (best, section) = self.state.best.as_ref().zip(self.prepared.plan.best.as_ref())?;
        let (Best { step, without_improvement, .. }, metric) = (best, to_name(&section.value.metric));
        let value = section.value.metric.of(&best.evaluation).unwrap_or(f64::NAN);
        (self.state.step < self.prepared.plan.steps.value).then(|| {
            format!(
                "ended early after step {} of {}: {without_improvement} evaluations brought no \
                 improvement; the best {metric} is {value:.4}, after step {step}",
                self.state.step, self.prepared.plan.steps.value
            )
        })
    }

    /// Returns `written` once all ranks have written their part of a checkpoint. If one disk is full, all ranks learn it and none waits for a part
    /// that will not come.
    fn where_all_have_room<T>(&self, written: Result<T, RunError>) -> Result<T, RunError> {
        if !self.trainer.optimizer.is_partial() {
            return written;
        }
        let is_full = written.as_ref().is_err_and(RunError::is_disk_full);
        if written.is_err() && !is_full {
            return written;
        }
        let full = self.trainer.ranks.all_reduce_count(u64::from(is_full))?;
        let path = self.folder.path().to_owned();
        if full > 0 && !is_full { Err(StorageError::DiskOfOtherRankFull { path }.into()) } else { written }
    }

    pub(super) fn finish(mut self) -> Result<Outcome, RunError> {
        let last = match self.evaluated_now() {
            Some(evaluation) => evaluation,
            None => {
                // Everything is saved: if the run is stopped here, the resumed run evaluates and finishes it.
                let Some(after) = self.evaluation()? else { return Ok(self.interrupted()) };
                report_evaluation(&mut self.sinks, self.state.step, &after);
                after
            }
        };
        self.sinks.flush();
        self.sinks.activity("writing the results");
        self.early_end().iter().for_each(|line| self.console.print(line));
        let is_main = self.trainer.ranks.is_main();
        // A pass over divided weights involves all ranks.
        let takes_part = is_main || self.trainer.model.is_divided();
        let (best_step, after) = match self.restore_best(takes_part)? {
            Some((step, evaluation)) => (Some(step), evaluation),
            None => (None, last),
        };
        let plan = &self.prepared.plan;
        let (weights, samples) = if takes_part { self.results()? } else { Default::default() };
        let summary = Summary {
            steps: self.state.step,
            best_step,
            train_loss: mean(&self.state.last_losses),
            eval_loss_before: self.state.before.loss,
            eval_loss_after: after.loss,
            eval_reward_before: self.state.before.reward,
            eval_reward_after: after.reward,
            token_accuracy_before: self.state.before.token_accuracy,
            token_accuracy_after: after.token_accuracy,
            exact_match_before: self.state.before.exact_match,
            exact_match_after: after.exact_match,
            pairs_before: self.state.before.pairs.map(Box::new),
            pairs_after: after.pairs.map(Box::new),
            loss_tokens: self.state.loss_tokens,
            tokens_per_s: per_second(self.state.step_tokens, self.state.step_s),
            sampled_per_s: self.state.rounds.map(|rounds| per_second(rounds.sampled_tokens, rounds.sampling_s)),
            trained_per_s: self
                .state
                .rounds
                .map(|rounds| per_second(self.state.step_tokens, self.state.step_s - rounds.all_s)),
            wall_s: self.wall_s(),
            waited_for_saves_s: self.waited_for_saves.as_secs_f64(),
            backend: plan.backend.value.to_string(),
            arithmetic: plan.arithmetic.value.clone(),
            weights: weights.display().to_string(),
            ranks: self.rank_meter.mean().map(Box::new),
            samples: self.with_answers_before(&samples),
            ended: date_and_time(now()),
        };
        let text = serde_json::to_string_pretty(&summary).expect("a summary of plain fields is expressible as JSON");
        // Not earlier: a run whose weights cannot be written has failed.
        self.sinks.close(RunEnd::Finished);
        let report = self.write_report(Some(&text));
        // Written last: a run killed before this does not count as complete, and the resumed run ends again.
        if is_main {
            self.folder.write_summary(&(text + "\n"))?;
        }
        let prompts = &plan.sample_prompts.value;
        self.console.samples("after ", prompts, &samples);
        self.console.summary(&summary, plan);
        report.iter().for_each(|line| self.console.print(line));
        Ok(Outcome::Finished(Box::new(summary)))
    }

    /// Writes the report of the run on rank 0, with its summary if it has one. Returns a line to print.
    fn write_report(&self, summary: Option<&str>) -> Option<String> {
        let write = self.report.filter(|_| self.trainer.ranks.is_main())?;
        Some(write(self.folder.path(), summary))
    }

    /// Answers the sample prompts and writes the trained weights. Returns their folder, and the answers.
    fn results(&self) -> Result<(PathBuf, Vec<String>), RunError> {
        let samples = sample(&self.prepared, &self.trainer.model)?;
        let collected = self.trainer.model.collect_weights();
        if !self.trainer.ranks.is_main() {
            return Ok((PathBuf::new(), samples));
        }
        let (model, weights) = (&self.trainer.model, &self.weights);
        let is_part = weights.adapter.is_none() && model.config.wrapper.is_some();
        let base = match is_part.then(|| HfFolder::open(&weights.companions.from)).transpose() {
            // A model that started at random has a config and no other parts.
            Err(ModelError::NotThere { .. }) => None,
            base => base?,
        };
        // They replace those of an earlier end once they are complete. A whole model keeps its original number format.
        let (path, dtype) = (weights.path_in(self.folder.path()), float_type_of(&model.config));
        let partial = AtomicFolder::create(&path).map_err(|error| StorageError::writing(&path, 0, error))?;
        let written = weights.write(model, collected, partial.temporary(), dtype, base.as_ref())?;
        partial.replace_by(&written).map_err(|error| StorageError::writing(&path, 0, error))?;
        Ok((path, samples))
    }

    /// Returns the sample prompts with these answers, next to those before the first step; the recipe of that part of the run may have had other
    /// prompts.
    fn with_answers_before(&self, answers: &[String]) -> Vec<SampleAnswer> {
        let earlier = || self.state.sample_prompts.iter().zip(&self.state.samples_before);
        let before = |prompt: &String| earlier().find(|(asked, _)| *asked == prompt).map(|(_, answer)| answer.clone());
        let answered = self.prepared.plan.sample_prompts.value.iter().zip(answers);
        let sample = |(prompt, after): (&String, &String)| SampleAnswer {
            prompt: prompt.clone(),
            before: before(prompt),
            after: after.clone(),
        };
        answered.map(sample).collect()
    }

    /// Returns the seconds since the start, over all resumed parts.
    pub(super) fn wall_s(&self) -> f64 {
        self.wall_before + self.started.elapsed().as_secs_f64()
    }
}

fn per_second(count: u64, seconds: f64) -> f64 {
    if seconds > 0.0 { count as f64 / seconds } else { 0.0 }
}

fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}
