//! The arithmetic of optimizers over flat tensors: global norm, accumulation, AdamW in f32 and with 8-bit moments, on parameters in f32 or bf16.
//!
//! Each update takes a list of parameters ("foreach", as in torch): an adapter is hundreds of small tensors, and a backend may update
//! them in few launches.

#[cfg(feature = "flex")]
pub(crate) mod conformance;
pub mod reference;
pub mod rounding;

use burn_tensor::{Int, Tensor, TensorData, backend::Backend};

use crate::dtype::added;
use crate::weights::WeightOps;
use rounding::Rounding;

/// Hyperparameters of one AdamW step (Loshchilov and Hutter, Decoupled weight decay regularization, 2019).
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
    /// Number of this step, from 1.
    pub step: u64,
}

impl AdamW {
    /// Returns the bias corrections `1 - beta1^t` and `sqrt(1 - beta2^t)`.
    pub(crate) fn corrections(&self) -> (f64, f64) {
        let after = |beta: f64| 1.0 - beta.powf(self.step as f64);
        (after(self.beta1), after(self.beta2).sqrt())
    }
}

/// A parameter with its moments.
#[derive(Clone, Debug)]
pub struct AdamWState<B: Backend> {
    /// The parameter, `[elements]`, f32; bf16 in [`OptimizerOps::adamw_bf16_foreach`].
    pub parameter: Tensor<B, 1>,
    /// Its moments.
    pub moments: Moments<B>,
}

/// The moments of a parameter.
#[derive(Clone, Debug)]
pub enum Moments<B: Backend> {
    /// f32, of the parameter's length.
    F32 {
        /// First moment.
        first: Tensor<B, 1>,
        /// Second moment.
        second: Tensor<B, 1>,
    },
    /// In a box: hundreds of states are moved from call to call, and four tensors take more than a kilobyte.
    EightBit(Box<EightBitMoments<B>>),
}

/// Both moments of a parameter in 8 bits per value, in blocks of 256 (Dettmers et al., 8-bit optimizers, 2022).
#[derive(Clone, Debug)]
pub struct EightBitMoments<B: Backend> {
    /// First moment, codes of the signed dynamic map, `[blocks * 256]`, in the form of [`OptimizerOps::packed_codes`].
    pub first_codes: Tensor<B, 1, Int>,
    /// Scale of each block of the first moment, `[blocks]` f32.
    pub first_absmax: Tensor<B, 1>,
    /// Second moment, codes of the unsigned dynamic map, in the same form.
    pub second_codes: Tensor<B, 1, Int>,
    /// Scale of each block of the second moment, `[blocks]` f32.
    pub second_absmax: Tensor<B, 1>,
}

/// The gradient for one range of a flat sum.
#[derive(Clone, Debug)]
pub struct RangeGradient<B: Backend> {
    /// Start of the range in the sum, in elements.
    pub start: usize,
    /// The gradient, f32, of the range's length.
    pub gradient: Tensor<B, 1>,
    /// Whether this is the first contribution to the range, which overwrites it.
    pub is_first: bool,
}

/// The operations of optimizers.
pub trait OptimizerOps: WeightOps {
    /// Returns the values of a tensor of moments from their codes, whole blocks of them.
    fn packed_codes(codes: Vec<u8>) -> TensorData {
        let count = codes.len();
        TensorData::new(codes, [count]).convert_dtype(Self::CODE_DTYPE.into())
    }

    /// Returns the codes in a tensor of moments.
    fn unpacked_codes(values: TensorData) -> Vec<u8> {
        values.convert::<u8>().into_vec().expect("codes were just converted to bytes")
    }

    /// Adds a gradient to the sum of earlier ones, both `[elements]`, f32 or bf16; in place where the backend can. A sum in bf16 is rounded to the
    /// nearest.
    fn accumulate(sum: Tensor<Self, 1>, gradient: Tensor<Self, 1>) -> Tensor<Self, 1> {
        Self::pause(&sum.device(), || added(sum, gradient))
    }

    /// Adds gradients to disjoint ranges of one flat f32 sum `[length]`, in place where the backend can: hundreds of small gradients
    /// then are one tensor. Without a `sum`, allocates one, where ranges that get no gradient are undefined.
    fn accumulate_ranges(
        sum: Option<Tensor<Self, 1>>,
        length: usize,
        gradients: Vec<RangeGradient<Self>>,
    ) -> Tensor<Self, 1> {
        let device = gradients.first().expect("some gradients").gradient.device();
        Self::pause(&device, || reference::accumulate_ranges(sum, length, gradients))
    }

    /// Computes the sum of the squares of all elements of all tensors, f32 or bf16, `[1]` f32: the square of the global norm.
    fn squared_norm(tensors: &[Tensor<Self, 1>]) -> Tensor<Self, 1> {
        let device = tensors.first().expect("a norm of some tensors").device();
        Self::pause(&device, || reference::squared_norm(tensors))
    }

    /// Returns the norm from its square, and the coefficient that clips the gradients to `max_norm`, both `[1]` f32. The coefficient
    /// is that of torch's `clip_grad_norm_`, `min(1, max_norm / (norm + 1e-6))`. It is NaN, which skips the step, if the norm is not finite or above
    /// `limit`, which is.
    fn clip(squared_norm: Tensor<Self, 1>, max_norm: f64, limit: f32) -> (Tensor<Self, 1>, Tensor<Self, 1>) {
        Self::pause(&squared_norm.device(), || reference::clip(squared_norm, max_norm, limit))
    }

    /// Takes one AdamW step for each parameter. Gradients are first multiplied by `gradient_scale` `[1]` (clipping, loss scaling), which stays on the
    /// device. A non-finite scale skips the step: parameters and moments keep every bit, and the host need not know.
    fn adamw_foreach(
        states: Vec<AdamWState<Self>>,
        gradients: Vec<Tensor<Self, 1>>,
        gradient_scale: Tensor<Self, 1>,
        hyper: &AdamW,
    ) -> Vec<AdamWState<Self>> {
        Self::pause(&gradient_scale.device(), || reference::adamw_foreach(states, gradients, gradient_scale, hyper))
    }

    /// Does the same for parameters in bf16: the step is that of the f32 that each stands for, and its result is rounded. Gradients are all f32, or
    /// all bf16.
    fn adamw_bf16_foreach(
        states: Vec<(AdamWState<Self>, Rounding<Self>)>,
        gradients: Vec<Tensor<Self, 1>>,
        gradient_scale: Tensor<Self, 1>,
        hyper: &AdamW,
    ) -> Vec<(AdamWState<Self>, Rounding<Self>)> {
        Self::pause(&gradient_scale.device(), || rounding::adamw_bf16_foreach(states, gradients, gradient_scale, hyper))
    }
}
