//! Preference training against TRL: losses, rewards, log-probabilities and LoRA gradients of every loss, with pairs packed into one row and
//! into several micro-batches; cached references against those of the pass.

use std::sync::Arc;

use firebrick_data::{Batch, DocumentSet, Example, PackOptions, PackedDataset, PairRows};
use firebrick_kernels::backends::Flex;
use firebrick_kernels::{GradientMap, GradientSink, Kernels, PAIR_NUMBERS, PairLoss, PairLossKind};
use firebrick_model::{Decoder, PassOptions};
use firebrick_tests::{
    FROZEN, Golden, host, host_gradients, in_turn, load, on_every_backend, relative_difference, upload,
};
use firebrick_trainer::metrics::PairMetrics;
use firebrick_trainer::run::preference::{PairObjective, Reference, StepCounts};

use crate::training::trainer;

const PAIRS: usize = 3;

/// A loss of the golden file: its name, pairs, and settings.
struct Case {
    name: &'static str,
    pairs: usize,
    loss: PairLoss,
    nll_weight: f64,
    prompt_loss: bool,
}

fn cases() -> [Case; 7] {
    let case = |name, kind, beta, label_smoothing| {
        let loss = PairLoss { kind, beta, label_smoothing };
        Case { name, pairs: PAIRS, loss, nll_weight: 0.0, prompt_loss: false }
    };
    [
        case("sigmoid", PairLossKind::Sigmoid, 0.1, 0.0),
        Case { pairs: 1, ..case("smoothed", PairLossKind::Sigmoid, 0.1, 0.1) },
        case("robust", PairLossKind::Robust, 0.1, 0.1),
        case("hinge", PairLossKind::Hinge, 0.5, 0.0),
        case("ipo", PairLossKind::Ipo, 0.1, 0.0),
        Case { nll_weight: 0.5, ..case("rpo", PairLossKind::Sigmoid, 0.1, 0.0) },
        Case { nll_weight: 1.0, prompt_loss: true, ..case("orpo", PairLossKind::OddsRatio, 0.1, 0.0) },
    ]
}

impl Case {
    fn objective(&self, reference: Reference) -> PairObjective {
        PairObjective { loss: self.loss, nll_weight: self.nll_weight, reference }
    }

    fn reference(&self) -> Reference {
        match self.loss.kind {
            PairLossKind::OddsRatio => Reference::None,
            _ => Reference::BaseWithoutAdapter,
        }
    }
}

/// Packs the golden's pairs into rows of this many tokens.
fn rows(golden: &Golden, case: &Case, row_len: usize) -> PackedDataset {
    let mut examples = Vec::new();
    for pair in 0..case.pairs {
        for side in ["chosen", "rejected"] {
            let prompt = golden.ids(&format!("pair{pair}.prompt"));
            let answer = golden.ids(&format!("pair{pair}.{side}"));
            let loss_mask = [vec![false; prompt.len()], vec![true; answer.len()]].concat();
            examples.push(Example { tokens: [prompt, answer].concat(), loss_mask });
        }
    }
    let pairs = Some(PairRows { prompt_loss: case.prompt_loss });
    PackedDataset::new(DocumentSet::from_examples(&examples), PackOptions { pairs, ..PackOptions::new(row_len) })
}

/// Builds one micro-batch per row.
fn micro_batches(rows: &PackedDataset) -> Vec<Batch> {
    (0..rows.rows()).map(|row| rows.batch(&[row])).collect()
}

/// Returns loss, metrics and gradients of a step.
fn step<B: Kernels>(
    model: &Decoder<B>,
    objective: &PairObjective,
    batches: &[Batch],
) -> (f64, PairMetrics, GradientMap<B>) {
    let (counts, mut gradients) = (StepCounts::of(batches), GradientMap::default());
    let mut sums = [0.0; PAIR_NUMBERS];
    for (index, batch) in batches.iter().enumerate() {
        gradients.begin_micro_batch(index + 1 == batches.len());
        let how = (PassOptions::default(), 20, None);
        let pairs = objective.upload(model, batch).expect("the pairs have tokens of the model");
        let numbers = host(objective.loss_and_gradients(model, &pairs, counts, how, &mut gradients));
        sums.iter_mut().zip(numbers).for_each(|(sum, number)| *sum += f64::from(number));
    }
    let (loss, metrics) = PairMetrics::new(sums, [counts.pairs, counts.chosen_targets], objective.nll_weight);
    (loss, metrics, gradients)
}

