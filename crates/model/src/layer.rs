//! One transformer layer: forward, what it saves, and backward, side by side in the same order.
//!
//! Five calls forward, five back: the qkv group, attention, the output projection, the gate and up group, the down projection. Norms
//! and activations are prologues of the GEMM that reads them; rotation, norms of outputs and residual sums are epilogues. Training, recomputation and
//! the cached forward of generation are one function, which differs in how it attends.
//! Inside a section only operations of `Kernels` touch the device. Tensor suffixes as in `firebrick_kernels::linear`.

use burn_tensor::Tensor;
use firebrick_arch::LayerSpec;
use firebrick_kernels::{
    AttentionOutput, CachedTokens, Documents, Epilogue, GradientSink, HeadsEpilogue, Keep, Kernels, KvCache, Parameter,
    ProjectSaved, Prologue, QkNorms, Qkv, RotaryTables,
};

use crate::linear::{AdapterPass, Linear, LinearGroup};
use crate::norm::Norm;

/// What all layers share for one micro-batch.
#[derive(Clone, Debug)]
pub struct Context<B: Kernels> {
    /// Document boundaries.
    pub documents: Documents<B>,
    /// Cosines and sines by token, one pair per rope of the model.
    pub rotary: Vec<RotaryTables<B>>,
}

/// A decoder layer.
#[derive(Clone, Debug)]
pub struct Layer<B: Kernels> {
    /// Its sizes and constants.
    pub spec: LayerSpec,
    /// Norm of attention's input.
    pub before_attention: Option<Norm<B>>,
    /// Query, key and value projections.
    pub qkv: LinearGroup<B>,
    /// Norms of queries and keys.
    pub qk_norm: Option<[Norm<B>; 2]>,
    /// Output projection of attention.
    pub attention_output: LinearGroup<B>,
    /// Norm of attention's output.
    pub after_attention: Option<Norm<B>>,
    /// Norm of the MLP's input.
    pub before_mlp: Option<Norm<B>>,
    /// Gate and up projections.
    pub gate_up: LinearGroup<B>,
    /// Down projection.
    pub down: LinearGroup<B>,
    /// Norm of the MLP's output.
    pub after_mlp: Option<Norm<B>>,
}

/// What one layer's backward needs of its forward.
#[derive(Clone, Debug)]
pub struct SavedForBackward<B: Kernels> {
    qkv: ProjectSaved<B>,
    heads: Qkv<B>,
    attention: AttentionOutput<B>,
    attention_output: ProjectSaved<B>,
    gate_up: ProjectSaved<B>,
    down: ProjectSaved<B>,
}

/// What is there when gate and up are computed: enough for the backward, but for the last GEMM.
struct UpToGate<B: Kernels> {
    qkv: Option<ProjectSaved<B>>,
    heads: Qkv<B>,
    attention: Option<AttentionOutput<B>>,
    attention_output: Option<ProjectSaved<B>>,
    h_nd: Tensor<B, 2>,
    gate_up: Option<ProjectSaved<B>>,
    gate_nf: Tensor<B, 2>,
    up_nf: Tensor<B, 2>,
}

