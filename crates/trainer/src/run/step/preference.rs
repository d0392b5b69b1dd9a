//! Pairs of answers in a step: their loss, and the source of the reference.
//!
//! Trade-off: a step has two denominators. The cross entropy of the chosen (ORPO, RPO) is a mean over the tokens of the whole step, the loss of the
//! margin a mean over its pairs.

use std::sync::Arc;

use burn_tensor::Tensor;
use firebrick_data::Batch;
use firebrick_kernels::{GradientSink, Kernels, PairLoss, PairWeights};
use firebrick_model::{Decoder, LossOptions, ModelError, PairBatch, PairReference, PassOptions};
use serde::{Deserialize, Serialize};

use crate::plan::{Plan, PlannedReference};

/// The objective of training on pairs, with the reference of one set of documents.
#[derive(Clone, Debug, PartialEq)]
pub struct PairObjective {
    /// The loss of a pair.
    pub loss: PairLoss,
    /// Weight of the mean cross entropy of the chosen.
    pub nll_weight: f64,
    /// The reference of the documents.
    pub reference: Reference,
}

/// The source of the reference's log-probabilities for the answers of a set.
#[derive(Clone, Debug, PartialEq)]
pub enum Reference {
    /// The loss has none.
    None,
    /// The base without its adapter, in every pass.
    BaseWithoutAdapter,
    /// Computed before training, one sum per document of the set.
    Cached(Arc<Vec<f32>>),
}

/// The denominators of a step, over all micro-batches and ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepCounts {
    /// Targets that count in the loss.
    pub loss_tokens: u64,
    /// Pairs of answers.
    pub pairs: u64,
    /// Targets of chosen documents.
    pub chosen_targets: u64,
}

impl StepCounts {
    /// Counts those of some micro-batches.
    pub fn of(micro_batches: &[Batch]) -> Self {
        let mut counts = Self::default();
        for batch in micro_batches {
            counts.loss_tokens += batch.loss_tokens() as u64;
            counts.pairs += batch.pair_count() as u64;
            counts.chosen_targets += batch.pairs.as_ref().map_or(0, |pairs| pairs.chosen_targets as u64);
        }
        counts
    }

    /// Adds two counts.
    pub fn plus(self, other: Self) -> Self {
        Self {
            loss_tokens: self.loss_tokens + other.loss_tokens,
            pairs: self.pairs + other.pairs,
            chosen_targets: self.chosen_targets + other.chosen_targets,
        }
    }
}

impl PairObjective {
    /// Returns the objective of a plan; `None` if it trains no pairs. A reference that is computed before training is empty until then.
    pub fn planned(plan: &Plan) -> Option<Self> {
        let section = &plan.preference.as_ref()?.value;
        let reference = match plan.reference.as_ref().map(|reference| reference.value) {
            None => Reference::None,
            Some(PlannedReference::BaseWithoutAdapter) => Reference::BaseWithoutAdapter,
            Some(PlannedReference::Precomputed) => Reference::Cached(Arc::default()),
        };
        Some(Self { loss: section.pair_loss(), nll_weight: section.nll_weight(), reference })
    }

    /// Uploads a batch of pairs with its reference.
    ///
    /// # Panics
    /// If the batch does not consist of pairs, unless it is padding.
    pub fn upload<B: Kernels>(&self, model: &Decoder<B>, batch: &Batch) -> Result<PairBatch<B>, ModelError> {
        let tokens = model.upload(&batch.input_ids, &batch.targets, &batch.positions, &batch.cu_seqlens)?;
        let is_answer = batch.pairs.as_ref().and_then(|pairs| pairs.is_answer.as_deref());
        let targets = model.upload_pairs(&batch.targets, is_answer, &batch.cu_seqlens);
        assert_eq!(targets.as_ref().map_or(0, |targets| targets.pairs), batch.pair_count(), "a batch has whole pairs");
        let reference = match &self.reference {
            Reference::Cached(sums) => {
                let documents = batch.pairs.iter().flat_map(|pairs| &pairs.documents);
                let known: Vec<f32> = documents.map(|&document| sums[document as usize]).collect();
                match known.is_empty() {
                    true => PairReference::None,
                    false => PairReference::Known(Tensor::from_floats(known.as_slice(), model.device())),
                }
            }
            Reference::BaseWithoutAdapter => PairReference::BaseWithoutAdapter,
            Reference::None => PairReference::None,
        };
        Ok(PairBatch { batch: tokens, targets, reference })
    }

    /// Runs forward and backward of an uploaded micro-batch, in a step with these counts. Returns `PairResult::numbers`, `[7]`, and after them the
    /// auxiliary loss if the micro-batch has one. `loss_scale` scales only the gradients.
    pub fn loss_and_gradients<B: Kernels>(
        &self,
        model: &Decoder<B>,
        pairs: &PairBatch<B>,
        counts: StepCounts,
        (pass, chunk_tokens, loss_scale): (PassOptions, usize, Option<Tensor<B, 1>>),
        sink: &mut dyn GradientSink<B>,
    ) -> Tensor<B, 1> {
        let loss = LossOptions {
            chunk_tokens,
            gradient_scale: Some(1.0 / counts.pairs as f64),
            log_probs: false,
            temperature: 1.0,
        };
        let nll_factor = self.nll_weight * counts.pairs as f64 / counts.chosen_targets as f64;
        let weights = PairWeights { nll_factor, factor: loss_scale };
        model.pair_loss_and_gradients(pairs, pass, (self.loss, weights), loss, sink)
    }
}
