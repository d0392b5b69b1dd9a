//! The gated delta rule in ordinary Burn operations: what [`rule`] reads, from what the projections give, and back.
//!
//! `beta = c sigmoid(b)`, `c` 1 or 2, so `db = beta (1 - beta / c) d_beta`.
//! With `n = x / |x|`, `dx = (dn - n (n · dn)) / |x|`, where `|x|² = Σ x² + 1e-6`. With `g = -exp(a_log) softplus(a + dt_bias)`,
//! `da = -exp(a_log) sigmoid(a + dt_bias) dg`, of which `dt_bias` has the sum over tokens, and `d a_log = Σ g dg`.
//! Trade-off: all chunks are in memory at once, in f32.

use std::ops::Range;

use burn_tensor::activation::sigmoid;
use burn_tensor::{DType, Tensor, backend::Backend};
use firebrick_arch::DeltaNetSpec;

use super::rule::{self, RuleInputs};
use super::{Chunks, DeltaGradients, DeltaInputs, DeltaOutput, DeltaParameters, DeltaState};
use crate::attention::{CachedTokens, Documents};
use crate::dtype::{to_dtype, to_f32};

/// Added to the squared length of queries and keys.
const EPSILON: f64 = 1e-6;

/// Implements [`crate::DeltaOps::gated_delta`].
pub fn forward<B: Backend>(
    inputs: &DeltaInputs<B>,
    parameters: &DeltaParameters<B>,
    spec: &DeltaNetSpec,
    documents: &Documents<B>,
    start: Option<Tensor<B, 3>>,
) -> DeltaOutput<B> {
    let (prepared, chunks) = (Prepared::new(inputs, parameters, spec), chunks(documents));
    let start = start.map(|start| among(&chunks, 0, start));
    let output = rule::forward(prepared.rule_inputs(spec), &chunks, start);
    let end = documents.goes_on.then(|| of_document(&chunks, documents.count() - 1, output.ends));
    DeltaOutput { o: to_dtype(side_by_side(output.o), inputs.qkv.dtype()), states: output.states, end }
}

/// Returns states of all documents in the order of their chunks: this one of a document, and zeros.
fn among<B: Backend>(chunks: &Chunks<B>, document: usize, state: Tensor<B, 3>) -> Tensor<B, 4> {
    let of = |&other: &usize| if other == document { state.clone() } else { state.zeros_like() };
    Tensor::stack(chunks.order.iter().map(of).collect(), 0)
}

fn of_document<B: Backend>(chunks: &Chunks<B>, document: usize, states: Tensor<B, 4>) -> Tensor<B, 3> {
    let place = chunks.order.iter().position(|&other| other == document).expect("every document has a place");
    states.narrow(0, place, 1).squeeze_dim(0)
}

/// Implements [`crate::DeltaOps::gated_delta_backward`].
pub fn backward<B: Backend>(
    inputs: DeltaInputs<B>,
    parameters: &DeltaParameters<B>,
    spec: &DeltaNetSpec,
    states: Tensor<B, 4>,
    d_o: Tensor<B, 2>,
    d_end: Option<Tensor<B, 3>>,
    documents: &Documents<B>,
    parameters_train: bool,
) -> DeltaGradients<B> {
    let prepared = Prepared::new(&inputs, parameters, spec);
    let (d_o, chunks) = (heads(d_o, spec.value_heads), chunks(documents));
    let d_ends = d_end.map(|d_end| among(&chunks, documents.count() - 1, d_end));
    let (gradients, d_starts) = rule::backward(prepared.rule_inputs(spec), &chunks, states, d_o, d_ends);
    let start = documents.begins_before.then(|| of_document(&chunks, 0, d_starts));
    let dq = prepared.q.backward(summed(gradients.q, spec).mul_scalar(scale(spec)));
    let dk = prepared.k.backward(summed(gradients.k, spec));
    let (beta, d_beta, dg) = (prepared.beta, side_by_side(gradients.beta), side_by_side(gradients.decay));
    let db = d_beta.mul(beta.clone()).mul(beta.div_scalar(-most(spec)).add_scalar(1.0));
    let da = dg.clone().mul(prepared.rate).mul(sigmoid(prepared.biased)).neg();
    let over_tokens = |x: Tensor<B, 2>| x.sum_dim(0).reshape([spec.value_heads]);
    let of_parameters = parameters_train
        .then(|| DeltaParameters { a_log: over_tokens(dg.mul(prepared.decay)), dt_bias: over_tokens(da.clone()) });
    let d_qkv = Tensor::cat([dq, dk, gradients.v].map(side_by_side).to_vec(), 1);
    let [qkv, a, b] = [(d_qkv, inputs.qkv), (da, inputs.a), (db, inputs.b)].map(|(d, x)| to_dtype(d, x.dtype()));
    DeltaGradients { inputs: DeltaInputs { qkv, a, b }, parameters: of_parameters, start }
}

/// Implements [`crate::DeltaOps::cached_gated_delta`].
pub fn cached<B: Backend>(
    inputs: &DeltaInputs<B>,
    parameters: &DeltaParameters<B>,
    spec: &DeltaNetSpec,
    state: &mut DeltaState<B>,
    tokens: &CachedTokens<B>,
) -> Tensor<B, 2> {
    let device = inputs.qkv.device();
    let (sequences, ranges): (Vec<_>, Vec<_>) = tokens.in_pass().unzip();
    let chunks = Chunks::new(&ranges, &device);
    let size = [spec.value_heads, spec.key_head_dim, spec.value_head_dim];
    let mut start_of = |&sequence: &usize| {
        let past = state.remove(&sequences[sequence].sequence()).filter(|_| sequences[sequence].past > 0);
        past.unwrap_or_else(|| Tensor::zeros(size, (&device, DType::F32)))
    };
    let start = Tensor::stack(chunks.order.iter().map(&mut start_of).collect(), 0);
    let prepared = Prepared::new(inputs, parameters, spec);
    let output = rule::forward(prepared.rule_inputs(spec), &chunks, Some(start));
    for (place, &sequence) in chunks.order.iter().enumerate() {
        let end = output.ends.clone().narrow(0, place, 1).reshape(size);
        state.insert(sequences[sequence].sequence(), end);
    }
    to_dtype(side_by_side(output.o), inputs.qkv.dtype())
}

