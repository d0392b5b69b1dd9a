//! Attention in ordinary Burn operations, one document at a time, and long ones in tiles of queries: exact, and its memory is linear in the longest
//! document.
//!
//! Query heads that share a key/value head are stacked along the token axis, so every GEMM is one batched matmul over the key/value
//! heads. The backward recomputes the probabilities from the saved log-sum-exp (Dao et al., FlashAttention, 2022, section 3.1): with
//! `p = exp(s - lse)` and `delta = Σ do * o`, `ds = p * (do vᵀ - delta)`. A soft cap `c = cap tanh(s / cap)` of the scaled scores multiplies
//! `ds` by `1 - (c / cap)²`. A sink of logit `b` only scales the output by `exp(lse - lse')` with `lse' = log(exp(lse) + exp(b))`; given that
//! output and `lse'` the backward is the same, and `db = -Σ exp(b - lse') delta`.
//! Trade-off: all scores of a tile exist at once, including hidden ones; gradients of keys and values are added up over tiles.

use std::ops::Range;

use burn_tensor::{DType, Int, Tensor, backend::Backend};
use firebrick_arch::AttentionSpec;

use super::{AttentionOutput, CachedTokens, Documents, KvCache, Qkv, Sinks, SoftmaxStatistics, StatisticsLayout};
use crate::dtype::{capped, to_dtype, to_f32, weighted};

/// Added to the scores of masked keys; finite, so that a fully masked row never becomes NaN.
const MASKED: f32 = -1e30;

/// Most scores of all heads that exist at once, unless those of one query are more.
pub(crate) const MAX_SCORES: usize = 1 << 26;

/// A batched matmul. Burn's own is exact where it multiplies in f32; on CUDA it rounds operands to 19 bits (TF32).
pub(crate) type Multiply<B> = fn(Tensor<B, 3>, Tensor<B, 3>) -> Tensor<B, 3>;

/// Implements [`crate::AttentionOps::packed_attention`].
pub fn forward<B: Backend>(
    qkv: &Qkv<B>,
    sinks: Option<&Sinks<B>>,
    spec: &AttentionSpec,
    documents: &Documents<B>,
) -> AttentionOutput<B> {
    forward_by(Tensor::matmul, MAX_SCORES, qkv, sinks, spec, documents)
}

/// Computes the forward with another matmul, in tiles with at most so many scores.
pub(crate) fn forward_by<B: Backend>(
    multiply: Multiply<B>,
    max_scores: usize,
    qkv: &Qkv<B>,
    sinks: Option<&Sinks<B>>,
    spec: &AttentionSpec,
    documents: &Documents<B>,
) -> AttentionOutput<B> {
    let (mut outputs, mut log_sums) = (Vec::new(), Vec::new());
    for [queries, keys] in documents.ranges().flat_map(|range| tiles(range, spec, max_scores)) {
        let [k, v] = [&qkv.k, &qkv.v].map(|x| rows(x, &keys));
        let (o, log_sum_ht) = one_sequence(multiply, [rows(&qkv.q, &queries), k, v], sinks, spec);
        outputs.push(o);
        log_sums.push(log_sum_ht);
    }
    let statistics = SoftmaxStatistics { log_sum_exp: join(log_sums, 1), layout: StatisticsLayout::HeadsTokens };
    AttentionOutput { o: join(outputs, 0), statistics }
}

/// Implements [`crate::AttentionOps::packed_attention_backward`].
///
/// # Panics
/// If the statistics are not in the layout of [`forward`].
pub fn backward<B: Backend>(
    qkv: Qkv<B>,
    sinks: Option<&Sinks<B>>,
    spec: &AttentionSpec,
    output: AttentionOutput<B>,
    d_o: Tensor<B, 2>,
    documents: &Documents<B>,
) -> (Qkv<B>, Option<Tensor<B, 1>>) {
    let d_sinks = trained(sinks).map(|sinks| sinks_gradient(sinks, &output, &d_o));
    (backward_by(Tensor::matmul, MAX_SCORES, qkv, spec, output, d_o, documents), d_sinks)
}

pub(crate) fn trained<B: Backend>(sinks: Option<&Sinks<B>>) -> Option<&Sinks<B>> {
    sinks.filter(|sinks| sinks.trains)
}

