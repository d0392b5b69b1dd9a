//! A mixture of experts in place of a layer's MLP: forward, what it saves, and backward.
//!
//! The normalized input goes to the router, and each token's row to its experts. The experts are two groups of stacks over all rows, sorted by expert;
//! experts without rows compute nothing, and their gradients are zero. A shared expert (`shared_expert.rs`) is added to the residual stream first.
//! The choices of all routers may have a loss of their own (`router_loss.rs`).
//! Trade-off: the rows of all experts are in memory at once. A recomputed layer routes again.

pub(crate) mod router_loss;

use burn_tensor::Tensor;
use firebrick_arch::{Activation, RouterSpec};
use firebrick_kernels::linear::{into_parts, into_single};
use firebrick_kernels::{
    Epilogue, GradientSink, Keep, Kernels, Parameter, ProjectSaved, Prologue, Routing, RowChoices,
};

use crate::linear::{AdapterPass, LinearGroup, mlp_backward};
use crate::norm::Norm;
use crate::shared_expert::{SavedShared, SharedExpert};
use router_loss::{RouterGradient, RouterSums};

/// Router and experts.
#[derive(Clone, Debug)]
pub struct Experts<B: Kernels> {
    /// The router, from the hidden size to one logit per expert; never quantized.
    pub router: LinearGroup<B>,
    /// The correction `[experts]` of its scores for the choice; it never trains.
    pub correction: Option<Parameter<B>>,
    /// Gate and up, of all experts.
    pub gate_up: LinearGroup<B>,
    /// Down, of all experts.
    pub down: LinearGroup<B>,
    /// The expert that every token goes through.
    pub shared: Option<SharedExpert<B>>,
    /// Experts per token.
    pub top_k: usize,
    /// The arithmetic of the router.
    pub router_spec: RouterSpec,
    /// Activation of the gates.
    pub activation: Activation,
}

/// The forward's results that the backward needs.
#[derive(Clone, Debug)]
pub(crate) struct SavedExperts<B: Kernels> {
    /// The input before its norm.
    h_nd: Tensor<B, 2>,
    router: Box<ProjectSaved<B>>,
    routing: Routing<B>,
    gate_up: Box<ProjectSaved<B>>,
    down: Box<ProjectSaved<B>>,
    /// The experts' outputs.
    y_sd: Tensor<B, 2>,
    shared: Option<SavedShared<B>>,
}

impl<B: Kernels> Experts<B> {
    /// Returns the residual stream `h` plus the weighted outputs of the experts; adds the router's choices to `sums`.
    pub(crate) fn forward(
        &self,
        h_nd: Tensor<B, 2>,
        norm: &Norm<B>,
        keep: Keep,
        adapters: AdapterPass,
        sums: Option<&mut RouterSums<B>>,
    ) -> (Tensor<B, 2>, Option<SavedExperts<B>>) {
        let x_nd = norm.forward(h_nd.clone());
        let router = self.router.frozen(adapters);
        let (logits, router) = B::project(Prologue::None { x: x_nd.clone() }, &router, Epilogue::None, keep);
        let correction = self.correction.as_ref().map(|correction| correction.value.clone());
        let mut routing = B::route(into_single(logits), self.top_k, self.router_spec, correction);
        routing.rows.choices = Some(RowChoices { rows: routing.choices_s.clone(), per_token: self.top_k });
        if let Some(sums) = sums {
            sums.add(&routing);
        }
        let (residual_nd, shared) = match &self.shared {
            Some(shared) => shared.forward(x_nd.clone(), h_nd.clone(), keep, adapters),
            None => (h_nd.clone(), None),
        };
        let x = B::dispatch(x_nd, &routing);
        let group = self.gate_up.frozen_over(routing.rows.clone(), adapters);
        let (outputs, gate_up) = B::project(Prologue::None { x }, &group, Epilogue::None, keep);
        let [gate, up] = into_parts(outputs);
        let gated = Prologue::Gated { gate, up, activation: self.activation };
        let group = self.down.frozen_over(routing.rows.clone(), adapters);
        let (y, down) = B::project(gated, &group, Epilogue::None, keep);
        let y_sd = into_single(y);
        let output_nd = B::combine(y_sd.clone(), &routing, Some(residual_nd));
        let saved = router.zip(gate_up).zip(down).map(|((router, gate_up), down)| SavedExperts {
            h_nd,
            router,
            routing,
            gate_up,
            down,
            y_sd,
            shared,
        });
        (output_nd, saved)
    }

    /// Computes the gradient of `h` from that of the output; gradients of parameters go to the sink.
    pub(crate) fn backward(
        &self,
        saved: SavedExperts<B>,
        norm: &Norm<B>,
        router_gradient: Option<&RouterGradient<B>>,
        dy_nd: Tensor<B, 2>,
        adapters: AdapterPass,
        sink: &mut dyn GradientSink<B>,
    ) -> Tensor<B, 2> {
        let SavedExperts { h_nd, router, routing, gate_up, down, y_sd, shared } = saved;
        let (d_rows_sd, d_weights_nk) = B::combine_backward(y_sd, &routing, dy_nd.clone());
        let groups = [(&self.gate_up, *gate_up), (&self.down, *down)];
        let rows = Some(&routing.rows);
        let d_rows_sd = mlp_backward(groups, rows, None, d_rows_sd, None, adapters, sink).input.plain();
        let dx_nd = B::combine(d_rows_sd, &routing, None);
        let d_logits = B::route_backward(&routing, d_weights_nk, &dx_nd);
        let d_logits = match router_gradient {
            Some(gradient) => gradient.add_to(d_logits, &routing),
            None => d_logits,
        };
        let grads = self.router.backward(*router, vec![d_logits], Some(dx_nd), adapters, sink);
        let dx_nd = match self.shared.as_ref().zip(shared) {
            Some((expert, saved)) => expert.backward(saved, dy_nd.clone(), grads.input.plain(), adapters, sink),
            None => grads.input.plain(),
        };
        norm.backward(h_nd, dx_nd, Some(dy_nd), sink)
    }
}
