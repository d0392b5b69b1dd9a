//! Guards of a run: a step that is not finite ends it with the place named and can be run again, and skipped steps change nothing.

use std::fs;
use std::path::Path;

use firebrick_tests::{
    NEW, NEWEST, checkpoint_folder, finish, fixture, metrics, one_step, recipe, refusal, step_losses,
};
use firebrick_trainer::config::RunConfig;
use firebrick_trainer::console::Console;
use firebrick_trainer::run::replay;
use firebrick_trainer::state::resume_point::ResumeFrom;
use safetensors::tensor::TensorView;
use safetensors::{SafeTensors, serialize_to_file};
use tempfile::{TempDir, tempdir};

/// A rate that makes weights of 1e30 in one update.
const TOO_FAST: [&str; 2] = ["train.learning_rate=1e30", "train.warmup_steps=0"];

fn assert_says(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
}

/// Runs the saved step of a run again; returns what was found.
fn again(config: RunConfig, run: &Path) -> String {
    let found = replay(config, run, Console::QUIET).unwrap_or_else(|error| panic!("{error}"));
    let [found] = &found[..] else { panic!("one rank has saved it: {found:?}") };
    found.clone()
}

#[test]
fn a_step_that_is_not_finite_names_the_place_and_is_run_again_with_the_weights_before_it() {
    let output = tempdir().unwrap();
    let run = output.path().join("run");
    one_step(recipe(output.path(), &[]), NEW);
    let config = recipe(output.path(), &TOO_FAST);
    // The second step ruins the weights, with finite gradients.
    assert_says(&refusal(config.clone(), NEWEST), &["step 3", "in the value of", "lora_", "train --replay"]);
    assert_says(&again(config.clone(), &run), &["all of its values are finite", "the gradient of"]);
    let file = run.join("replay.json");
    let whole = fs::read(&file).unwrap();
    fs::write(&file, &whole[..whole.len() / 2]).unwrap();
    let error = replay(config.clone(), &run, Console::QUIET).unwrap_err().to_string();
    assert_says(&error, &["is not a step that a run of this version saved"]);
    fs::remove_file(&file).unwrap();
    let error = replay(config, &run, Console::QUIET).unwrap_err().to_string();
    assert_says(&error, &["there is no step that ended the run"]);
}

/// Copies the tiny model with a norm of its second layer multiplied so that its MLP overflows.
fn overflowing_model() -> TempDir {
    let copy = tempdir().unwrap();
    for entry in fs::read_dir(fixture("tiny-llama")).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, copy.path().join(path.file_name().unwrap())).unwrap();
    }
    let file = copy.path().join("model.safetensors");
    let bytes = fs::read(&file).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let changed = "model.layers.1.post_attention_layernorm.weight";
    let weight = tensors.tensor(changed).unwrap();
    let width = weight.data().len() / weight.shape()[0];
    let large: Vec<u8> = match width {
        4 => 1e25_f32.to_le_bytes().repeat(weight.shape()[0]),
        other => panic!("the fixture is stored in f32, not with {other} bytes"),
    };
    let views = tensors.tensors().into_iter().map(|(name, view)| match name == changed {
        true => (name, TensorView::new(view.dtype(), view.shape().to_vec(), &large).unwrap()),
        false => (name, view),
    });
    let views: Vec<(String, TensorView<'_>)> = views.collect();
    let target = copy.path().join("changed.safetensors");
    serialize_to_file(views, None, &target).unwrap();
    fs::rename(target, file).unwrap();
    copy
}

#[test]
fn the_place_that_overflows_is_named_in_training_on_rows_and_on_pairs() {
    let model = overflowing_model();
    let (model, pairs) = (format!("model='{}'", model.path().display()), fixture("data/pairs-tiny.jsonl"));
    let pairs = format!("data.path='{}'", pairs.display());
    let output = "the output of layer 1 in micro-batch 1";
    let kinds: [(&[&str], &str); 3] = [
        (&[], output),
        (&["preference={}", &pairs, "max_seq_len=128"], output),
        // A weight that trains is looked at first.
        (&["bnb_4bit=", "lora=", "mode=full"], "the value of model.layers.1.post_attention_layernorm.weight"),
    ];
    for (kind, place) in kinds {
        let output = tempdir().unwrap();
        let config = recipe(output.path(), &[&[model.as_str(), "eval.on_start=false"], kind].concat());
        assert_says(&refusal(config.clone(), NEW), &["step 1: loss is NaN", place]);
        assert_says(&again(config, &output.path().join("run")), &[place]);
    }
}

#[test]
fn so_many_steps_in_a_row_are_skipped_and_the_next_one_ends_the_run() {
    let output = tempdir().unwrap();
    one_step(recipe(output.path(), &[]), NEW);
    let skip = [TOO_FAST[0], TOO_FAST[1], "train.on_nonfinite=skip", "train.max_skipped_steps=2", "train.steps=9"];
    let message = refusal(recipe(output.path(), &skip), NEWEST);
    assert_says(&message, &["step 5", "train.max_skipped_steps = 2"]);
    let run = output.path().join("run");
    assert_eq!(
        (metrics(&run).iter().filter(|line| line.get("grad_norm").is_some()).count(), step_losses(&run).len()),
        (4, 2)
    );
}

fn adapter(run: &Path, step: u64) -> Vec<u8> {
    fs::read(checkpoint_folder(run, step).join("adapter/adapter_model.safetensors")).unwrap()
}

/// The rule is computed again from the metrics. Its factor is so small that usual steps are spikes.
#[test]
fn a_spike_changes_nothing_and_a_resumed_run_skips_the_same_steps() {
    const STEPS: u64 = 30;
    let output = tempdir().unwrap();
    let run = output.path().join("run");
    let changes = [
        "train.steps=30",
        "train.schedule=constant",
        "train.spike_factor=1.0001",
        "train.max_skipped_steps=99",
        "checkpoint.every_steps=1",
        "checkpoint.keep=99",
    ];
    let config = recipe(output.path(), &changes);
    finish(config.clone(), NEW);
    let norms: Vec<f32> =
        metrics(&run).iter().filter_map(|line| Some(line.get("grad_norm")?.as_f64()? as f32)).collect();
    assert_eq!(norms.len(), STEPS as usize);
    let is_spike = |step: u64| {
        let mut known = norms[..(step as usize).saturating_sub(2)].to_vec();
        known.sort_by(f32::total_cmp);
        known.len() >= 16 && norms[step as usize - 1] > (1.0001 * f64::from(known[known.len() / 2])) as f32
    };
    let skipped: Vec<u64> = (2..=STEPS).filter(|&step| adapter(&run, step) == adapter(&run, step - 1)).collect();
    assert_eq!(skipped, (2..=STEPS).filter(|&step| is_spike(step)).collect::<Vec<_>>(), "{norms:?}");
    assert!(!skipped.is_empty(), "{norms:?}");
    let end = adapter(&run, STEPS);
    finish(config, Some(ResumeFrom::Named(checkpoint_folder(&run, 20))));
    assert!(adapter(&run, STEPS) == end, "resumed");
    // Without checkpoints the numbers of a step arrive after the next one is queued.
    let unsaved = recipe(output.path(), &[&changes[..], &["checkpoint.every_steps=0"]].concat());
    finish(unsaved, NEW);
    assert!(adapter(&output.path().join("run-2"), STEPS) == end, "without checkpoints on the way");
}