/// Computes the gradient `[h]` of the logits from the forward's results.
pub(crate) fn sinks_gradient<B: Backend>(
    sinks: &Sinks<B>,
    output: &AttentionOutput<B>,
    d_o: &Tensor<B, 2>,
) -> Tensor<B, 1> {
    let [heads] = sinks.logits_h.dims();
    let delta_htk = heads_first(output.o.clone(), heads).mul(heads_first(d_o.clone(), heads));
    let [_, tokens, _] = delta_htk.dims();
    let delta_ht = delta_htk.sum_dim(2).reshape([heads, tokens]);
    let logits_h1: Tensor<B, 2> = sinks.logits_h.clone().unsqueeze_dim(1);
    let p_ht = logits_h1.sub(output.statistics.log_sum_exp.clone()).exp();
    p_ht.mul(delta_ht).sum_dim(1).neg().reshape([heads])
}

/// Computes the gradients of queries, keys and values in the same way as [`forward_by`].
pub(crate) fn backward_by<B: Backend>(
    multiply: Multiply<B>,
    max_scores: usize,
    qkv: Qkv<B>,
    spec: &AttentionSpec,
    output: AttentionOutput<B>,
    d_o: Tensor<B, 2>,
    documents: &Documents<B>,
) -> Qkv<B> {
    let layout = output.statistics.layout;
    assert_eq!(layout, StatisticsLayout::HeadsTokens, "the reference backward reads what the reference forward wrote");
    let (mut dqs, mut dks, mut dvs) = (Vec::new(), Vec::new(), Vec::new());
    for range in documents.ranges() {
        let mut sums: Option<[Tensor<B, 2>; 2]> = None;
        for [queries, keys] in tiles(range.clone(), spec, max_scores) {
            let of_queries = |x: &Tensor<B, 2>| rows(x, &queries);
            let of_tile = Qkv { q: of_queries(&qkv.q), k: rows(&qkv.k, &keys), v: rows(&qkv.v, &keys) };
            let log_sum_ht = output.statistics.log_sum_exp.clone().narrow(1, queries.start, queries.len());
            let gradients = one_backward(multiply, of_tile, spec, of_queries(&output.o), log_sum_ht, of_queries(&d_o));
            dqs.push(gradients.q);
            let parts = [gradients.k, gradients.v];
            sums = Some(if queries == range { parts } else { added(sums, parts, &range, &keys) });
        }
        let [dk, dv] = sums.expect("a document has a tile");
        dks.push(dk);
        dvs.push(dv);
    }
    Qkv { q: join(dqs, 0), k: join(dks, 0), v: join(dvs, 0) }
}

/// Adds gradients of the keys and values of a tile to those of its document.
fn added<B: Backend>(
    sums: Option<[Tensor<B, 2>; 2]>,
    parts: [Tensor<B, 2>; 2],
    document: &Range<usize>,
    keys: &Range<usize>,
) -> [Tensor<B, 2>; 2] {
    let zeros = |part: &Tensor<B, 2>| Tensor::zeros([document.len(), part.dims()[1]], (&part.device(), part.dtype()));
    let sums = sums.unwrap_or_else(|| parts.each_ref().map(zeros));
    let place = keys.start - document.start..keys.end - document.start;
    let mut parts = parts.into_iter();
    sums.map(|sum| {
        let part = parts.next().expect("two gradients");
        let ranges = [place.clone(), 0..part.dims()[1]];
        sum.clone().slice_assign(ranges.clone(), sum.slice(ranges).add(part))
    })
}

/// Cuts a document into tiles of queries with at most so many scores, each with the keys that it sees.
fn tiles(document: Range<usize>, spec: &AttentionSpec, max_scores: usize) -> impl Iterator<Item = [Range<usize>; 2]> {
    let (window, step) = (spec.window, (max_scores / (spec.heads * document.len().max(1))).max(1));
    document.clone().step_by(step).map(move |start| {
        let queries = start..document.end.min(start + step);
        let hidden = window.map_or(document.start, |window| (start + 1).saturating_sub(window).max(document.start));
        // A document in one tile is as it always was.
        let first = if queries == document { document.start } else { hidden };
        [queries.clone(), first..queries.end]
    })
}

/// Stores new keys and values for [`crate::AttentionOps::cached_attention`].
pub fn store<B: Backend>(cache: &mut KvCache<B>, k: Tensor<B, 2>, v: Tensor<B, 2>, tokens: &CachedTokens<B>) {
    let width = k.dims()[1];
    cache.replace(|[mut keys, mut values]| {
        for (new, in_pass) in tokens.in_pass() {
            let mut from = in_pass.start;
            for to in new.new_rows() {
                let own = from..from + to.len();
                from = own.end;
                keys = keys.slice_assign([to.clone(), 0..width], rows(&k, &own));
                values = values.slice_assign([to, 0..width], rows(&v, &own));
            }
        }
        [keys, values]
    });
}