fn losses_and_gradients<B: Kernels>() {
    let golden = Golden::open("tiny-llama-preference");
    let model = load::<B>("tiny-llama", Some("tiny-llama-lora"), FROZEN);
    for (turn, case) in cases().into_iter().enumerate() {
        // All pairs in one row, and micro-batches of one row with one or two pairs.
        for row_len in in_turn::<B, _>(&[120, 64], turn) {
            let batches = micro_batches(&rows(&golden, &case, row_len));
            assert_eq!(batches.iter().map(Batch::pair_count).sum::<usize>(), case.pairs);
            let (loss, metrics, gradients) = step(&model, &case.objective(case.reference()), &batches);
            let expected = f64::from(golden.f32s(&format!("{}.loss", case.name))[0]);
            assert!((loss / expected - 1.0).abs() < 2e-5, "{}: loss {loss}, TRL {expected}", case.name);
            let ours = [
                metrics.chosen_reward,
                metrics.rejected_reward,
                metrics.margin,
                metrics.accuracy,
                metrics.chosen_log_prob,
                metrics.rejected_log_prob,
            ];
            for (ours, expected) in ours.into_iter().zip(golden.f32s(&format!("{}.metrics", case.name))) {
                let distance = (ours - f64::from(expected)).abs();
                assert!(distance < 2e-5 * f64::from(expected.abs()).max(1.0), "{}: {ours} {expected}", case.name);
            }
            let gradients = host_gradients(&gradients);
            let names = golden.keys(&format!("{}.grad.", case.name));
            assert_eq!(names, gradients.keys().cloned().collect::<Vec<_>>(), "{}", case.name);
            for name in names {
                let expected = golden.f32s(&format!("{}.grad.{name}", case.name));
                let difference = relative_difference(&gradients[&name], &expected);
                assert!(difference < 1e-3, "{}, {name}: {difference:e}", case.name);
            }
        }
    }
}

on_every_backend!(losses_rewards_and_gradients_of_pairs_equal_those_of_trl, losses_and_gradients);

/// Cached reference sums give the same results as those of the pass.
#[test]
fn a_cached_reference_gives_the_same_loss_and_gradients() {
    let golden = Golden::open("tiny-llama-preference");
    let model = load::<Flex>("tiny-llama", Some("tiny-llama-lora"), FROZEN);
    let [case, ..] = cases();
    let rows = rows(&golden, &case, 64);
    let batches = micro_batches(&rows);
    let mut sums = vec![0.0; rows.documents().len()];
    for batch in &batches {
        let tokens = upload(&model, batch);
        let targets = model.upload_pairs(&batch.targets, None, &batch.cu_seqlens);
        let found = model.answer_log_probs(&tokens, targets.as_ref(), false, 7).expect("there are pairs");
        for (value, &document) in host(found).into_iter().zip(&batch.pairs.as_ref().expect("of pairs").documents) {
            sums[document as usize] = value;
        }
    }
    let (loss, metrics, gradients) = step(&model, &case.objective(Reference::Cached(Arc::new(sums))), &batches);
    let (expected, expected_metrics, expected_gradients) = step(&model, &case.objective(case.reference()), &batches);
    assert_eq!((loss, metrics), (expected, expected_metrics));
    assert_eq!(host_gradients(&gradients), host_gradients(&expected_gradients));
}

#[test]
fn three_steps_of_dpo_equal_those_of_trl() {
    let golden = Golden::open("tiny-llama-preference");
    let [case, ..] = cases();
    let batches = micro_batches(&rows(&golden, &case, 64));
    let mut trainer = trainer("tiny-llama-lora", FROZEN, 1e-8);
    trainer.settings.pairs = Some(case.objective(case.reference()));
    for (loss, margin) in golden.f32s("steps.losses").into_iter().zip(golden.f32s("steps.margins")) {
        let numbers = trainer.step(&batches).expect("one rank reaches itself").read();
        let pairs = numbers.pairs.expect("a step of pairs reports them");
        assert!((numbers.loss - loss).abs() < 2e-5, "{} {loss}", numbers.loss);
        assert!((pairs.margin - f64::from(margin)).abs() < 1e-4, "{} {margin}", pairs.margin);
    }
}
