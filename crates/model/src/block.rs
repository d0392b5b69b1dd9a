//! One transformer layer: forward, what it keeps, and backward, side by side in the same order.
//!
//! The backward is written out, not recorded: every line of `backward` undoes the line of `forward` with the same name.
//! What lives between them is [`Activations`], and nothing else; how much of it lives at all is the policy, [`Recompute`].
//! Between the first line of a pass and its last only operations of `Kernels` touch the device, so that a backend with a
//! queue of its own runs a whole pass without meeting Burn's (`Kernels::section`).
//! Suffixes as in `firebrick_kernels::Kernels`.

use burn_tensor::Tensor;
use firebrick_kernels::{
    AttentionOutput, Documents, GradientMap, Heads, Kernels, Parameter, Projection, ProjectionGradients, RotaryTables,
};

use crate::linear::Linear;

/// What all layers share for one micro-batch: where documents end, and each token's rotary angles.
#[derive(Clone, Debug)]
pub struct Context<B: Kernels> {
    /// Document boundaries.
    pub documents: Documents<B>,
    /// Cosines and sines by token.
    pub rotary: RotaryTables<B>,
}

/// An RMSNorm weight `[d]` and whether it trains.
#[derive(Clone, Debug)]
pub struct Norm<B: Kernels> {
    /// The weight.
    pub weight: Parameter<B>,
    /// Full fine-tuning trains it, LoRA does not.
    pub trained: bool,
    /// Added to the mean square.
    pub epsilon: f64,
}

impl<B: Kernels> Norm<B> {
    pub(crate) fn forward(&self, x_nd: Tensor<B, 2>) -> Tensor<B, 2> {
        B::rms_norm(x_nd, self.weight.value.clone(), self.epsilon)
    }

    pub(crate) fn backward(
        &self,
        x_nd: Tensor<B, 2>,
        dy_nd: Tensor<B, 2>,
        dx_residual: Option<Tensor<B, 2>>,
        gradients: &mut GradientMap<B>,
    ) -> Tensor<B, 2> {
        let (weight, trained) = (self.weight.value.clone(), self.trained);
        let (dx_nd, d_weight) = B::rms_norm_backward(x_nd, weight, self.epsilon, dy_nd, dx_residual, trained);
        if let Some(d_weight) = d_weight {
            gradients.add(&self.weight, d_weight);
        }
        dx_nd
    }
}

/// A decoder layer of the Llama family.
#[derive(Clone, Debug)]
pub struct Block<B: Kernels> {
    /// Norm before attention.
    pub input_layernorm: Norm<B>,
    /// Query projection.
    pub q_proj: Linear<B>,
    /// Key projection.
    pub k_proj: Linear<B>,
    /// Value projection.
    pub v_proj: Linear<B>,
    /// Attention output projection.
    pub o_proj: Linear<B>,
    /// Norm before the feed-forward part.
    pub post_attention_layernorm: Norm<B>,
    /// Gate projection.
    pub gate_proj: Linear<B>,
    /// Up projection.
    pub up_proj: Linear<B>,
    /// Down projection.
    pub down_proj: Linear<B>,
    /// Width of a head.
    pub head_dim: usize,
}

/// What the forward pass keeps of each block for its backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recompute {
    /// Only the block's input; the block runs forward a second time, its last projection left out.
    Full,
    /// Outputs of matrix products and of attention; norms and activation functions are computed again.
    Selective,
    /// Everything the backward reads.
    None,
}

/// What one layer's backward needs of its forward.
#[derive(Clone, Debug)]
pub struct Activations<B: Kernels> {
    /// The layer's input: all that [`Recompute::Full`] keeps.
    pub x_nd: Tensor<B, 2>,
    attention_input_nd: Option<Tensor<B, 2>>,
    heads: Heads<B>,
    attention: AttentionOutput<B>,
    h_nd: Tensor<B, 2>,
    mlp_input_nd: Option<Tensor<B, 2>>,
    gate_nf: Tensor<B, 2>,
    up_nf: Tensor<B, 2>,
    activated_nf: Option<Tensor<B, 2>>,
}

/// The heads of each token side by side.
fn join_heads<B: Kernels>(x: Tensor<B, 3>) -> Tensor<B, 2> {
    let [tokens, heads, head_dim] = x.dims();
    x.reshape([tokens, heads * head_dim])
}

/// The one element of a group of one.
fn only<T>(group: Vec<T>) -> T {
    let [one] = group.try_into().unwrap_or_else(|group: Vec<T>| panic!("a group of one came back as {}", group.len()));
    one
}

