//! Guarantees of `[best]`: the result has the best weights, the run ends when its patience is over, and neither depends on interruptions.
//!
//! Trade-off: a learning rate that is far too high makes the held-out loss rise; which step is the best follows from the metrics.

use std::fs;
use std::path::{Path, PathBuf};

use firebrick_tests::{NEW, NEWEST, checkpoint_folder, finish, metrics, recipe, train};
use firebrick_trainer::config::RunConfig;
use firebrick_trainer::console::Outcome;
use firebrick_trainer::run::interrupt::Interrupt;
use firebrick_trainer::state::checkpoint::{RunState, read_state};
use serde_json::Value;
use tempfile::tempdir;

const FULL: [&str; 3] = ["bnb_4bit=", "lora=", "mode=full"];

/// Twelve steps whose held-out loss first falls and then rises, evaluated after each.
fn rising(output: &Path, changes: &[&str]) -> RunConfig {
    let common = [
        "train.steps=12",
        "train.learning_rate=0.3",
        "train.warmup_steps=6",
        "train.schedule=constant",
        "train.weight_decay=0",
        "eval.every_steps=1",
        "checkpoint.keep=1",
    ];
    recipe(output, &[&common, changes].concat())
}

/// Returns the held-out loss after each step that was evaluated, the one before the first step left out.
fn eval_losses(run: &Path) -> Vec<(u64, f64)> {
    let of_line = |line: Value| Some((line["step"].as_u64()?, line.get("eval_loss")?.as_f64()?));
    metrics(run).into_iter().filter_map(of_line).filter(|(step, _)| *step > 0).collect()
}

/// Returns the step of the lowest loss.
fn lowest(losses: &[(u64, f64)]) -> u64 {
    losses.iter().copied().min_by(|(_, a), (_, b)| a.total_cmp(b)).expect("the run was evaluated").0
}

