//! Losses of pairs in ordinary Burn operations.
//!
//! The loss `L` depends on the model only through the log-probabilities `a` of both answers, and `a` is a sum over
//! targets, so `-dL/da` is the weight of the cross entropy of each target in the answer.
//! Trade-off: sums over documents multiply by a matrix of documents by targets, which suits the few pairs of a micro-batch.

use burn_tensor::activation::{log_sigmoid, sigmoid};
use burn_tensor::{DType, Int, Tensor, backend::Backend};

use super::{PairLogProbs, PairLoss, PairLossKind, PairResult, PairTargets, PairWeights};
use crate::dtype::weighted;

/// Below this distance from 0, `1 - exp(x)` is computed by its series.
const SERIES_BELOW: f64 = 0.05;
/// Lower bound of `1 - exp(x)`, because the odds of a certain answer are not finite.
const LEAST: f64 = f32::EPSILON as f64;

/// Implements [`super::super::LossOps::document_sums`].
pub fn document_sums<B: Backend>(values_m: Tensor<B, 1>, targets: &PairTargets<B>, of_answers: bool) -> Tensor<B, 1> {
    let (documents, device) = (2 * targets.pairs, values_m.device());
    let values_m = weighted(values_m, targets.answers_m.clone().filter(|_| of_answers));
    let shape = [documents, targets.count];
    let number_km = Tensor::<B, 1, Int>::arange(0..documents as i64, &device).reshape([documents, 1]).expand(shape);
    let document_km = targets.documents_m.clone().reshape([1, targets.count]).expand(shape);
    let is_of_km = number_km.equal(document_km).float().cast(DType::F32);
    is_of_km.mul(values_m.reshape([1, targets.count])).sum_dim(1).reshape([documents])
}

/// Implements [`super::super::LossOps::pair_loss`].
pub fn pair_loss<B: Backend>(
    log_probs: PairLogProbs<B>,
    targets: &PairTargets<B>,
    loss: PairLoss,
    weights: PairWeights<B>,
) -> PairResult<B> {
    let PairLogProbs { answers, all, reference } = log_probs;
    let pairs = targets.pairs;
    let [chosen, rejected] = sides(answers.clone(), pairs);
    let counts = sides(targets.answer_counts.clone(), pairs);
    let all = sides(all.unwrap_or_else(|| answers.clone()), pairs);
    let margin = match loss.kind {
        PairLossKind::OddsRatio => odds_ratio([chosen, rejected], counts, loss.beta),
        _ => {
            let reference = sides(reference.expect("a loss of log ratios has a reference"), pairs);
            log_ratios([chosen, rejected], reference, counts, loss)
        }
    };
    let Margin { loss_p, gradients, rewards, log_probs } = margin;
    let [chosen_reward, rejected_reward] = rewards;
    let correct = chosen_reward.clone().greater(rejected_reward.clone()).float().cast(DType::F32);
    let [chosen, rejected] = log_probs;
    let [all_chosen, _] = all;
    let numbers = [loss_p, all_chosen.neg(), chosen_reward, rejected_reward, correct, chosen, rejected];
    let of_document = |chosen: Tensor<B, 1>, rejected: Tensor<B, 1>| {
        let values = Tensor::stack::<2>(vec![chosen, rejected], 1).reshape([2 * pairs]);
        values.select(0, targets.documents_m.clone())
    };
    let [d_chosen, d_rejected] = gradients;
    // The weight of the chosen answer's own cross entropy.
    let nll = Tensor::full([pairs], weights.nll_factor, (&d_chosen.device(), DType::F32));
    let of_answers = weighted(of_document(d_chosen.neg(), d_rejected.neg()), targets.answers_m.clone());
    let weights_m = weighted(of_answers.add(of_document(nll.clone(), nll.zeros_like())), weights.factor);
    PairResult { weights_m, numbers: Tensor::cat(numbers.map(Tensor::sum).to_vec(), 0) }
}

/// The loss of each pair, its derivatives with respect to the log-probabilities of both answers, and the reported numbers, `[p]` each.
struct Margin<B: Backend> {
    loss_p: Tensor<B, 1>,
    gradients: [Tensor<B, 1>; 2],
    rewards: [Tensor<B, 1>; 2],
    log_probs: [Tensor<B, 1>; 2],
}