/// Computes attention over the stored rows for [`crate::AttentionOps::cached_attention`], with this matmul.
pub(crate) fn cached<B: Backend>(
    multiply: Multiply<B>,
    q: Tensor<B, 2>,
    sinks: Option<&Sinks<B>>,
    cache: &KvCache<B>,
    tokens: &CachedTokens<B>,
    spec: &AttentionSpec,
) -> Tensor<B, 2> {
    let [keys, values] = cache.tensors();
    let outputs = tokens.in_pass().flat_map(|(new, in_pass)| {
        // No query attends to keys before the window of the first one.
        let hidden = spec.window.map_or(0, |window| (new.all() + 1).saturating_sub(new.count + window));
        let seen = new.rows(hidden..new.all());
        let gathered = |stored: &Tensor<B, 2>| join(seen.iter().map(|range| rows(stored, range)).collect(), 0);
        let (keys, values) = (gathered(&keys), gathered(&values));
        let [past, _] = keys.dims();
        let tile = |[queries, _]: [Range<usize>; 2]| {
            let seen = 0..past - (in_pass.end - queries.end);
            one_sequence(multiply, [rows(&q, &queries), rows(&keys, &seen), rows(&values, &seen)], sinks, spec).0
        };
        tiles(in_pass.clone(), spec, MAX_SCORES / past.div_ceil(new.count)).map(tile).collect::<Vec<_>>()
    });
    join(outputs.collect(), 0)
}

fn rows<B: Backend>(x: &Tensor<B, 2>, range: &Range<usize>) -> Tensor<B, 2> {
    if range.len() == x.dims()[0] { x.clone() } else { x.clone().narrow(0, range.start, range.len()) }
}

/// Computes attention of the last `n` tokens of a sequence of `t >= n` tokens: `(o [n, h * k], log-sum-exp [h, n])`.
fn one_sequence<B: Backend>(
    multiply: Multiply<B>,
    [q, k, v]: [Tensor<B, 2>; 3],
    sinks: Option<&Sinks<B>>,
    spec: &AttentionSpec,
) -> (Tensor<B, 2>, Tensor<B, 2>) {
    let (dtype, [tokens, _], [past, _]) = (q.dtype(), q.dims(), k.dims());
    let (heads, groups, head_dim) = (spec.heads, spec.kv_heads, spec.head_dim);
    let scores_hnt = masked(capped_scores(multiply, &q, &k, spec), spec);
    let max_hn1 = scores_hnt.clone().max_dim(2);
    let exponentials = scores_hnt.sub(max_hn1.clone()).exp();
    let sum_hn1 = exponentials.clone().sum_dim(2);
    let stacked = exponentials.reshape([groups, heads / groups * tokens, past]);
    let o = multiply(stacked, heads_first(v, groups)).reshape([heads, tokens, head_dim]).div(sum_hn1.clone());
    let log_sum_hn1 = max_hn1.add(sum_hn1.log());
    let (o, log_sum_hn1) = match sinks {
        // A column without a value in the softmax of each row.
        Some(sinks) => {
            let logits_hn1 = sinks.logits_h.clone().reshape([heads as i32, 1, 1]).expand(log_sum_hn1.dims());
            let largest = log_sum_hn1.clone().max_pair(logits_hn1.clone());
            let sum = log_sum_hn1.clone().sub(largest.clone()).exp().add(logits_hn1.sub(largest.clone()).exp());
            let merged_hn1 = sum.log().add(largest);
            (o.mul(log_sum_hn1.sub(merged_hn1.clone()).exp()), merged_hn1)
        }
        None => (o, log_sum_hn1),
    };
    (side_by_side(o, dtype), log_sum_hn1.reshape([heads, tokens]))
}

