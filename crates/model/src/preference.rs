//! Preference training of a micro-batch in one section: two passes over the head, and if the reference is the base without its adapter, one more pass
//! over the layers.
//!
//! ```text
//! reference log-probabilities   forward without adapters, head      (or given: cached before training)
//! log-probabilities             forward, head
//! weights of the targets        one operation over the pairs
//! gradients                     head with these weights, backward
//! ```
//!
//! There is one copy of the base. Trade-off: the head multiplies every target twice, where a plain loss multiplies it once.

use burn_tensor::{DType, Tensor};
use firebrick_kernels::{
    CrossEntropyOptions, GradientSink, Kernels, LossTargets, PAIR_NUMBERS, PairLogProbs, PairLoss, PairResult,
    PairTargets, PairWeights,
};

use crate::decoder::{Decoder, LossOptions, MicroBatch};
use crate::experts::router_loss::with_router_loss;
use crate::pass::PassOptions;

/// Source of the reference's log-probabilities.
#[derive(Clone, Debug)]
pub enum PairReference<B: Kernels> {
    /// The loss has no reference.
    None,
    /// The base without its adapter, in the same section.
    BaseWithoutAdapter,
    /// Known: sums over the targets of each answer, `[2p]` f32.
    Known(Tensor<B, 1>),
}

/// A micro-batch of pairs on the device.
#[derive(Clone, Debug)]
pub struct PairBatch<B: Kernels> {
    /// The tokens of both answers of each pair.
    pub batch: MicroBatch<B>,
    /// Assigns targets to answers; `None` if a rank has nothing but padding.
    pub targets: Option<PairTargets<B>>,
    /// The reference.
    pub reference: PairReference<B>,
}

impl<B: Kernels> Decoder<B> {
    /// Uploads the assignment of a micro-batch's targets to answers: documents with targets alternate, chosen and rejected. `is_answer` says for each
    /// token whether its target belongs to an answer; without it all do.
    ///
    /// # Panics
    /// If the documents are no pairs.
    pub fn upload_pairs(
        &self,
        targets: &[i64],
        is_answer: Option<&[bool]>,
        cu_seqlens: &[u32],
    ) -> Option<PairTargets<B>> {
        let of_document = |bounds: &[u32]| -> Vec<bool> {
            let tokens = bounds[0] as usize..bounds[1] as usize;
            tokens.filter(|&token| targets[token] >= 0).map(|token| is_answer.is_none_or(|is| is[token])).collect()
        };
        let documents: Vec<Vec<bool>> =
            cu_seqlens.windows(2).map(of_document).filter(|targets| !targets.is_empty()).collect();
        (!documents.is_empty()).then(|| PairTargets::new(&documents, self.device()))
    }

    /// Runs forward, loss and backward of a micro-batch of pairs in one section. Returns [`PairResult::numbers`], and after them the auxiliary loss
    /// if the micro-batch has one. The gradients of the losses' sum times the gradient scale, plus those of that loss, go to the sink.
    ///
    /// # Panics
    /// If the loss options have no gradient scale, or a loss of log ratios has no reference.
    pub fn pair_loss_and_gradients(
        &self,
        pairs: &PairBatch<B>,
        pass: PassOptions,
        (pair_loss, weights): (PairLoss, PairWeights<B>),
        loss: LossOptions,
        sink: &mut dyn GradientSink<B>,
    ) -> Tensor<B, 1> {
        self.begin_mixers(&pairs.batch);
        let (numbers, router_loss) = B::section(self.device(), || {
            let reference = self.reference(pairs, loss.chunk_tokens);
            let (hidden_nd, tape) = self.forward(&pairs.batch, pass);
            let router_loss = tape.router_loss();
            let result = pairs.targets.as_ref().map(|targets| {
                let log_probs_m = self.log_probs_of(hidden_nd.clone(), &pairs.batch.targets, loss.chunk_tokens, 1.0);
                pair_result(log_probs_m, targets, reference, pair_loss, weights)
            });
            let (numbers, weights_m) = result.map(|result| (result.numbers, result.weights_m)).unzip();
            let targets = LossTargets { weights_m, ..pairs.batch.targets.clone() };
            let loss = self.loss(hidden_nd, &targets, loss, sink);
            let d_hidden_nd = loss.d_hidden_nd.expect("gradients need a gradient scale");
            self.backward(tape, d_hidden_nd, sink);
            (numbers, router_loss)
        });
        with_router_loss(self.or_zeros(numbers), router_loss)
    }

