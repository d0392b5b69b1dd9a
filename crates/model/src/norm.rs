//! An RMSNorm of a model: its weight, whether it trains, and what a group of linear modules does with it.

use burn_tensor::Tensor;
use firebrick_kernels::{Epilogue, GradientSink, Kernels, NormWeight, Parameter, Prologue};

/// An RMSNorm weight `[d]`.
#[derive(Clone, Debug)]
pub struct Norm<B: Kernels> {
    /// `[d]`, f32.
    pub weight: Parameter<B>,
    /// Full fine-tuning trains it, LoRA does not.
    pub trains: bool,
    /// Added to the weight before it multiplies.
    pub offset: f64,
    /// Added to the mean square.
    pub epsilon: f64,
}

impl<B: Kernels> Norm<B> {
    /// Returns the norm as an operand: a handle, not a copy.
    pub(crate) fn operand(&self) -> NormWeight<B> {
        NormWeight {
            weight: self.weight.value.clone(),
            offset: self.offset,
            epsilon: self.epsilon,
            trains: self.trains,
        }
    }

    pub(crate) fn forward(&self, x_nd: Tensor<B, 2>) -> Tensor<B, 2> {
        B::rms_norm(x_nd, &self.operand(), None)
    }

    /// Computes the gradient of `x`, plus the one that flows past the norm if there is one; the gradient of the weight goes to the sink.
    pub(crate) fn backward(
        &self,
        x_nd: Tensor<B, 2>,
        dy_nd: Tensor<B, 2>,
        d_residual_nd: Option<Tensor<B, 2>>,
        sink: &mut dyn GradientSink<B>,
    ) -> Tensor<B, 2> {
        let (dx_nd, d_weight) = B::rms_norm_backward(x_nd, &self.operand(), dy_nd, d_residual_nd);
        self.add_gradient(d_weight, sink);
        dx_nd
    }

    pub(crate) fn add_gradient(&self, d_weight: Option<Tensor<B, 1>>, sink: &mut dyn GradientSink<B>) {
        if let Some(d_weight) = d_weight {
            sink.add(&self.weight, d_weight);
        }
    }
}

/// Builds the input of a group, normalized if there is a norm.
pub(crate) fn input<B: Kernels>(x: Tensor<B, 2>, norm: Option<&Norm<B>>) -> Prologue<B> {
    match norm {
        Some(norm) => Prologue::Norm { x, norm: norm.operand() },
        None => Prologue::None { x },
    }
}

/// Builds the epilogue that adds a group's output, normalized if there is a norm, to the residual stream.
pub(crate) fn added_to<B: Kernels>(residual: Tensor<B, 2>, norm: Option<&Norm<B>>) -> Epilogue<B> {
    match norm {
        Some(norm) => Epilogue::NormResidual { norm: norm.operand(), residual },
        None => Epilogue::Residual(residual),
    }
}

pub(crate) fn add_gradient<B: Kernels>(
    norm: Option<&Norm<B>>,
    d_weight: Option<Tensor<B, 1>>,
    sink: &mut dyn GradientSink<B>,
) {
    if let Some(norm) = norm {
        norm.add_gradient(d_weight, sink);
    }
}
