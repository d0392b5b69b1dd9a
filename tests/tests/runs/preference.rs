//! Preference training as a user runs it: the rewards diverge, runs resume, the reference is the run's own, and data and recipes that do not fit
//! together are refused.

use std::f64::consts::LN_2;
use std::fs;
use std::path::{Path, PathBuf};

use firebrick_tests::{
    NEW, NEWEST, checkpoint_folder, finish, fixture, metrics, one_step, recipe, refusal, snapshot, step_losses,
};
use firebrick_trainer::config::RunConfig;
use tempfile::tempdir;

use crate::resume::tensors;

fn pairs(output: &Path, changes: &[&str]) -> RunConfig {
    let path = format!("data.path='{}'", fixture("data/pairs-tiny.jsonl").display());
    let cache = format!("data.cache='{}'", output.join("cache").display());
    let usual = [path.as_str(), cache.as_str(), "max_seq_len=128", "eval.every_steps=3"];
    recipe(output, &[&usual, changes].concat())
}

const FULL: [&str; 3] = ["bnb_4bit=", "lora=", "mode=full"];
/// The base is the reference, and its log-probabilities are computed before training.
const PRECOMPUTED: &str = "preference={precompute_ref_log_probs=true}";

/// Lists the files of log-probabilities, those of the training rows last: they are the larger ones.
fn references(output: &Path) -> Vec<PathBuf> {
    let cached = fs::read_dir(output.join("cache")).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> = cached.filter(|path| path.extension().is_some_and(|end| end == "reference")).collect();
    files.sort_by_key(|path| fs::metadata(path).unwrap().len());
    files
}

fn starting_from(adapter: &Path) -> String {
    format!("lora.init_from='{}'", adapter.display())
}

#[test]
fn dpo_and_orpo_move_rewards_apart_in_every_mode() {
    let kinds: [(&str, &[&str], &[&str]); 5] = [
        ("dpo", &["preference={}"], &[]),
        ("dpo without packing", &["preference={rpo_alpha=0.5}", "pack=false"], &["bnb_4bit="]),
        ("ipo, precomputed", &["preference={loss_type='ipo', precompute_ref_log_probs=true}"], &[]),
        ("dpo, full", &["preference={}", "train.learning_rate=1e-3"], &FULL),
        ("orpo, full", &["preference={loss='orpo'}", "train.learning_rate=1e-3"], &FULL),
    ];
    // The pairs are those of the training: a few steps teach nothing about others.
    let trained = format!("data.eval_path='{}'", fixture("data/pairs-tiny.jsonl").display());
    for (name, loss, mode) in kinds {
        let output = tempdir().unwrap();
        let rate = ["train.learning_rate=5e-3", &trained, "data.eval_fraction="];
        let summary = finish(pairs(output.path(), &[loss, mode, &rate].concat()), NEW);
        let (before, after) = (summary.pairs_before.unwrap(), summary.pairs_after.unwrap());
        assert!(after.margin > before.margin + 1e-3, "{name}: {} -> {}", before.margin, after.margin);
        let starts_at_reference = !name.starts_with("orpo");
        assert_eq!(starts_at_reference, before.margin.abs() < 1e-4, "{name}: {}", before.margin);
        for line in metrics(&output.path().join("run")) {
            for key in ["rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen"] {
                assert!(line[key].is_number(), "{name}: {line}");
            }
        }
    }
}

#[test]
fn a_preference_run_that_was_interrupted_equals_one_that_was_not() {
    let adapter = starting_from(&fixture("tiny-llama-lora"));
    let kinds: [&[&str]; 3] =
        [&["preference={}"], &["preference={}", FULL[0], FULL[1], FULL[2]], &["preference={}", &adapter]];
    for kind in kinds {
        let (whole, parts) = (tempdir().unwrap(), tempdir().unwrap());
        finish(pairs(whole.path(), kind), NEW);
        let config = pairs(parts.path(), kind);
        one_step(config.clone(), NEW);
        // The reference of a resumed run is that of the model before its first step, even if it has to be computed again.
        let references = references(parts.path());
        assert_eq!(references.len(), if kind.len() == 1 { 0 } else { 2 }, "{kind:?}");
        references.iter().for_each(|path| fs::remove_file(path).unwrap());
        finish(config, NEWEST);
        for (path, bytes) in tensors(&whole.path().join("run")) {
            assert!(fs::read(parts.path().join("run").join(&path)).unwrap() == bytes, "{kind:?}: {}", path.display());
        }
    }
}

