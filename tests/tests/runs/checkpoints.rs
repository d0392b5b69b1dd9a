//! Guarantees of a checkpoint: damage is found and named, an older checkpoint takes over, and allowed changes take effect on resuming.

use std::fs;
use std::path::{Path, PathBuf};

use firebrick_tests::{
    NEW, NEWEST, checkpoint_folder, finish, fixture, metrics, one_step, recipe, refusal, snapshot, step_losses,
};
use firebrick_trainer::config::RunConfig;
use firebrick_trainer::plan::PlanRequest;
use firebrick_trainer::run::prepare::prepare_for;
use firebrick_trainer::state::checkpoint::read_state;
use firebrick_trainer::state::identity::RunSettings;
use firebrick_trainer::state::resume_point::{ResumeFrom, ResumePoint};
use tempfile::tempdir;

use crate::resume::tensors;

/// Checkpoints after steps 2, 4 and 6.
const EVERY_TWO: [&str; 2] = ["checkpoint.every_steps=2", "checkpoint.keep=9"];

fn named(path: &Path) -> Option<ResumeFrom> {
    Some(ResumeFrom::Named(path.to_path_buf()))
}

/// Lists every file of a folder.
fn files(folder: &Path) -> Vec<PathBuf> {
    snapshot(folder).into_keys().chain([PathBuf::from("plan.toml")]).map(|name| folder.join(name)).collect()
}

#[test]
fn a_flipped_bit_in_any_file_of_a_checkpoint_is_found_and_named() {
    for kind in [&[][..], &["bnb_4bit=", "lora=", "mode=full", "train.optimizer=adamw_8bit"]] {
        let output = tempdir().unwrap();
        let config = recipe(output.path(), kind);
        one_step(config.clone(), NEW);
        let checkpoint = checkpoint_folder(&output.path().join("run"), 1);
        let files = files(&checkpoint);
        assert!(files.len() > 6, "{files:?}");
        for path in files {
            let whole = fs::read(&path).unwrap();
            let mut flipped = whole.clone();
            flipped[whole.len() / 2] ^= 1;
            fs::write(&path, flipped).unwrap();
            let message = refusal(config.clone(), named(&checkpoint));
            let is_named = message.contains(&path.display().to_string());
            assert!(is_named && message.contains("cannot be resumed"), "{}: {message}", path.display());
            fs::write(&path, whole).unwrap();
        }
        assert_eq!(finish(config, named(&checkpoint)).steps, 6, "the restored checkpoint is whole");
    }
}

#[test]
fn a_truncated_newest_checkpoint_is_reported_and_the_run_continues_from_the_older_one() {
    let output = tempdir().unwrap();
    let run = output.path().join("run");
    let config = recipe(output.path(), &EVERY_TWO);
    finish(config.clone(), NEW);
    let expected = tensors(&run);
    let damaged = checkpoint_folder(&run, 6).join("optimizer.safetensors");
    let whole = fs::read(&damaged).unwrap();
    fs::write(&damaged, &whole[..whole.len() / 2]).unwrap();

    let point = ResumePoint::open(&ResumeFrom::Newest, output.path(), "run").unwrap();
    assert_eq!((point.state.step, point.checkpoint.clone()), (4, checkpoint_folder(&run, 4)));
    let notes = point.notes.join("\n");
    for part in [damaged.display().to_string(), point.checkpoint.display().to_string(), "is damaged".to_owned()] {
        assert!(notes.contains(&part), "`{part}` is not in: {notes}");
    }
    drop(point);

    finish(config, NEWEST);
    let mut after = tensors(&run);
    let set_aside: Vec<_> = after.keys().filter(|path| path.to_string_lossy().contains("set-aside")).cloned().collect();
    assert!(!set_aside.is_empty(), "the damaged checkpoint stays on the disk under another name");
    set_aside.iter().for_each(|path| drop(after.remove(path)));
    assert!(after == expected);
}

