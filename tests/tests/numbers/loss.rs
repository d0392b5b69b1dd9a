//! The fused head and cross entropy against torch: weights per token, log-probabilities, gradients of hidden states and head.

use burn_tensor::{Int, Tensor};
use firebrick_kernels::{CrossEntropy, CrossEntropyOptions, Kernels, LossTargets, Weight, WeightGradient};
use firebrick_tests::{Golden, host, on_every_backend, relative_difference};

const HIDDEN: [usize; 2] = [12, 8];
const HEAD: [usize; 2] = [20, 8];

fn matrix<B: Kernels>(golden: &Golden, key: &str, shape: [usize; 2]) -> Tensor<B, 2> {
    Tensor::<B, 1>::from_floats(golden.f32s(key).as_slice(), &B::Device::default()).reshape(shape)
}

/// Lists the positions that count, as `Decoder::upload` does.
fn counted(targets: &[i64]) -> Vec<usize> {
    (0..targets.len()).filter(|&position| targets[position] >= 0).collect()
}

fn targets<B: Kernels>(golden: &Golden) -> LossTargets<B> {
    let (device, targets, weights) = (B::Device::default(), golden.i64s("targets"), golden.f32s("weights"));
    let positions = counted(&targets);
    let ints = |values: Vec<i32>| Tensor::<B, 1, Int>::from_ints(values.as_slice(), &device);
    let weights: Vec<f32> = positions.iter().map(|&position| weights[position]).collect();
    LossTargets {
        count: positions.len(),
        positions_m: ints(positions.iter().map(|&position| position as i32).collect()),
        targets_m: ints(positions.iter().map(|&position| targets[position] as i32).collect()),
        weights_m: Some(Tensor::from_floats(weights.as_slice(), &device)),
    }
}

fn cross_entropy<B: Kernels>(golden: &Golden, chunk_tokens: usize, gradient_scale: Option<f64>) -> CrossEntropy<B> {
    let head = Weight::Dense(matrix(golden, "head", HEAD));
    let weight_gradient = if gradient_scale.is_some() { WeightGradient::New } else { WeightGradient::Frozen };
    let sum = CrossEntropyOptions::new(chunk_tokens);
    let options = CrossEntropyOptions { gradient_scale, weight_gradient, log_probs: true, ..sum };
    B::section(&B::Device::default(), || {
        B::linear_cross_entropy(matrix(golden, "hidden", HIDDEN), &head, &targets(golden), options)
    })
}

fn weighted_loss<B: Kernels>() {
    let golden = Golden::open("loss-weights");
    let positions = counted(&golden.i64s("targets"));
    let expected: Vec<f32> = positions.iter().map(|&position| golden.f32s("target_log_probs")[position]).collect();
    // One chunk, chunks with a short last one, and one chunk per token.
    for chunk_tokens in [64, 4, 3, 1] {
        let ours = cross_entropy::<B>(&golden, chunk_tokens, Some(1.0));
        let checks = [
            (ours.loss_sum, golden.f32s("loss"), "loss"),
            (ours.log_probs_m.expect("they were requested"), expected.clone(), "log-probabilities"),
            (flat(ours.d_hidden_nd), golden.f32s("grad.hidden"), "gradient of the hidden states"),
            (flat(ours.d_weight_vd), golden.f32s("grad.head"), "gradient of the head"),
        ];
        for (ours, expected, what) in checks {
            let difference = relative_difference(&host(ours), &expected);
            assert!(difference < 1e-5, "{what} in chunks of {chunk_tokens}: {difference:e}");
        }
    }
}

fn flat<B: Kernels>(gradient: Option<Tensor<B, 2>>) -> Tensor<B, 1> {
    let gradient = gradient.expect("there is a gradient scale");
    let [rows, columns] = gradient.dims();
    gradient.reshape([rows * columns])
}

on_every_backend!(weighted_losses_log_probabilities_and_gradients_equal_those_of_torch, weighted_loss);

fn scale_and_sums<B: Kernels>() {
    let golden = Golden::open("loss-weights");
    let whole = cross_entropy::<B>(&golden, 4, Some(1.0));
    let scaled = cross_entropy::<B>(&golden, 4, Some(0.25));
    let without = cross_entropy::<B>(&golden, 4, None);
    assert!(without.d_hidden_nd.is_none() && without.d_weight_vd.is_none());
    assert_eq!(host(without.loss_sum), host(whole.loss_sum.clone()));
    assert_eq!(host(scaled.loss_sum), host(whole.loss_sum), "the loss is not scaled");
    for (scaled, whole) in [(scaled.d_hidden_nd, whole.d_hidden_nd), (scaled.d_weight_vd, whole.d_weight_vd)] {
        let expected: Vec<f32> = host(flat(whole)).into_iter().map(|value| 0.25 * value).collect();
        assert!(relative_difference(&host(flat(scaled)), &expected) < 1e-6);
    }
}

on_every_backend!(the_gradient_scale_scales_gradients_and_not_the_loss, scale_and_sums);