#[test]
fn pairs_and_recipes_that_do_not_fit_together_are_refused() {
    let output = tempdir().unwrap();
    let message = refusal(pairs(output.path(), &[]), NEW);
    assert!(message.contains("[preference]") && message.contains("rejected"), "{message}");
    let message = refusal(recipe(output.path(), &["preference={}"]), NEW);
    assert!(message.contains("\"chosen\"") && message.contains("\"rejected\""), "{message}");
}

/// Before its first step a model is its own reference, so the first loss is ln 2; against another model's
/// log-probabilities it is not.
#[test]
fn runs_that_start_as_another_model_compute_their_own_reference() {
    let phi = format!("model='{}'", fixture("tiny-phi3").display());
    let kinds: [[&[&str]; 2]; 2] = [
        [&[PRECOMPUTED], &["preference={}", "lora.init_lora_weights=pissa", "lora.r=16"]],
        [&[phi.as_str(), PRECOMPUTED], &[phi.as_str(), PRECOMPUTED, "max_seq_len=256"]],
    ];
    for kind in kinds {
        let output = tempdir().unwrap();
        for (changes, name) in kind.into_iter().zip(["run", "run-2"]) {
            one_step(pairs(output.path(), changes), NEW);
            let loss = step_losses(&output.path().join(name))[0];
            assert!((loss - LN_2).abs() < 1e-5, "{changes:?}: {loss}");
        }
    }
}

#[test]
fn log_probabilities_of_another_model_end_the_run_at_its_first_step_and_their_file_is_named() {
    let output = tempdir().unwrap();
    one_step(pairs(output.path(), &["preference={}", &starting_from(&fixture("tiny-llama-lora"))]), NEW);
    let theirs = references(output.path()).pop().unwrap();
    let config = || pairs(output.path(), &[PRECOMPUTED]);
    one_step(config(), NEW);
    let ours = references(output.path()).into_iter().rfind(|path| *path != theirs).unwrap();
    fs::copy(&theirs, &ours).unwrap();
    let message = refusal(config(), NEW);
    for part in ["ln 2 = 0.693147", "delete or rename", &ours.display().to_string()] {
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
    assert!(!checkpoint_folder(&output.path().join("run-3"), 1).exists(), "nothing of such a step is saved");
    fs::remove_file(&ours).unwrap();
    one_step(config(), NEW);
}

#[test]
fn a_preference_run_is_resumed_against_its_own_reference_alone() {
    let (output, copy) = (tempdir().unwrap(), tempdir().unwrap());
    let original = fixture("tiny-llama-lora");
    for entry in fs::read_dir(&original).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, copy.path().join(path.file_name().unwrap())).unwrap();
    }
    let config = |adapter: &Path| pairs(output.path(), &["preference={}", &starting_from(adapter)]);
    let run = output.path().join("run");
    one_step(config(&original), NEW);
    let before = snapshot(&run);
    let matrices = copy.path().join("adapter_model.safetensors");
    let whole = fs::read(&matrices).unwrap();
    let mut other = whole.clone();
    *other.last_mut().unwrap() ^= 1;
    fs::write(&matrices, other).unwrap();
    let message = refusal(config(copy.path()), NEWEST);
    assert!(message.contains("has lora.init_from = matrices") && message.contains("now it is matrices"), "{message}");
    fs::remove_file(&matrices).unwrap();
    let message = refusal(config(copy.path()), NEWEST);
    assert!(message.contains("adapter_model.safetensors` cannot be read"), "{message}");
    assert!(snapshot(&run) == before, "a refusal touched the run folder");
    // Only the content counts, not the path or the adapter's name for its base.
    fs::write(&matrices, whole).unwrap();
    let settings = copy.path().join("adapter_config.json");
    let text = fs::read_to_string(&settings).unwrap().replace("\"tiny-llama\"", "\"org/llama\"");
    fs::write(&settings, text).unwrap();
    finish(config(copy.path()), NEWEST);
}
