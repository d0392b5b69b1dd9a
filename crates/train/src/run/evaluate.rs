//! Evaluation: held-out loss and token accuracy through the same chunked loss as training, and exact match of greedy answers.
//!
//! The loss is the mean over all loss tokens; transformers reports the mean of the batches' means, which weighs tokens of short batches
//! more. Rows are read again for each evaluation, and prompts are answered in groups of bounded length, so memory does not grow with the
//! held-out data.
//! Trade-off: every rank evaluates everything, so all of them have the numbers without a reduction.

use std::ops::ControlFlow;
use std::sync::Arc;

use firebrick_data::{DocumentSet, Loader, LoaderConfig, PackOptions, PackedDataset, Tokenizer};
use firebrick_kernels::Kernels;
use firebrick_model::{Decoder, Sampler};

use crate::config::Extraction;
use crate::error::RunError;
use crate::metrics::Evaluation;
use crate::plan::{MAX_PROMPTS_AT_ONCE, Plan};
use crate::run::eval_prompts::EvalPrompts;
use crate::run::generate::continue_prompts;
use crate::run::step::scalar;

/// What a run is evaluated on.
#[derive(Clone, Debug, Default)]
pub struct EvaluationSet {
    held_out: Option<HeldOut>,
}

#[derive(Clone, Debug)]
struct HeldOut {
    rows: Arc<PackedDataset>,
    rows_per_batch: usize,
    max_batches: usize,
    prompts: EvalPrompts,
    extraction: Extraction,
    max_new_tokens: usize,
    answer_tokens: usize,
    loss_chunk_tokens: usize,
}

/// Where an evaluation is, for a display.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Batches of the loss that are done, and all of them.
    Loss(usize, usize),
    /// Prompts that are answered, and all of them.
    Answers(usize, usize),
}

impl std::fmt::Display for Stage {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Loss(done, all) => write!(formatter, "evaluating: batch {done} of {all}"),
            Self::Answers(done, all) => write!(formatter, "evaluating: answer {done} of {all}"),
        }
    }
}

/// Called before each batch and each group of answers; a break ends the evaluation.
pub type Watch<'a> = &'a mut dyn FnMut(Stage) -> ControlFlow<()>;

impl EvaluationSet {
    /// The evaluation that a plan describes, of these held-out documents.
    ///
    /// # Errors
    /// The plan wants answers, and no document has a prompt with a complete answer; or the tokenizer cannot decode an answer.
    pub fn new(
        plan: &Plan,
        documents: DocumentSet,
        packing: PackOptions,
        tokenizer: &Tokenizer,
    ) -> Result<Self, RunError> {
        let (limit, max_new_tokens) = (plan.exact_match_prompts.value, plan.max_new_tokens.value);
        let extraction = Extraction::parse(&plan.extract.value).expect("it was checked when the recipe was read");
        let prompts = EvalPrompts::find(&documents, tokenizer, limit, max_new_tokens, &extraction)?;
        let max_batches = match plan.eval_max_batches.value {
            0 => usize::MAX,
            limit => limit,
        };
        let held_out = HeldOut {
            rows: Arc::new(PackedDataset::new(documents, packing)),
            rows_per_batch: plan.eval_micro_batch_size.value,
            max_batches,
            prompts,
            extraction,
            max_new_tokens,
            answer_tokens: plan.answer_tokens.value,
            loss_chunk_tokens: plan.loss_chunk_tokens.value,
        };
        Ok(Self { held_out: Some(held_out) })
    }

    /// What is answered, and what was skipped and why, as a sentence; `None` if nothing is answered.
    #[must_use]
    pub fn note(&self) -> Option<String> {
        self.held_out.as_ref().and_then(|held_out| held_out.prompts.note())
    }

    /// Evaluates the model as it is.
    ///
    /// # Errors
    /// Logits that are not finite while answering.
    pub fn evaluate<B: Kernels>(&self, model: &Decoder<B>, tokenizer: &Tokenizer) -> Result<Evaluation, RunError> {
        let evaluation = self.evaluate_watched(model, tokenizer, &mut |_| ControlFlow::Continue(()))?;
        Ok(evaluation.expect("an evaluation that nothing stops has a result"))
    }

