//! A mixture of experts in place of a layer's MLP: forward, what it saves, and backward.
//!
//! The normalized input goes to the router, and each token's row to its experts. The experts are two groups of stacks over all rows, sorted by expert;
//! experts without rows compute nothing, and their gradients are zero. A shared expert (`shared_expert.rs`) is added to the residual stream first. In
//! Gemma 4 it is the layer's dense MLP, and router, experts and dense MLP each read the residual stream through a norm of their own; both outputs are
//! normalized, and so is their sum: `r + N(N(dense(N(r))) + N(experts(N(r))))`.
//! The choices of all routers may have a loss of their own (`router_loss.rs`).
//! Trade-off: the rows of all experts are in memory at once. A recomputed layer routes again.

mod choices;
pub(crate) mod router_loss;

use burn_tensor::Tensor;
use firebrick_arch::{Activation, RouterSpec};
use firebrick_kernels::linear::{into_parts, into_single};
use firebrick_kernels::{
    Combined, Epilogue, GradientSink, Keep, Kernels, NormWeight, Parameter, ProjectSaved, Prologue, Routing, RowChoices,
};

pub use choices::ExpertChoices;

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
    /// Factor `[experts]` of the weights of each expert; it never trains.
    pub scale: Option<Parameter<B>>,
    /// Norms of its own, if the shared expert is the layer's dense MLP.
    pub norms: Option<ExpertNorms<B>>,
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
    /// Where the router's choices are noted, if they are.
    pub choices: Option<ExpertChoices<B>>,
}

/// Norms of router and experts next to a dense MLP. The norm before the layer's MLP is the dense one's, and that after it is the sum's.
#[derive(Clone, Debug)]
pub struct ExpertNorms<B: Kernels> {
    /// Norm of the router's input.
    pub router: RouterNorm<B>,
    /// Norm of the experts' input.
    pub before: Norm<B>,
    /// Norm of the experts' output.
    pub after: Norm<B>,
}

/// The norm of a router's input, which never trains.
#[derive(Clone, Debug)]
pub struct RouterNorm<B: Kernels> {
    /// The vector `[hidden]` as a checkpoint has it.
    pub scale: Parameter<B>,
    /// Its product with `hidden^-0.5` as the weight.
    pub norm: NormWeight<B>,
}

impl<B: Kernels> RouterNorm<B> {
    /// Takes the stored vector, and what is added to the mean square.
    pub(crate) fn new(scale: Parameter<B>, epsilon: f64) -> Self {
        let weight = scale.value.clone().div_scalar((scale.elements() as f64).sqrt());
        Self { scale, norm: NormWeight { weight, offset: 0.0, epsilon, trains: false } }
    }
}

/// The layer's norms before and after its MLP.
pub(crate) type MlpNorms<'a, B> = (&'a Norm<B>, Option<&'a Norm<B>>);

#[derive(Clone, Debug)]
pub(crate) struct SavedExperts<B: Kernels> {
    /// The input before its norms.
    h_nd: Tensor<B, 2>,
    router: Box<ProjectSaved<B>>,
    routing: Routing<B>,
    gate_up: Box<ProjectSaved<B>>,
    down: Box<ProjectSaved<B>>,
    /// The experts' outputs.
    y_sd: Tensor<B, 2>,
    shared: Option<SavedShared<B>>,
    /// The sum of the experts' outputs and that with the dense MLP's, before their norms.
    next_to_dense: Option<[Tensor<B, 2>; 2]>,
}

impl<B: Kernels> Experts<B> {
    /// Returns the residual stream `h` plus the weighted outputs of the experts; adds the router's choices to `sums`.
    pub(crate) fn forward(
        &self,
        h_nd: Tensor<B, 2>,
        norms: MlpNorms<'_, B>,
        keep: Keep,
        adapters: AdapterPass,
        sums: Option<&mut RouterSums<B>>,
    ) -> (Tensor<B, 2>, Option<SavedExperts<B>>) {
        let x_nd = self.norms.as_ref().map_or(norms.0, |own| &own.before).forward(h_nd.clone());
        let router_input = match &self.norms {
            None => Prologue::None { x: x_nd.clone() },
            Some(own) => Prologue::Norm { x: h_nd.clone(), norm: own.router.norm.clone() },
        };
        let (routing, router) = self.route(router_input, keep, adapters);
        if let Some(sums) = sums {
            sums.add(&routing);
        }
        if let Some(choices) = &self.choices {
            choices.add(routing.experts_nk.clone());
        }
        let (residual_nd, shared) = match &self.shared {
            Some(shared) if self.norms.is_none() => {
                shared.forward(Prologue::None { x: x_nd.clone() }, h_nd.clone(), keep, adapters)
            }
            _ => (h_nd.clone(), None),
        };
        let x = B::dispatch(x_nd, &routing);
        let group = self.gate_up.frozen_over(routing.rows.clone(), adapters);
        let (outputs, gate_up) = B::project(Prologue::None { x }, &group, Epilogue::None, keep);
        let [gate, up] = into_parts(outputs);
        let gated = Prologue::Gated { gate, up, activation: self.activation };
        let group = self.down.frozen_over(routing.rows.clone(), adapters);
        let (y, down) = B::project(gated, &group, Epilogue::None, keep);
        let y_sd = into_single(y);
        let (output_nd, shared, next_to_dense) = match &self.norms {
            None => (B::combine(y_sd.clone(), &routing, Combined::WeightedOnto(residual_nd)), shared, None),
            Some(own) => {
                let experts_nd = B::combine(y_sd.clone(), &routing, Combined::Weighted);
                let (dense, after) = self.dense_mlp(norms);
                let input = Prologue::Norm { x: h_nd.clone(), norm: norms.0.operand() };
                let (sum_nd, dense) = dense.forward(input, own.after.forward(experts_nd.clone()), keep, adapters);
                let output_nd = B::rms_norm(sum_nd.clone(), &after.operand(), Some(residual_nd));
                (output_nd, dense, Some([experts_nd, sum_nd]))
            }
        };
        let saved = router.zip(gate_up).zip(down).map(|((router, gate_up), down)| SavedExperts {
            h_nd,
            router,
            routing,
            gate_up,
            down,
            y_sd,
            shared,
            next_to_dense,
        });
        (output_nd, saved)
    }

