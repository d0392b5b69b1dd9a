//! The part of a layer after its MLP that reads an input of the layer's own (Gemma 4 E2B, E4B): `h + norm(projection(activation(gate(h)) * input))`.
//!
//! Forward and backward are those of two groups of linear modules: the input is what a gated activation multiplies.
//! Trade-off: a recomputed layer computes the output of its MLP again, which this part reads.

use burn_tensor::Tensor;
use firebrick_arch::Activation;
use firebrick_kernels::linear::into_single;
use firebrick_kernels::{Epilogue, GradientSink, Keep, Kernels, ProjectSaved, Prologue};

use crate::linear::{AdapterPass, LinearGroup};
use crate::norm::Norm;

/// What reads a layer's own input `[n, p]`.
#[derive(Clone, Debug)]
pub struct PerLayer<B: Kernels> {
    /// The number of the layer.
    pub layer: usize,
    /// The gate, `[p, hidden]`.
    pub gate: LinearGroup<B>,
    /// Activation of the gate.
    pub activation: Activation,
    /// From the gated input to the residual stream, `[hidden, p]`.
    pub projection: LinearGroup<B>,
    /// Norm of what is added.
    pub norm: Norm<B>,
}

#[derive(Clone, Debug)]
pub(crate) struct SavedPerLayer<B: Kernels> {
    gate: Box<ProjectSaved<B>>,
    projection: Box<ProjectSaved<B>>,
}

impl<B: Kernels> PerLayer<B> {
    /// Returns the residual stream `h` plus what the input adds.
    pub(crate) fn forward(
        &self,
        h_nd: Tensor<B, 2>,
        input_np: Tensor<B, 2>,
        keep: Keep,
        adapters: AdapterPass,
    ) -> (Tensor<B, 2>, Option<SavedPerLayer<B>>) {
        let prologue = Prologue::None { x: h_nd.clone() };
        let (gate, of_gate) = B::project(prologue, &self.gate.frozen(adapters), Epilogue::None, keep);
        let gated = Prologue::Gated { gate: into_single(gate), up: input_np, activation: self.activation };
        let epilogue = Epilogue::NormResidual { norm: self.norm.operand(), residual: h_nd };
        let (y_nd, of_projection) = B::project(gated, &self.projection.frozen(adapters), epilogue, keep);
        let saved = of_gate.zip(of_projection).map(|(gate, projection)| SavedPerLayer { gate, projection });
        (into_single(y_nd), saved)
    }

    /// Computes the gradients of `h` and of the input from that of the sum; gradients of parameters go to the sink.
    pub(crate) fn backward(
        &self,
        saved: SavedPerLayer<B>,
        dy_nd: Tensor<B, 2>,
        adapters: AdapterPass,
        sink: &mut dyn GradientSink<B>,
    ) -> [Tensor<B, 2>; 2] {
        let SavedPerLayer { gate, projection } = saved;
        let grads = self.projection.backward(*projection, vec![dy_nd.clone()], None, adapters, sink);
        self.norm.add_gradient(grads.output_norm, sink);
        let (d_gate, d_input_np) = grads.input.gated();
        let grads = self.gate.backward(*gate, vec![d_gate], Some(dy_nd), adapters, sink);
        [grads.input.plain(), d_input_np]
    }
}
