//! A whole run in f32 has the losses of the same run in transformers. With `FIREBRICK_TEST_CURVE` the recorded run is that of the files with this path
//! and the endings `.json` and `.safetensors`: `make_curve_golden.py --wide` makes one with the widths of Gemma 4 12B.

use std::env;

use firebrick_kernels::backends::Cuda;
use firebrick_tests::{largest_difference, loss_curves};
use tempfile::tempdir;

use crate::has_card;

#[test]
fn a_gemma_4_of_four_layers_learns_in_100_steps_what_it_learns_in_transformers() {
    if !has_card() {
        return;
    }
    let folder = tempdir().expect("a temporary folder");
    let golden = env::var("FIREBRICK_TEST_CURVE").unwrap_or_else(|_| "gemma4-curve".to_owned());
    let [ours, expected] = loss_curves::<Cuda>(&golden, folder.path());
    let difference = largest_difference(&ours, &expected);
    assert!(ours.len() == 100 && difference < 1e-3, "losses differ by {difference:e}: {ours:?}, not {expected:?}");
}
