//! The same recipe gives the same losses on every backend.
//!
//! It is a separate binary, because the settings of a backend belong to the whole process.
//! Trade-off: CUDA is left out. It computes in bfloat16 by default and needs a card: `gpu`.

use firebrick_precision::QuantFormat;
use firebrick_precision::difference::largest_difference;
use firebrick_tests::{FAMILIES, NEW, finish, fixture, recipe, step_losses};
use tempfile::tempdir;

/// The families whose modules, norms and layers differ most: fused projections, norms of heads with a scaled embedding, experts.
const DIFFERENT: [&str; 3] = ["tiny-phi3", "tiny-gemma3", "tiny-qwen3-moe"];
/// Three micro-batches instead of six: `numbers/sinks.rs` accumulates on every backend.
const QUICK: &str = "train.gradient_accumulation=1";

/// Returns the backends of this binary that find a device and must agree with flex.
fn backends() -> Vec<&'static str> {
    let mut found = Vec::new();
    if cfg!(feature = "candle") {
        found.push("candle");
    }
    #[cfg(feature = "wgpu")]
    if firebrick_tests::has_wgpu() {
        found.push("wgpu");
    }
    found
}

fn losses(backend: &str, changes: &[&str]) -> Vec<f64> {
    let output = tempdir().unwrap();
    let backend = format!("backend={backend}");
    // At this rate a wrong gradient changes the next loss.
    let three_steps =
        [backend.as_str(), "train.steps=3", "train.warmup_steps=0", "train.learning_rate=1e-2", "data.eval_fraction="];
    let summary = finish(recipe(output.path(), &[&three_steps, changes].concat()), NEW);
    assert_eq!(summary.steps, 3);
    step_losses(&output.path().join("run"))
}

fn assert_agree(backends: &[&str], changes: &[&str]) {
    let expected = losses("flex", changes);
    assert_eq!(expected.len(), 3);
    for backend in backends {
        let ours = losses(backend, changes);
        let difference = largest_difference(&ours, &expected);
        assert!(ours.len() == 3 && difference < 1e-4, "{backend} {changes:?}: {ours:?}, flex {expected:?}");
    }
}

#[test]
fn three_steps_of_qlora_have_the_same_losses_on_every_backend() {
    assert_agree(&backends(), &[]);
}

#[test]
fn three_steps_over_a_base_in_every_format_have_the_same_losses_on_every_backend() {
    for format in QuantFormat::ALL {
        assert_agree(&backends(), &[&format!("base={format}"), QUICK]);
    }
}

/// Rank 64 gives matrices of 4,096 elements, the fewest that get 8-bit moments.
#[test]
fn three_steps_with_8_bit_moments_have_the_same_losses_on_every_backend() {
    assert_agree(&backends(), &["lora.r=64", "train.optimizer=adamw_8bit", QUICK]);
}

/// wgpu trains three families only: a family adds its forward and backward to a step, which `numbers/` compares for each family on each backend; the
/// optimizer and the run do not depend on the family.
#[test]
fn three_steps_of_every_family_have_the_same_losses_on_every_backend() {
    for family in FAMILIES {
        let mut backends = backends();
        backends.retain(|backend| *backend != "wgpu" || DIFFERENT.contains(&family));
        assert_agree(&backends, &[&format!("model='{}'", fixture(family).display()), QUICK]);
    }
}
