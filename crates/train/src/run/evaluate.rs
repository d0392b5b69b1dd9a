//! Evaluation: held-out loss through the same chunked loss as training, and exact match of greedy answers.
//!
//! Trade-off: every rank evaluates everything, so all of them have the numbers without a reduction.

use std::sync::Arc;

use firebrick_data::{
    Batch, DataError, DocumentSet, EvalPrompt, Loader, LoaderConfig, PackOptions, PackedDataset, Tokenizer,
};
use firebrick_kernels::Kernels;
use firebrick_model::{Decoder, Sampler};

use crate::error::RunError;
use crate::metrics::Evaluation;
use crate::plan::Plan;
use crate::run::generate::continue_prompts;
use crate::run::step::scalar;

/// Prompts that are answered at the same time: bounds the memory of their caches.
const PROMPTS_AT_ONCE: usize = 64;

/// What a run is evaluated on.
#[derive(Clone, Debug, Default)]
pub struct EvaluationSet {
    /// Packed held-out rows.
    pub batches: Vec<Batch>,
    /// Held-out prompts with one reference answer each.
    pub prompts: Vec<EvalPrompt>,
    /// Maximum tokens of an answer.
    pub max_new_tokens: usize,
    /// Rows of logits at a time.
    pub loss_chunk_tokens: usize,
}

impl EvaluationSet {
    /// The evaluation that a plan describes, of these held-out documents.
    ///
    /// # Errors
    /// The tokenizer cannot decode a reference answer.
    pub fn new(
        plan: &Plan,
        documents: DocumentSet,
        packing: PackOptions,
        tokenizer: &Tokenizer,
    ) -> Result<Self, DataError> {
        let loader = LoaderConfig {
            rows_per_batch: plan.eval_micro_batch_size.value,
            seed: 0,
            shuffle: false,
            epochs: Some(1),
            rank: 0,
            world_size: 1,
            prefetch: 1,
            workers: 1,
        };
        let prompts = EvalPrompt::from_documents(&documents, tokenizer, plan.exact_match_prompts.value)?;
        let mut loader = Loader::new(Arc::new(PackedDataset::new(documents, packing)), loader, Default::default());
        let limit = match plan.eval_max_batches.value {
            0 => usize::MAX,
            limit => limit,
        };
        let batches = std::iter::from_fn(|| loader.next_batch().map(|(batch, _)| batch)).take(limit).collect();
        Ok(Self {
            batches,
            prompts,
            max_new_tokens: plan.max_new_tokens.value,
            loss_chunk_tokens: plan.loss_chunk_tokens.value,
        })
    }

    /// Evaluates the model as it is.
    ///
    /// # Errors
    /// Logits that are not finite while answering.
    pub fn evaluate<B: Kernels>(&self, model: &Decoder<B>, tokenizer: &Tokenizer) -> Result<Evaluation, RunError> {
        let loss = (!self.batches.is_empty()).then(|| self.loss(model));
        let exact_match = if self.prompts.is_empty() { None } else { Some(self.exact_match(model, tokenizer)?) };
        Ok(Evaluation { loss, exact_match })
    }

    fn loss<B: Kernels>(&self, model: &Decoder<B>) -> f64 {
        let (mut sum, mut tokens) = (0.0, 0);
        for batch in &self.batches {
            let on_device = model.upload(&batch.input_ids, &batch.targets, &batch.positions, &batch.cu_seqlens);
            sum += f64::from(scalar(model.loss_only(&on_device, self.loss_chunk_tokens)));
            tokens += batch.loss_tokens();
        }
        sum / tokens as f64
    }

    fn exact_match<B: Kernels>(&self, model: &Decoder<B>, tokenizer: &Tokenizer) -> Result<f64, RunError> {
        let mut right = 0;
        for chunk in self.prompts.chunks(PROMPTS_AT_ONCE) {
            let prompts: Vec<Vec<u32>> = chunk.iter().map(|prompt| prompt.prompt.clone()).collect();
            let answers = continue_prompts(model, tokenizer, &prompts, self.max_new_tokens, Sampler::greedy())?;
            right +=
                chunk.iter().zip(&answers).filter(|(prompt, answer)| prompt.answer.trim() == answer.trim()).count();
        }
        Ok(right as f64 / self.prompts.len() as f64)
    }
}
