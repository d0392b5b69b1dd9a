//! Evaluation: held-out loss through the same chunked loss as training, and exact match of greedy answers.

use firebrick_data::{Batch, Question, Tokenizer};
use firebrick_kernels::Kernels;
use firebrick_model::{Llama, Sampler};
use serde::{Deserialize, Serialize};

use crate::error::RunError;
use crate::generate::continue_prompts;
use crate::step::scalar;

/// Sequences that are answered at the same time: bounds the memory of their caches.
const ANSWERS_AT_ONCE: usize = 64;

/// Quality on held-out data.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// Mean cross entropy of the trained tokens.
    pub loss: Option<f64>,
    /// Part of the questions whose greedy answer is the reference, to the letter.
    pub exact_match: Option<f64>,
}

impl Evaluation {
    /// `exp(loss)`.
    pub fn perplexity(&self) -> Option<f64> {
        self.loss.map(f64::exp)
    }
}

/// What a run is evaluated on.
#[derive(Clone, Debug, Default)]
pub struct EvaluationSet {
    /// Packed held-out rows.
    pub batches: Vec<Batch>,
    /// Held-out questions with one right answer each.
    pub questions: Vec<Question>,
    /// Longest answer.
    pub max_new_tokens: usize,
    /// Rows of logits at a time.
    pub loss_chunk_tokens: usize,
}

impl EvaluationSet {
    /// Whether there is nothing to evaluate.
    pub fn is_empty(&self) -> bool {
        self.batches.is_empty() && self.questions.is_empty()
    }

    /// Evaluates the model as it is.
    ///
    /// # Errors
    /// Logits that are not finite while answering.
    pub fn evaluate<B: Kernels>(&self, model: &Llama<B>, tokenizer: &Tokenizer) -> Result<Evaluation, RunError> {
        let loss = (!self.batches.is_empty()).then(|| self.loss(model));
        let exact_match = if self.questions.is_empty() { None } else { Some(self.exact_match(model, tokenizer)?) };
        Ok(Evaluation { loss, exact_match })
    }

    fn loss<B: Kernels>(&self, model: &Llama<B>) -> f64 {
        let (mut sum, mut tokens) = (0.0, 0);
        for batch in &self.batches {
            let on_device = model.upload(&batch.input_ids, &batch.targets, &batch.positions, &batch.cu_seqlens);
            sum += f64::from(scalar(model.loss(&on_device, self.loss_chunk_tokens)));
            tokens += batch.trained_tokens();
        }
        sum / tokens as f64
    }

    fn exact_match<B: Kernels>(&self, model: &Llama<B>, tokenizer: &Tokenizer) -> Result<f64, RunError> {
        let mut right = 0;
        for questions in self.questions.chunks(ANSWERS_AT_ONCE) {
            let prompts: Vec<Vec<u32>> = questions.iter().map(|question| question.prompt.clone()).collect();
            let answers = continue_prompts(model, tokenizer, &prompts, self.max_new_tokens, Sampler::greedy())?;
            right += questions
                .iter()
                .zip(&answers)
                .filter(|(question, answer)| question.answer.trim() == answer.trim())
                .count();
        }
        Ok(right as f64 / self.questions.len() as f64)
    }
}
