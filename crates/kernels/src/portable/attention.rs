//! Causal grouped-query attention, one document at a time: exact, and quadratic only in the longest document.
//!
//! Query heads that share a key/value head are stacked along the token axis, so every product is one batched matmul over the
//! key/value heads. The backward recomputes the probabilities from the saved log-sum-exp (Dao et al., FlashAttention, 2022,
//! section 3.1): with `p = exp(s - lse)` and `delta = Σ do * o`, `ds = p * (do vᵀ - delta)`.

use burn_tensor::{DType, Int, Tensor, backend::Backend};

use super::{to_dtype, to_f32};
use crate::{AttentionOutput, Documents};

/// Added to the score of a key that the query must not see; finite, so that a masked row never becomes NaN.
const MASKED: f32 = -1e30;

/// See [`crate::Kernels::packed_attention`].
pub fn forward<B: Backend>(
    q_nhk: Tensor<B, 3>,
    k_ngk: Tensor<B, 3>,
    v_ngk: Tensor<B, 3>,
    documents: &Documents<B>,
) -> AttentionOutput<B> {
    let (mut outputs, mut log_sums) = (Vec::new(), Vec::new());
    for range in documents.ranges() {
        let part = |x: &Tensor<B, 3>| x.clone().narrow(0, range.start, range.len());
        let (o_thk, lse_ht) = one_sequence(part(&q_nhk), part(&k_ngk), part(&v_ngk));
        outputs.push(o_thk);
        log_sums.push(lse_ht);
    }
    AttentionOutput { o_nhk: join(outputs, 0), log_sum_exp_hn: join(log_sums, 1) }
}

/// See [`crate::Kernels::packed_attention_backward`].
pub fn backward<B: Backend>(
    q_nhk: Tensor<B, 3>,
    k_ngk: Tensor<B, 3>,
    v_ngk: Tensor<B, 3>,
    output: &AttentionOutput<B>,
    do_nhk: Tensor<B, 3>,
    documents: &Documents<B>,
) -> (Tensor<B, 3>, Tensor<B, 3>, Tensor<B, 3>) {
    let (mut dqs, mut dks, mut dvs) = (Vec::new(), Vec::new(), Vec::new());
    for range in documents.ranges() {
        let part = |x: &Tensor<B, 3>| x.clone().narrow(0, range.start, range.len());
        let log_sum = output.log_sum_exp_hn.clone().narrow(1, range.start, range.len());
        let (dq, dk, dv) =
            one_backward(part(&q_nhk), part(&k_ngk), part(&v_ngk), part(&output.o_nhk), log_sum, part(&do_nhk));
        dqs.push(dq);
        dks.push(dk);
        dvs.push(dv);
    }
    (join(dqs, 0), join(dks, 0), join(dvs, 0))
}

/// Attention of the last `n` tokens of a sequence of `t >= n` tokens: `(o [n, h, k], log-sum-exp [h, n])`.
pub fn one_sequence<B: Backend>(
    q_nhk: Tensor<B, 3>,
    k_tgk: Tensor<B, 3>,
    v_tgk: Tensor<B, 3>,
) -> (Tensor<B, 3>, Tensor<B, 2>) {
    let (dtype, [tokens, heads, width]) = (q_nhk.dtype(), q_nhk.dims());
    let groups = k_tgk.dims()[1];
    let scores = scores(&q_nhk, &k_tgk);
    let max_hn1 = scores.clone().max_dim(2);
    let exponentials = scores.sub(max_hn1.clone()).exp();
    let sum_hn1 = exponentials.clone().sum_dim(2);
    let past = exponentials.dims()[2];
    let stacked = exponentials.reshape([groups, heads / groups * tokens, past]);
    let o_hnk = stacked.matmul(heads_first(to_f32(v_tgk))).reshape([heads, tokens, width]).div(sum_hn1.clone());
    let log_sum_hn = max_hn1.add(sum_hn1.log()).reshape([heads, tokens]);
    (to_dtype(o_hnk.swap_dims(0, 1), dtype), log_sum_hn)
}