/// Returns variants of a file's bytes with damage: one bit changed near its start, in its middle or at its end, or a part cut off.
fn damages(whole: &[u8]) -> Vec<Vec<u8>> {
    let flipped = |at: usize, bit: u8| {
        let mut bytes = whole.to_vec();
        bytes[at] ^= 1 << bit;
        bytes
    };
    let last = whole.len() - 1;
    vec![
        flipped(whole.len() / 16, 0),
        flipped(whole.len() / 2, 3),
        flipped(last, 6),
        whole[..last].to_vec(),
        whole[..whole.len() / 2].to_vec(),
        Vec::new(),
    ]
}

/// Checkpoints of an adapter and of a whole model differ only in the weights, so both are tried.
#[test]
fn damage_to_any_file_of_the_newest_checkpoint_leads_to_the_older_one_and_names_the_file() {
    for kind in [&[][..], &["bnb_4bit=", "lora=", "mode=full", "train.optimizer=adamw_8bit"]] {
        let output = tempdir().unwrap();
        let run = output.path().join("run");
        let config = recipe(output.path(), kind);
        one_step(config.clone(), NEW);
        one_step(config, NEWEST);
        let (older, newest) = (checkpoint_folder(&run, 1), checkpoint_folder(&run, 2));
        let files = files(&newest);
        assert!(files.len() > 8, "{files:?}");
        let check = |path: &Path, what: &str| {
            let point = ResumePoint::open(&ResumeFrom::Newest, output.path(), "run").unwrap();
            assert_eq!((point.state.step, &point.checkpoint), (1, &older), "{what} of {}", path.display());
            let [note] = &point.notes[..] else { panic!("{what} of {}: {:?}", path.display(), point.notes) };
            for part in ["is damaged", "continues from", &path.display().to_string(), &older.display().to_string()] {
                assert!(note.contains(part), "{what}: `{part}` is not in: {note}");
            }
        };
        for path in &files {
            let whole = fs::read(path).unwrap();
            for (number, damaged) in damages(&whole).into_iter().enumerate() {
                fs::write(path, damaged).unwrap();
                check(path, &format!("damage {number}"));
            }
            fs::remove_file(path).unwrap();
            check(path, "removal");
            fs::write(path, whole).unwrap();
        }
        let point = ResumePoint::open(&ResumeFrom::Newest, output.path(), "run").unwrap();
        assert_eq!((point.state.step, point.notes), (2, Vec::new()), "the restored checkpoint is whole");
    }
}

#[test]
fn a_run_whose_checkpoints_are_all_damaged_is_refused_with_the_file_of_the_newest() {
    let output = tempdir().unwrap();
    let config = recipe(output.path(), &[]);
    one_step(config.clone(), NEW);
    one_step(config.clone(), NEWEST);
    let [older, newest] = [1, 2].map(|step| checkpoint_folder(&output.path().join("run"), step));
    fs::write(older.join("state.json"), "").unwrap();
    for file in ["optimizer.safetensors", "state.json", "adapter/adapter_model.safetensors"] {
        let path = newest.join(file);
        let whole = fs::read(&path).unwrap();
        fs::write(&path, &whole[..whole.len() / 2]).unwrap();
        let message = refusal(config.clone(), NEWEST);
        let expected = format!("{}` has {} bytes, expected {}", path.display(), whole.len() / 2, whole.len());
        assert!(message.contains(&expected), "{file}: {message}");
        fs::write(&path, whole).unwrap();
    }
    finish(config, NEWEST);
}

#[test]
fn a_run_resumes_from_any_of_its_checkpoints_by_folder_and_from_the_run_by_name_or_folder() {
    let output = tempdir().unwrap();
    let run = output.path().join("run");
    let config = recipe(output.path(), &EVERY_TWO);
    finish(config.clone(), NEW);
    let expected = tensors(&run);
    for from in [checkpoint_folder(&run, 2), checkpoint_folder(&run, 4), run.clone(), PathBuf::from("run")] {
        finish(config.clone(), named(&from));
        let mut after = tensors(&run);
        after.retain(|path, _| !path.to_string_lossy().contains("set-aside"));
        assert!(after == expected, "resumed from {}", from.display());
    }
    let message = refusal(config, named(Path::new("no-such-run")));
    assert!(message.contains("nothing to resume") && message.contains("no-such-run"), "{message}");
}