impl<B: Kernels> Block<B> {
    /// The layer's output and what its backward needs under the policy. Under [`Recompute::Full`] that is the input alone,
    /// which [`Block::recompute`] begins from.
    pub fn forward(
        &self,
        x_nd: Tensor<B, 2>,
        context: &Context<B>,
        recompute: Recompute,
    ) -> (Tensor<B, 2>, Activations<B>) {
        let mut kept = self.forward_to_activation(x_nd, context, recompute);
        let down = self.down_proj.projection();
        let (gate, up, h) = (kept.gate_nf.clone(), kept.up_nf.clone(), kept.h_nd.clone());
        let (y_nd, activated_nf) = B::swiglu_project_add(gate, up, &down, h, recompute == Recompute::None);
        kept.activated_nf = activated_nf;
        (y_nd, kept)
    }

    /// What the backward needs, from the input alone. The layer's output is not made: nobody reads it a second time.
    pub fn recompute(&self, x_nd: Tensor<B, 2>, context: &Context<B>) -> Activations<B> {
        self.forward_to_activation(x_nd, context, Recompute::Full)
    }

    /// Forward up to gate and up projection.
    fn forward_to_activation(&self, x_nd: Tensor<B, 2>, context: &Context<B>, recompute: Recompute) -> Activations<B> {
        let keep = |input: Tensor<B, 2>| (recompute == Recompute::None).then_some(input);
        let attention_input_nd = self.input_layernorm.forward(x_nd.clone());
        let heads =
            B::project_heads(attention_input_nd.clone(), &self.head_projections(), &context.rotary, self.head_dim);
        let Heads { q_nhk, k_ngk, v_ngk } = heads.clone();
        let attention = B::packed_attention(q_nhk, k_ngk, v_ngk, &context.documents);
        let o_input = join_heads(attention.o_nhk.clone());
        let h_nd = B::project_add(o_input, &self.o_proj.projection(), x_nd.clone());

        let mlp_input_nd = self.post_attention_layernorm.forward(h_nd.clone());
        let outputs = B::project(mlp_input_nd.clone(), &self.mlp_projections());
        let [gate_nf, up_nf]: [_; 2] = outputs.try_into().expect("two projections have two outputs");
        Activations {
            x_nd,
            attention_input_nd: keep(attention_input_nd),
            heads,
            attention,
            h_nd,
            mlp_input_nd: keep(mlp_input_nd),
            gate_nf,
            up_nf,
            activated_nf: None,
        }
    }

    /// From the gradient of the output to the gradient of the input; parameter gradients are added to `gradients`.
    pub fn backward(
        &self,
        kept: Activations<B>,
        context: &Context<B>,
        dy_nd: Tensor<B, 2>,
        gradients: &mut GradientMap<B>,
    ) -> Tensor<B, 2> {
        let Activations { x_nd, heads, attention, h_nd, gate_nf, up_nf, .. } = kept;
        let down = self.down_proj.projection();
        let found = B::swiglu_project_backward(gate_nf, up_nf, kept.activated_nf, &down, dy_nd.clone());
        self.down_proj.add_gradients(found.projection, gradients);

        let norm = &self.post_attention_layernorm;
        let mlp_input_nd = kept.mlp_input_nd.unwrap_or_else(|| norm.forward(h_nd.clone()));
        let d_outputs = vec![found.d_gate_nf, found.d_up_nf];
        let (d_input, found) = B::project_backward(mlp_input_nd, &self.mlp_projections(), d_outputs);
        Self::add_gradients([&self.gate_proj, &self.up_proj], found, gradients);
        let dh_nd = norm.backward(h_nd, d_input, Some(dy_nd), gradients);

        let o_input = join_heads(attention.o_nhk.clone());
        let (d_o, found) = B::project_backward(o_input, &[self.o_proj.projection()], vec![dh_nd.clone()]);
        self.o_proj.add_gradients(only(found), gradients);
        let d_o = d_o.reshape(attention.o_nhk.dims());
        let Heads { q_nhk, k_ngk, v_ngk } = heads;
        let (q_nhk, k_ngk, v_ngk) =
            B::packed_attention_backward(q_nhk, k_ngk, v_ngk, &attention, d_o, &context.documents);
        let d_heads = Heads { q_nhk, k_ngk, v_ngk };

        let norm = &self.input_layernorm;
        let attention_input_nd = kept.attention_input_nd.unwrap_or_else(|| norm.forward(x_nd.clone()));
        let (d_input, found) =
            B::project_heads_backward(attention_input_nd, &self.head_projections(), &context.rotary, d_heads);
        Self::add_gradients([&self.q_proj, &self.k_proj, &self.v_proj], found, gradients);
        norm.backward(x_nd, d_input, Some(dh_nd), gradients)
    }