/// Computes the gradients of the last `n` queries of a document, and their part of those of its `t >= n` keys and values.
fn one_backward<B: Backend>(
    multiply: Multiply<B>,
    Qkv { q, k, v }: Qkv<B>,
    spec: &AttentionSpec,
    o: Tensor<B, 2>,
    log_sum_ht: Tensor<B, 2>,
    d_o: Tensor<B, 2>,
) -> Qkv<B> {
    let (dtype, [tokens, _], [past, _]) = (q.dtype(), q.dims(), k.dims());
    let (heads, groups, head_dim) = (spec.heads, spec.kv_heads, spec.head_dim);
    let stack = |x: Tensor<B, 3>, last: usize| x.reshape([groups, heads / groups * tokens, last]);

    let log_sum: Tensor<B, 3> = log_sum_ht.unsqueeze_dim(2);
    let capped_htt = capped_scores(multiply, &q, &k, spec);
    let slope_htt = spec.soft_cap.map(|cap| capped_htt.clone().div_scalar(cap).square().neg().add_scalar(1.0));
    let p_htt = masked(capped_htt, spec).sub(log_sum).exp();
    let (q_htk, do_htk) = (heads_first(q, heads).mul_scalar(spec.scale), heads_first(d_o, heads));
    let delta_ht1 = do_htk.clone().mul(heads_first(o, heads)).sum_dim(2);
    let (q, d_o, p) = (stack(q_htk, head_dim), stack(do_htk, head_dim), stack(p_htt.clone(), past));
    let (k_gtk, v_gtk) = (heads_first(k, groups), heads_first(v, groups));

    let dv_gtk = multiply(p.transpose(), d_o.clone());
    let dp_htt = multiply(d_o, v_gtk.transpose()).reshape([heads, tokens, past]);
    let ds = stack(weighted(p_htt.mul(dp_htt.sub(delta_ht1)), slope_htt), past);
    let dq_htk = multiply(ds.clone(), k_gtk).mul_scalar(spec.scale).reshape([heads, tokens, head_dim]);
    let dk_gtk = multiply(ds.transpose(), q);
    Qkv { q: side_by_side(dq_htk, dtype), k: side_by_side(dk_gtk, dtype), v: side_by_side(dv_gtk, dtype) }
}

/// Computes scaled scores, soft-capped if there is a cap.
fn capped_scores<B: Backend>(
    multiply: Multiply<B>,
    q: &Tensor<B, 2>,
    k: &Tensor<B, 2>,
    spec: &AttentionSpec,
) -> Tensor<B, 3> {
    let ([tokens, _], [past, _]) = (q.dims(), k.dims());
    let (heads, groups) = (spec.heads, spec.kv_heads);
    let q_hnk = heads_first(q.clone(), heads).mul_scalar(spec.scale);
    let stacked = q_hnk.reshape([groups, heads / groups * tokens, spec.head_dim]);
    let scores = multiply(stacked, heads_first(k.clone(), groups).transpose()).reshape([heads, tokens, past]);
    capped(scores, spec.soft_cap)
}

/// Adds [`MASKED`] to the scores of keys that a query must not attend to.
fn masked<B: Backend>(scores_hnt: Tensor<B, 3>, spec: &AttentionSpec) -> Tensor<B, 3> {
    let ([_, tokens, past], device) = (scores_hnt.dims(), scores_hnt.device());
    let window = spec.window_within(past);
    if tokens == 1 && window.is_none() { scores_hnt } else { scores_hnt.add(mask(tokens, past, window, &device)) }
}

/// Returns the additive mask `[1, n, t]`: 0 where the query attends to the key, else [`MASKED`].
fn mask<B: Backend>(tokens: usize, past: usize, window: Option<usize>, device: &B::Device) -> Tensor<B, 3> {
    let offset = (past - tokens) as i64;
    let index = |range| Tensor::<B, 1, Int>::arange(range, device).float();
    let queries: Tensor<B, 2> = index(offset..past as i64).unsqueeze_dim(1);
    let keys: Tensor<B, 2> = index(0..past as i64).unsqueeze_dim(0);
    // Distance of the key ahead of the query.
    let ahead = keys.sub(queries);
    let mut hidden = ahead.clone().clamp(0.0, 1.0);
    if let Some(window) = window {
        let behind = ahead.neg().sub_scalar(window as f64 - 1.0).clamp(0.0, 1.0);
        hidden = hidden.add(behind);
    }
    to_dtype(hidden.mul_scalar(MASKED).unsqueeze_dim(0), DType::F32)
}

/// Converts `[t, heads * k]` to `[heads, t, k]` f32.
fn heads_first<B: Backend>(x: Tensor<B, 2>, heads: usize) -> Tensor<B, 3> {
    let [tokens, width] = x.dims();
    to_f32(x).reshape([tokens, heads, width / heads]).swap_dims(0, 1)
}