/// Values per token, f32.
struct Prepared<B: Backend> {
    q: Directions<B>,
    k: Directions<B>,
    v: Tensor<B, 3>,
    /// `[n, h]`.
    beta: Tensor<B, 2>,
    /// `exp(a_log)`, `[1, h]`.
    rate: Tensor<B, 2>,
    /// `a + dt_bias`, `[n, h]`.
    biased: Tensor<B, 2>,
    /// `g`, `[n, h]`.
    decay: Tensor<B, 2>,
}

impl<B: Backend> Prepared<B> {
    fn new(inputs: &DeltaInputs<B>, parameters: &DeltaParameters<B>, spec: &DeltaNetSpec) -> Self {
        let keys = spec.key_size();
        let columns = |columns: Range<usize>| inputs.qkv.clone().narrow(1, columns.start, columns.len());
        let rate = to_f32(parameters.a_log.clone()).exp().unsqueeze::<2>();
        let biased = to_f32(inputs.a.clone()).add(to_f32(parameters.dt_bias.clone()).unsqueeze());
        Self {
            q: Directions::new(heads(columns(0..keys), spec.key_heads)),
            k: Directions::new(heads(columns(keys..2 * keys), spec.key_heads)),
            v: heads(columns(2 * keys..spec.channels()), spec.value_heads),
            beta: sigmoid(to_f32(inputs.b.clone())).mul_scalar(most(spec)),
            decay: softplus(biased.clone()).mul(rate.clone()).neg(),
            rate,
            biased,
        }
    }

    fn rule_inputs(&self, spec: &DeltaNetSpec) -> RuleInputs<B, 3> {
        RuleInputs {
            q: shared(self.q.of_length_one.clone(), spec).mul_scalar(scale(spec)),
            k: shared(self.k.of_length_one.clone(), spec),
            v: self.v.clone(),
            beta: self.beta.clone().unsqueeze_dim(2),
            decay: self.decay.clone().unsqueeze_dim(2),
        }
    }
}

/// Queries or keys of length one.
struct Directions<B: Backend> {
    /// `[n, key heads, k]`.
    of_length_one: Tensor<B, 3>,
    /// What they were divided by, `[n, key heads, 1]`.
    lengths: Tensor<B, 3>,
}

impl<B: Backend> Directions<B> {
    fn new(x: Tensor<B, 3>) -> Self {
        let lengths = x.clone().mul(x.clone()).sum_dim(2).add_scalar(EPSILON).sqrt();
        Self { of_length_one: x.div(lengths.clone()), lengths }
    }

    fn backward(self, d: Tensor<B, 3>) -> Tensor<B, 3> {
        let along = self.of_length_one.clone().mul(d.clone()).sum_dim(2);
        d.sub(self.of_length_one.mul(along)).div(self.lengths)
    }
}

fn chunks<B: Backend>(documents: &Documents<B>) -> Chunks<B> {
    let ranges: Vec<_> = documents.ranges().collect();
    Chunks::new(&ranges, &documents.cu_seqlens.device())
}

/// The largest beta.
fn most(spec: &DeltaNetSpec) -> f64 {
    if spec.doubles_beta { 2.0 } else { 1.0 }
}

/// Factor of the queries.
fn scale(spec: &DeltaNetSpec) -> f64 {
    (spec.key_head_dim as f64).powf(-0.5)
}

/// Computes `log(1 + exp(x))`, which is `x` where the exponential would overflow.
fn softplus<B: Backend>(x: Tensor<B, 2>) -> Tensor<B, 2> {
    x.clone().clamp_min(0.0).add(x.abs().neg().exp().log1p())
}

/// Views columns as heads, in f32, `[n, heads, d]`.
fn heads<B: Backend>(x: Tensor<B, 2>, heads: usize) -> Tensor<B, 3> {
    let [tokens, width] = x.dims();
    to_f32(x).reshape([tokens, heads, width / heads])
}

/// Views heads as columns, `[n, heads * d]`.
fn side_by_side<B: Backend>(x: Tensor<B, 3>) -> Tensor<B, 2> {
    let [tokens, heads, width] = x.dims();
    x.reshape([tokens, heads * width])
}

/// Repeats each key head for its value heads, which follow one another, `[n, value heads, k]`.
fn shared<B: Backend>(x: Tensor<B, 3>, spec: &DeltaNetSpec) -> Tensor<B, 3> {
    let [tokens, key_heads, width] = x.dims();
    let repeated: Tensor<B, 4> = x.unsqueeze_dim::<4>(2).repeat_dim(2, spec.value_heads / key_heads);
    repeated.reshape([tokens, spec.value_heads, width])
}

/// Backward of [`shared`]: sums over the value heads of each key head.
fn summed<B: Backend>(d: Tensor<B, 3>, spec: &DeltaNetSpec) -> Tensor<B, 3> {
    let ([tokens, value_heads, width], key_heads) = (d.dims(), spec.key_heads);
    let of_key_heads = d.reshape([tokens, key_heads, value_heads / key_heads, width]);
    of_key_heads.sum_dim(2).reshape([tokens, key_heads, width])
}