/// Returns the differences between the checkpoint after step 1 and a recipe, as the run reports them.
fn reported_changes(run: &Path, config: &RunConfig) -> Option<String> {
    let saved = read_state(&checkpoint_folder(run, 1)).unwrap().settings;
    saved.changes(&RunSettings::new(&prepare_for(config.clone(), 1, &PlanRequest::default()).unwrap().plan))
}

#[test]
fn learning_rate_steps_evaluation_and_checkpoints_may_change_and_are_reported() {
    let changes = [
        ("train.learning_rate=2e-3", "train.learning_rate 0.001 -> 0.002"),
        ("train.steps=4", "train.steps 6 -> 4"),
        ("train.adam_beta2=0.99", "train.adam_beta2 0.999 -> 0.99"),
        ("eval.every_steps=2", "eval.every_steps"),
        ("checkpoint.keep=5", "checkpoint.keep"),
        ("train.recompute=full", "train.recompute"),
    ];
    for (change, reported) in changes {
        let output = tempdir().unwrap();
        let run = output.path().join("run");
        let original = recipe(output.path(), &["train.recompute=none"]);
        one_step(original.clone(), NEW);
        assert_eq!(reported_changes(&run, &original), None);
        let changed = recipe(output.path(), &["train.recompute=none", change]);
        let note = reported_changes(&run, &changed).unwrap_or_else(|| panic!("{change} is not reported"));
        assert!(note.contains("changed since the checkpoint") && note.contains(reported), "{change}: {note}");
        let steps = if change == "train.steps=4" { 4 } else { 6 };
        assert_eq!(finish(changed, NEWEST).steps, steps, "{change}");
    }
}

#[test]
fn a_changed_learning_rate_is_used_from_the_next_step_on() {
    let output = tempdir().unwrap();
    let run = output.path().join("run");
    let constant = |rate: &str| {
        recipe(
            output.path(),
            &["train.schedule=constant", "train.warmup_steps=0", &format!("train.learning_rate={rate}")],
        )
    };
    one_step(constant("1e-3"), NEW);
    finish(constant("5e-4"), NEWEST);
    let rates: Vec<f64> = metrics(&run).iter().filter_map(|line| line.get("lr")?.as_f64()).collect();
    assert_eq!(rates, [1e-3, 5e-4, 5e-4, 5e-4, 5e-4, 5e-4]);
}

/// The recipe has micro-batches of 2 and accumulates 2. Sums are rounded in another order, so losses agree up to rounding.
#[test]
fn micro_batch_and_accumulation_may_change_while_their_product_stays() {
    let (whole, parts) = (tempdir().unwrap(), tempdir().unwrap());
    finish(recipe(whole.path(), &[]), NEW);
    one_step(recipe(parts.path(), &[]), NEW);
    let other_cut = ["train.micro_batch_size=4", "train.gradient_accumulation=1"];
    finish(recipe(parts.path(), &other_cut), NEWEST);
    let (expected, ours) = (step_losses(&whole.path().join("run")), step_losses(&parts.path().join("run")));
    assert_eq!((expected.len(), ours.len()), (6, 6));
    for (ours, expected) in ours.iter().zip(&expected) {
        assert!((ours - expected).abs() < 1e-4, "{ours} {expected}");
    }
}

#[test]
fn the_base_model_is_recognized_by_its_content_and_not_by_its_path() {
    let (output, model) = (tempdir().unwrap(), tempdir().unwrap());
    for entry in fs::read_dir(fixture("tiny-llama")).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, model.path().join(path.file_name().unwrap())).unwrap();
    }
    one_step(recipe(output.path(), &[]), NEW);
    let moved = format!("model='{}'", model.path().display());
    let weights = model.path().join("model.safetensors");
    let whole = fs::read(&weights).unwrap();
    let mut other = whole.clone();
    let last = other.len() - 4;
    other[last] ^= 1;
    fs::write(&weights, other).unwrap();
    let message = refusal(recipe(output.path(), &[&moved]), NEWEST);
    assert!(message.contains("the model has other weights"), "{message}");
    fs::write(&weights, whole).unwrap();
    assert_eq!(finish(recipe(output.path(), &[&moved]), NEWEST).steps, 6);
}
