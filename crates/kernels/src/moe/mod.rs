//! Mixtures of experts: from the router's logits to the rows of each expert, and from their outputs back to tokens.
//!
//! A [`RouterSpec`] describes how logits become scores, choices and weights. A token's row is copied once for each of its experts; the rows of one
//! expert are contiguous, in the order of tokens. The experts themselves are groups of stacks over these rows ([`crate::Group::rows`]). The router's
//! scores, the experts' weights and their gradients are f32; of equal scores, the expert with the lower index wins, and what is not a number counts as
//! the largest one.
//!
//! Suffixes: `n` tokens, `d` hidden size, `e` experts, `k` experts per token, `s` rows of all experts (`n k` of them).

#[cfg(feature = "flex")]
pub(crate) mod conformance;
pub mod reference;

use burn_tensor::{Int, Tensor, backend::Backend};
use firebrick_arch::RouterSpec;

use crate::linear::{ExpertRows, LinearOps};
use crate::memory::MemoryOps;

/// Assignment of tokens to experts with weights, the result of [`MoeOps::route`].
#[derive(Clone, Debug)]
pub struct Routing<B: Backend> {
    /// Score of each expert, `[n, e]` f32: its probability, or the sigmoid of its logit.
    pub scores_ne: Tensor<B, 2>,
    /// The experts of each token, that with the largest score (corrected, if the router corrects) first, `[n, k]`.
    pub experts_nk: Tensor<B, 2, Int>,
    /// Their weights, `[n, k]` f32.
    pub weights_nk: Tensor<B, 2>,
    /// Factor of the weights of each expert, `[e]` f32; `None`: 1.
    pub scale_e: Option<Tensor<B, 1>>,
    /// The arithmetic of the router.
    pub router: RouterSpec,
    /// The row of each choice among the rows of all experts, `[n, k]`.
    pub rows_nk: Tensor<B, 2, Int>,
    /// The choice of each row as `token * k + rank of the expert`, `[s]`: the inverse of `rows_nk`.
    pub choices_s: Tensor<B, 1, Int>,
    /// The token of each row, `[s]`.
    pub tokens_s: Tensor<B, 1, Int>,
    /// The rows of each expert; `n k` together.
    pub rows: ExpertRows<B>,
}

/// What [`MoeOps::combine`] adds up for each token.
#[derive(Clone, Debug)]
pub enum Combined<B: Backend> {
    /// Its rows as they are: the backward of [`MoeOps::dispatch`].
    Rows,
    /// Its rows times their weights.
    Weighted,
    /// Its rows times their weights, and this residual `[n, d]`.
    WeightedOnto(Tensor<B, 2>),
}

/// Routing of tokens to experts.
pub trait MoeOps: LinearOps + MemoryOps {
    /// Chooses for each token the `top_k` experts with the largest scores of the router's logits `[n, e]`, with their
    /// weights. The correction `[e]` f32 is added to the scores for the choice alone. The scale `[e]` f32 multiplies the weights of each expert after
    /// all else, and never trains.
    ///
    /// # Panics
    /// If there are fewer experts, in all groups that may be chosen, than `top_k`.
    fn route(
        logits_ne: Tensor<Self, 2>,
        top_k: usize,
        router: RouterSpec,
        correction_e: Option<Tensor<Self, 1>>,
        scale_e: Option<Tensor<Self, 1>>,
    ) -> Routing<Self> {
        Self::pause(&logits_ne.device(), || reference::route(logits_ne, top_k, router, correction_e, scale_e))
    }

    /// Backward of [`MoeOps::route`] through the weights: the gradient of the logits `[n, e]`, in the dtype of `like_nd`.
    fn route_backward(
        routing: &Routing<Self>,
        d_weights_nk: Tensor<Self, 2>,
        like_nd: &Tensor<Self, 2>,
    ) -> Tensor<Self, 2> {
        Self::pause(&like_nd.device(), || reference::route_backward(routing, d_weights_nk, like_nd))
    }

    /// Gathers the rows `[n, d]` of all choices in the order of experts, `[s, d]`.
    fn dispatch(x_nd: Tensor<Self, 2>, routing: &Routing<Self>) -> Tensor<Self, 2> {
        Self::pause(&x_nd.device(), || reference::dispatch(x_nd, routing))
    }

    /// Sums each token's rows, `[n, d]`, in f32, and rounds once.
    fn combine(y_sd: Tensor<Self, 2>, routing: &Routing<Self>, combined: Combined<Self>) -> Tensor<Self, 2> {
        Self::pause(&y_sd.device(), || reference::combine(y_sd, routing, combined))
    }

    /// Backward of [`MoeOps::combine`] of weighted rows: the gradients of the rows `[s, d]` and of the weights `[n, k]`
    /// f32. The residual's gradient is `dy`.
    fn combine_backward(
        y_sd: Tensor<Self, 2>,
        routing: &Routing<Self>,
        dy_nd: Tensor<Self, 2>,
    ) -> (Tensor<Self, 2>, Tensor<Self, 2>) {
        Self::pause(&y_sd.device(), || reference::combine_backward(y_sd, routing, dy_nd))
    }
}
