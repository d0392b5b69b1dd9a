//! Output projection and cross entropy in one pass over chunks of trained positions.
//!
//! Loss and gradient are made together, chunk by chunk: with `p = softmax(h Wᵀ)`, `d_logits = (p - onehot) * scale`,
//! `dh = d_logits W`, `dW += d_logitsᵀ h`. Logits exist for one chunk at a time, and never for positions that do not train
//! (the trick of TRL's chunked loss, with the gradient taken on the spot so that no chunk is computed twice).

use burn_tensor::{IndexingUpdateOp, Int, Tensor, backend::Backend};

use super::linear::dense;
use super::{to_dtype, to_f32};
use crate::{CrossEntropy, CrossEntropyOptions, Kernels, TrainedPositions, Weight};

/// See [`Kernels::linear_cross_entropy`].
pub fn forward<B: Kernels>(
    hidden_nd: Tensor<B, 2>,
    head: &Weight<B>,
    trained: &TrainedPositions<B>,
    options: CrossEntropyOptions,
) -> CrossEntropy<B> {
    assert!(options.chunk_tokens > 0, "a chunk of logits needs at least one token");
    let (dtype, device) = (hidden_nd.dtype(), hidden_nd.device());
    let weight_vd = dense(head, dtype);
    let mut loss_sum = Tensor::<B, 1>::zeros([1], &device);
    let mut d_hidden = options.gradient_scale.map(|_| Tensor::<B, 2>::zeros(hidden_nd.dims(), (&device, dtype)));
    let mut d_weight: Option<Tensor<B, 2>> = None;

    for start in (0..trained.count).step_by(options.chunk_tokens) {
        let length = options.chunk_tokens.min(trained.count - start);
        let positions_c = trained.positions_m.clone().narrow(0, start, length);
        let targets_c = trained.targets_m.clone().narrow(0, start, length);
        let hidden_cd = hidden_nd.clone().select(0, positions_c.clone());
        let logits_cv = to_f32(hidden_cd.clone().matmul(weight_vd.clone().transpose()));
        let (chunk_loss, d_logits_cv) = B::cross_entropy(logits_cv, targets_c, options.gradient_scale);
        loss_sum = loss_sum.add(chunk_loss);

        let (Some(d_logits_cv), Some(so_far)) = (d_logits_cv, d_hidden.take()) else { continue };
        let d_logits_cv = to_dtype(d_logits_cv, dtype);
        let d_hidden_cd = d_logits_cv.clone().matmul(weight_vd.clone());
        d_hidden = Some(so_far.select_assign(0, positions_c, d_hidden_cd, IndexingUpdateOp::Add));
        if options.weight_gradient {
            let part = to_f32(d_logits_cv.transpose().matmul(hidden_cd));
            d_weight = Some(match d_weight.take() {
                Some(so_far) => so_far.add(part),
                None => part,
            });
        }
    }
    if options.weight_gradient && options.gradient_scale.is_some() && d_weight.is_none() {
        d_weight = Some(Tensor::zeros(head.shape(), &device));
    }
    CrossEntropy { loss_sum, d_hidden_nd: d_hidden, d_weight_vd: d_weight }
}

/// See [`Kernels::cross_entropy`].
pub fn of_logits<B: Backend>(
    logits_cv: Tensor<B, 2>,
    targets_c: Tensor<B, 1, Int>,
    gradient_scale: Option<f64>,
) -> (Tensor<B, 1>, Option<Tensor<B, 2>>) {
    let (device, [rows, _]) = (logits_cv.device(), logits_cv.dims());
    let targets_c1 = targets_c.reshape([rows, 1]);
    let max_c1 = logits_cv.clone().max_dim(1);
    let shifted_cv = logits_cv.sub(max_c1);
    let target_c1 = shifted_cv.clone().gather(1, targets_c1.clone());
    let exponentials_cv = shifted_cv.exp();
    let sum_c1 = exponentials_cv.clone().sum_dim(1);
    let loss_sum = sum_c1.clone().log().sub(target_c1).sum();
    let gradient = gradient_scale.map(|scale| {
        let minus_one = Tensor::full([rows, 1], -scale, &device);
        let scaled_cv = exponentials_cv.mul(sum_c1.recip().mul_scalar(scale));
        scaled_cv.scatter(1, targets_c1, minus_one, IndexingUpdateOp::Add)
    });
    (loss_sum, gradient)
}

#[cfg(test)]
mod tests {
    use burn_tensor::activation::log_softmax;

    use super::super::testing::{Plain, Recorded, assert_close, leaf, random};
    use super::*;

    const VOCABULARY: usize = 31;
    const SCALE: f64 = 0.25;

    fn trained(positions: &[i32], targets: &[i32]) -> TrainedPositions<Plain> {
        let device = Default::default();
        TrainedPositions {
            positions_m: Tensor::from_ints(positions, &device),
            targets_m: Tensor::from_ints(targets, &device),
            count: positions.len(),
        }
    }

    fn options(chunk_tokens: usize) -> CrossEntropyOptions {
        CrossEntropyOptions { chunk_tokens, gradient_scale: Some(SCALE), weight_gradient: true }
    }

    #[test]
    fn chunked_loss_and_gradients_equal_autodiff_over_full_logits() {
        let (hidden, weight) = (random::<Plain, 2>(1, [10, 12]), random::<Plain, 2>(2, [VOCABULARY, 12]));
        let (positions, targets) = ([0, 2, 3, 7, 9], [30, 0, 5, 5, 17]);
        let (rh, rw) = (leaf(&hidden), leaf(&weight));
        let device = Default::default();
        let picked = rh.clone().select(0, Tensor::from_ints(positions, &device));
        let logs = log_softmax(picked.matmul(rw.clone().transpose()), 1);
        let wanted: Tensor<Recorded, 2, burn_tensor::Int> =
            Tensor::<_, 1, _>::from_ints(targets, &device).reshape([5, 1]);
        let loss = logs.gather(1, wanted).sum().neg();
        let expected = loss.clone().mul_scalar(SCALE).backward();

        for chunk_tokens in [1, 2, 5, 64] {
            let head = Weight::Dense(weight.clone());
            let found = forward(hidden.clone(), &head, &trained(&positions, &targets), options(chunk_tokens));
            assert_close(found.loss_sum, loss.clone().inner(), 1e-5);
            assert_close(found.d_hidden_nd.unwrap(), rh.grad(&expected).unwrap(), 1e-5);
            assert_close(found.d_weight_vd.unwrap(), rw.grad(&expected).unwrap(), 1e-5);
        }
    }

    #[test]
    fn untrained_positions_get_no_gradient() {
        let head = Weight::Dense(random::<Plain, 2>(2, [VOCABULARY, 12]));
        let found = forward(random(1, [4, 12]), &head, &trained(&[2], &[7]), options(8));
        let d_hidden: Vec<f32> = found.d_hidden_nd.unwrap().into_data().to_vec().unwrap();
        for (row, values) in d_hidden.chunks(12).enumerate() {
            assert_eq!(values.iter().any(|&value| value != 0.0), row == 2, "row {row}");
        }
    }

    #[test]
    fn loss_of_huge_logits_is_finite() {
        let hidden = Tensor::<Plain, 2>::full([1, 12], 1e4, &Default::default());
        let head = Weight::Dense(random::<Plain, 2>(2, [VOCABULARY, 12]));
        let found = forward(hidden, &head, &trained(&[0], &[3]), options(8));
        assert!(found.loss_sum.into_scalar().is_finite());
    }
}
