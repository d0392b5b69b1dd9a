//! Head and cross entropy in ordinary Burn operations, over chunks of targets.
//!
//! Loss and gradient are computed together, chunk by chunk: with `p = softmax(h Wᵀ)` and weights `w`,
//! `d_logits = (p - onehot) * w * scale`, `dh = d_logits W`, `dW += d_logitsᵀ h`. A soft cap `z = cap tanh(l / cap)` of the logits
//! multiplies `d_logits` by `1 - (z / cap)²`, and a factor of the logits multiplies it once more. Logits exist for one chunk at a time, and
//! never for positions without a target (as in TRL's chunked loss, but each chunk's gradient is computed at once, so that no chunk is
//! computed twice).
//! Trade-off: a chunk's logits, their exponentials and their gradient exist together, in f32.

use std::ops::Range;

use burn_tensor::{DType, IndexingUpdateOp, Int, Tensor, backend::Backend};

use super::{CrossEntropy, CrossEntropyOptions, LossOps, LossTargets};
pub use crate::dtype::capped;
use crate::dtype::{added, to_dtype, to_f32, weighted};
use crate::linear::WeightGradient;
use crate::weights::Weight;
use crate::weights::reference::dense;

/// Implements [`LossOps::linear_cross_entropy`].
///
/// # Panics
/// If `chunk_tokens` is 0.
pub fn linear_cross_entropy<B: LossOps>(
    hidden_nd: Tensor<B, 2>,
    head: &Weight<B>,
    targets: &LossTargets<B>,
    options: CrossEntropyOptions<B>,
) -> CrossEntropy<B> {
    assert!(options.chunk_tokens > 0, "a chunk of logits needs at least one token");
    let (dtype, device) = (hidden_nd.dtype(), hidden_nd.device());
    let weight_vd = dense(head, dtype);
    let wants_weight = options.weight_gradient.is_needed() && options.gradient_scale.is_some();
    let mut loss_sum = Tensor::<B, 1>::zeros([1], (&device, DType::F32));
    let mut log_probs = Vec::new();
    let mut correct = options.correct.then(|| Tensor::<B, 1>::zeros([1], (&device, DType::F32)));
    let mut d_hidden = options.gradient_scale.map(|_| Tensor::<B, 2>::zeros(hidden_nd.dims(), (&device, dtype)));
    let mut d_weight = match options.weight_gradient {
        WeightGradient::AddTo(sum) => Some(sum),
        WeightGradient::New | WeightGradient::Frozen => None,
    };

    for start in (0..targets.count).step_by(options.chunk_tokens) {
        let length = options.chunk_tokens.min(targets.count - start);
        let positions_c = targets.positions_m.clone().narrow(0, start, length);
        let targets_c = targets.targets_m.clone().narrow(0, start, length);
        let weights_c = targets.weights_m.as_ref().map(|weights| weights.clone().narrow(0, start, length));
        let hidden_cd = hidden_nd.clone().select(0, positions_c.clone());
        let logits_cv = scaled(to_f32(hidden_cd.clone().matmul(weight_vd.clone().transpose())), options.logit_scale);
        correct = correct.map(|count| count.add(highest_at(logits_cv.clone(), targets_c.clone())));
        // The gradient is that of the GEMM's result.
        let gradient_scale = options.gradient_scale.map(|scale| scale * options.logit_scale);
        let (losses_c, d_logits_cv) =
            B::cross_entropy(logits_cv, targets_c, weights_c.clone(), gradient_scale, options.soft_cap);
        if options.log_probs {
            log_probs.push(losses_c.clone().neg());
        }
        loss_sum = loss_sum.add(weighted(losses_c, weights_c).sum());

        let (Some(d_logits_cv), Some(so_far)) = (d_logits_cv, d_hidden.take()) else { continue };
        let d_logits_cv = to_dtype(d_logits_cv, dtype);
        let d_hidden_cd = d_logits_cv.clone().matmul(weight_vd.clone());
        d_hidden = Some(so_far.select_assign(0, positions_c, d_hidden_cd, IndexingUpdateOp::Add));
        if wants_weight {
            let d_rows_cv = columns_of(d_logits_cv, options.weight_rows.as_deref());
            let part = to_f32(d_rows_cv.transpose().matmul(hidden_cd));
            d_weight = Some(match d_weight.take() {
                Some(so_far) => added(so_far, part),
                None => part,
            });
        }
    }
    if wants_weight && d_weight.is_none() {
        let [all, width] = head.shape();
        let rows = options.weight_rows.as_ref().map_or(all, |rows| rows.iter().map(Range::len).sum());
        d_weight = Some(Tensor::zeros([rows, width], (&device, DType::F32)));
    }
    let log_probs_m = options.log_probs.then(|| joined(log_probs, &device));
    CrossEntropy { loss_sum, log_probs_m, correct, d_hidden_nd: d_hidden, d_weight_vd: d_weight }
}