    fn route(
        &self,
        input: Prologue<B>,
        keep: Keep,
        adapters: AdapterPass,
    ) -> (Routing<B>, Option<Box<ProjectSaved<B>>>) {
        let (logits, saved) = B::project(input, &self.router.frozen(adapters), Epilogue::None, keep);
        let [correction, scale] = [&self.correction, &self.scale].map(|vector| Some(vector.as_ref()?.value.clone()));
        let mut routing = B::route(into_single(logits), self.top_k, self.router_spec, correction, scale);
        routing.rows.choices = Some(RowChoices { rows: routing.choices_s.clone(), per_token: self.top_k });
        (routing, saved)
    }

    /// Iterates over the router's vectors, which never train.
    pub(crate) fn router_vectors(&self) -> impl Iterator<Item = &Parameter<B>> {
        let of_input = self.norms.iter().map(|norms| &norms.router.scale);
        self.correction.iter().chain(&self.scale).chain(of_input)
    }

    /// Returns the dense MLP next to the experts, and the norm of their sum.
    fn dense_mlp<'a>(&'a self, norms: MlpNorms<'a, B>) -> (&'a SharedExpert<B>, &'a Norm<B>) {
        self.shared.as_ref().zip(norms.1).expect("experts with norms of their own are next to a dense MLP")
    }

    /// Computes the gradient of `h` from that of the output; gradients of parameters go to the sink.
    pub(crate) fn backward(
        &self,
        saved: SavedExperts<B>,
        norms: MlpNorms<'_, B>,
        router_gradient: Option<&RouterGradient<B>>,
        dy_nd: Tensor<B, 2>,
        adapters: AdapterPass,
        sink: &mut dyn GradientSink<B>,
    ) -> Tensor<B, 2> {
        let SavedExperts { h_nd, router, routing, gate_up, down, y_sd, shared, next_to_dense } = saved;
        let own = self.norms.as_ref();
        // Of what the shared expert is added to, and of the experts' outputs.
        let (d_sum_nd, d_experts_nd) = match own.zip(next_to_dense) {
            None => (dy_nd.clone(), dy_nd.clone()),
            Some((own, [experts_nd, sum_nd])) => {
                let d_sum_nd = self.dense_mlp(norms).1.backward(sum_nd, dy_nd.clone(), None, sink);
                let d_experts_nd = own.after.backward(experts_nd, d_sum_nd.clone(), None, sink);
                (d_sum_nd, d_experts_nd)
            }
        };
        let (d_rows_sd, d_weights_nk) = B::combine_backward(y_sd, &routing, d_experts_nd);
        let groups = [(&self.gate_up, *gate_up), (&self.down, *down)];
        let rows = Some(&routing.rows);
        let d_rows_sd = mlp_backward(groups, rows, None, d_rows_sd, None, adapters, sink).input.plain();
        let dx_nd = B::combine(d_rows_sd, &routing, Combined::Rows);
        let dx_nd = match own {
            Some(own) => own.before.backward(h_nd.clone(), dx_nd, Some(dy_nd.clone()), sink),
            None => dx_nd,
        };
        let d_logits = B::route_backward(&routing, d_weights_nk, &dx_nd);
        let d_logits = match router_gradient {
            Some(gradient) => gradient.add_to(d_logits, &routing),
            None => d_logits,
        };
        let grads = self.router.backward(*router, vec![d_logits], Some(dx_nd), adapters, sink);
        let grads = match self.shared.as_ref().zip(shared) {
            Some((expert, saved)) => expert.backward(saved, d_sum_nd, grads.input.plain(), adapters, sink),
            None => grads,
        };
        let dx_nd = grads.input.plain();
        match own {
            None => norms.0.backward(h_nd, dx_nd, Some(dy_nd), sink),
            Some(_) => {
                norms.0.add_gradient(grads.norm, sink);
                dx_nd
            }
        }
    }
}

#[cfg(test)]
mod tests;
