//! A step is the same however its rows are divided into micro-batches, dropout included.
//!
//! Trade-off: sums are rounded in another order, so losses are equal up to rounding.

use firebrick_tests::{NEW, NEWEST, checkpoint_folder, finish, fixture, one_step, recipe, some_in_turn, step_losses};
use firebrick_trainer::state::checkpoint::read_state;
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
    let mixture = format!("model='{}'", fixture("tiny-qwen3-moe").display());
    let kinds = [
        &["lora.dropout=0.3"][..],
        &["lora.dropout=0.3", "pack=false"],
        &["lora.dropout=0.3", "lora.use_dora=true"],
        &[&mixture, "lora.dropout=0.3", "lora.target=['up_proj', 'down_proj']"],
    ];
    for (turn, kind) in kinds.into_iter().enumerate() {
        let kind = [&quick[..], kind].concat();
        let whole = losses(&DIVIDED[0], &kind);
        for divided in some_in_turn(&DIVIDED[1..], 1, turn) {
            let part = losses(&divided, &kind);
            let differ = whole.iter().zip(&part).any(|(whole, part)| (whole - part).abs() > 1e-5 * whole);
            assert!(whole.len() == 3 && !differ, "{kind:?}: {whole:?} {part:?}");
        }
        let other = losses(&DIVIDED[0], &[&kind[..], &["lora.dropout=0.2"]].concat());
        assert!(other != whole, "dropout has no effect");
    }
}

#[test]
fn a_run_whose_plan_divides_the_step_goes_on_with_the_division_it_began_with() {
    let auto = ["train.micro_batch_size=auto", "train.rows_per_step=6", "eval.every_steps=0"];
    let (whole, parts) = (tempdir().unwrap(), tempdir().unwrap());
    finish(recipe(whole.path(), &auto), NEW);
    let config = recipe(parts.path(), &auto);
    assert_eq!(one_step(config.clone(), NEW), 1);
    let decided = read_state(&checkpoint_folder(&parts.path().join("run"), 1)).unwrap().decided.unwrap();
    assert!(6_usize.is_multiple_of(decided.micro_batch_size), "{decided:?}");
    finish(config, NEWEST);
    let losses = [whole, parts].map(|output| step_losses(&output.path().join("run")));
    assert_eq!(losses[0], losses[1]);
}
