//! Losses against the reference: weights, log-probabilities, chunks that do not divide the targets, and a head gradient that is added to
//! an earlier one.

use std::ops::Range;

use burn_flex::Flex;
use burn_tensor::{DType, Tensor, backend::Backend};

use super::draw::{self, Draw};
use super::pairs::{self, PairLogProbs, PairLoss, PairLossKind, PairTargets, PairWeights};
use super::{CrossEntropy, CrossEntropyOptions, LossTargets, reference};
use crate::Kernels;
use crate::conformance::check::{Check, Pair};
use crate::dtype::to_f32;
use crate::linear::WeightGradient;
use crate::weights::Weight;

pub(crate) fn check<B: Kernels>(check: &mut Check<'_, B>) {
    for (share, is_weighted) in check.variants([(1.0, false), (0.6, true), (0.0, false)]) {
        let targets = targets(check, share, is_weighted);
        for head_gradient in check.variants([HeadGradient::Frozen, HeadGradient::New, HeadGradient::AddTo]) {
            linear_cross_entropy(check, &targets, head_gradient);
        }
    }
    some_rows_of_the_head(check);
    choices(check);
    most_probable(check);
    drawn(check);
    for soft_cap in check.variants([None, Some(6.0)]) {
        logits(check, soft_cap);
    }
    pairs(check);
}

#[derive(Clone, Copy, PartialEq)]
enum HeadGradient {
    Frozen,
    New,
    AddTo,
}

type Targets<B> = (LossTargets<B>, LossTargets<Flex>);

/// Weights of one sign: mixed signs would cancel in the sum and make its relative error meaningless.
const WEIGHTS: Range<f32> = 0.25..1.75;

fn targets<B: Kernels>(check: &mut Check<'_, B>, share: f64, is_weighted: bool) -> Targets<B> {
    let (tokens, vocabulary) = (check.case.tokens(), check.case.vocab_size);
    let positions: Vec<i32> = (0..tokens as i32).filter(|&token| (f64::from(token) * 0.37).fract() < share).collect();
    let targets: Vec<i32> = positions.iter().map(|&token| (token * 13) % vocabulary as i32).collect();
    let (positions, targets, count) = (check.ints(&positions), check.ints(&targets), positions.len());
    let weights = is_weighted.then(|| check.random_within([count], WEIGHTS)).unzip();
    (
        LossTargets { positions_m: positions.0, targets_m: targets.0, weights_m: weights.0, count },
        LossTargets { positions_m: positions.1, targets_m: targets.1, weights_m: weights.1, count },
    )
}

fn linear_cross_entropy<B: Kernels>(check: &mut Check<'_, B>, targets: &Targets<B>, head_gradient: HeadGradient) {
    let (tokens, width, vocabulary) = (check.case.tokens(), check.case.hidden_size, check.case.vocab_size);
    let hidden = check.random([tokens, width], 1.0);
    let dtype = if head_gradient == HeadGradient::Frozen { check.case.dtype } else { DType::F32 };
    let head = check.random_in(dtype, [vocabulary, width], 0.3);
    let earlier = check.random_f32([vocabulary, width], 0.3);
    // Not a divisor, so that the last chunk is shorter.
    let chunk_tokens = (tokens / 2).max(1) + 1;
    let scales: &[Option<f64>] =
        if head_gradient == HeadGradient::Frozen { &[None, Some(0.125)] } else { &[Some(0.125)] };
    let of_logits = check.variants([(1.0, None), (1.0, Some(3.0)), (0.25, None)]);
    for (&gradient_scale, of_logits) in
        scales.iter().flat_map(|scale| of_logits.iter().map(move |&of_logits| (scale, of_logits)))
    {
        let asked = options(chunk_tokens, gradient_scale, weight_gradient(head_gradient, &earlier.0), of_logits);
        let grads = B::linear_cross_entropy(hidden.0.clone(), &Weight::Dense(head.0.clone()), &targets.0, asked);
        let asked = options(chunk_tokens, gradient_scale, weight_gradient(head_gradient, &earlier.1), of_logits);
        let head = Weight::Dense(head.1.clone());
        let expected = reference::linear_cross_entropy(hidden.1.clone(), &head, &targets.1, asked);
        compare(check, grads, expected);
    }
}

