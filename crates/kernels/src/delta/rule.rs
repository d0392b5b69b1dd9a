//! The recurrence under Gated DeltaNet in ordinary Burn operations, in f32, chunk by chunk.
//!
//! Per token: `S = e^g S`, `S = S + k ⊗ β (v - Sᵀ k)`, `o = Sᵀ q`, where `g` is one number per head.
//!
//! In a chunk that starts with `S` and whose log decays sum up to `G`, with `D_ij = exp(G_i - G_j)` for `i >= j` and `*` by elements:
//! `A = strictly lower (β (k kᵀ) * D)`, `T = (I + A)⁻¹`, and what is written is `N = T β v - T (β e^G k) S`. Then
//! `o = e^G q S + ((q kᵀ) * D) N` and the next chunk starts with `e^G_last S + (e^(G_last - G) k)ᵀ N` (Yang et al., Parallelizing linear
//! transformers with the delta rule over sequence length, 2024). Everything but the states is one batch over chunks and heads.
//!
//! Backward: `dN` comes from `do` and from the gradient of the next chunk's start; with `dX = Tᵀ dN`, `dv = β dX`, the gradient of `β e^G k` is
//! `-dX Sᵀ`, and `dA = -strictly lower (dX Nᵀ)`. Gradients of `G` are summed from the end of the chunk to give those of `g`.

use std::ops::Range;

use burn_tensor::{DType, Tensor, backend::Backend};

use super::chunks::Chunks;
use super::pairs::{PairDecays, strictly_lower, transposed, unit_inverse};

/// What the recurrence reads, or the gradients of it, f32: `[n, h, ..]` of tokens, or `[chunks, h, rows, ..]`.
#[derive(Clone, Debug)]
pub struct RuleInputs<B: Backend, const D: usize> {
    /// Queries, width `k`.
    pub q: Tensor<B, D>,
    /// Keys, width `k`; of length one at most, or the states grow.
    pub k: Tensor<B, D>,
    /// Values, width `v`.
    pub v: Tensor<B, D>,
    /// Factor of what is written, width 1.
    pub beta: Tensor<B, D>,
    /// Log of the decay, at most 0, width 1.
    pub decay: Tensor<B, D>,
}

/// Result of [`forward`], f32.
#[derive(Clone, Debug)]
pub struct RuleOutput<B: Backend> {
    /// `[n, h, v]`.
    pub o: Tensor<B, 3>,
    /// The state at the start of each chunk, `[chunks, h, k, v]`.
    pub states: Tensor<B, 4>,
    /// The state after each document, in the order of [`Chunks::order`], `[documents, h, k, v]`.
    pub ends: Tensor<B, 4>,
}

impl<B: Backend, const D: usize> RuleInputs<B, D> {
    fn map<const E: usize>(self, of_each: impl Fn(Tensor<B, D>) -> Tensor<B, E>) -> RuleInputs<B, E> {
        let [q, k, v, beta, decay] = [self.q, self.k, self.v, self.beta, self.decay].map(of_each);
        RuleInputs { q, k, v, beta, decay }
    }
}

/// Computes the recurrence from zero, or from a state per document in the order of [`Chunks::order`], `[documents, h, k, v]`.
pub fn forward<B: Backend>(inputs: RuleInputs<B, 3>, chunks: &Chunks<B>, start: Option<Tensor<B, 4>>) -> RuleOutput<B> {
    let parts = Parts::new(inputs, chunks);
    let start = start.unwrap_or_else(|| parts.zeros(chunks.order.len()));
    let (states, ends) = parts.scan(start, chunks);
    let RuleInputs { q, k, .. } = &parts.inputs;
    let of_state = q.clone().mul(parts.since_start.clone()).matmul(states.clone());
    let of_chunk = parts.pairs.products(q, k).matmul(parts.written(&states, &chunks.all()));
    RuleOutput { o: chunks.to_tokens(of_state.add(of_chunk)), states, ends }
}

