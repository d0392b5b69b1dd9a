//! Cross entropy of logits, and the head with its loss in chunks, with gradients.
//!
//! Trade-off: of the head, the loss is checked only through the gradient of the hidden states at both ends.

use burn_tensor::{DType, Int, Tensor, TensorData};
use firebrick_kernels::backends::Flex;
use firebrick_kernels::loss::reference;
use firebrick_kernels::{CrossEntropyOptions, Kernels, LossTargets, Weight, WeightGradient};

use super::super::case::{Case, Comparison, Output, Prepared, key, to_reference, token_axis, tokens};
use super::super::models::{LLAMA_1B, SMOLLM2_135M};
use super::{Scale, Setting, at_edges, bytes_of, edges, random, tolerance};

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
    let prepare = move || {
        let logits = random::<B, 2>([count, vocab], 4.0, DType::F32, &device);
        let targets = targets(count, vocab);
        let on_device = integers::<B>(&targets, &device);
        let (input, section) = (logits.clone(), device.clone());
        let work = move || B::cross_entropy(input.clone(), on_device.clone(), None, Some(GRADIENT_SCALE), None);
        let call = move || {
            let (loss_c, gradient_cv) = B::section(&section, &work);
            Output::Tensors(vec![loss_c.unsqueeze_dim(1), gradient_cv.expect("a scale was given")])
        };
        let check = move |output: Output<B>| {
            let at_ends: Vec<usize> =
                edges(count).into_iter().flat_map(|(start, length)| targets[start..start + length].to_vec()).collect();
            let integers = integers::<Flex>(&at_ends, &Default::default());
            let logits = to_reference(at_edges(&logits, 0));
            let (loss_c, gradient_cv) = reference::cross_entropy(logits, integers, None, Some(GRADIENT_SCALE), None);
            let got = output.tensors();
            vec![
                Comparison::of_tensors("losses", at_edges(&got[0], 0), loss_c.unsqueeze_dim(1)),
                Comparison::of_tensors("gradient", at_edges(&got[1], 0), gradient_cv.expect("a scale was given")),
            ]
        };
        Prepared { call: Box::new(call), check: Box::new(check) }
    };
    Case {
        key: key(
            "cross_entropy",
            "with_gradient",
            &format!("logits of {model}"),
            "f32",
            &[("tokens", count), ("vocab", vocab)],
        ),
        work: tokens(count, 6.0 * values, 8.0 * values),
        axis: token_axis(count),
        tolerance: tolerance(DType::F32),
        set_bytes: 4.0 * values,
        prepare: Box::new(prepare),
    }
}

fn of_head<B: Kernels>(setting: &Setting<B>, [count, hidden, vocab]: [usize; 3], model: &str) -> Case<B> {
    let (device, (dtype, format)) = (setting.device.clone(), setting.main_format());
    let product = 2.0 * count as f64 * hidden as f64 * vocab as f64;
    let weight_bytes = bytes_of(dtype) * (hidden * vocab) as f64;
    let bytes = 2.0 * weight_bytes + 2.0 * bytes_of(dtype) * (count * hidden) as f64;
    let sizes = [("tokens", count), ("hidden", hidden), ("vocab", vocab)];
    Case {
        key: key("cross_entropy", "head_with_gradient", &format!("head of {model}"), format, &sizes),
        work: tokens(count, 2.0 * product, bytes),
        axis: None,
        tolerance: tolerance(dtype),
        set_bytes: weight_bytes,
        prepare: Box::new(move || prepare_head(&device, [count, hidden, vocab], dtype)),
    }
}

fn prepare_head<B: Kernels>(device: &B::Device, [count, hidden, vocab]: [usize; 3], dtype: DType) -> Prepared<B> {
    // Logits of a few units, as those of a model that has learned something.
    let states = random::<B, 2>([count, hidden], 1.0, dtype, device);
    let weight = random::<B, 2>([vocab, hidden], 3.0 / (hidden as f64).sqrt(), dtype, device);
    let ids = targets(count, vocab);
    let (on_device, head) = (loss_targets::<B>(&ids, device), Weight::Dense(weight.clone()));
    let (input, device) = (states.clone(), device.clone());
    let call = move || {
        let work = || B::linear_cross_entropy(input.clone(), &head, &on_device, options());
        let result = B::section(&device, work);
        Output::Tensors(vec![result.d_hidden_nd.expect("a scale was given")])
    };
    let check = move |output: Output<B>| {
        let at_ends: Vec<usize> =
            edges(count).into_iter().flat_map(|(start, length)| ids[start..start + length].to_vec()).collect();
        let states = to_reference(at_edges(&states, 0));
        let head = Weight::Dense(to_reference(weight));
        let targets = loss_targets::<Flex>(&at_ends, &Default::default());
        let expected = reference::linear_cross_entropy(states, &head, &targets, options());
        let expected = expected.d_hidden_nd.expect("a scale was given");
        vec![Comparison::of_tensors("gradient of the hidden states", at_edges(&output.tensors()[0], 0), expected)]
    };
    Prepared { call: Box::new(call), check: Box::new(check) }
}

fn options<B: Kernels>() -> CrossEntropyOptions<B> {
    CrossEntropyOptions {
        chunk_tokens: CHUNK,
        gradient_scale: Some(GRADIENT_SCALE),
        weight_gradient: WeightGradient::Frozen,
        weight_rows: None,
        log_probs: false,
        correct: false,
        soft_cap: None,
    }
}

/// A target of each token, spread over the vocabulary.
fn targets(count: usize, vocab: usize) -> Vec<usize> {
    (0..count).map(|token| (token * 7919 + 13) % vocab).collect()
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
