//! One transformer layer: forward, what it keeps, and backward, side by side in the same order.
//!
//! The backward is written out, not recorded: every line of `backward` undoes the line of `forward` with the same name.
//! What lives between them is [`Activations`], and nothing else; whether it lives at all is the caller's policy.
//! Suffixes as in `firebrick_kernels::Kernels`.

use burn_tensor::Tensor;
use firebrick_kernels::{AttentionOutput, Documents, GradientMap, Kernels, Parameter, RotaryTables};

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

/// What one layer's backward needs of its forward.
pub struct Activations<B: Kernels> {
    /// The layer's input: all that `recompute = "full"` keeps.
    pub x_nd: Tensor<B, 2>,
    attention_input_nd: Tensor<B, 2>,
    q_nhk: Tensor<B, 3>,
    k_ngk: Tensor<B, 3>,
    v_ngk: Tensor<B, 3>,
    attention: AttentionOutput<B>,
    h_nd: Tensor<B, 2>,
    mlp_input_nd: Tensor<B, 2>,
    gate_nf: Tensor<B, 2>,
    up_nf: Tensor<B, 2>,
    activated_nf: Tensor<B, 2>,
    low_rank: LowRank<B>,
}

/// `x Aᵀ` of each adapted projection, r values a token.
struct LowRank<B: Kernels> {
    q: Option<Tensor<B, 2>>,
    k: Option<Tensor<B, 2>>,
    v: Option<Tensor<B, 2>>,
    o: Option<Tensor<B, 2>>,
    gate: Option<Tensor<B, 2>>,
    up: Option<Tensor<B, 2>>,
    down: Option<Tensor<B, 2>>,
}

/// The last axis split into heads.
fn split_heads<B: Kernels>(x: Tensor<B, 2>, head_dim: usize) -> Tensor<B, 3> {
    let [tokens, width] = x.dims();
    x.reshape([tokens, width / head_dim, head_dim])
}

/// The heads joined again.
fn join_heads<B: Kernels>(x: Tensor<B, 3>) -> Tensor<B, 2> {
    let [tokens, heads, head_dim] = x.dims();
    x.reshape([tokens, heads * head_dim])
}

impl<B: Kernels> Block<B> {
    /// The layer's output and what its backward needs.
    pub fn forward(&self, x_nd: Tensor<B, 2>, context: &Context<B>) -> (Tensor<B, 2>, Activations<B>) {
        let attention_input_nd = self.input_layernorm.forward(x_nd.clone());
        let q = self.q_proj.forward(attention_input_nd.clone());
        let k = self.k_proj.forward(attention_input_nd.clone());
        let v = self.v_proj.forward(attention_input_nd.clone());
        let q_nhk = B::rotary(split_heads(q.y_no, self.head_dim), &context.rotary);
        let k_ngk = B::rotary(split_heads(k.y_no, self.head_dim), &context.rotary);
        let v_ngk = split_heads(v.y_no, self.head_dim);
        let attention = B::packed_attention(q_nhk.clone(), k_ngk.clone(), v_ngk.clone(), &context.documents);
        let o = self.o_proj.forward(join_heads(attention.o_nhk.clone()));

        let norm = &self.post_attention_layernorm;
        let (h_nd, mlp_input_nd) = B::add_rms_norm(o.y_no, x_nd.clone(), norm.weight.value.clone(), norm.epsilon);
        let gate = self.gate_proj.forward(mlp_input_nd.clone());
        let up = self.up_proj.forward(mlp_input_nd.clone());
        let activated_nf = B::swiglu(gate.y_no.clone(), up.y_no.clone());
        let down = self.down_proj.forward(activated_nf.clone());
        let y_nd = down.y_no.add(h_nd.clone());

        let low_rank = LowRank {
            q: q.xa_nr,
            k: k.xa_nr,
            v: v.xa_nr,
            o: o.xa_nr,
            gate: gate.xa_nr,
            up: up.xa_nr,
            down: down.xa_nr,
        };
        let (gate_nf, up_nf) = (gate.y_no, up.y_no);
        let kept = Activations {
            x_nd,
            attention_input_nd,
            q_nhk,
            k_ngk,
            v_ngk,
            attention,
            h_nd,
            mlp_input_nd,
            gate_nf,
            up_nf,
            activated_nf,
            low_rank,
        };
        (y_nd, kept)
    }

    /// From the gradient of the output to the gradient of the input; parameter gradients are added to `gradients`.
    pub fn backward(
        &self,
        kept: Activations<B>,
        context: &Context<B>,
        dy_nd: Tensor<B, 2>,
        gradients: &mut GradientMap<B>,
    ) -> Tensor<B, 2> {
        let low_rank = kept.low_rank;
        let d_activated = self.down_proj.backward(kept.activated_nf, low_rank.down, dy_nd.clone(), None, gradients);
        let (d_gate, d_up) = B::swiglu_backward(kept.gate_nf, kept.up_nf, d_activated);
        let d_input = self.up_proj.backward(kept.mlp_input_nd.clone(), low_rank.up, d_up, None, gradients);
        let d_input = self.gate_proj.backward(kept.mlp_input_nd, low_rank.gate, d_gate, Some(d_input), gradients);
        let dh_nd = self.post_attention_layernorm.backward(kept.h_nd, d_input, Some(dy_nd), gradients);

        let o_input = join_heads(kept.attention.o_nhk.clone());
        let d_o = self.o_proj.backward(o_input, low_rank.o, dh_nd.clone(), None, gradients);
        let d_o = split_heads(d_o, self.head_dim);
        let (dq, dk, dv) =
            B::packed_attention_backward(kept.q_nhk, kept.k_ngk, kept.v_ngk, &kept.attention, d_o, &context.documents);
        let dq = join_heads(B::rotary_backward(dq, &context.rotary));
        let dk = join_heads(B::rotary_backward(dk, &context.rotary));
        let x = kept.attention_input_nd;
        let d_input = self.v_proj.backward(x.clone(), low_rank.v, join_heads(dv), None, gradients);
        let d_input = self.k_proj.backward(x.clone(), low_rank.k, dk, Some(d_input), gradients);
        let d_input = self.q_proj.backward(x, low_rank.q, dq, Some(d_input), gradients);
        self.input_layernorm.backward(kept.x_nd, d_input, Some(dh_nd), gradients)
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
        let q_nhk = B::rotary(split_heads(self.q_proj.forward(input.clone()).y_no, self.head_dim), rotary);
        let k_ngk = B::rotary(split_heads(self.k_proj.forward(input.clone()).y_no, self.head_dim), rotary);
        let v_ngk = split_heads(self.v_proj.forward(input).y_no, self.head_dim);
        let mut outputs = Vec::with_capacity(tokens.len());
        let mut start = 0;
        for (&length, cache) in tokens.iter().zip(caches) {
            let part = |x: &Tensor<B, 3>| x.clone().narrow(0, start, length);
            let (k_tgk, v_tgk) = cache.extend(part(&k_ngk), part(&v_ngk));
            outputs.push(B::attention_with_past(part(&q_nhk), k_tgk, v_tgk));
            start += length;
        }
        let h_nd = self.o_proj.forward(join_heads(Tensor::cat(outputs, 0))).y_no.add(x_nd);
        let input = self.post_attention_layernorm.forward(h_nd.clone());
        let gate = self.gate_proj.forward(input.clone()).y_no;
        let activated = B::swiglu(gate, self.up_proj.forward(input).y_no);
        self.down_proj.forward(activated).y_no.add(h_nd)
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
