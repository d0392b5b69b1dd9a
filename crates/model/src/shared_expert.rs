//! The shared expert of a mixture: a gated MLP that every token goes through, added to the outputs of its other experts; forward and backward.
//!
//! Without a gate, the sum is an epilogue of the down projection, after a norm if there is one. With one, the output is weighted by the sigmoid of one
//! more linear module from the hidden size to 1: a router with one expert, so that the operations of `firebrick_kernels::moe` apply.
//! Trade-off: that router also places the rows of its only expert, which a kernel of its own would not.

use burn_tensor::Tensor;
use firebrick_arch::{Activation, RouterSpec};
use firebrick_kernels::linear::{into_parts, into_single};
use firebrick_kernels::{
    Combined, Epilogue, GradientSink, Keep, Kernels, ProjectGradients, ProjectSaved, Prologue, Routing,
};

use crate::linear::{AdapterPass, LinearGroup, mlp_backward};
use crate::norm::{Norm, added_to};

/// A shared expert.
#[derive(Clone, Debug)]
pub struct SharedExpert<B: Kernels> {
    /// Gate and up, `[width, hidden]` each.
    pub gate_up: LinearGroup<B>,
    /// Down, `[hidden, width]`.
    pub down: LinearGroup<B>,
    /// Norm of its output, which has no gate then.
    pub after: Option<Norm<B>>,
    /// The gate of its output.
    pub gate: Option<LinearGroup<B>>,
    /// Activation of its gated MLP.
    pub activation: Activation,
}

#[derive(Clone, Debug)]
pub(crate) struct SavedShared<B: Kernels> {
    gate_up: Box<ProjectSaved<B>>,
    down: Box<ProjectSaved<B>>,
    gate: Option<SavedGate<B>>,
}

#[derive(Clone, Debug)]
struct SavedGate<B: Kernels> {
    projected: Box<ProjectSaved<B>>,
    weights: Routing<B>,
    y_nd: Tensor<B, 2>,
}

impl<B: Kernels> SharedExpert<B> {
    /// Iterates over the groups of linear modules in the order of the forward pass.
    pub(crate) fn groups(&self) -> impl Iterator<Item = &LinearGroup<B>> {
        [&self.gate_up, &self.down].into_iter().chain(&self.gate)
    }

    pub(crate) fn groups_mut(&mut self) -> impl Iterator<Item = &mut LinearGroup<B>> {
        [&mut self.gate_up, &mut self.down].into_iter().chain(&mut self.gate)
    }

    /// Returns `h` plus the expert's output.
    pub(crate) fn forward(
        &self,
        input: Prologue<B>,
        h_nd: Tensor<B, 2>,
        keep: Keep,
        adapters: AdapterPass,
    ) -> (Tensor<B, 2>, Option<SavedShared<B>>) {
        let (outputs, gate_up) = B::project(input.clone(), &self.gate_up.frozen(adapters), Epilogue::None, keep);
        let [gate, up] = into_parts(outputs);
        let gated = Prologue::Gated { gate, up, activation: self.activation };
        let Some(gate) = &self.gate else {
            let epilogue = added_to(h_nd, self.after.as_ref());
            let (y, down) = B::project(gated, &self.down.frozen(adapters), epilogue, keep);
            let saved = gate_up.zip(down).map(|(gate_up, down)| SavedShared { gate_up, down, gate: None });
            return (into_single(y), saved);
        };
        let (y, down) = B::project(gated, &self.down.frozen(adapters), Epilogue::None, keep);
        let (logits, projected) = B::project(input, &gate.frozen(adapters), Epilogue::None, keep);
        let weights = B::route(into_single(logits), 1, RouterSpec::gate(), None, None);
        let y_nd = into_single(y);
        let sum_nd = B::combine(y_nd.clone(), &weights, Combined::WeightedOnto(h_nd));
        let gate = projected.map(|projected| SavedGate { projected, weights, y_nd });
        let saved = gate_up.zip(down).zip(gate);
        (sum_nd, saved.map(|((gate_up, down), gate)| SavedShared { gate_up, down, gate: Some(gate) }))
    }

    /// Returns the gradient of the input, from that of the sum, plus `dx`, and of its norm; gradients of parameters go to the sink.
    pub(crate) fn backward(
        &self,
        saved: SavedShared<B>,
        dy_nd: Tensor<B, 2>,
        dx_nd: Tensor<B, 2>,
        adapters: AdapterPass,
        sink: &mut dyn GradientSink<B>,
    ) -> ProjectGradients<B> {
        let SavedShared { gate_up, down, gate } = saved;
        let (dy_nd, dx_nd) = match self.gate.as_ref().zip(gate) {
            Some((gate, SavedGate { projected, weights, y_nd })) => {
                let (dy_nd, d_weights) = B::combine_backward(y_nd, &weights, dy_nd);
                let d_logits = B::route_backward(&weights, d_weights, &dx_nd);
                let grads = gate.backward(*projected, vec![d_logits], Some(dx_nd), adapters, sink);
                (dy_nd, grads.input.plain())
            }
            None => (dy_nd, dx_nd),
        };
        let groups = [(&self.gate_up, *gate_up), (&self.down, *down)];
        mlp_backward(groups, None, self.after.as_ref(), dy_nd, Some(dx_nd), adapters, sink)
    }
}