/// Asks for everything else with the gradients.
fn options<B: Backend>(
    chunk_tokens: usize,
    gradient_scale: Option<f64>,
    weight_gradient: WeightGradient<B>,
    (logit_scale, soft_cap): (f64, Option<f64>),
) -> CrossEntropyOptions<B> {
    let (log_probs, correct) = (gradient_scale.is_some(), gradient_scale.is_some());
    let options = CrossEntropyOptions::new(chunk_tokens);
    CrossEntropyOptions { gradient_scale, weight_gradient, log_probs, correct, logit_scale, soft_cap, ..options }
}

/// Tests adjacent and single rows, at offsets where no vector load begins.
fn some_rows_of_the_head<B: Kernels>(check: &mut Check<'_, B>) {
    let (tokens, width, vocabulary) = (check.case.tokens(), check.case.hidden_size, check.case.vocab_size);
    let targets = targets(check, 0.6, true);
    let hidden = check.random([tokens, width], 1.0);
    let head = check.random_in(check.case.dtype, [vocabulary, width], 0.3);
    let rows = vec![vocabulary - 3..vocabulary, 5..6, 9..11];
    fn options<B: Backend>(rows: &[Range<usize>]) -> CrossEntropyOptions<B> {
        CrossEntropyOptions {
            gradient_scale: Some(0.125),
            weight_gradient: WeightGradient::New,
            weight_rows: Some(rows.to_vec()),
            ..CrossEntropyOptions::new(7)
        }
    }
    let grads = B::linear_cross_entropy(hidden.0, &Weight::Dense(head.0), &targets.0, options(&rows));
    let expected = reference::linear_cross_entropy(hidden.1, &Weight::Dense(head.1), &targets.1, options(&rows));
    compare(check, grads, expected);
}

fn weight_gradient<B: Backend>(head_gradient: HeadGradient, earlier: &Tensor<B, 2>) -> WeightGradient<B> {
    match head_gradient {
        HeadGradient::Frozen => WeightGradient::Frozen,
        HeadGradient::New => WeightGradient::New,
        HeadGradient::AddTo => WeightGradient::AddTo(earlier.clone()),
    }
}

fn compare<B: Kernels>(check: &mut Check<'_, B>, grads: CrossEntropy<B>, expected: CrossEntropy<Flex>) {
    check.compare("linear_cross_entropy: loss", grads.loss_sum, expected.loss_sum);
    check.same("linear_cross_entropy: choices", grads.correct.is_some() == expected.correct.is_some());
    check.compare_optional("linear_cross_entropy: log-probabilities", grads.log_probs_m, expected.log_probs_m);
    check.compare_optional("linear_cross_entropy: hidden states", grads.d_hidden_nd, expected.d_hidden_nd);
    check.compare_optional("linear_cross_entropy: head", grads.d_weight_vd, expected.d_weight_vd);
}

/// Makes every second target the token of the highest logit and the others that of the lowest, so that rounding cannot change the count.
fn choices<B: Kernels>(check: &mut Check<'_, B>) {
    let (tokens, width, vocabulary) = (check.case.tokens(), check.case.hidden_size, check.case.vocab_size);
    let hidden = check.random([tokens, width], 1.0);
    let head = check.random_in(check.case.dtype, [vocabulary, width], 0.3);
    let logits = to_f32(hidden.1.clone()).matmul(to_f32(head.1).transpose());
    let [highest, lowest] =
        [logits.clone().argmax(1), logits.argmin(1)].map(|ids| ids.into_data().iter::<i32>().collect::<Vec<_>>());
    let ids: Vec<i32> = (0..tokens).map(|token| if token % 2 == 0 { highest[token] } else { lowest[token] }).collect();
    let positions = check.ints(&(0..tokens as i32).collect::<Vec<_>>());
    let targets = LossTargets {
        positions_m: positions.0,
        targets_m: check.ints(&ids).0,
        weights_m: Some(check.random_f32([tokens], 1.0).0),
        count: tokens,
    };
    for soft_cap in check.variants([None, Some(3.0)]) {
        let options =
            CrossEntropyOptions { correct: true, soft_cap, ..CrossEntropyOptions::new((tokens / 2).max(1) + 1) };
        let found = B::linear_cross_entropy(hidden.0.clone(), &Weight::Dense(head.0.clone()), &targets, options);
        let count = found.correct.expect("the count was requested").into_data().iter::<f32>().next();
        check.same("linear_cross_entropy: choices", count == Some(tokens.div_ceil(2) as f32));
    }
}

