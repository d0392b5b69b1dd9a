//! Preference training as a user runs it: rewards move apart, runs resume, and data and recipes that do not fit together are refused.

use std::fs;

use firebrick_tests::{NEW, NEWEST, finish, fixture, metrics, one_step, recipe, refusal};
use firebrick_train::config::RunConfig;
use tempfile::tempdir;

use crate::resume::tensors;

fn pairs(output: &std::path::Path, changes: &[&str]) -> RunConfig {
    let path = format!("data.path='{}'", fixture("data/pairs-tiny.jsonl").display());
    let cache = format!("data.cache='{}'", output.join("cache").display());
    let usual = [path.as_str(), cache.as_str(), "max_seq_len=128", "eval.every_steps=3"];
    recipe(output, &[&usual, changes].concat())
}

const FULL: [&str; 3] = ["bnb_4bit=", "lora=", "mode=full"];

#[test]
fn dpo_and_orpo_move_rewards_apart_in_every_mode() {
    let kinds: [(&str, &[&str], &[&str]); 5] = [
        ("dpo", &["preference={}"], &[]),
        ("dpo without packing", &["preference={rpo_alpha=0.5}", "pack=false"], &["bnb_4bit="]),
        ("ipo, precomputed", &["preference={loss_type='ipo', precompute_ref_log_probs=true}"], &[]),
        ("dpo, full", &["preference={}", "train.learning_rate=1e-3"], &FULL),
        ("orpo, full", &["preference={loss='orpo'}", "train.learning_rate=1e-3"], &FULL),
    ];
    // Of the pairs that it trains on: a few steps teach nothing about others.
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
    let adapter = format!("lora.init_from='{}'", fixture("tiny-llama-lora").display());
    let kinds: [&[&str]; 3] =
        [&["preference={}"], &["preference={}", FULL[0], FULL[1], FULL[2]], &["preference={}", &adapter]];
    for kind in kinds {
        let (whole, parts) = (tempdir().unwrap(), tempdir().unwrap());
        finish(pairs(whole.path(), kind), NEW);
        let config = pairs(parts.path(), kind);
        one_step(config.clone(), NEW);
        // The reference of a resumed run is that of the model before its first step, also where it has to be computed again.
        let cached = fs::read_dir(parts.path().join("cache")).unwrap().map(|entry| entry.unwrap().path());
        let references: Vec<_> = cached.filter(|path| path.extension().is_some_and(|end| end == "reference")).collect();
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
