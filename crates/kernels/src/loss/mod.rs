//! Output projection and cross entropy over the targets that count, in chunks: the full logits never exist.
//!
//! Loss and gradient are computed together. The operation returns sums and per-token log-probabilities and takes
//! per-token weights; the caller chooses the denominator, so supervised fine-tuning and preference losses share it.
//! Trade-off: gradients are computed with the loss, so a loss that first needs all log-probabilities runs the head twice.

#[cfg(feature = "flex")]
pub(crate) mod conformance;
pub mod draw;
pub mod pairs;
pub mod reference;

use std::ops::Range;

use burn_tensor::{Int, Tensor, backend::Backend};

use crate::linear::WeightGradient;
use crate::weights::{Weight, WeightOps};
use draw::{Draw, Drawn};
use pairs::{PairLogProbs, PairLoss, PairResult, PairTargets, PairWeights};

/// The tokens of a micro-batch whose next token counts in the loss.
#[derive(Clone, Debug)]
pub struct LossTargets<B: Backend> {
    /// The tokens, of `n`, that predict a target, `[m]`, ascending.
    pub positions_m: Tensor<B, 1, Int>,
    /// The targets, `[m]`.
    pub targets_m: Tensor<B, 1, Int>,
    /// Weight of each target's loss, `[m]` f32; `None`: 1 each.
    pub weights_m: Option<Tensor<B, 1>>,
    /// `m`.
    pub count: usize,
}

/// Options of [`LossOps::linear_cross_entropy`].
#[derive(Clone, Debug)]
pub struct CrossEntropyOptions<B: Backend> {
    /// Rows of logits that are computed at a time.
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
    /// Factor of the logits, before the soft cap; 1 in most models.
    pub logit_scale: f64,
    /// The `cap` of `cap * tanh(logits / cap)`, applied to the logits before the softmax by every operation over the head.
    pub soft_cap: Option<f64>,
}

impl<B: Backend> CrossEntropyOptions<B> {
    /// Asks for the sum of the losses alone.
    pub fn new(chunk_tokens: usize) -> Self {
        Self {
            chunk_tokens,
            gradient_scale: None,
            weight_gradient: WeightGradient::Frozen,
            weight_rows: None,
            log_probs: false,
            correct: false,
            logit_scale: 1.0,
            soft_cap: None,
        }
    }
}

/// Result of [`LossOps::linear_cross_entropy`].
#[derive(Clone, Debug)]
pub struct CrossEntropy<B: Backend> {
    /// Weighted sum of `-log softmax(logits)[target]` over the targets, `[1]` f32, not scaled.
    pub loss_sum: Tensor<B, 1>,
    /// `log softmax(logits)[target]` of each target, `[m]` f32, not weighted.
    pub log_probs_m: Option<Tensor<B, 1>>,
    /// Number of targets with the highest logit of their row, not weighted, `[1]` f32.
    pub correct: Option<Tensor<B, 1>>,
    /// Gradient of the hidden states `[n, d]`, scaled; rows of tokens without a target are zero.
    pub d_hidden_nd: Option<Tensor<B, 2>>,
    /// Gradient of the head `[v, d]` f32, or of the requested rows, scaled; with [`WeightGradient::AddTo`] the new sum.
    pub d_weight_vd: Option<Tensor<B, 2>>,
}

/// Losses.
pub trait LossOps: WeightOps {
    /// Computes `-log softmax(logits)[target]` per row, `[c]` f32, of logits `[c, v]` f32, soft-capped if there is a cap. With a
    /// scale, also returns the gradient `[c, v]` of the weighted sum times the scale, with respect to the logits before the cap.
    fn cross_entropy(
        logits_cv: Tensor<Self, 2>,
        targets_c: Tensor<Self, 1, Int>,
        weights_c: Option<Tensor<Self, 1>>,
        gradient_scale: Option<f64>,
        soft_cap: Option<f64>,
    ) -> (Tensor<Self, 1>, Option<Tensor<Self, 2>>) {
        Self::pause(&logits_cv.device(), || {
            reference::cross_entropy(logits_cv, targets_c, weights_c, gradient_scale, soft_cap)
        })
    }

    /// Computes head and cross entropy of hidden states `[n, d]` at the positions that count.
    fn linear_cross_entropy(
        hidden_nd: Tensor<Self, 2>,
        head: &Weight<Self>,
        targets: &LossTargets<Self>,
        options: CrossEntropyOptions<Self>,
    ) -> CrossEntropy<Self> {
        Self::pause(&hidden_nd.device(), || reference::linear_cross_entropy(hidden_nd, head, targets, options))
    }

    /// Sums per-target values `[m]` f32 over each document, `[2p]`: over the targets of its answer, or over all.
    ///
    /// # Panics
    /// If there are no pairs.
    fn document_sums(values_m: Tensor<Self, 1>, targets: &PairTargets<Self>, of_answers: bool) -> Tensor<Self, 1> {
        Self::pause(&values_m.device(), || pairs::reference::document_sums(values_m, targets, of_answers))
    }

    /// Computes the summed loss of the pairs, and target weights under which the cross entropy has the gradient of that loss.
    ///
    /// # Panics
    /// If there are no pairs, or a loss of log ratios gets no reference.
    fn pair_loss(
        log_probs: PairLogProbs<Self>,
        targets: &PairTargets<Self>,
        loss: PairLoss,
        weights: PairWeights<Self>,
    ) -> PairResult<Self> {
        Self::pause(&log_probs.answers.device(), || pairs::reference::pair_loss(log_probs, targets, loss, weights))
    }

    /// Returns the first index of the largest value in each row of logits `[n, v]`, as `[n]`; -1 for a row that
    /// contains NaN or plus infinity, or only minus infinities.
    fn most_probable(logits_nv: Tensor<Self, 2>) -> Tensor<Self, 1, Int> {
        Self::pause(&logits_nv.device(), || reference::most_probable(logits_nv))
    }

    /// Draws a token for each of the hidden states `[n, d]`, after the final norm, by a random number in `[0, 1)`, `[n]` f32. Logits are those that
    /// [`LossOps::linear_cross_entropy`] computes.
    fn draw(hidden_nd: Tensor<Self, 2>, head: &Weight<Self>, random_n: Tensor<Self, 1>, draw: Draw) -> Drawn<Self> {
        Self::pause(&hidden_nd.device(), || draw::reference(hidden_nd, head, random_n, draw))
    }
}