fn logits<B: Kernels>(check: &mut Check<'_, B>, soft_cap: Option<f64>) {
    let (rows, vocabulary) = (5, check.case.vocab_size);
    let logits = check.random_f32([rows, vocabulary], 9.0);
    let targets = check.ints(&(0..rows as i32).collect::<Vec<_>>());
    let weights = check.random_f32([rows], 1.0);
    for (weights, expected_weights) in [(None, None), (Some(weights.0), Some(weights.1))] {
        let (losses, gradient) = B::cross_entropy(logits.0.clone(), targets.0.clone(), weights, Some(0.5), soft_cap);
        let expected =
            reference::cross_entropy(logits.1.clone(), targets.1.clone(), expected_weights, Some(0.5), soft_cap);
        check.compare("cross_entropy: losses", losses, expected.0);
        check.compare_optional("cross_entropy: gradient", gradient, expected.1);
    }
    let without = B::cross_entropy(logits.0, targets.0, None, None, soft_cap).1;
    check.same("cross_entropy: no gradient without a scale", without.is_none());
}

/// Tests answers of one target and of many, with and without targets in the prompt.
fn pairs<B: Kernels>(check: &mut Check<'_, B>) {
    for prompt in check.variants([0, 3]) {
        let lengths = [5, 1, 40, 33, 700, 2];
        let targets = |(number, length): (usize, usize)| {
            let prompt = if number.is_multiple_of(2) { prompt } else { 0 };
            [vec![false; prompt], vec![true; length]].concat()
        };
        let documents: Vec<Vec<bool>> = lengths.into_iter().enumerate().map(targets).collect();
        let targets = PairTargets::<B>::new(&documents, check.device);
        let on_cpu = PairTargets::<Flex>::new(&documents, &check.cpu);
        let (log_probs, log_probs_on_cpu) = check.random_within([targets.count], -1.0..0.0);
        let sums = [true, false].map(|of_answers| {
            let found = B::document_sums(log_probs.clone(), &targets, of_answers);
            let expected = pairs::reference::document_sums(log_probs_on_cpu.clone(), &on_cpu, of_answers);
            check.compare("document_sums", found.clone(), expected.clone());
            (found, expected)
        });
        for kind in PairLossKind::ALL {
            pair_loss(check, (&targets, &on_cpu), &sums, kind);
        }
    }
}

fn pair_loss<B: Kernels>(
    check: &mut Check<'_, B>,
    (targets, on_cpu): (&PairTargets<B>, &PairTargets<Flex>),
    [answers, all]: &[Pair<B, 1>; 2],
    kind: PairLossKind,
) {
    let reference = check.random_f32([2 * targets.pairs], 3.0);
    let factor = check.random_f32([1], 1.0);
    for (label_smoothing, nll_factor, is_scaled) in [(0.0, 0.0, false), (0.1, 0.3, true)] {
        let loss = PairLoss { kind, beta: 0.3, label_smoothing };
        fn inputs<B: Backend>(
            [answers, all, reference, factor]: [&Tensor<B, 1>; 4],
            nll_factor: f64,
            is_scaled: bool,
        ) -> (PairLogProbs<B>, PairWeights<B>) {
            let (all, factor) = is_scaled.then(|| (all.clone(), factor.clone())).unzip();
            let reference = Some(reference.clone());
            (PairLogProbs { answers: answers.clone(), all, reference }, PairWeights { nll_factor, factor })
        }
        let (log_probs, weights) = inputs([&answers.0, &all.0, &reference.0, &factor.0], nll_factor, is_scaled);
        let found = B::pair_loss(log_probs, targets, loss, weights);
        let (log_probs, weights) = inputs([&answers.1, &all.1, &reference.1, &factor.1], nll_factor, is_scaled);
        let expected = pairs::reference::pair_loss(log_probs, on_cpu, loss, weights);
        check.compare("pair_loss: weights", found.weights_m, expected.weights_m);
        check.compare("pair_loss: numbers", found.numbers, expected.numbers);
    }
}