/// Backward of [`forward`] from its inputs, the states at the start of each chunk, `d_o` `[n, h, v]`, and the gradient of the state after each document;
/// returns also that of the state before it.
pub fn backward<B: Backend>(
    inputs: RuleInputs<B, 3>,
    chunks: &Chunks<B>,
    states: Tensor<B, 4>,
    d_o: Tensor<B, 3>,
    d_ends: Option<Tensor<B, 4>>,
) -> (RuleInputs<B, 3>, Tensor<B, 4>) {
    let parts = Parts::new(inputs, chunks);
    let RuleInputs { q, k, .. } = &parts.inputs;
    let (d_o, written) = (chunks.of_tokens(d_o), parts.written(&states, &chunks.all()));
    let scores = parts.pairs.products(q, k);
    let d_ends = d_ends.unwrap_or_else(|| parts.zeros(chunks.order.len()));
    let d_written = transposed(scores.clone()).matmul(d_o.clone());
    let (d_written, d_ends, d_starts) = parts.scan_backward(d_written, &d_o, d_ends, chunks);

    let read = parts.pairs.backward(d_o.clone().matmul(transposed(written.clone())), scores, q, k);
    let dq_of_state = d_o.matmul(transposed(states.clone())).mul(parts.since_start.clone());
    let dk_of_end = written.clone().matmul(transposed(d_ends.clone())).mul(parts.until_end.clone());
    let from_end = k.clone().mul(dk_of_end.clone());
    let d_log = q.clone().mul(dq_of_state.clone()).sub(from_end.clone()).sum_dim(3).add(read.log);
    let d_whole = transposed(d_ends.mul(states.clone()).sum_dim(3).mul(parts.whole.clone()));
    let d_last = from_end.sum_dim(2).add(d_whole).sum_dim(3);

    let [dv, d_beta, more_dk, more_d_log] = parts.written_backward(d_written, written, states);
    let (dk, d_log) = (read.y.add(dk_of_end).add(more_dk), d_log.add(more_d_log));
    let decay = sums(d_log.flip([2])).flip([2]).add(d_last);
    let gradients = RuleInputs { q: dq_of_state.add(read.x), k: dk, v: dv, beta: d_beta, decay };
    (gradients.map(|gradient| chunks.to_tokens(gradient)), d_starts)
}

/// What does not depend on states; `m` chunks of `c` rows.
struct Parts<B: Backend> {
    inputs: RuleInputs<B, 4>,
    /// Decay from the start of the chunk to each row, that row's included, `[m, h, c, 1]`.
    since_start: Tensor<B, 4>,
    /// Decay from each row to the last one, `[m, h, c, 1]`.
    until_end: Tensor<B, 4>,
    /// Decay of the whole chunk, `[m, h, 1, 1]`.
    whole: Tensor<B, 4>,
    pairs: PairDecays<B>,
    /// What a chunk writes that starts from zero, `[m, h, c, v]`.
    values: Tensor<B, 4>,
    /// Decayed products of keys, strictly lower, `[m, h, c, c]`.
    products: Tensor<B, 4>,
    /// `T`, `[m, h, c, c]`.
    inverse: Tensor<B, 4>,
    /// `T β e^G k`, `[m, h, c, k]`.
    keys: Tensor<B, 4>,
}

impl<B: Backend> Parts<B> {
    fn new(inputs: RuleInputs<B, 3>, chunks: &Chunks<B>) -> Self {
        let inputs = inputs.map(|x| chunks.of_tokens(x));
        let RuleInputs { k, v, beta, decay, .. } = &inputs;
        let rows = decay.dims()[2];
        let log = sums(decay.clone());
        let last = log.clone().narrow(2, rows - 1, 1);
        let pairs = PairDecays::new(&log);
        let (since_start, until_end) = (log.clone().exp(), last.clone().sub(log).exp());
        let products = pairs.products(k, k).mul(strictly_lower(rows, &k.device()));
        let inverse = unit_inverse(&beta.clone().mul(products.clone()));
        let keys = inverse.clone().matmul(beta.clone().mul(since_start.clone()).mul(k.clone()));
        let values = inverse.clone().matmul(beta.clone().mul(v.clone()));
        Self { since_start, until_end, whole: last.exp(), pairs, values, products, inverse, keys, inputs }
    }

    fn zeros(&self, states: usize) -> Tensor<B, 4> {
        let ([_, heads, _, k], v) = (self.inputs.k.dims(), self.inputs.v.dims()[3]);
        Tensor::zeros([states, heads, k, v], (&self.inputs.k.device(), DType::F32))
    }

    /// Returns what a range of chunks writes at its keys, `[.., h, c, v]`.
    fn written(&self, states: &Tensor<B, 4>, range: &Range<usize>) -> Tensor<B, 4> {
        at(&self.values, range).sub(at(&self.keys, range).matmul(states.clone()))
    }