    /// As [`EvaluationSet::evaluate`]; `None` if `watch` ended it.
    ///
    /// # Errors
    /// As [`EvaluationSet::evaluate`].
    pub fn evaluate_watched<B: Kernels>(
        &self,
        model: &Decoder<B>,
        tokenizer: &Tokenizer,
        watch: Watch<'_>,
    ) -> Result<Option<Evaluation>, RunError> {
        let Some(held_out) = &self.held_out else { return Ok(Some(Evaluation::default())) };
        // What the last step left for reuse has other sizes than what follows, and the other way around.
        B::release_memory(model.device());
        let evaluation = held_out.evaluate(model, tokenizer, watch);
        B::release_memory(model.device());
        evaluation
    }
}

impl HeldOut {
    fn evaluate<B: Kernels>(
        &self,
        model: &Decoder<B>,
        tokenizer: &Tokenizer,
        watch: Watch<'_>,
    ) -> Result<Option<Evaluation>, RunError> {
        let ControlFlow::Continue((loss, token_accuracy)) = self.score(model, watch) else { return Ok(None) };
        let mut evaluation = Evaluation { loss: Some(loss), token_accuracy: Some(token_accuracy), exact_match: None };
        if !self.prompts.is_empty() {
            let Some(share) = self.exact_match(model, tokenizer, watch)? else { return Ok(None) };
            evaluation.exact_match = Some(share);
        }
        Ok(Some(evaluation))
    }

    fn loader(&self) -> Loader {
        let config = LoaderConfig {
            rows_per_batch: self.rows_per_batch,
            seed: 0,
            shuffle: false,
            epochs: Some(1),
            rank: 0,
            world_size: 1,
            prefetch: 1,
            workers: 1,
        };
        Loader::new(Arc::clone(&self.rows), config, Default::default())
    }

    /// Mean loss, and the fraction of right tokens.
    fn score<B: Kernels>(&self, model: &Decoder<B>, watch: Watch<'_>) -> ControlFlow<(), (f64, f64)> {
        let batches = self.rows.rows().div_ceil(self.rows_per_batch).min(self.max_batches);
        let mut loader = self.loader();
        let (mut sum, mut correct, mut tokens) = (0.0, 0.0, 0);
        for done in 0..batches {
            watch(Stage::Loss(done, batches))?;
            let Some((batch, _)) = loader.next_batch() else { break };
            let on_device = model.upload(&batch.input_ids, &batch.targets, &batch.positions, &batch.cu_seqlens);
            let score = model.score(&on_device, self.loss_chunk_tokens);
            sum += f64::from(scalar(score.loss_sum));
            correct += f64::from(scalar(score.correct));
            tokens += batch.loss_tokens();
        }
        ControlFlow::Continue((sum / tokens as f64, correct / tokens as f64))
    }

    fn exact_match<B: Kernels>(
        &self,
        model: &Decoder<B>,
        tokenizer: &Tokenizer,
        watch: Watch<'_>,
    ) -> Result<Option<f64>, RunError> {
        let (mut done, mut right) = (0, 0);
        for group in self.prompts.groups(self.answer_tokens, MAX_PROMPTS_AT_ONCE, self.max_new_tokens) {
            if watch(Stage::Answers(done, self.prompts.len())).is_break() {
                return Ok(None);
            }
            let prompts: Vec<Vec<u32>> = group.iter().map(|prompt| prompt.prompt.clone()).collect();
            let answers = continue_prompts(model, tokenizer, &prompts, self.max_new_tokens, Sampler::greedy())?;
            let is_right = |(prompt, answer): &(&firebrick_data::EvalPrompt, &String)| {
                self.extraction.matches(answer, &prompt.answer)
            };
            right += group.iter().zip(&answers).filter(is_right).count();
            done += group.len();
        }
        Ok(Some(right as f64 / self.prompts.len() as f64))
    }
}