/// Tests that ties go to the lowest id, and rows that are not finite to none.
fn most_probable<B: Kernels>(check: &mut Check<'_, B>) {
    let width = check.case.vocab_size;
    let mut values: Vec<f32> = (0..7 * width).map(|at| ((at * 37) % 101) as f32 * 0.25 - 12.0).collect();
    let row = |index: usize| index * width..(index + 1) * width;
    values[row(1)].fill(-2.0);
    values[row(2)].fill(f32::NEG_INFINITY);
    values[3 * width + width / 2] = f32::NAN;
    values[5 * width - 1] = f32::INFINITY;
    values[row(5)].fill(f32::NEG_INFINITY);
    values[6 * width - 1] = -1.0;
    values[6 * width + width / 3] = 20.0;
    values[7 * width - 1] = 20.0;
    let (logits, on_cpu) = check.on_both(check.case.dtype, [7, width], values);
    let ids = B::most_probable(logits);
    let expected = reference::most_probable::<Flex>(on_cpu).into_data();
    let equal = ids.into_data().iter::<i64>().eq(expected.iter::<i64>());
    check.same("most_probable", equal);
    let [best, last] = [width / 3, width - 1].map(|id| id as i64);
    let rows: Vec<i64> = expected.iter::<i64>().skip(1).collect();
    check.same("most_probable: ties and values that are not finite", rows == [0, -1, -1, -1, last, best]);
}

/// Tests tokens and their log-probabilities by numbers that are not close to a border between two tokens.
fn drawn<B: Kernels>(check: &mut Check<'_, B>) {
    let [rows, width, vocabulary] = [9, 64, check.case.vocab_size];
    let (hidden, on_cpu) = check.random([rows, width], 2.0);
    let (head, head_on_cpu) = check.random([vocabulary, width], 0.3);
    let (random, random_on_cpu) =
        check.on_both(DType::F32, [1, rows], (0..rows).map(|row| 0.03 + row as f32 / 10.0).collect());
    let plain = Draw { temperature: 1.0, top_p: 1.0, min_p: 0.0, logit_scale: 1.0, soft_cap: None };
    for draw in [
        plain,
        Draw { temperature: 0.6, top_p: 0.7, ..plain },
        Draw { temperature: 1.7, min_p: 0.2, logit_scale: 0.5, ..plain },
        Draw { top_p: 0.9, min_p: 0.02, soft_cap: Some(4.0), ..plain },
    ] {
        let found = B::draw(hidden.clone(), &Weight::Dense(head.clone()), random.clone().reshape([rows]), draw);
        let head = Weight::Dense(head_on_cpu.clone());
        let expected = draw::reference::<Flex>(on_cpu.clone(), &head, random_on_cpu.clone().reshape([rows]), draw);
        let [ids, expected_ids] = [found.ids_n.into_data(), expected.ids_n.into_data()];
        let same = ids.iter::<i64>().zip(expected_ids.iter::<i64>()).filter(|(one, other)| one == other).count();
        // A number may lie where rounding decides, which rounds logits themselves in reference bodies of half formats.
        let may_differ = if check.case.dtype == DType::F32 { 1 } else { rows / 2 };
        check.same(&format!("tokens drawn with {draw:?}"), same + may_differ >= rows);
        if same == rows {
            check.compare("log-probabilities of drawn tokens", found.log_probs_n, expected.log_probs_n);
        }
    }
}
