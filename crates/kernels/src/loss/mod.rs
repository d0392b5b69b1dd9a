//! Output projection and cross entropy over the targets that count, in chunks: the full logits never exist.
//!
//! Loss and gradient are computed together. The operation returns sums and per-token log-probabilities and takes per-token weights;
//! what a loss divides by is the caller's choice, so supervised fine-tuning and preference losses share it.
//! Trade-off: gradients are computed with the loss, so a loss that needs all log-probabilities first runs the head twice.

#[cfg(feature = "flex")]
pub(crate) mod conformance;
pub mod pairs;
pub mod reference;

use std::ops::Range;

use burn_tensor::{Int, Tensor, backend::Backend};

use crate::linear::WeightGradient;
use crate::weights::{Weight, WeightOps};
use pairs::{PairLogProbs, PairLoss, PairResult, PairTargets, PairWeights};

/// The tokens of a micro-batch whose next token counts in the loss.
#[derive(Clone, Debug)]
pub struct LossTargets<B: Backend> {
    /// Which of the `n` tokens predict a target, `[m]`, ascending.
    pub positions_m: Tensor<B, 1, Int>,
    /// The targets, `[m]`.
    pub targets_m: Tensor<B, 1, Int>,
    /// Weight of each target's loss, `[m]` f32; `None`: 1 each.
    pub weights_m: Option<Tensor<B, 1>>,
    /// `m`.
    pub count: usize,
}

/// What [`LossOps::linear_cross_entropy`] computes in addition to the loss.
#[derive(Clone, Debug)]
pub struct CrossEntropyOptions<B: Backend> {
    /// Rows of logits that exist at a time.
    pub chunk_tokens: usize,
    /// Factor of the gradients, usually one over the loss tokens of the whole step. `None`: no gradients.
    pub gradient_scale: Option<f64>,
    /// Whether the head trains, and where its gradient goes.
    pub weight_gradient: WeightGradient<B>,
    /// The rows of the head whose gradient is needed, side by side in the gradient; `None`: all.
    pub weight_rows: Option<Vec<Range<usize>>>,
    /// Whether [`CrossEntropy::log_probs_m`] is returned.
    pub log_probs: bool,
    /// Whether [`CrossEntropy::correct`] is returned.
    pub correct: bool,
    /// `cap`, where logits become `cap * tanh(logits / cap)` before the softmax. Every operation over the head applies it.
    pub soft_cap: Option<f64>,
}

/// Result of [`LossOps::linear_cross_entropy`].
#[derive(Clone, Debug)]
pub struct CrossEntropy<B: Backend> {
    /// Weighted sum of `-log softmax(logits)[target]` over the targets, `[1]` f32, not scaled.
    pub loss_sum: Tensor<B, 1>,
    /// `log softmax(logits)[target]` of each target, `[m]` f32, not weighted.
    pub log_probs_m: Option<Tensor<B, 1>>,
    /// Number of targets that no other token has a higher logit than, not weighted, `[1]` f32.
    pub correct: Option<Tensor<B, 1>>,
    /// Gradient of the hidden states `[n, d]`, scaled; zero rows where nothing counts.
    pub d_hidden_nd: Option<Tensor<B, 2>>,
    /// Gradient of the head `[v, d]` f32, or of the rows that are needed, scaled; with [`WeightGradient::AddTo`] the new sum.
    pub d_weight_vd: Option<Tensor<B, 2>>,
}

/// Losses.
pub trait LossOps: WeightOps {
    /// Per-row `-log softmax(logits)[target]` `[c]` f32 of logits `[c, v]` f32, which are soft-capped first where there is a cap; and
    /// with a scale the gradient `[c, v]` of their weighted sum times the scale, of the logits before the cap.
    fn cross_entropy(
        logits_cv: Tensor<Self, 2>,
        targets_c: Tensor<Self, 1, Int>,
        weights_c: Option<Tensor<Self, 1>>,
        gradient_scale: Option<f64>,
        soft_cap: Option<f64>,
    ) -> (Tensor<Self, 1>, Option<Tensor<Self, 2>>) {
        reference::cross_entropy(logits_cv, targets_c, weights_c, gradient_scale, soft_cap)
    }

    /// Head and cross entropy of hidden states `[n, d]` at the positions that count.
    fn linear_cross_entropy(
        hidden_nd: Tensor<Self, 2>,
        head: &Weight<Self>,
        targets: &LossTargets<Self>,
        options: CrossEntropyOptions<Self>,
    ) -> CrossEntropy<Self> {
        reference::linear_cross_entropy(hidden_nd, head, targets, options)
    }

    /// Sums of values `[m]` f32 of targets over each document, `[2p]`: over the targets of its answer, or over all.
    ///
    /// # Panics
    /// Without pairs.
    fn document_sums(values_m: Tensor<Self, 1>, targets: &PairTargets<Self>, of_answers: bool) -> Tensor<Self, 1> {
        pairs::reference::document_sums(values_m, targets, of_answers)
    }

    /// The loss of each pair, summed, and the weights with which the cross entropy of the targets has its gradient.
    ///
    /// # Panics
    /// Without pairs; if a loss of log ratios gets no reference.
    fn pair_loss(
        log_probs: PairLogProbs<Self>,
        targets: &PairTargets<Self>,
        loss: PairLoss,
        weights: PairWeights<Self>,
    ) -> PairResult<Self> {
        pairs::reference::pair_loss(log_probs, targets, loss, weights)
    }

    /// The first index of the largest value of each row of logits `[n, v]`: `[n]`. -1 for a row with a value that is NaN or plus infinity,
    /// or of minus infinities alone.
    fn most_probable(logits_nv: Tensor<Self, 2>) -> Tensor<Self, 1, Int> {
        reference::most_probable(logits_nv)
    }
}
