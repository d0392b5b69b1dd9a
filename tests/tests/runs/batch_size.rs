//! A step is the same however its rows are divided into micro-batches, dropout included.
//!
//! Trade-off: sums are rounded in another order, so losses are equal up to rounding.

use firebrick_tests::{NEW, finish, recipe, step_losses};
use tempfile::tempdir;

/// Rows of one step in micro-batches of eight, four, two and one.
const DIVIDED: [[&str; 2]; 4] = [
    ["train.micro_batch_size=8", "train.gradient_accumulation=1"],
    ["train.micro_batch_size=4", "train.gradient_accumulation=2"],
    ["train.micro_batch_size=2", "train.gradient_accumulation=4"],
    ["train.micro_batch_size=1", "train.gradient_accumulation=8"],
];

#[test]
fn rows_have_the_same_dropout_masks_in_any_micro_batch() {
    let losses = |divided: &[&str], kind: &[&str]| {
        let output = tempdir().unwrap();
        finish(recipe(output.path(), &[divided, kind].concat()), NEW);
        step_losses(&output.path().join("run"))
    };
    let quick = ["train.steps=3", "train.learning_rate=1e-2", "eval.every_steps=0", "data.eval_fraction="];
    for kind in
        [&["lora.dropout=0.3"][..], &["lora.dropout=0.3", "pack=false"], &["lora.dropout=0.3", "lora.use_dora=true"]]
    {
        let kind = [&quick[..], kind].concat();
        let [whole, parts @ ..] = DIVIDED.map(|divided| losses(&divided, &kind));
        for part in &parts {
            let differ = whole.iter().zip(part).any(|(whole, part)| (whole - part).abs() > 1e-5 * whole);
            assert!(whole.len() == 3 && !differ, "{kind:?}: {whole:?} {part:?}");
        }
        let other = losses(&DIVIDED[0], &[&kind[..], &["lora.dropout=0.2"]].concat());
        assert!(other != whole, "dropout has no effect");
    }
}
