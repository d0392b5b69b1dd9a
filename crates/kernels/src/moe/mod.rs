//! Mixtures of experts: from the router's logits to the rows of each expert, and from their outputs back to tokens.
//!
//! A token's row is copied once for each of its experts, rows of one expert next to each other in the order of tokens. The experts
//! themselves are groups of linear modules over ranges of these rows ([`crate::LinearOps::project`]). The router's softmax, the weights of
//! experts and their gradients are f32; of equal probabilities the expert with the lower number wins.
//! Trade-off: how many rows each expert has is read back by the host once per routing, because the sizes of the experts' GEMMs follow from
//! it.
//!
//! Suffixes: `n` tokens, `d` hidden size, `e` experts, `k` experts per token, `s` rows of all experts (`n k` of them).

#[cfg(feature = "flex")]
pub(crate) mod conformance;
pub mod reference;

use burn_tensor::{Int, Tensor, backend::Backend};

use crate::linear::LinearOps;
use crate::memory::{Hint, MemoryOps};

/// Where tokens go and with which weights: what [`MoeOps::route`] decides.
#[derive(Clone, Debug)]
pub struct Routing<B: Backend> {
    /// Probability of each expert, `[n, e]` f32.
    pub probabilities_ne: Tensor<B, 2>,
    /// The experts of each token, the most probable first, `[n, k]`.
    pub experts_nk: Tensor<B, 2, Int>,
    /// Their weights, `[n, k]` f32.
    pub weights_nk: Tensor<B, 2>,
    /// Whether the weights of a token add up to one; otherwise they are its probabilities.
    pub normalizes: bool,
    /// The row of each choice among those of all experts, `[n, k]`.
    pub rows_nk: Tensor<B, 2, Int>,
    /// The choice of each row as `token * k + rank of the expert`, `[s]`: the inverse of `rows_nk`.
    pub choices_s: Tensor<B, 1, Int>,
    /// The token of each row, `[s]`.
    pub tokens_s: Tensor<B, 1, Int>,
    /// Rows of each expert; their sum is `n k`.
    pub rows: Vec<usize>,
}

impl<B: Backend> Routing<B> {
    /// Where the rows of each expert that has any begin, and how many there are: for [`MemoryOps::slices`].
    pub fn row_ranges(&self) -> Vec<(usize, usize)> {
        let mut start = 0;
        let range = |&count: &usize| {
            start += count;
            (start - count, count)
        };
        self.rows.iter().filter(|&&count| count > 0).map(range).collect()
    }
}

/// Routing of tokens to experts.
pub trait MoeOps: LinearOps + MemoryOps {
    /// The `top_k` most probable experts of each token by the softmax of the router's logits `[n, e]`, and their weights, which add up to
    /// one where it `normalizes`. Waits until the device has counted the rows of each expert.
    fn route(logits_ne: Tensor<Self, 2>, top_k: usize, normalizes: bool) -> Routing<Self> {
        reference::route(logits_ne, top_k, normalizes)
    }

    /// Backward of [`MoeOps::route`] through the weights: the gradient of the logits `[n, e]`, in the dtype of `like_nd`.
    fn route_backward(
        routing: &Routing<Self>,
        d_weights_nk: Tensor<Self, 2>,
        like_nd: &Tensor<Self, 2>,
    ) -> Tensor<Self, 2> {
        reference::route_backward(routing, d_weights_nk, like_nd)
    }

    /// The rows `[n, d]` of all choices in the order of experts, `[s, d]`.
    fn dispatch(x_nd: Tensor<Self, 2>, routing: &Routing<Self>) -> Tensor<Self, 2> {
        reference::dispatch(x_nd, routing)
    }

    /// The sum of each token's rows, `[n, d]`, added up in f32 and rounded once: with a residual stream weighted and
    /// added to it, without one plain, which is the backward of [`MoeOps::dispatch`].
    fn combine(
        y_sd: Tensor<Self, 2>,
        routing: &Routing<Self>,
        residual_nd: Option<Tensor<Self, 2>>,
    ) -> Tensor<Self, 2> {
        reference::combine(y_sd, routing, residual_nd)
    }

    /// Backward of [`MoeOps::combine`] with a residual stream: the gradient of the rows `[s, d]`, and of the weights
    /// `[n, k]` f32. That of the residual is `dy`.
    fn combine_backward(
        y_sd: Tensor<Self, 2>,
        routing: &Routing<Self>,
        dy_nd: Tensor<Self, 2>,
    ) -> (Tensor<Self, 2>, Tensor<Self, 2>) {
        reference::combine_backward(y_sd, routing, dy_nd)
    }

    /// Rows of experts one after the other.
    ///
    /// # Panics
    /// Without any part.
    fn join_rows(parts: Vec<Tensor<Self, 2>>) -> Tensor<Self, 2> {
        reference::join_rows(parts)
    }

    /// f32 zeros: the gradient of what no token has reached.
    fn zero_gradient(elements: usize, device: &Self::Device) -> Tensor<Self, 1> {
        reference::zero_gradient(elements, device)
    }
}

/// Runs work whose tensors have other sizes in every pass.
pub fn with_varying_sizes<B: MemoryOps, R>(device: &B::Device, work: impl FnOnce() -> R) -> R {
    /// Ends it also where the work fails.
    struct End<'a, B: MemoryOps>(&'a B::Device);
    impl<B: MemoryOps> Drop for End<'_, B> {
        fn drop(&mut self) {
            B::hint(self.0, Hint::VaryingSizes(false));
        }
    }
    B::hint(device, Hint::VaryingSizes(true));
    let _end = End::<B>(device);
    work()
}