/// Splits values `[2p]` of alternating documents into those of chosen and of rejected ones.
fn sides<B: Backend>(values: Tensor<B, 1>, pairs: usize) -> [Tensor<B, 1>; 2] {
    let values_p2 = values.reshape([pairs, 2]);
    [0, 1].map(|side| values_p2.clone().narrow(1, side, 1).reshape([pairs]))
}

fn log_ratios<B: Backend>(
    [chosen, rejected]: [Tensor<B, 1>; 2],
    [reference_chosen, reference_rejected]: [Tensor<B, 1>; 2],
    [chosen_count, rejected_count]: [Tensor<B, 1>; 2],
    loss: PairLoss,
) -> Margin<B> {
    let (beta, smoothing) = (loss.beta, loss.label_smoothing);
    let ratios = [chosen.clone().sub(reference_chosen), rejected.clone().sub(reference_rejected)];
    let rewards = ratios.clone().map(|ratio| ratio.mul_scalar(beta));
    let [chosen_ratio, rejected_ratio] = ratios;
    let log_probs = [chosen, rejected];
    if loss.kind == PairLossKind::Ipo {
        let margin = chosen_ratio.div(chosen_count.clone()).sub(rejected_ratio.div(rejected_count.clone()));
        let distance = margin.sub_scalar(0.5 / beta);
        let slope = distance.clone().mul_scalar(2.0);
        let gradients = [slope.clone().div(chosen_count), slope.neg().div(rejected_count)];
        return Margin { loss_p: distance.square(), gradients, rewards, log_probs };
    }
    let x = chosen_ratio.sub(rejected_ratio).mul_scalar(beta);
    let both = |sign: f64, of_x: fn(Tensor<B, 1>) -> Tensor<B, 1>| {
        let right = of_x(x.clone()).mul_scalar(1.0 - smoothing);
        right.add(of_x(x.clone().neg()).mul_scalar(sign * smoothing))
    };
    // d/dx of -log sigmoid(x) is -sigmoid(-x).
    let opposite: fn(Tensor<B, 1>) -> Tensor<B, 1> = |x| sigmoid(x.neg());
    let (loss_p, slope) = match loss.kind {
        PairLossKind::Sigmoid => (both(1.0, log_sigmoid).neg(), both(-1.0, opposite).neg()),
        PairLossKind::Robust => {
            let norm = 1.0 / (1.0 - 2.0 * smoothing);
            (both(-1.0, log_sigmoid).mul_scalar(-norm), both(1.0, opposite).mul_scalar(-norm))
        }
        PairLossKind::Hinge => {
            let below = x.clone().neg().add_scalar(1.0);
            let is_below = below.clone().greater_elem(0.0).float().cast(DType::F32);
            (below.mul(is_below.clone()), is_below.neg())
        }
        PairLossKind::Ipo | PairLossKind::OddsRatio => unreachable!("computed elsewhere"),
    };
    let slope = slope.mul_scalar(beta);
    Margin { loss_p, gradients: [slope.clone(), slope.neg()], rewards, log_probs }
}

fn odds_ratio<B: Backend>(answers: [Tensor<B, 1>; 2], counts: [Tensor<B, 1>; 2], beta: f64) -> Margin<B> {
    let [chosen_count, rejected_count] = counts.clone();
    let [chosen, rejected] = answers;
    let means = [chosen.div(chosen_count.clone()), rejected.div(rejected_count.clone())];
    let [rest_chosen, rest_rejected] = means.clone().map(one_minus_exp);
    let [chosen, rejected] = means.clone();
    let odds = chosen.sub(rejected).sub(rest_chosen.clone().log().sub(rest_rejected.clone().log()));
    let loss_p = log_sigmoid(odds.clone()).mul_scalar(-beta);
    let slope = sigmoid(odds.neg()).mul_scalar(-beta);
    let gradients =
        [slope.clone().div(rest_chosen).div(chosen_count), slope.neg().div(rest_rejected).div(rejected_count)];
    Margin { loss_p, gradients, rewards: means.clone().map(|mean| mean.mul_scalar(beta)), log_probs: means }
}

