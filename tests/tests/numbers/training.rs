//! Whole optimizer steps: three of them against torch, and one step cut into micro-batches in different ways.

use std::collections::BTreeMap;

use firebrick_data::Batch;
use firebrick_kernels::backends::Flex;
use firebrick_model::BaseStorage;
use firebrick_optim::{Optimizer, OptimizerConfig, OptimizerKind, Schedule, ScheduleKind, TrainedWeights};
use firebrick_parallel::Ranks;
use firebrick_tests::{FROZEN, Golden, NF4, batch, every_next_token, host, load, relative_difference};
use firebrick_trainer::run::step::{StepSettings, Trainer};

/// Creates the golden files' optimizer over the adapter they start from; theirs has an `epsilon` of 1e-8.
pub(crate) fn trainer(adapter: &str, storage: BaseStorage, epsilon: f64) -> Trainer<Flex> {
    Trainer {
        model: load("tiny-llama", Some(adapter), storage),
        optimizer: Optimizer::new(OptimizerConfig {
            kind: OptimizerKind::AdamW,
            beta1: 0.9,
            beta2: 0.999,
            epsilon,
            weight_decay: 0.01,
            weights: TrainedWeights::default(),
            max_grad_norm: Some(1.0),
        }),
        schedule: Schedule { kind: ScheduleKind::Constant, peak: 1e-3, lowest: 0.0, warmup_steps: 0, total_steps: 3 },
        ranks: Ranks::single(),
        settings: StepSettings { loss_chunk_tokens: 20, ..StepSettings::default() },
    }
}

fn adapter(trainer: &Trainer<Flex>) -> BTreeMap<String, Vec<f32>> {
    let parameters = trainer.model.parameters();
    parameters.into_iter().map(|parameter| (parameter.name.to_string(), host(parameter.value.clone()))).collect()
}

/// Tolerances of three steps.
struct Tolerance {
    loss: f32,
    /// Relative.
    grad_norm: f32,
    /// Tolerance of each tensor's change over the three steps, relative by norm.
    change: f64,
}

fn assert_three_steps_agree(golden: &str, start: &str, storage: BaseStorage, tolerance: &Tolerance) {
    let golden = Golden::open(golden);
    let batch = [every_next_token(&golden.ids("input_ids"), 48)];
    let mut trainer = trainer(start, storage, 1e-8);
    let start = adapter(&trainer);
    for (loss, grad_norm) in golden.f32s("losses").into_iter().zip(golden.f32s("grad_norms")) {
        let outcome = trainer.step(&batch).expect("one rank reaches itself");
        let (step, ours) = (outcome.step, outcome.read());
        assert!((ours.loss - loss).abs() < tolerance.loss, "step {step}: loss {} {loss}", ours.loss);
        let norm = ours.grad_norm;
        assert!((norm / grad_norm - 1.0).abs() < tolerance.grad_norm, "step {step}: norm {norm} {grad_norm}");
    }
    let end = adapter(&trainer);
    assert_eq!(golden.keys("adapter."), end.keys().cloned().collect::<Vec<_>>());
    for (name, ours) in &end {
        let change = |end: &[f32]| end.iter().zip(&start[name]).map(|(end, start)| end - start).collect::<Vec<_>>();
        let difference = relative_difference(&change(ours), &change(&golden.f32s(&format!("adapter.{name}"))));
        assert!(difference < tolerance.change, "{name}: {difference:e}");
    }
}

#[test]
fn three_steps_of_lora_equal_those_of_peft_and_torch() {
    let tolerance = Tolerance { loss: 1e-5, grad_norm: 1e-5, change: 1e-4 };
    assert_three_steps_agree("tiny-llama-lora-train", "tiny-llama-lora", FROZEN, &tolerance);
}

/// The norms of the second and third step are those of the updated matrices.
#[test]
fn three_steps_of_dora_equal_those_of_peft_and_torch() {
    let tolerance = Tolerance { loss: 1e-5, grad_norm: 1e-5, change: 5e-4 };
    assert_three_steps_agree("tiny-llama-dora-train", "tiny-llama-dora", FROZEN, &tolerance);
}

/// The golden's base has the coarser block scales of bitsandbytes' CPU path (`nf4.rs`), which alone move logits by 8e-4.
#[test]
fn three_steps_of_qlora_equal_those_of_bitsandbytes_peft_and_torch() {
    let tolerance = Tolerance { loss: 1e-4, grad_norm: 1e-4, change: 1e-2 };
    assert_three_steps_agree("tiny-llama-qlora-train", "tiny-llama-lora", NF4, &tolerance);
}

/// Returns eight sequences with 1, 4, 7, .. 22 loss tokens: a mean of the sequences' means would weigh them 22 to 1 wrongly.
fn uneven_sequences() -> Vec<Vec<u32>> {
    (0..8u32).map(|row| (0..24).map(|index| (row * 31 + index * 17 + index * index) % 256).collect()).collect()
}

fn micro_batches(sequences_each: usize) -> Vec<Batch> {
    let cut = |(number, rows): (usize, &[Vec<u32>])| {
        let last = |row: usize| 1 + 3 * (number * sequences_each + row);
        batch(rows, |row, index| index <= last(row))
    };
    uneven_sequences().chunks(sequences_each).enumerate().map(cut).collect()
}

#[test]
fn eight_sequences_at_once_and_one_by_one_give_the_same_update() {
    for storage in [FROZEN, NF4] {
        let step = |sequences_each: usize| {
            // If a gradient is nothing but rounding, AdamW's first step is its sign; a larger epsilon keeps it small.
            let mut trainer = trainer("tiny-llama-lora", storage, 1e-5);
            let outcome = trainer.step(&micro_batches(sequences_each)).expect("one rank reaches itself");
            assert_eq!(outcome.loss_tokens, (0..8).map(|row| 1 + 3 * row).sum::<u64>());
            let numbers = outcome.read();
            (numbers.loss, numbers.grad_norm, adapter(&trainer))
        };
        let (loss, norm, at_once) = step(8);
        for sequences_each in [1, 2] {
            let (other_loss, other_norm, cut) = step(sequences_each);
            assert!((other_loss / loss - 1.0).abs() < 1e-6, "{other_loss} {loss}");
            assert!((other_norm / norm - 1.0).abs() < 1e-5, "{other_norm} {norm}");
            for (name, values) in &at_once {
                let difference = relative_difference(&cut[name], values);
                assert!(difference < 1e-6, "{sequences_each} sequences at once, {name}: {difference:e}");
            }
        }
    }
}
