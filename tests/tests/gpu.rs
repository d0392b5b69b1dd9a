//! Whole runs on an NVIDIA card against the same runs on the CPU. Part of the GPU suite (`cargo xtask dist --tests`); without
//! a card each test says so and passes.
#![cfg(feature = "cuda")]

use firebrick_tests::{finish, recipe, step_losses};
use tempfile::tempdir;

#[expect(clippy::print_stderr, reason = "a test that is not run must be seen")]
fn has_card() -> bool {
    match firebrick_kernels::probe::cuda() {
        Ok(()) => true,
        Err(reason) => {
            eprintln!("SKIPPED: {reason}");
            false
        }
    }
}

fn losses(backend: &str, changes: &[&str]) -> Vec<f64> {
    let output = tempdir().unwrap();
    let backend = format!("backend={backend}");
    let steps =
        [backend.as_str(), "train.steps=20", "train.warmup_steps=2", "train.learning_rate=1e-3", "data.eval_fraction="];
    let summary = finish(recipe(output.path(), &[&steps, changes].concat()), false);
    assert_eq!(summary.steps, 20);
    step_losses(&output.path().join("run"))
}

/// Every step's loss on the card is the CPU's, to a hundredth.
fn assert_agrees(changes: &[&str]) {
    let (ours, expected) = (losses("cuda", changes), losses("flex", changes));
    assert_eq!((ours.len(), expected.len()), (20, 20));
    for (step, (ours, expected)) in ours.iter().zip(&expected).enumerate() {
        assert!((ours - expected).abs() < 1e-2, "{changes:?}, step {}: {ours} on cuda, {expected} on flex", step + 1);
    }
}

#[test]
fn twenty_steps_of_qlora_in_bf16_have_the_losses_of_the_cpu() {
    if has_card() {
        assert_agrees(&["train.bf16=true", "train.optimizer=paged_adamw_8bit"]);
    }
}

#[test]
fn twenty_steps_of_qlora_in_f32_have_the_losses_of_the_cpu() {
    if has_card() {
        assert_agrees(&["train.bf16=false"]);
    }
}

#[test]
fn recomputation_and_offloading_change_no_loss() {
    if has_card() {
        let full = losses("cuda", &["train.recompute=full", "train.offload=true"]);
        for changes in [
            &["train.recompute=full", "train.offload=false"][..],
            &["train.recompute=selective"],
            &["train.recompute=none"],
        ] {
            let other = losses("cuda", changes);
            let apart = full.iter().zip(&other).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(apart < 1e-3, "{changes:?} differs by {apart}");
        }
    }
}