    /// Returns the states at the start of each chunk, and those after each document.
    fn scan(&self, start: Tensor<B, 4>, chunks: &Chunks<B>) -> (Tensor<B, 4>, Tensor<B, 4>) {
        let k_to_end = transposed(self.inputs.k.clone().mul(self.until_end.clone()));
        let (mut state, mut states, mut ends) = (start, Vec::new(), Vec::new());
        for step in &chunks.steps {
            let ended = state.dims()[0] - step.len();
            if ended > 0 {
                ends.push(state.clone().narrow(0, step.len(), ended));
                state = state.narrow(0, 0, step.len());
            }
            states.push(state.clone());
            let written = self.written(&state, step);
            state = at(&self.whole, step).mul(state).add(at(&k_to_end, step).matmul(written));
        }
        ends.push(state);
        ends.reverse();
        (Tensor::cat(states, 0), Tensor::cat(ends, 0))
    }

    /// Backward of [`Parts::scan`] from the part of `dN` that `o` gives, and from the gradients of the states after documents: returns all of `dN`, and
    /// the gradients of the state after each chunk, and of that before each document.
    fn scan_backward(
        &self,
        d_written: Tensor<B, 4>,
        d_o: &Tensor<B, 4>,
        of_documents: Tensor<B, 4>,
        chunks: &Chunks<B>,
    ) -> (Tensor<B, 4>, Tensor<B, 4>, Tensor<B, 4>) {
        let k_to_end = self.inputs.k.clone().mul(self.until_end.clone());
        let of_o = transposed(self.inputs.q.clone().mul(self.since_start.clone())).matmul(d_o.clone());
        let (mut d_state, mut d_writtens, mut d_ends) = (None, Vec::new(), Vec::new());
        for step in chunks.steps.iter().rev() {
            let going_on = d_state.as_ref().map_or(0, |d_state: &Tensor<B, 4>| d_state.dims()[0]);
            let ending = step.len() - going_on;
            let ending = (ending > 0).then(|| of_documents.clone().narrow(0, going_on, ending));
            let d_end = Tensor::cat(d_state.into_iter().chain(ending).collect(), 0);
            let d_written = at(&d_written, step).add(at(&k_to_end, step).matmul(d_end.clone()));
            let d_start = at(&of_o, step).add(at(&self.whole, step).mul(d_end.clone()));
            d_state = Some(d_start.sub(transposed(at(&self.keys, step)).matmul(d_written.clone())));
            d_writtens.push(d_written);
            d_ends.push(d_end);
        }
        d_writtens.reverse();
        d_ends.reverse();
        (Tensor::cat(d_writtens, 0), Tensor::cat(d_ends, 0), d_state.expect("there is a document"))
    }

    /// Backward of [`Parts::written`]: the gradients of values, of `β`, of keys and of `G`.
    fn written_backward(
        &self,
        d_written: Tensor<B, 4>,
        written: Tensor<B, 4>,
        states: Tensor<B, 4>,
    ) -> [Tensor<B, 4>; 4] {
        let RuleInputs { k, v, beta, .. } = &self.inputs;
        let dx = transposed(self.inverse.clone()).matmul(d_written);
        let of_start = dx.clone().matmul(transposed(states)).mul(self.since_start.clone()).neg();
        let strictly_lower = strictly_lower(written.dims()[2], &k.device());
        let da = dx.clone().matmul(transposed(written)).mul(strictly_lower).neg();
        let d_beta = dx.clone().mul(v.clone()).sum_dim(3);
        let d_beta = d_beta.add(of_start.clone().mul(k.clone()).sum_dim(3));
        let d_beta = d_beta.add(da.clone().mul(self.products.clone()).sum_dim(3));
        let of_pairs = self.pairs.backward(da.mul(beta.clone()), self.products.clone(), k, k);
        let of_start = of_start.mul(beta.clone());
        let d_log = k.clone().mul(of_start.clone()).sum_dim(3).add(of_pairs.log);
        [dx.mul(beta.clone()), d_beta, of_pairs.x.add(of_pairs.y).add(of_start), d_log]
    }
}

/// Sums over the rows of a chunk up to each, `[m, h, c, 1]`. In three dimensions, because candle cannot where others are swapped.
fn sums<B: Backend>(x: Tensor<B, 4>) -> Tensor<B, 4> {
    let [chunks, heads, rows, width] = x.dims();
    x.reshape([chunks * heads, rows, width]).cumsum(1).reshape([chunks, heads, rows, width])
}

fn at<B: Backend>(x_mhcd: &Tensor<B, 4>, range: &Range<usize>) -> Tensor<B, 4> {
    x_mhcd.clone().narrow(0, range.start, range.len())
}
