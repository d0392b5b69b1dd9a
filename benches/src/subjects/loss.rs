//! Cross entropy of logits, and the head with its loss in chunks, with gradients.
//!
//! Trade-off: for the head, the loss is checked only through the gradient of the hidden states at both ends.

use std::ops::Range;

use burn_tensor::{DType, Int, Tensor, TensorData};
use firebrick_kernels::backends::Flex;
use firebrick_kernels::loss::reference;
use firebrick_kernels::{CrossEntropyOptions, Kernels, LossTargets, Weight};

use super::{Scale, Setting, at_edges, edges, random, tolerance};
use crate::case::{Case, Comparison, Output, Prepared, axis, key, to_reference, work};
use crate::models::{LLAMA_1B, SMOLLM2_135M};

/// Rows of logits at a time.
const CHUNK: usize = 1024;
const GRADIENT_SCALE: f64 = 1e-2;

pub(super) fn cases<B: Kernels>(setting: &Setting<B>) -> Vec<Case<B>> {
    let model = if setting.scale == Scale::Small { SMOLLM2_135M } else { LLAMA_1B };
    let (hidden, vocab, name) = (model.hidden, model.vocab, model.name());
    let (few, many) = match setting.scale {
        Scale::Small => (64, 128),
        Scale::Medium => (256, 512),
        Scale::Large => (1024, 4096),
    };
    let counts = setting.sweep(&[few], &[few / 4, few, few * 2]);
    let mut cases: Vec<_> = counts.into_iter().map(|count| of_logits(setting, [count, vocab], &name)).collect();
    cases.push(of_head(setting, [many, hidden, vocab], &name));
    cases
}

fn of_logits<B: Kernels>(setting: &Setting<B>, [count, vocab]: [usize; 2], model: &str) -> Case<B> {
    let (device, values) = (setting.device.clone(), (count * vocab) as f64);
    let sizes = [("tokens", count), ("vocab", vocab)];
    let prepare = move || {
        let logits = random::<B, 2>([count, vocab], 4.0, DType::F32, &device);
        let on_device = integers::<B>(&targets(0..count, vocab), &device);
        let (input, device) = (logits.clone(), device.clone());
        let call = move || {
            let work = || B::cross_entropy(input.clone(), on_device.clone(), None, Some(GRADIENT_SCALE), None);
            let (loss_c, gradient_cv) = B::section(&device, work);
            Output::Tensors(vec![loss_c.unsqueeze_dim(1), gradient_cv.expect("a scale was given")])
        };
        let check = move |output: Output<B>| {
            let integers = integers::<Flex>(&targets_at_edges(count, vocab), &Default::default());
            let logits = to_reference(at_edges(&logits, 0));
            let (loss_c, gradient_cv) = reference::cross_entropy(logits, integers, None, Some(GRADIENT_SCALE), None);
            let got = output.tensors();
            vec![
                Comparison::of_tensors("losses", at_edges(&got[0], 0), loss_c.unsqueeze_dim(1)),
                Comparison::of_tensors("gradient", at_edges(&got[1], 0), gradient_cv.expect("a scale was given")),
            ]
        };
        Prepared::new(call, check)
    };
    Case {
        key: key("cross_entropy", "with_gradient", &format!("logits of {model}"), "f32", &sizes),
        work: work(count as f64, "tokens", 6.0 * values, 8.0 * values),
        axis: axis("tokens", count),
        tolerance: tolerance(DType::F32),
        set_bytes: 4.0 * values,
        prepare: Box::new(prepare),
    }
}

fn of_head<B: Kernels>(setting: &Setting<B>, [count, hidden, vocab]: [usize; 3], model: &str) -> Case<B> {
    let (device, (dtype, format)) = (setting.device.clone(), setting.main_format());
    let product = 2.0 * count as f64 * hidden as f64 * vocab as f64;
    let weight_bytes = (dtype.size() * hidden * vocab) as f64;
    let sizes = [("tokens", count), ("hidden", hidden), ("vocab", vocab)];
    let prepare = move || {
        // Logits of a few units, as in a model that has learned something.
        let states = random::<B, 2>([count, hidden], 1.0, dtype, &device);
        let weight = random::<B, 2>([vocab, hidden], 3.0 / (hidden as f64).sqrt(), dtype, &device);
        let on_device = loss_targets::<B>(&targets(0..count, vocab), &device);
        let (head, input, device) = (Weight::Dense(weight.clone()), states.clone(), device.clone());
        let call = move || {
            let work = || B::linear_cross_entropy(input.clone(), &head, &on_device, options());
            Output::Tensors(vec![B::section(&device, work).d_hidden_nd.expect("a scale was given")])
        };
        let check = move |output: Output<B>| {
            let states = to_reference(at_edges(&states, 0));
            let head = Weight::Dense(to_reference(weight));
            let targets = loss_targets::<Flex>(&targets_at_edges(count, vocab), &Default::default());
            let expected = reference::linear_cross_entropy(states, &head, &targets, options());
            let expected = expected.d_hidden_nd.expect("a scale was given");
            vec![Comparison::of_tensors("gradient of the hidden states", at_edges(&output.tensors()[0], 0), expected)]
        };
        Prepared::new(call, check)
    };
    Case {
        key: key("cross_entropy", "head_with_gradient", &format!("head of {model}"), format, &sizes),
        work: work(
            count as f64,
            "tokens",
            2.0 * product,
            2.0 * weight_bytes + 2.0 * (dtype.size() * count * hidden) as f64,
        ),
        axis: None,
        tolerance: tolerance(dtype),
        set_bytes: weight_bytes,
        prepare: Box::new(prepare),
    }
}

fn options<B: Kernels>() -> CrossEntropyOptions<B> {
    CrossEntropyOptions { gradient_scale: Some(GRADIENT_SCALE), ..CrossEntropyOptions::new(CHUNK) }
}

/// Returns a target for each token, spread over the vocabulary.
fn targets(tokens: Range<usize>, vocab: usize) -> Vec<usize> {
    tokens.map(|token| (token * 7919 + 13) % vocab).collect()
}

fn targets_at_edges(count: usize, vocab: usize) -> Vec<usize> {
    edges(count).into_iter().flat_map(|(start, length)| targets(start..start + length, vocab)).collect()
}

fn integers<B: Kernels>(values: &[usize], device: &B::Device) -> Tensor<B, 1, Int> {
    let values: Vec<i32> = values.iter().map(|&value| value as i32).collect();
    let length = values.len();
    Tensor::from_data(TensorData::new(values, [length]), device)
}

fn loss_targets<B: Kernels>(ids: &[usize], device: &B::Device) -> LossTargets<B> {
    let positions: Vec<usize> = (0..ids.len()).collect();
    LossTargets {
        positions_m: integers(&positions, device),
        targets_m: integers(ids, device),
        weights_m: None,
        count: ids.len(),
    }
}