/// Selects the columns of the head rows that train; with `None`, all columns.
fn columns_of<B: Backend>(logits_cv: Tensor<B, 2>, rows: Option<&[Range<usize>]>) -> Tensor<B, 2> {
    let Some(rows) = rows else { return logits_cv };
    let columns = rows.iter().map(|run| logits_cv.clone().narrow(1, run.start, run.len()));
    Tensor::cat(columns.collect(), 1)
}

/// Concatenates the values of all chunks; returns an empty tensor if there was no chunk.
fn joined<B: Backend>(mut chunks: Vec<Tensor<B, 1>>, device: &B::Device) -> Tensor<B, 1> {
    match chunks.len() {
        0 => Tensor::zeros([0], (device, DType::F32)),
        1 => chunks.remove(0),
        _ => Tensor::cat(chunks, 0),
    }
}

/// Counts the rows of logits `[c, v]` whose target has the highest logit, `[1]` f32. A soft cap does not change which logit is highest.
fn highest_at<B: Backend>(logits_cv: Tensor<B, 2>, targets_c: Tensor<B, 1, Int>) -> Tensor<B, 1> {
    let rows = targets_c.dims()[0];
    let target_c1 = logits_cv.clone().gather(1, targets_c.reshape([rows, 1]));
    let is_right_c1 = target_c1.greater_equal(logits_cv.max_dim(1));
    is_right_c1.float().cast(DType::F32).sum()
}

/// Multiplies logits by their factor, if that is not 1.
pub fn scaled<B: Backend, const D: usize>(logits: Tensor<B, D>, logit_scale: f64) -> Tensor<B, D> {
    if logit_scale == 1.0 { logits } else { logits.mul_scalar(logit_scale) }
}

/// Implements [`LossOps::cross_entropy`].
pub fn cross_entropy<B: Backend>(
    logits_cv: Tensor<B, 2>,
    targets_c: Tensor<B, 1, Int>,
    weights_c: Option<Tensor<B, 1>>,
    gradient_scale: Option<f64>,
    soft_cap: Option<f64>,
) -> (Tensor<B, 1>, Option<Tensor<B, 2>>) {
    let (device, [rows, _]) = (logits_cv.device(), logits_cv.dims());
    let logits_cv = capped(logits_cv, soft_cap);
    let slope_cv = soft_cap.filter(|_| gradient_scale.is_some()).map(|cap| {
        let tanh_cv = logits_cv.clone().div_scalar(cap);
        tanh_cv.square().neg().add_scalar(1.0)
    });
    let targets_c1 = targets_c.reshape([rows, 1]);
    let max_c1 = logits_cv.clone().max_dim(1);
    let shifted_cv = logits_cv.sub(max_c1);
    let target_c1 = shifted_cv.clone().gather(1, targets_c1.clone());
    let exponentials_cv = shifted_cv.exp();
    let sum_c1 = exponentials_cv.clone().sum_dim(1);
    let losses_c = sum_c1.clone().log().sub(target_c1).reshape([rows]);
    let gradient = gradient_scale.map(|scale| {
        let ones = || Tensor::ones([rows], (&device, DType::F32));
        let factors_c1 = weights_c.unwrap_or_else(ones).mul_scalar(scale).reshape([rows, 1]);
        let scaled_cv = exponentials_cv.mul(sum_c1.recip().mul(factors_c1.clone()));
        let gradient_cv = scaled_cv.scatter(1, targets_c1, factors_c1.neg(), IndexingUpdateOp::Add);
        weighted(gradient_cv, slope_cv)
    });
    (losses_c, gradient)
}

/// Implements [`LossOps::most_probable`]. Goes through the host, where NaN compares the same on every backend.
pub fn most_probable<B: Backend>(logits_nv: Tensor<B, 2>) -> Tensor<B, 1, Int> {
    let ([_, width], device) = (logits_nv.dims(), logits_nv.device());
    let values = to_f32(logits_nv).into_data().to_vec::<f32>().expect("logits were cast to f32");
    let ids: Vec<i32> = values.chunks(width).map(|row| first_largest(row).map_or(-1, |id| id as i32)).collect();
    Tensor::from_ints(ids.as_slice(), &device)
}

