//! The arithmetic of optimizers over flat f32 tensors: global norm, accumulation, AdamW in f32 and with 8-bit moments.
//!
//! Each update takes a list of parameters ("foreach", as in torch): an adapter is hundreds of small tensors, and a backend may update
//! them in few launches.
//! Trade-off: an update of few large tensors gains nothing from the list.

#[cfg(feature = "flex")]
pub(crate) mod conformance;
pub mod reference;

use burn_tensor::{Int, Tensor, backend::Backend};

use crate::weights::WeightOps;

/// The numbers of one AdamW step (Loshchilov and Hutter, Decoupled weight decay regularization, 2019).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Learning rate of this step.
    pub learning_rate: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Which step this is, from 1.
    pub step: u64,
}

/// A parameter with its moments.
#[derive(Clone, Debug)]
pub struct AdamWState<B: Backend> {
    /// The parameter, f32 `[elements]`.
    pub parameter: Tensor<B, 1>,
    /// Its moments.
    pub moments: Moments<B>,
}

/// The moments of a parameter.
#[derive(Clone, Debug)]
pub enum Moments<B: Backend> {
    /// f32, as long as the parameter.
    F32 {
        /// The first.
        first: Tensor<B, 1>,
        /// The second.
        second: Tensor<B, 1>,
    },
    /// In a box: hundreds of states are handed from call to call, and four tensors are a kilobyte and more.
    EightBit(Box<EightBitMoments<B>>),
}

/// Both moments of a parameter in 8 bits per value, in blocks of 256 (Dettmers et al., 8-bit optimizers, 2022).
#[derive(Clone, Debug)]
pub struct EightBitMoments<B: Backend> {
    /// First moment, codes of the signed dynamic map, `[blocks * 256]`.
    pub first_codes: Tensor<B, 1, Int>,
    /// `[blocks]` f32.
    pub first_absmax: Tensor<B, 1>,
    /// Second moment, codes of the unsigned dynamic map, `[blocks * 256]`.
    pub second_codes: Tensor<B, 1, Int>,
    /// `[blocks]` f32.
    pub second_absmax: Tensor<B, 1>,
}

/// A gradient that belongs to a range of a flat sum.
#[derive(Clone, Debug)]
pub struct RangeGradient<B: Backend> {
    /// Where the range begins in the sum, in elements.
    pub start: usize,
    /// f32, `[elements]` of the range.
    pub gradient: Tensor<B, 1>,
    /// Whether nothing was written to the range before: it becomes the gradient, whatever it holds.
    pub is_first: bool,
}

/// What optimizers are made of.
pub trait OptimizerOps: WeightOps {
    /// Adds a gradient to the sum of earlier ones, both f32 `[elements]`; in place where the backend can.
    fn accumulate(sum: Tensor<Self, 1>, gradient: Tensor<Self, 1>) -> Tensor<Self, 1> {
        sum.add(gradient)
    }

    /// Adds gradients to disjoint ranges of one flat f32 sum `[length]`, in place where the backend can: hundreds of small gradients are
    /// then one tensor. Without a `sum` a new one is made; what no gradient was written to is undefined there.
    fn accumulate_ranges(
        sum: Option<Tensor<Self, 1>>,
        length: usize,
        gradients: Vec<RangeGradient<Self>>,
    ) -> Tensor<Self, 1> {
        reference::accumulate_ranges(sum, length, gradients)
    }

    /// Sum of the squares of all elements of all tensors, `[1]` f32: the square of the global norm.
    fn squared_norm(tensors: &[Tensor<Self, 1>]) -> Tensor<Self, 1> {
        reference::squared_norm(tensors)
    }

    /// The norm from its square, both `[1]` f32, and what to multiply the gradients by so that it is at most `max_norm`, as torch's
    /// `clip_grad_norm_` has it: `min(1, max_norm / (norm + 1e-6))`; 0 if the norm is not finite.
    fn clip(squared_norm: Tensor<Self, 1>, max_norm: f64) -> (Tensor<Self, 1>, Tensor<Self, 1>) {
        reference::clip(squared_norm, max_norm)
    }

    /// One AdamW step of each parameter from its gradient. Gradients are first multiplied by `gradient_scale` `[1]`, which stays on
    /// the device (clipping, loss scaling). A scale that is not finite skips the step: parameters and moments stay as they are, bit
    /// for bit, without the host knowing.
    fn adamw_foreach(
        states: Vec<AdamWState<Self>>,
        gradients: Vec<Tensor<Self, 1>>,
        gradient_scale: Tensor<Self, 1>,
        hyper: &AdamW,
    ) -> Vec<AdamWState<Self>> {
        reference::adamw_foreach(states, gradients, gradient_scale, hyper)
    }
}