/// Computes `1 - exp(x)` for `x <= 0`, precise to the last digits near 0.
fn one_minus_exp<B: Backend>(x: Tensor<B, 1>) -> Tensor<B, 1> {
    let step = |inner: Tensor<B, 1>, over: f64| inner.mul(x.clone()).div_scalar(over).add_scalar(1.0);
    let series = [4.0, 3.0, 2.0].into_iter().fold(x.clone().div_scalar(5.0).add_scalar(1.0), step).mul(x.clone().neg());
    let plain = x.clone().exp().neg().add_scalar(1.0);
    let is_near = x.greater_elem(-SERIES_BELOW);
    plain.mask_where(is_near, series).clamp_min(LEAST)
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::testing::{Plain, Recorded, assert_close};

    const LOG_PROBS: [f32; 13] = [-0.9, -2.0, -0.1, -3.0, -0.02, -0.5, -1.5, -4.0, -0.3, -0.01, -0.02, -0.7, -1.1];
    const REFERENCE: [f32; 4] = [-3.5, -3.0, -5.0, -1.5];

    fn targets<B: Backend>(device: &B::Device) -> PairTargets<B> {
        let answers = [vec![false, true, true], vec![true; 3], vec![false, false, true], vec![true; 4]];
        PairTargets::new(&answers, device)
    }

    fn numbers<B: Backend>(
        log_probs_m: Tensor<B, 1>,
        loss: PairLoss,
        nll_factor: f64,
        factor: Option<f32>,
    ) -> PairResult<B> {
        let device = log_probs_m.device();
        let targets = targets::<B>(&device);
        let log_probs = PairLogProbs {
            answers: document_sums(log_probs_m.clone(), &targets, true),
            all: Some(document_sums(log_probs_m, &targets, false)),
            reference: Some(Tensor::from_floats(REFERENCE, &device)),
        };
        let factor = factor.map(|factor| Tensor::from_floats([factor], &device));
        pair_loss(log_probs, &targets, loss, PairWeights { nll_factor, factor })
    }

    #[test]
    fn sums_are_of_each_document_or_of_its_answer() {
        let device = Default::default();
        let values = Tensor::<Plain, 1>::from_floats(LOG_PROBS, &device);
        let sums = |of_answers| document_sums(values.clone(), &targets(&device), of_answers);
        assert_close(sums(true), Tensor::from_floats([-2.1, -3.52, -0.3, -1.83], &device), 1e-6);
        assert_close(sums(false), Tensor::from_floats([-3.0, -3.52, -5.8, -1.83], &device), 1e-6);
    }

    #[test]
    fn weights_are_minus_the_derivatives_that_autodiff_finds() {
        let device = Default::default();
        for kind in PairLossKind::ALL {
            for (label_smoothing, nll_factor) in [(0.0, 0.0), (0.2, 0.7)] {
                let loss = PairLoss { kind, beta: 0.4, label_smoothing };
                let values = Tensor::<Recorded, 1>::from_floats(LOG_PROBS, &device).require_grad();
                let found = numbers(values.clone(), loss, nll_factor, None).numbers;
                let total = found.clone().narrow(0, 0, 1).add(found.narrow(0, 1, 1).mul_scalar(nll_factor));
                let expected = values.grad(&total.backward()).unwrap().neg();
                let plain = Tensor::<Plain, 1>::from_floats(LOG_PROBS, &device);
                assert_close(numbers(plain, loss, nll_factor, None).weights_m, expected, 2e-5);
            }
        }
    }

    #[test]
    fn the_loss_scale_is_a_factor_of_the_weights_alone() {
        let loss = PairLoss { kind: PairLossKind::Sigmoid, beta: 0.1, label_smoothing: 0.0 };
        let plain = Tensor::<Plain, 1>::from_floats(LOG_PROBS, &Default::default());
        let [without, scaled] = [None, Some(8.0)].map(|factor| numbers(plain.clone(), loss, 1.0, factor));
        assert_close(scaled.weights_m, without.weights_m.mul_scalar(8.0), 1e-6);
        assert_close(scaled.numbers, without.numbers, 1e-6);
    }

    #[test]
    fn an_answer_that_is_certain_has_finite_odds() {
        let device = Default::default();
        let targets = PairTargets::<Plain>::new(&[vec![true], vec![true]], &device);
        let answers = Tensor::from_floats([0.0, -1e-5], &device);
        let loss = PairLoss { kind: PairLossKind::OddsRatio, beta: 0.1, label_smoothing: 0.0 };
        let log_probs = PairLogProbs { answers, all: None, reference: None };
        let found = pair_loss(log_probs, &targets, loss, PairWeights { nll_factor: 0.0, factor: None });
        for values in [found.numbers, found.weights_m] {
            assert!(values.into_data().iter::<f32>().all(f32::is_finite));
        }
    }
}