fn one_backward<B: Backend>(
    q_thk: Tensor<B, 3>,
    k_tgk: Tensor<B, 3>,
    v_tgk: Tensor<B, 3>,
    o_thk: Tensor<B, 3>,
    log_sum_ht: Tensor<B, 2>,
    do_thk: Tensor<B, 3>,
) -> (Tensor<B, 3>, Tensor<B, 3>, Tensor<B, 3>) {
    let (dtype, [tokens, heads, width]) = (q_thk.dtype(), q_thk.dims());
    let groups = k_tgk.dims()[1];
    let stack = |x: Tensor<B, 3>, last: usize| x.reshape([groups, heads / groups * tokens, last]);
    let scale = 1.0 / (width as f64).sqrt();

    let log_sum: Tensor<B, 3> = log_sum_ht.unsqueeze_dim(2);
    let p_htt = scores(&q_thk, &k_tgk).sub(log_sum).exp();
    let (q_htk, do_htk) = (heads_first(to_f32(q_thk)).mul_scalar(scale), heads_first(to_f32(do_thk)));
    let delta_ht1 = do_htk.clone().mul(heads_first(to_f32(o_thk))).sum_dim(2);
    let (q, d_o, p) = (stack(q_htk, width), stack(do_htk, width), stack(p_htt.clone(), tokens));
    let (k_gtk, v_gtk) = (heads_first(to_f32(k_tgk)), heads_first(to_f32(v_tgk)));

    let dv_gtk = p.transpose().matmul(d_o.clone());
    let dp_htt = d_o.matmul(v_gtk.transpose()).reshape([heads, tokens, tokens]);
    let ds = stack(p_htt.mul(dp_htt.sub(delta_ht1)), tokens);
    let dq_htk = ds.clone().matmul(k_gtk).mul_scalar(scale).reshape([heads, tokens, width]);
    let dk_gtk = ds.transpose().matmul(q);
    let back = |x: Tensor<B, 3>| to_dtype(x.swap_dims(0, 1), dtype);
    (back(dq_htk), back(dk_gtk), back(dv_gtk))
}

/// Scaled, causally masked scores `[h, n, t]` f32 of the last `n` of `t` tokens.
fn scores<B: Backend>(q_nhk: &Tensor<B, 3>, k_tgk: &Tensor<B, 3>) -> Tensor<B, 3> {
    let [tokens, heads, width] = q_nhk.dims();
    let [past, groups, _] = k_tgk.dims();
    let q_hnk = heads_first(to_f32(q_nhk.clone())).mul_scalar(1.0 / (width as f64).sqrt());
    let stacked = q_hnk.reshape([groups, heads / groups * tokens, width]);
    let scores = stacked.matmul(heads_first(to_f32(k_tgk.clone())).transpose()).reshape([heads, tokens, past]);
    if tokens == 1 { scores } else { scores.add(causal_mask(tokens, past, &q_nhk.device())) }
}

/// `[1, n, t]`: 0 where the key is at or before the query, else [`MASKED`].
fn causal_mask<B: Backend>(tokens: usize, past: usize, device: &B::Device) -> Tensor<B, 3> {
    let offset = (past - tokens) as i64;
    let index = |range| Tensor::<B, 1, Int>::arange(range, device).float();
    let queries: Tensor<B, 2> = index(offset..past as i64).unsqueeze_dim(1);
    let keys: Tensor<B, 2> = index(0..past as i64).unsqueeze_dim(0);
    let hidden = keys.sub(queries).clamp(0.0, 1.0);
    to_dtype(hidden.mul_scalar(MASKED).unsqueeze_dim(0), DType::F32)
}

/// `[t, heads, k]` to `[heads, t, k]`.
fn heads_first<B: Backend>(x_thk: Tensor<B, 3>) -> Tensor<B, 3> {
    x_thk.swap_dims(0, 1)
}