fn checkpoints(run: &Path) -> Vec<String> {
    let entries = fs::read_dir(run.join("checkpoints")).unwrap();
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn newest(run: &Path, step: u64) -> RunState {
    read_state(&checkpoint_folder(run, step)).unwrap()
}

fn weights(folder: &Path) -> Vec<u8> {
    let files = ["adapter/adapter_model.safetensors", "model/model.safetensors"].map(PathBuf::from);
    let file = files.iter().map(|file| folder.join(file)).find(|file| file.exists()).expect("there are weights");
    fs::read(file).unwrap()
}

#[test]
fn a_run_ends_after_patience_evaluations_and_its_result_is_the_best_checkpoint() {
    for kind in [&[][..], &["lora.init_lora_weights=pissa"], &["lora.use_dora=true"], &FULL] {
        let output = tempdir().unwrap();
        let run = output.path().join("run");
        let config = rising(output.path(), &[kind, &["best.patience=2"]].concat());
        let summary = finish(config.clone(), NEW);
        let losses = eval_losses(&run);
        let best = lowest(&losses);
        assert_eq!((summary.best_step, summary.steps), (Some(best), best + 2), "{kind:?}: {losses:?}");
        assert!(summary.steps < 12, "{kind:?}: the loss is to rise: {losses:?}");
        let of_best = losses.iter().find(|(step, _)| *step == best).map(|(_, loss)| *loss);
        assert_eq!(summary.eval_loss_after, of_best);
        let mut expected = [best, best + 2].map(|step| format!("step-{step}"));
        expected.sort();
        assert_eq!(checkpoints(&run), expected, "{kind:?}: the best and the newest stay");
        // The format of the tiny model is f32, as that of checkpoints.
        assert!(weights(&run) == weights(&checkpoint_folder(&run, best)), "{kind:?}");
        assert!(weights(&run) != weights(&checkpoint_folder(&run, best + 2)), "{kind:?}");
        let text = fs::read_to_string(run.join("summary.json")).unwrap();
        assert!(text.contains(&format!("\"best_step\": {best}")), "{text}");

        let before = firebrick_tests::snapshot(&run);
        assert_eq!(finish(config, NEWEST), summary, "a run that has ended early is finished");
        assert!(firebrick_tests::snapshot(&run) == before);
    }
}

#[test]
fn a_run_without_patience_takes_all_steps_and_still_has_the_best_weights() {
    let output = tempdir().unwrap();
    let run = output.path().join("run");
    let summary = finish(rising(output.path(), &["best={}"]), NEW);
    let losses = eval_losses(&run);
    assert_eq!((summary.steps, losses.len(), summary.best_step), (12, 12, Some(lowest(&losses))));
    assert!(weights(&run) == weights(&checkpoint_folder(&run, lowest(&losses))));
}

#[test]
fn an_interrupted_run_has_the_same_best_and_ends_after_the_same_step() {
    let (whole, parts) = (tempdir().unwrap(), tempdir().unwrap());
    let changes = ["best.patience=2", "eval.every_steps=2", "train.steps=20"];
    let expected = finish(rising(whole.path(), &changes), NEW);
    assert!(expected.steps < 20 && expected.steps > 4, "{expected:?}");
    let config = rising(parts.path(), &changes);
    // Each part has time for one step and the evaluation after it.
    let short = rising(parts.path(), &[&changes[..], &["train.max_time_hours=1e-9"]].concat());
    for step in 1..expected.steps {
        let resume = if step == 1 { NEW } else { NEWEST };
        let outcome = train(short.clone(), resume, &Interrupt::detached()).unwrap();
        assert!(matches!(outcome, Outcome::Interrupted { step: taken, .. } if taken == step), "{outcome:?}");
    }
    let found = finish(config, NEWEST);
    assert_eq!((found.steps, found.best_step), (expected.steps, expected.best_step));
    let (whole, parts) = (whole.path().join("run"), parts.path().join("run"));
    assert_eq!(eval_losses(&parts), eval_losses(&whole));
    assert_eq!(newest(&parts, found.steps).best, newest(&whole, found.steps).best);
    assert_eq!(checkpoints(&parts), checkpoints(&whole));
    assert!(weights(&parts) == weights(&whole));
}

#[test]
fn more_patience_lets_a_run_that_has_ended_go_on_from_its_newest_checkpoint() {
    let output = tempdir().unwrap();
    let run = output.path().join("run");
    let first = finish(rising(output.path(), &["best.patience=1"]), NEW);
    let longer = finish(rising(output.path(), &["best.patience=3"]), NEWEST);
    let losses = eval_losses(&run);
    assert_eq!((longer.steps, losses.len() as u64), (lowest(&losses) + 3, longer.steps), "{first:?}");
    assert_eq!(longer.best_step, Some(lowest(&losses)));
}

/// What may happen to a checkpoint.
const DAMAGES: [fn(&Path); 4] = [
    |folder| fs::remove_file(folder.join("manifest.json")).unwrap(),
    |folder| fs::write(folder.join("optimizer.safetensors"), "").unwrap(),
    |folder| {
        let file = folder.join("adapter/adapter_model.safetensors");
        let bytes = fs::read(&file).unwrap();
        fs::write(file, [&bytes[..bytes.len() - 1], &[7]].concat()).unwrap();
    },
    |folder| fs::remove_dir_all(folder).unwrap(),
];

#[test]
fn a_damaged_best_checkpoint_is_searched_again_and_at_the_end_the_last_weights_take_its_place() {
    for damage in DAMAGES {
        let output = tempdir().unwrap();
        let run = output.path().join("run");
        let config = rising(output.path(), &["best={}"]);
        let first = finish(config.clone(), NEW).best_step.unwrap();
        assert!(first < 12, "the loss is to rise");
        let best = checkpoint_folder(&run, first);
        damage(&best);
        let second = finish(rising(output.path(), &["best={}", "train.steps=14"]), NEWEST).best_step.unwrap();
        assert!(second > 12 && weights(&run) == weights(&checkpoint_folder(&run, second)));

        fs::remove_dir_all(&run).unwrap();
        let while_it_runs = std::thread::spawn(move || {
            while !best.join("manifest.json").exists() {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            damage(&best);
        });
        let summary = finish(config, NEW);
        while_it_runs.join().unwrap();
        assert_eq!(
            (summary.best_step, summary.eval_loss_after),
            (None, eval_losses(&run).last().map(|(_, loss)| *loss))
        );
        assert!(weights(&run) == weights(&checkpoint_folder(&run, 12)));
    }
}

#[test]
fn a_section_without_evaluations_or_with_a_metric_that_they_lack_is_refused() {
    let refused = |changes: &[&str]| {
        let set = [&["output_dir='x'", "model='m'", "data.path='d'", "mode=lora"], changes].concat();
        let overrides: Vec<String> = set.iter().map(|&change| change.to_owned()).collect();
        RunConfig::from_toml("", Path::new("x.toml"), &overrides).unwrap_err().to_string()
    };
    let evaluated = ["data.eval_fraction=0.1", "eval.every_steps=2"];
    assert!(refused(&["best={}"]).contains("nothing to evaluate on"));
    assert!(refused(&["best={}", "data.eval_fraction=0.1"]).contains("add eval.every_steps"));
    assert!(refused(&[&evaluated[..], &["best.metric=exact_match"]].concat()).contains("exact_match_prompts"));
    assert!(refused(&[&evaluated[..], &["best.metric='rewards/margins'"]].concat()).contains("[preference]"));
    assert!(refused(&[&evaluated[..], &["best.metric=loss"]].concat()).contains("here it is 'eval_loss'"));
}