    fn add_gradients<const N: usize>(
        linears: [&Linear<B>; N],
        found: Vec<ProjectionGradients<B>>,
        gradients: &mut GradientMap<B>,
    ) {
        linears.into_iter().zip(found).for_each(|(linear, found)| linear.add_gradients(found, gradients));
    }

    fn head_projections(&self) -> [Projection<B>; 3] {
        [self.q_proj.projection(), self.k_proj.projection(), self.v_proj.projection()]
    }

    fn mlp_projections(&self) -> [Projection<B>; 2] {
        [self.gate_proj.projection(), self.up_proj.projection()]
    }

    /// The layer's output for the newest tokens of several sequences, each with its own cache.
    ///
    /// `tokens[i]` of the rows of `x` belong to sequence `i`; `caches[i]` is extended by them.
    pub(crate) fn forward_cached(
        &self,
        x_nd: Tensor<B, 2>,
        rotary: &RotaryTables<B>,
        tokens: &[usize],
        caches: &mut [LayerCache<B>],
    ) -> Tensor<B, 2> {
        let input = self.input_layernorm.forward(x_nd.clone());
        let Heads { q_nhk, k_ngk, v_ngk } = B::project_heads(input, &self.head_projections(), rotary, self.head_dim);
        let mut outputs = Vec::with_capacity(tokens.len());
        let mut start = 0;
        for (&length, cache) in tokens.iter().zip(caches) {
            let part = |x: &Tensor<B, 3>| x.clone().narrow(0, start, length);
            let (k_tgk, v_tgk) = cache.extend(part(&k_ngk), part(&v_ngk));
            outputs.push(B::attention_with_past(part(&q_nhk), k_tgk, v_tgk));
            start += length;
        }
        let h_nd = B::project_add(join_heads(Tensor::cat(outputs, 0)), &self.o_proj.projection(), x_nd);
        let input = self.post_attention_layernorm.forward(h_nd.clone());
        let outputs = B::project(input, &self.mlp_projections());
        let [gate, up]: [_; 2] = outputs.try_into().expect("two projections have two outputs");
        B::swiglu_project_add(gate, up, &self.down_proj.projection(), h_nd, false).0
    }

    /// The seven projections, in the order of the forward pass.
    pub fn linears(&self) -> [&Linear<B>; 7] {
        [&self.q_proj, &self.k_proj, &self.v_proj, &self.o_proj, &self.gate_proj, &self.up_proj, &self.down_proj]
    }

    pub(crate) fn linears_mut(&mut self) -> [&mut Linear<B>; 7] {
        [
            &mut self.q_proj,
            &mut self.k_proj,
            &mut self.v_proj,
            &mut self.o_proj,
            &mut self.gate_proj,
            &mut self.up_proj,
            &mut self.down_proj,
        ]
    }

    pub(crate) fn parameters_mut(&mut self) -> Vec<&mut Parameter<B>> {
        let norms = [&mut self.input_layernorm, &mut self.post_attention_layernorm];
        let attention = [&mut self.q_proj, &mut self.k_proj, &mut self.v_proj, &mut self.o_proj];
        let mlp = [&mut self.gate_proj, &mut self.up_proj, &mut self.down_proj];
        let norms = norms.into_iter().filter(|norm| norm.trained).map(|norm| &mut norm.weight);
        norms.chain(attention.into_iter().chain(mlp).flat_map(Linear::parameters_mut)).collect()
    }
}

/// Keys (already rotated) and values of one sequence in one layer.
#[derive(Clone, Debug, Default)]
pub(crate) struct LayerCache<B: Kernels> {
    stored: Option<(Tensor<B, 3>, Tensor<B, 3>)>,
}

impl<B: Kernels> LayerCache<B> {
    fn extend(&mut self, k_ngk: Tensor<B, 3>, v_ngk: Tensor<B, 3>) -> (Tensor<B, 3>, Tensor<B, 3>) {
        let extended = match self.stored.take() {
            Some((k, v)) => (Tensor::cat(vec![k, k_ngk], 0), Tensor::cat(vec![v, v_ngk], 0)),
            None => (k_ngk, v_ngk),
        };
        self.stored = Some(extended.clone());
        extended
    }
}