fn join<B: Backend, const D: usize>(mut parts: Vec<Tensor<B, D>>, dim: usize) -> Tensor<B, D> {
    if parts.len() == 1 { parts.remove(0) } else { Tensor::cat(parts, dim) }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Plain, Recorded, assert_close, backward as recorded_backward, leaf, random};
    use super::*;

    fn documents(cu_seqlens: &[u32]) -> Documents<Plain> {
        Documents::new(cu_seqlens, &Default::default())
    }

    #[test]
    fn attention_backward_equals_autodiff_over_packed_documents() {
        for (heads, groups) in [(4, 4), (4, 2), (4, 1)] {
            let q = random::<Plain, 3>(1, [13, heads, 8]);
            let (k, v) = (random::<Plain, 3>(2, [13, groups, 8]), random::<Plain, 3>(3, [13, groups, 8]));
            let d_o = random::<Plain, 3>(4, [13, heads, 8]);
            let boundaries = [0, 1, 6, 13];
            let (rq, rk, rv) = (leaf(&q), leaf(&k), leaf(&v));
            let recorded = Documents::<Recorded>::new(&boundaries, &Default::default());
            let expected = recorded_backward(forward(rq.clone(), rk.clone(), rv.clone(), &recorded).o_nhk, &d_o);

            let packed = documents(&boundaries);
            let output = forward(q.clone(), k.clone(), v.clone(), &packed);
            let (dq, dk, dv) = backward(q, k, v, &output, d_o, &packed);
            assert_close(dq, rq.grad(&expected).unwrap(), 1e-5);
            assert_close(dk, rk.grad(&expected).unwrap(), 1e-5);
            assert_close(dv, rv.grad(&expected).unwrap(), 1e-5);
        }
    }

    #[test]
    fn attention_backward_equals_finite_differences() {
        let (k, v) = (random::<Plain, 3>(2, [4, 1, 4]), random::<Plain, 3>(3, [4, 1, 4]));
        let (q, d_o, packed) = (random::<Plain, 3>(1, [4, 2, 4]), random::<Plain, 3>(4, [4, 2, 4]), documents(&[0, 4]));
        let loss =
            |q: Tensor<Plain, 3>| forward(q, k.clone(), v.clone(), &packed).o_nhk.mul(d_o.clone()).sum().into_scalar();
        let output = forward(q.clone(), k.clone(), v.clone(), &packed);
        let (dq, _, _) = backward(q.clone(), k.clone(), v.clone(), &output, d_o.clone(), &packed);
        let dq: Vec<f32> = dq.into_data().to_vec().unwrap();
        let values: Vec<f32> = q.into_data().to_vec().unwrap();
        let moved = |index: usize, by: f32| {
            let mut values = values.clone();
            values[index] += by;
            Tensor::<Plain, 1>::from_floats(values.as_slice(), &Default::default()).reshape([4, 2, 4])
        };
        for (index, &expected) in dq.iter().enumerate() {
            let slope = (loss(moved(index, 1e-2)) - loss(moved(index, -1e-2))) / 2e-2;
            assert!((slope - expected).abs() < 2e-3, "element {index}: slope {slope}, gradient {expected}");
        }
    }

    #[test]
    fn a_document_does_not_see_its_neighbours() {
        let inputs =
            |seed| (random::<Plain, 3>(seed, [9, 2, 4]), random(seed + 1, [9, 1, 4]), random(seed + 2, [9, 1, 4]));
        let ((q, k, v), (other_q, other_k, other_v)) = (inputs(1), inputs(11));
        let first = |x: &Tensor<Plain, 3>| x.clone().narrow(0, 0, 4);
        let mixed =
            |own: &Tensor<Plain, 3>, other: Tensor<Plain, 3>| Tensor::cat(vec![first(own), other.narrow(0, 4, 5)], 0);
        let packed = documents(&[0, 4, 9]);
        let with_own = forward(q.clone(), k.clone(), v.clone(), &packed).o_nhk;
        let with_other = forward(mixed(&q, other_q), mixed(&k, other_k), mixed(&v, other_v), &packed).o_nhk;
        assert_eq!(first(&with_own).into_data(), first(&with_other).into_data(), "bit for bit");
    }

    #[test]
    fn attention_with_past_equals_attention_over_the_whole_sequence() {
        let q = random::<Plain, 3>(1, [7, 4, 8]);
        let (k, v) = (random::<Plain, 3>(2, [7, 2, 8]), random::<Plain, 3>(3, [7, 2, 8]));
        let whole = forward(q.clone(), k.clone(), v.clone(), &documents(&[0, 7])).o_nhk;
        for new in [1, 3] {
            let (newest, _) = one_sequence(q.clone().narrow(0, 7 - new, new), k.clone(), v.clone());
            assert_close(newest, whole.clone().narrow(0, 7 - new, new), 1e-5);
        }
    }
}
