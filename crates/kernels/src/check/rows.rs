//! Norms, embedding and the loss.

use burn_tensor::{DType, Tensor};

use super::Check;
use crate::{CrossEntropyOptions, Kernels, TrainedPositions, Weight, oracle};

pub(super) fn check<B: Kernels>(check: &mut Check<'_, B>) {
    norm(check);
    embedding(check);
    for trained in [1.0, 0.6, 0.0] {
        loss(check, trained);
    }
}

fn norm<B: Kernels>(check: &mut Check<'_, B>) {
    let shape = [check.case.tokens(), check.case.width];
    let (x, dy, residual) = (check.random(shape, 2.0), check.random(shape, 1.0), check.random(shape, 1.0));
    let weight = check.random_f32([shape[1]], 1.0);
    let epsilon = 1e-5;
    let y = B::rms_norm(x.0.clone(), weight.0.clone(), epsilon);
    check.compare("rms_norm", y, oracle::norm::forward(x.1.clone(), weight.1.clone(), epsilon));
    for (past, past_reference) in [(None, None), (Some(residual.0), Some(residual.1))] {
        for wanted in [false, true] {
            let (x, dy, weight) = (x.clone(), dy.clone(), weight.clone());
            let (dx, dw) = B::rms_norm_backward(x.0, weight.0, epsilon, dy.0, past.clone(), wanted);
            let expected = oracle::norm::backward(x.1, weight.1, epsilon, dy.1, past_reference.clone(), wanted);
            check.compare("rms_norm_backward: input", dx, expected.0);
            check.same("rms_norm_backward: what was asked for", dw.is_some() == wanted);
            if let Some((dw, expected)) = dw.zip(expected.1) {
                check.compare("rms_norm_backward: weight", dw, expected);
            }
        }
    }
}

fn embedding<B: Kernels>(check: &mut Check<'_, B>) {
    let (tokens, width, vocabulary) = (check.case.tokens(), check.case.width, check.case.vocabulary);
    let ids: Vec<i32> = (0..tokens).map(|token| ((token * 37) % vocabulary.min(11)) as i32).collect();
    let ids = check.ints(&ids);
    let dtype = check.case.dtype;
    for table in [check.random([vocabulary, width], 1.0), check.random_f32([vocabulary, width], 1.0)] {
        let rows = B::embed(table.0, ids.0.clone(), dtype);
        check.same("embed: format", rows.dtype() == dtype);
        check.compare("embed", rows, oracle::embedding::forward(table.1, ids.1.clone()));
    }
    let dy = check.random([tokens, width], 1.0);
    let table = B::embed_backward(ids.0, dy.0, vocabulary);
    check.compare("embed_backward", table, oracle::embedding::backward(ids.1, dy.1, vocabulary));
}

fn loss<B: Kernels>(check: &mut Check<'_, B>, share: f64) {
    let (tokens, width, vocabulary) = (check.case.tokens(), check.case.width, check.case.vocabulary);
    let hidden = check.random([tokens, width], 1.0);
    let positions: Vec<i32> = (0..tokens as i32).filter(|&token| (f64::from(token) * 0.37).fract() < share).collect();
    let targets: Vec<i32> = positions.iter().map(|&token| (token * 13) % vocabulary as i32).collect();
    let (positions, targets, count) = (check.ints(&positions), check.ints(&targets), positions.len());
    let trained = TrainedPositions { positions_m: positions.0, targets_m: targets.0, count };
    let reference = TrainedPositions { positions_m: positions.1, targets_m: targets.1, count };
    for (trains, gradient_scale) in [(false, None), (false, Some(0.125)), (true, Some(0.125))] {
        let dtype = if trains { DType::F32 } else { check.case.dtype };
        let head = check.random_in(dtype, [vocabulary, width], 0.3);
        let options = CrossEntropyOptions {
            // Not a divisor, so that the last chunk is a short one.
            chunk_tokens: (tokens / 2).max(1) + 1,
            gradient_scale,
            weight_gradient: trains,
        };
        let got = B::linear_cross_entropy(hidden.0.clone(), &Weight::Dense(head.0), &trained, options);
        let expected = oracle::cross_entropy::forward(hidden.1.clone(), &Weight::Dense(head.1), &reference, options);
        check.compare("linear_cross_entropy: loss", got.loss_sum, expected.loss_sum);
        let parts = [
            ("linear_cross_entropy: hidden states", got.d_hidden_nd, expected.d_hidden_nd),
            ("linear_cross_entropy: head", got.d_weight_vd, expected.d_weight_vd),
        ];
        for (what, got, expected) in parts {
            check.same(what, got.is_some() == expected.is_some());
            if let Some((got, expected)) = got.zip(expected) {
                check.compare(what, got, expected);
            }
        }
    }
    logits(check);
}

fn logits<B: Kernels>(check: &mut Check<'_, B>) {
    let (rows, vocabulary) = (5, check.case.vocabulary);
    let (logits, expected) = check.random_f32([rows, vocabulary], 9.0);
    let targets = check.ints(&(0..rows as i32).collect::<Vec<_>>());
    let (loss, gradient) = B::cross_entropy(logits, targets.0, Some(0.5));
    let (expected_loss, expected_gradient) = oracle::cross_entropy::of_logits(expected, targets.1, Some(0.5));
    check.compare("cross_entropy: loss", loss, expected_loss);
    let empty = || Tensor::zeros([0, vocabulary], check.device);
    let gradient = gradient.unwrap_or_else(empty);
    check.compare("cross_entropy: logits", gradient, expected_gradient.expect("a scale was given"));
}
