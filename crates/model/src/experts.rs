//! A mixture of experts in place of a layer's MLP: forward, what it saves, and backward.
//!
//! The normalized input goes to the router, and each token's row to its experts. An expert is two groups of linear modules over its rows; experts
//! without rows compute nothing, and their gradients are zero.
//! Trade-off: experts run one after the other, each with separate GEMMs, and the host waits once per routing for the row counts. A recomputed layer
//! routes again.

use burn_tensor::Tensor;
use firebrick_arch::Activation;
use firebrick_kernels::linear::{into_parts, into_single};
use firebrick_kernels::{Epilogue, GradientSink, Keep, Kernels, ProjectSaved, Prologue, Routing, with_varying_sizes};

use crate::linear::{AdapterPass, Linear, LinearGroup, mlp_backward};
use crate::norm::Norm;

/// Router and experts.
#[derive(Clone, Debug)]
pub struct Experts<B: Kernels> {
    /// The router, from the hidden size to one logit per expert; never quantized.
    pub router: LinearGroup<B>,
    /// Gate and up, then down, of each expert.
    pub experts: Vec<[LinearGroup<B>; 2]>,
    /// Experts per token.
    pub top_k: usize,
    /// Whether the weights of a token's experts add up to one.
    pub normalizes_weights: bool,
    /// Activation of the gates.
    pub activation: Activation,
}

/// The saved tensors of an expert's two groups: gate and up, and down.
type SavedExpert<B> = [Box<ProjectSaved<B>>; 2];

/// The forward's results that the backward needs.
#[derive(Clone, Debug)]
pub(crate) struct SavedExperts<B: Kernels> {
    /// The input before its norm.
    h_nd: Tensor<B, 2>,
    router: Box<ProjectSaved<B>>,
    routing: Routing<B>,
    /// Experts with rows, in their order.
    experts: Vec<SavedExpert<B>>,
    /// Their outputs.
    y_sd: Tensor<B, 2>,
}

impl<B: Kernels> Experts<B> {
    /// Returns the residual stream `h` plus the weighted outputs of the experts.
    pub(crate) fn forward(
        &self,
        h_nd: Tensor<B, 2>,
        norm: &Norm<B>,
        keep: Keep,
        adapters: AdapterPass,
    ) -> (Tensor<B, 2>, Option<SavedExperts<B>>) {
        let device = h_nd.device();
        let x_nd = norm.forward(h_nd.clone());
        let router = self.router.frozen(adapters);
        let (logits, router) = B::project(Prologue::None { x: x_nd.clone() }, &router, Epilogue::None, keep);
        let routing = B::route(into_single(logits), self.top_k, self.normalizes_weights);
        let rows = B::slices(B::dispatch(x_nd, &routing), &routing.row_ranges());
        let (outputs, experts): (Vec<_>, Vec<_>) = with_varying_sizes::<B, _>(&device, || {
            let with_rows = self.with_rows(&routing).zip(rows);
            with_rows.map(|(expert, rows)| self.expert_forward(expert, rows, keep, adapters)).unzip()
        });
        let y_sd = B::join_rows(outputs);
        let output_nd = B::combine(y_sd.clone(), &routing, Some(h_nd.clone()));
        let experts: Option<Vec<_>> = experts.into_iter().collect();
        let saved = router.zip(experts);
        (output_nd, saved.map(|(router, experts)| SavedExperts { h_nd, router, routing, experts, y_sd }))
    }

    fn expert_forward(
        &self,
        [gate_up, down]: &[LinearGroup<B>; 2],
        x: Tensor<B, 2>,
        keep: Keep,
        adapters: AdapterPass,
    ) -> (Tensor<B, 2>, Option<SavedExpert<B>>) {
        let (outputs, saved_gate_up) =
            B::project(Prologue::None { x }, &gate_up.frozen(adapters), Epilogue::None, keep);
        let [gate, up] = into_parts(outputs);
        let gated = Prologue::Gated { gate, up, activation: self.activation };
        let (y, saved_down) = B::project(gated, &down.frozen(adapters), Epilogue::None, keep);
        (into_single(y), saved_gate_up.zip(saved_down).map(Into::into))
    }

    /// Computes the gradient of `h` from that of the output; gradients of parameters go to the sink.
    pub(crate) fn backward(
        &self,
        saved: SavedExperts<B>,
        norm: &Norm<B>,
        dy_nd: Tensor<B, 2>,
        adapters: AdapterPass,
        sink: &mut dyn GradientSink<B>,
    ) -> Tensor<B, 2> {
        let SavedExperts { h_nd, router, routing, experts, y_sd } = saved;
        let device = h_nd.device();
        let (d_rows_sd, d_weights_nk) = B::combine_backward(y_sd, &routing, dy_nd.clone());
        let d_rows = B::slices(d_rows_sd, &routing.row_ranges());
        let d_rows = with_varying_sizes::<B, _>(&device, || {
            let with_rows = self.with_rows(&routing).zip(experts.into_iter().zip(d_rows));
            with_rows.map(|(expert, (saved, dy))| expert_backward(expert, saved, dy, adapters, sink)).collect()
        });
        for (expert, _) in self.experts.iter().zip(&routing.rows).filter(|(_, rows)| **rows == 0) {
            expert.iter().flat_map(|group| &group.modules).for_each(|linear| add_zeros(linear, &device, sink));
        }
        let dx_nd = B::combine(B::join_rows(d_rows), &routing, None);
        let d_logits = B::route_backward(&routing, d_weights_nk, &dx_nd);
        let grads = self.router.backward(*router, vec![d_logits], Some(dx_nd), adapters, sink);
        let dx_nd = grads.input.plain();
        norm.backward(h_nd, dx_nd, Some(dy_nd), sink)
    }

    /// Iterates over the experts with rows, in their order.
    fn with_rows(&self, routing: &Routing<B>) -> impl Iterator<Item = &[LinearGroup<B>; 2]> {
        let rows = routing.rows.clone();
        self.experts.iter().zip(rows).filter(|(_, rows)| *rows > 0).map(|(expert, _)| expert)
    }
}

/// Computes the gradient of an expert's rows from that of its outputs.
fn expert_backward<B: Kernels>(
    [gate_up, down]: &[LinearGroup<B>; 2],
    [saved_gate_up, saved_down]: SavedExpert<B>,
    dy: Tensor<B, 2>,
    adapters: AdapterPass,
    sink: &mut dyn GradientSink<B>,
) -> Tensor<B, 2> {
    let groups = [(gate_up, *saved_gate_up), (down, *saved_down)];
    mlp_backward(groups, None, dy, None, adapters, sink).input.plain()
}

/// Adds zero gradients, because a sink waits for a contribution of every parameter.
fn add_zeros<B: Kernels>(linear: &Linear<B>, device: &B::Device, sink: &mut dyn GradientSink<B>) {
    for parameter in linear.parameters() {
        match sink.lend(parameter) {
            Some(sum) => sink.give_back(parameter, sum),
            None => sink.add(parameter, B::zero_gradient(parameter.elements(), device)),
        }
    }
}