/// Which keys the queries meet.
pub(crate) enum Attend<'a, B: Kernels> {
    /// The earlier tokens of the same document.
    Documents(&'a Documents<B>),
    /// The same; keys and values are stored as well. Each document begins a sequence.
    Prompts { documents: &'a Documents<B>, tokens: &'a CachedTokens<B>, cache: &'a mut KvCache<B> },
    /// All earlier tokens of the same sequence, which are stored; so are the new ones.
    Cached { tokens: &'a CachedTokens<B>, cache: &'a mut KvCache<B> },
}

fn pair<B: Kernels>(outputs: Vec<Tensor<B, 2>>) -> [Tensor<B, 2>; 2] {
    outputs.try_into().unwrap_or_else(|outputs: Vec<_>| panic!("expected gate and up, got {} parts", outputs.len()))
}

fn single<B: Kernels>(outputs: Vec<Tensor<B, 2>>) -> Tensor<B, 2> {
    let [output] =
        outputs.try_into().unwrap_or_else(|outputs: Vec<_>| panic!("expected one part, got {}", outputs.len()));
    output
}

/// The input of a group, normalized where there is a norm.
fn input<B: Kernels>(x: Tensor<B, 2>, norm: Option<&Norm<B>>) -> Prologue<B> {
    match norm {
        Some(norm) => Prologue::Norm { x, norm: norm.operand() },
        None => Prologue::None { x },
    }
}

/// The output of a group, normalized where there is a norm, plus the residual stream.
fn added_to<B: Kernels>(residual: Tensor<B, 2>, norm: Option<&Norm<B>>) -> Epilogue<B> {
    match norm {
        Some(norm) => Epilogue::NormResidual { norm: norm.operand(), residual },
        None => Epilogue::Residual(residual),
    }
}

fn add_gradient<B: Kernels>(norm: Option<&Norm<B>>, d_weight: Option<Tensor<B, 1>>, sink: &mut dyn GradientSink<B>) {
    if let Some(norm) = norm {
        norm.add_gradient(d_weight, sink);
    }
}

impl<B: Kernels> Layer<B> {
    /// The layer's output, and what its backward needs; nothing is saved under [`Keep::Nothing`].
    pub(crate) fn forward(
        &self,
        x_nd: Tensor<B, 2>,
        rotary: &[RotaryTables<B>],
        attend: Attend<'_, B>,
        keep: Keep,
        adapters: AdapterPass,
    ) -> (Tensor<B, 2>, Option<SavedForBackward<B>>) {
        let UpToGate { qkv, heads, attention, attention_output, h_nd, gate_up, gate_nf, up_nf } =
            self.forward_to_gate(x_nd, rotary, attend, keep, adapters);
        let epilogue = added_to(h_nd, self.after_mlp.as_ref());
        let (y_nd, down) = self.down.forward(self.gated(gate_nf, up_nf), epilogue, keep, adapters);
        let saved = (|| {
            Some(SavedForBackward {
                qkv: qkv?,
                heads,
                attention: attention?,
                attention_output: attention_output?,
                gate_up: gate_up?,
                down: down?,
            })
        })();
        (single(y_nd), saved)
    }

    /// What the backward needs, from the layer's input alone. The output is not computed, unless it is normalized: nothing else reads it
    /// a second time.
    pub(crate) fn recompute(
        &self,
        x_nd: Tensor<B, 2>,
        context: &Context<B>,
        adapters: AdapterPass,
    ) -> SavedForBackward<B> {
        let attend = Attend::Documents(&context.documents);
        if self.after_mlp.is_some() {
            let (_, saved) = self.forward(x_nd, &context.rotary, attend, Keep::Inputs, adapters);
            return saved.expect("a layer saves its activations under Keep::Inputs");
        }
        let again = self.forward_to_gate(x_nd, &context.rotary, attend, Keep::Inputs, adapters);
        let kept = "a projection saves its inputs under Keep::Inputs";
        SavedForBackward {
            qkv: again.qkv.expect(kept),
            heads: again.heads,
            attention: again.attention.expect("attention over documents has an output"),
            attention_output: again.attention_output.expect(kept),
            gate_up: again.gate_up.expect(kept),
            down: ProjectSaved {
                prologue: self.gated(again.gate_nf, again.up_nf),
                prologue_output: None,
                low_rank: None,
                heads: None,
                output_norm: None,
            },
        }
    }

    fn forward_to_gate(
        &self,
        x_nd: Tensor<B, 2>,
        rotary: &[RotaryTables<B>],
        attend: Attend<'_, B>,
        keep: Keep,
        adapters: AdapterPass,
    ) -> UpToGate<B> {
        let prologue = input(x_nd.clone(), self.before_attention.as_ref());
        let (outputs, qkv) = self.qkv.forward(prologue, Epilogue::Heads(self.heads_epilogue(rotary)), keep, adapters);
        let [q, k, v]: [_; 3] =
            outputs.try_into().unwrap_or_else(|parts: Vec<_>| panic!("expected q, k and v, got {} parts", parts.len()));
        let heads = Qkv { q, k, v };

        let (o, attention) = self.attend(&heads, attend);
        let epilogue = added_to(x_nd, self.after_attention.as_ref());
        let (h_nd, attention_output) = self.attention_output.forward(Prologue::None { x: o }, epilogue, keep, adapters);
        let h_nd = single(h_nd);

        let prologue = input(h_nd.clone(), self.before_mlp.as_ref());
        let (outputs, gate_up) = self.gate_up.forward(prologue, Epilogue::None, keep, adapters);
        let [gate_nf, up_nf] = pair(outputs);
        UpToGate { qkv, heads, attention, attention_output, h_nd, gate_up, gate_nf, up_nf }
    }

    /// From the gradient of the output to the gradient of the input; gradients of parameters go to the sink.
    pub(crate) fn backward(
        &self,
        saved: SavedForBackward<B>,
        context: &Context<B>,
        dy_nd: Tensor<B, 2>,
        adapters: AdapterPass,
        sink: &mut dyn GradientSink<B>,
    ) -> Tensor<B, 2> {
        let SavedForBackward { qkv, heads, attention, attention_output, gate_up, down } = saved;
        let grads = self.down.backward(down, vec![dy_nd.clone()], None, Some(&self.gate_up), adapters, sink);
        add_gradient(self.after_mlp.as_ref(), grads.output_norm, sink);
        let (d_gate, d_up) = grads.input.gated();

        let grads = self.gate_up.backward(gate_up, vec![d_gate, d_up], Some(dy_nd), None, adapters, sink);
        add_gradient(self.before_mlp.as_ref(), grads.norm, sink);
        let dh_nd = grads.input.plain();

        let grads = self.attention_output.backward(attention_output, vec![dh_nd.clone()], None, None, adapters, sink);
        add_gradient(self.after_attention.as_ref(), grads.output_norm, sink);
        let d_o = grads.input.plain();
        let Qkv { q, k, v } =
            B::packed_attention_backward(heads, &self.spec.attention, attention, d_o, &context.documents);

        let grads = self.qkv.backward(qkv, vec![q, k, v], Some(dh_nd), None, adapters, sink);
        add_gradient(self.before_attention.as_ref(), grads.norm, sink);
        if let Some(norms) = &self.qk_norm {
            for (norm, gradient) in norms.iter().zip(grads.qk_norm) {
                norm.add_gradient(gradient, sink);
            }
        }
        grads.input.plain()
    }

    fn gated(&self, gate: Tensor<B, 2>, up: Tensor<B, 2>) -> Prologue<B> {
        Prologue::Gated { gate, up, activation: self.spec.mlp.activation() }
    }

    fn heads_epilogue(&self, rotary: &[RotaryTables<B>]) -> HeadsEpilogue<B> {
        let attention = &self.spec.attention;
        let norms = |[q, k]: &[Norm<B>; 2]| QkNorms { q: q.operand(), k: k.operand() };
        HeadsEpilogue {
            head_dim: attention.head_dim,
            qk_norm: self.qk_norm.as_ref().map(norms),
            rotary: attention.rope.map(|index| rotary[index].clone()),
        }
    }

    fn attend(&self, heads: &Qkv<B>, attend: Attend<'_, B>) -> (Tensor<B, 2>, Option<AttentionOutput<B>>) {
        match attend {
            Attend::Documents(documents) => {
                let output = B::packed_attention(heads, &self.spec.attention, documents);
                (output.o.clone(), Some(output))
            }
            Attend::Prompts { documents, tokens, cache } => {
                B::store_in_cache(cache, heads.k.clone(), heads.v.clone(), tokens);
                (B::packed_attention(heads, &self.spec.attention, documents).o, None)
            }
            Attend::Cached { tokens, cache } => {
                B::store_in_cache(cache, heads.k.clone(), heads.v.clone(), tokens);
                (B::cached_attention(heads.q.clone(), cache, tokens, &self.spec.attention), None)
            }
        }
    }

    fn groups(&self) -> [&LinearGroup<B>; 4] {
        [&self.qkv, &self.attention_output, &self.gate_up, &self.down]
    }

    /// The linear modules, in the order of the forward pass.
    pub fn linears(&self) -> impl Iterator<Item = &Linear<B>> {
        self.groups().into_iter().flat_map(|group| &group.modules)
    }

    pub(crate) fn linears_mut(&mut self) -> impl Iterator<Item = &mut Linear<B>> {
        let groups = [&mut self.qkv, &mut self.attention_output, &mut self.gate_up, &mut self.down];
        groups.into_iter().flat_map(|group| &mut group.modules)
    }

    /// Norms over the hidden size.
    pub(crate) fn hidden_norms(&self) -> impl Iterator<Item = &Norm<B>> {
        [&self.before_attention, &self.after_attention, &self.before_mlp, &self.after_mlp].into_iter().flatten()
    }

    fn norms(&self) -> impl Iterator<Item = &Norm<B>> {
        self.hidden_norms().chain(self.qk_norm.iter().flatten())
    }

    pub(crate) fn parameters(&self) -> impl Iterator<Item = &Parameter<B>> {
        self.norms().flat_map(Norm::parameters).chain(self.linears().flat_map(Linear::parameters))
    }

    pub(crate) fn parameters_mut(&mut self) -> impl Iterator<Item = &mut Parameter<B>> {
        let norms = [&mut self.before_attention, &mut self.after_attention, &mut self.before_mlp, &mut self.after_mlp];
        let norms = norms.into_iter().flatten().chain(self.qk_norm.iter_mut().flatten()).flat_map(Norm::parameters_mut);
        let groups = [&mut self.qkv, &mut self.attention_output, &mut self.gate_up, &mut self.down];
        let linears = groups.into_iter().flat_map(|group| &mut group.modules);
        norms.chain(linears.flat_map(Linear::parameters_mut))
    }
}
