//! One law over all backends: the same recipe gives the same losses.
//!
//! A binary of its own, because the settings of a backend belong to the whole process. CUDA is left out: it computes in
//! bfloat16 by default and needs a card.

use firebrick_tests::{finish, recipe, step_losses};
use tempfile::tempdir;

/// The backends of this binary that find a device, flex first.
fn backends() -> Vec<&'static str> {
    let mut found = vec!["flex"];
    if cfg!(feature = "candle") {
        found.push("candle");
    }
    #[cfg(feature = "wgpu")]
    match firebrick_kernels::probe::wgpu() {
        Ok(()) => found.push("wgpu"),
        Err(reason) => {
            // Where tests decide over a change, a missing software Vulkan driver must not pass unseen.
            assert!(std::env::var_os("CI").is_none(), "wgpu finds no adapter: {reason}");
            skip(&reason);
        }
    }
    found
}

#[cfg(feature = "wgpu")]
#[expect(clippy::print_stderr, reason = "a test that is not run must be seen")]
fn skip(reason: &str) {
    eprintln!("SKIPPED on wgpu: {reason}");
}

fn losses(backend: &str, changes: &[&str]) -> Vec<f64> {
    let output = tempdir().unwrap();
    let backend = format!("backend={backend}");
    // A rate at which a wrong gradient shows in the next loss.
    let three_steps =
        [backend.as_str(), "train.steps=3", "train.warmup_steps=0", "train.learning_rate=1e-2", "data.eval_fraction="];
    let summary = finish(recipe(output.path(), &[&three_steps, changes].concat()), false);
    assert_eq!(summary.steps, 3);
    step_losses(&output.path().join("run"))
}

fn assert_all_agree(changes: &[&str]) {
    let expected = losses("flex", changes);
    assert_eq!(expected.len(), 3);
    for backend in backends() {
        let ours = losses(backend, changes);
        let apart = ours.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(ours.len() == 3 && apart < 1e-4, "{backend} {changes:?}: {ours:?}, flex {expected:?}");
    }
}

#[test]
fn three_steps_of_qlora_have_the_same_losses_on_every_backend() {
    assert_all_agree(&[]);
}

/// Rank 64 gives matrices of 4,096 elements, the fewest that get 8-bit moments.
#[test]
fn three_steps_with_8_bit_moments_have_the_same_losses_on_every_backend() {
    assert_all_agree(&["lora.r=64", "train.optimizer=adamw_8bit"]);
}