/// Returns the first index of the largest value; `None` if a value is NaN or plus infinity, or all are minus infinity.
pub(super) fn first_largest(values: &[f32]) -> Option<usize> {
    let mut best = 0;
    for (index, &value) in values.iter().enumerate() {
        if value.is_nan() || value == f32::INFINITY {
            return None;
        }
        if value > values[best] {
            best = index;
        }
    }
    values.get(best).filter(|value| value.is_finite()).map(|_| best)
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn_tensor::activation::log_softmax;

    use super::*;
    use crate::testing::{Plain, Recorded, assert_close, leaf, random};

    const VOCABULARY: usize = 31;
    const SCALE: f64 = 0.25;
    const POSITIONS: [i32; 5] = [0, 2, 3, 7, 9];
    const TARGETS: [i32; 5] = [30, 0, 5, 5, 17];

    fn targets(positions: &[i32], targets: &[i32], weights: Option<&[f32]>) -> LossTargets<Plain> {
        let device = Default::default();
        LossTargets {
            positions_m: Tensor::from_ints(positions, &device),
            targets_m: Tensor::from_ints(targets, &device),
            weights_m: weights.map(|weights| Tensor::from_floats(weights, &device)),
            count: positions.len(),
        }
    }

    fn options(chunk_tokens: usize) -> CrossEntropyOptions<Plain> {
        CrossEntropyOptions {
            gradient_scale: Some(SCALE),
            weight_gradient: WeightGradient::New,
            log_probs: true,
            correct: true,
            ..CrossEntropyOptions::new(chunk_tokens)
        }
    }

    #[test]
    fn chunked_loss_and_gradients_equal_autodiff_over_full_logits() {
        let (hidden, weight) = (random::<Plain, 2>(1, [10, 12]), random::<Plain, 2>(2, [VOCABULARY, 12]));
        let device = Default::default();
        let weights = Some([1.0, 0.0, -0.5, 2.0, 0.3]);
        for (weights, logit_scale, soft_cap) in [
            (None, 1.0, None),
            (weights, 1.0, None),
            (None, 1.0, Some(0.8)),
            (None, 0.125, None),
            (weights, 3.0, Some(0.8)),
        ] {
            let (rh, rw) = (leaf(&hidden), leaf(&weight));
            let picked = rh.clone().select(0, Tensor::from_ints(POSITIONS, &device));
            let logits = picked.matmul(rw.clone().transpose());
            let logs = log_softmax(capped(scaled(logits, logit_scale), soft_cap), 1);
            let expected_targets: Tensor<Recorded, 2, Int> =
                Tensor::<_, 1, _>::from_ints(TARGETS, &device).reshape([5, 1]);
            let log_probs = logs.gather(1, expected_targets).reshape([5]);
            let factors = Tensor::<Recorded, 1>::from_floats(weights.unwrap_or([1.0; 5]), &device);
            let loss = log_probs.clone().mul(factors).sum().neg();
            let expected = loss.clone().mul_scalar(SCALE).backward();

            let targets = targets(&POSITIONS, &TARGETS, weights.as_ref().map(<[f32; 5]>::as_slice));
            for chunk_tokens in [1, 2, 5, 64] {
                let head = Weight::Dense(weight.clone());
                let options = CrossEntropyOptions { logit_scale, soft_cap, ..options(chunk_tokens) };
                let found = linear_cross_entropy(hidden.clone(), &head, &targets, options);
                assert_close(found.loss_sum, loss.clone().inner(), 1e-5);
                assert_close(found.log_probs_m.unwrap(), log_probs.clone().inner(), 1e-5);
                assert_close(found.d_hidden_nd.unwrap(), rh.grad(&expected).unwrap(), 1e-5);
                assert_close(found.d_weight_vd.unwrap(), rw.grad(&expected).unwrap(), 1e-5);
            }
        }
    }

    #[test]
    fn the_gradient_of_the_head_is_added_to_a_sum_or_that_of_some_rows() {
        let (hidden, weight) = (random::<Plain, 2>(1, [10, 12]), random::<Plain, 2>(2, [VOCABULARY, 12]));
        let (head, targets) = (Weight::Dense(weight), targets(&POSITIONS, &TARGETS, None));
        let gradient = |options| linear_cross_entropy(hidden.clone(), &head, &targets, options).d_weight_vd.unwrap();
        let whole = gradient(options(2));
        let earlier = random::<Plain, 2>(3, [VOCABULARY, 12]);
        let weight_gradient = WeightGradient::AddTo(earlier.clone());
        let added = gradient(CrossEntropyOptions { weight_gradient, ..options(2) });
        assert_close(added, earlier.add(whole.clone()), 1e-6);
        let rows = vec![29..31, 5..6, 0..2];
        let expected = Tensor::cat(rows.iter().map(|run| whole.clone().narrow(0, run.start, run.len())).collect(), 0);
        let some = gradient(CrossEntropyOptions { weight_rows: Some(rows), ..options(2) });
        assert_close(some, expected, 1e-6);
    }

    #[test]
    fn without_targets_loss_and_gradients_are_zero() {
        let head = Weight::Dense(random::<Plain, 2>(2, [VOCABULARY, 12]));
        let found = linear_cross_entropy(random(1, [4, 12]), &head, &targets(&[], &[], None), options(8));
        assert_eq!(found.loss_sum.into_scalar(), 0.0);
        assert_eq!(found.log_probs_m.unwrap().dims(), [0]);
        assert_eq!(found.d_hidden_nd.unwrap().abs().sum().into_scalar(), 0.0);
        assert_eq!(found.d_weight_vd.unwrap().abs().sum().into_scalar(), 0.0);
    }

    #[test]
    fn loss_of_huge_logits_is_finite() {
        let hidden = Tensor::<Plain, 2>::full([1, 12], 1e4, &Default::default());
        let head = Weight::Dense(random::<Plain, 2>(2, [VOCABULARY, 12]));
        let found = linear_cross_entropy(hidden, &head, &targets(&[0], &[3], None), options(8));
        assert!(found.loss_sum.into_scalar().is_finite());
    }
}
