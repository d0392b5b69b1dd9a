//! A whole run has the losses of the same run in transformers.

use firebrick_kernels::backends::Flex;
use firebrick_tests::{largest_difference, loss_curves};
use tempfile::tempdir;

/// With another order of sums, transformers' own losses differ by less than 1e-6. Three layers have a window of 16 tokens, which is shorter than the
/// documents, and the fourth has keys as values.
#[test]
fn a_gemma_4_of_four_layers_learns_in_100_steps_what_it_learns_in_transformers() {
    let folder = tempdir().expect("a temporary folder");
    let [ours, expected] = loss_curves::<Flex>("gemma4-curve", folder.path());
    let difference = largest_difference(&ours, &expected);
    assert!(ours.len() == 100 && difference < 1e-3, "losses differ by {difference:e}: {ours:?}, not {expected:?}");
    assert!(expected[99] < 0.15 * expected[0], "it learns: {expected:?}");
}