    /// Computes [`PairResult::numbers`] of a micro-batch without gradients.
    pub fn pair_score(&self, pairs: &PairBatch<B>, pair_loss: PairLoss, chunk_tokens: usize) -> Tensor<B, 1> {
        let numbers = B::section(self.device(), || {
            let reference = self.reference(pairs, chunk_tokens);
            let hidden_nd = self.hidden(&pairs.batch, true);
            let targets = pairs.targets.as_ref()?;
            let log_probs_m = self.log_probs_of(hidden_nd, &pairs.batch.targets, chunk_tokens, 1.0);
            let weights = PairWeights { nll_factor: 0.0, factor: None };
            Some(pair_result(log_probs_m, targets, reference, pair_loss, weights).numbers)
        });
        self.or_zeros(numbers)
    }

    /// Computes the log-probabilities of a micro-batch's answers, summed over their targets, `[2p]` f32, with or without adapters. `None` if there is
    /// only padding, which still passes through the layers when ranks divide the weights.
    pub fn answer_log_probs(
        &self,
        batch: &MicroBatch<B>,
        targets: Option<&PairTargets<B>>,
        adapters: bool,
        chunk_tokens: usize,
    ) -> Option<Tensor<B, 1>> {
        B::section(self.device(), || self.answers(batch, targets, adapters, chunk_tokens))
    }

    fn answers(
        &self,
        batch: &MicroBatch<B>,
        targets: Option<&PairTargets<B>>,
        adapters: bool,
        chunk_tokens: usize,
    ) -> Option<Tensor<B, 1>> {
        let hidden_nd = self.hidden(batch, adapters);
        let targets = targets?;
        let log_probs_m = self.log_probs_of(hidden_nd, &batch.targets, chunk_tokens, 1.0);
        Some(B::document_sums(log_probs_m, targets, true))
    }

    fn reference(&self, pairs: &PairBatch<B>, chunk_tokens: usize) -> Option<Tensor<B, 1>> {
        match &pairs.reference {
            PairReference::None => None,
            PairReference::BaseWithoutAdapter => {
                self.answers(&pairs.batch, pairs.targets.as_ref(), false, chunk_tokens)
            }
            PairReference::Known(sums) => Some(sums.clone()),
        }
    }

    /// Computes the log-probability of each target at a temperature, `[m]` f32.
    pub(crate) fn log_probs_of(
        &self,
        hidden_nd: Tensor<B, 2>,
        targets: &LossTargets<B>,
        chunk_tokens: usize,
        temperature: f64,
    ) -> Tensor<B, 1> {
        let options = CrossEntropyOptions { log_probs: true, ..self.without_gradients(chunk_tokens, temperature) };
        let loss = B::linear_cross_entropy(hidden_nd, &self.head(), targets, options);
        loss.log_probs_m.expect("log-probabilities were requested")
    }

    fn or_zeros(&self, numbers: Option<Tensor<B, 1>>) -> Tensor<B, 1> {
        numbers.unwrap_or_else(|| Tensor::zeros([PAIR_NUMBERS], (self.device(), DType::F32)))
    }
}

fn pair_result<B: Kernels>(
    log_probs_m: Tensor<B, 1>,
    targets: &PairTargets<B>,
    reference: Option<Tensor<B, 1>>,
    pair_loss: PairLoss,
    weights: PairWeights<B>,
) -> PairResult<B> {
    let all = targets.answers_m.as_ref().map(|_| B::document_sums(log_probs_m.clone(), targets, false));
    let answers = B::document_sums(log_probs_m, targets, true);
    B::pair_loss(PairLogProbs { answers, all, reference }, targets, pair_loss, weights)
}