/// Converts `[heads, t, k]` to `[t, heads * k]`.
fn side_by_side<B: Backend>(x: Tensor<B, 3>, dtype: DType) -> Tensor<B, 2> {
    let [heads, tokens, head_dim] = x.dims();
    to_dtype(x.swap_dims(0, 1).reshape([tokens, heads * head_dim]), dtype)
}

fn join<B: Backend, const D: usize>(mut parts: Vec<Tensor<B, D>>, dim: usize) -> Tensor<B, D> {
    if parts.len() == 1 { parts.remove(0) } else { Tensor::cat(parts, dim) }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::attention::NewTokens;
    use crate::testing::{Plain, Recorded, assert_close, backward as recorded_backward, leaf, random};

    fn spec(heads: usize, kv_heads: usize, head_dim: usize, window: Option<usize>) -> AttentionSpec {
        AttentionSpec { window, ..AttentionSpec::new(heads, kv_heads, head_dim) }
    }

    fn documents(cu_seqlens: &[u32]) -> Documents<Plain> {
        Documents::new(cu_seqlens, &Default::default())
    }

    fn inputs(seed: u64, tokens: usize, spec: &AttentionSpec) -> Qkv<Plain> {
        Qkv {
            q: random(seed, [tokens, spec.query_size()]),
            k: random(seed + 1, [tokens, spec.kv_size()]),
            v: random(seed + 2, [tokens, spec.kv_size()]),
        }
    }

    #[test]
    fn attention_backward_equals_autodiff_over_packed_documents_windows_and_sinks() {
        let shapes = [(4, 4, None), (4, 2, None), (4, 1, None), (4, 2, Some(2)), (4, 2, Some(3)), (2, 1, Some(100))];
        for ((heads, groups, window), soft_cap) in shapes.into_iter().zip([None, Some(0.5)].into_iter().cycle()) {
            let spec = AttentionSpec { soft_cap, ..spec(heads, groups, 8, window) };
            let qkv = inputs(1, 13, &spec);
            let d_o = random::<Plain, 2>(4, [13, spec.query_size()]);
            let boundaries = [0, 1, 6, 13];
            let recorded = Qkv { q: leaf(&qkv.q), k: leaf(&qkv.k), v: leaf(&qkv.v) };
            let recorded_logits = leaf(&random::<Plain, 1>(9, [heads]).mul_scalar(3.0));
            let logits = random::<Plain, 1>(9, [heads]).mul_scalar(3.0);
            let has_sinks = window.is_none() || soft_cap.is_some();
            let recorded_sinks = has_sinks.then(|| Sinks { logits_h: recorded_logits.clone(), trains: true });
            let sinks = has_sinks.then(|| Sinks { logits_h: logits, trains: true });
            let on_tape = Documents::<Recorded>::new(&boundaries, &Default::default());
            let expected = recorded_backward(forward(&recorded, recorded_sinks.as_ref(), &spec, &on_tape).o, &d_o);

            let packed = documents(&boundaries);
            let output = forward(&qkv, sinks.as_ref(), &spec, &packed);
            let (gradients, d_logits) = backward(qkv, sinks.as_ref(), &spec, output, d_o, &packed);
            assert_close(gradients.q, recorded.q.grad(&expected).unwrap(), 1e-5);
            assert_close(gradients.k, recorded.k.grad(&expected).unwrap(), 1e-5);
            assert_close(gradients.v, recorded.v.grad(&expected).unwrap(), 1e-5);
            assert_eq!(d_logits.is_some(), has_sinks);
            if let Some(d_logits) = d_logits {
                assert_close(d_logits, recorded_logits.grad(&expected).unwrap(), 1e-5);
            }
        }
    }

    #[test]
    fn tiles_of_queries_compute_what_one_tile_computes() {
        for (window, soft_cap) in [(None, None), (Some(5), None), (None, Some(0.5))] {
            let spec = AttentionSpec { soft_cap, ..spec(4, 2, 8, window) };
            let (qkv, packed) = (inputs(1, 20, &spec), documents(&[0, 3, 20]));
            let d_o = random::<Plain, 2>(4, [20, spec.query_size()]);
            let in_tiles = |max_scores| {
                let output = forward_by(Tensor::matmul, max_scores, &qkv, None, &spec, &packed);
                let (o, d_o) = (output.o.clone(), d_o.clone());
                let Qkv { q, k, v } = backward_by(Tensor::matmul, max_scores, qkv.clone(), &spec, output, d_o, &packed);
                [o, q, k, v]
            };
            // Five queries of the longer document.
            for (tiled, whole) in in_tiles(4 * 17 * 5).into_iter().zip(in_tiles(MAX_SCORES)) {
                assert_close(tiled, whole, 1e-5);
            }
        }
    }

    #[test]
    fn a_document_does_not_see_its_neighbors() {
        let spec = spec(2, 1, 4, None);
        let (own, other) = (inputs(1, 9, &spec), inputs(11, 9, &spec));
        let first = |x: &Tensor<Plain, 2>| x.clone().narrow(0, 0, 4);
        let mixed = |own: &Tensor<Plain, 2>, other: &Tensor<Plain, 2>| {
            Tensor::cat(vec![first(own), other.clone().narrow(0, 4, 5)], 0)
        };
        let packed = documents(&[0, 4, 9]);
        let with_own = forward(&own, None, &spec, &packed).o;
        let changed = Qkv { q: mixed(&own.q, &other.q), k: mixed(&own.k, &other.k), v: mixed(&own.v, &other.v) };
        let with_other = forward(&changed, None, &spec, &packed).o;
        assert_eq!(first(&with_own).into_data(), first(&with_other).into_data(), "bit for bit");
    }

    #[test]
    fn a_query_sees_its_window_and_nothing_before_it() {
        let window = 3;
        let spec = spec(2, 1, 4, Some(window));
        let qkv = inputs(1, 8, &spec);
        let packed = documents(&[0, 8]);
        let output = forward(&qkv, None, &spec, &packed).o;
        for query in 0..8 {
            let seen = (query + 1usize).saturating_sub(window)..query + 1;
            let alone = Qkv { q: qkv.q.clone().narrow(0, query, 1), k: rows(&qkv.k, &seen), v: rows(&qkv.v, &seen) };
            let (expected, _) = one_sequence(Tensor::matmul, [alone.q, alone.k, alone.v], None, &spec);
            assert_close(output.clone().narrow(0, query, 1), expected, 1e-5);
        }
    }

    #[test]
    fn a_sink_takes_its_share_of_a_querys_attention_and_adds_no_value() {
        let spec = spec(2, 1, 4, None);
        let (qkv, packed) = (inputs(1, 1, &spec), documents(&[0, 1]));
        let score = |head: usize| {
            let q = qkv.q.clone().narrow(1, 4 * head, 4);
            q.mul(qkv.k.clone()).sum().into_scalar() * spec.scale as f32
        };
        let logits = [-0.5_f32, 2.0];
        let sinks = Sinks { logits_h: Tensor::from_floats(logits, &Default::default()), trains: false };
        let output = forward(&qkv, Some(&sinks), &spec, &packed);
        for (head, logit) in logits.into_iter().enumerate() {
            let share = 1.0 / (1.0 + (logit - score(head)).exp());
            assert_close(output.o.clone().narrow(1, 4 * head, 4), qkv.v.clone().mul_scalar(share), 1e-6);
        }
        assert!(backward(qkv.clone(), Some(&sinks), &spec, output, qkv.q.clone(), &packed).1.is_none(), "frozen");
    }

    #[test]
    fn cached_attention_equals_attention_over_the_whole_sequence() {
        for window in [None, Some(1), Some(4), Some(7)] {
            let spec = AttentionSpec { soft_cap: Some(0.7), ..spec(4, 2, 8, window) };
            let qkv = inputs(1, 7, &spec);
            let sinks = Sinks { logits_h: random::<Plain, 1>(9, [4]), trains: false };
            let whole = forward(&qkv, Some(&sinks), &spec, &documents(&[0, 7])).o;
            for new in [1, 3, 7] {
                let mut cache = KvCache::new([2 * crate::PAGE_ROWS, spec.kv_size()], DType::F32, &Default::default());
                let tokens = |past, count| {
                    CachedTokens::new(vec![NewTokens { pages: vec![1], past, count }], &Default::default())
                };
                store(&mut cache, qkv.k.clone(), qkv.v.clone(), &tokens(0, 7));
                let newest = qkv.q.clone().narrow(0, 7 - new, new);
                let newest = cached(Tensor::matmul, newest, Some(&sinks), &cache, &tokens(7 - new, new), &spec);
                assert_close(newest, whole.clone().narrow(0, 7 - new, new), 1e-5);
            }
        }
    }
}
