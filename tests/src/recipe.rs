//! Recipes over the tiny models, run in this process, and the files that they write.
//!
//! Trade-off: a run's console is off, so notes are tested where they are computed.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use firebrick_parallel::Ranks;
use firebrick_train::report::write_at_end;
use firebrick_trainer::RunError;
use firebrick_trainer::config::RunConfig;
use firebrick_trainer::console::{Console, Outcome, Summary};
use firebrick_trainer::run::interrupt::Interrupt;
use firebrick_trainer::run::trace::TraceSteps;
use firebrick_trainer::run::{RunOptions, run};
use firebrick_trainer::state::resume_point::ResumeFrom;
use serde_json::Value;

use crate::fixture;

/// Starts a new run.
pub const NEW: Option<ResumeFrom> = None;
/// Continues the newest run of the recipe's name from its newest checkpoint.
pub const NEWEST: Option<ResumeFrom> = Some(ResumeFrom::Newest);

/// Six steps of QLoRA on chats: every part of a run has something to do.
const RECIPE: &str = r#"
name = "run"
backend = "flex"
max_seq_len = 64
seed = 7
[bnb_4bit]
[lora]
r = 4
alpha = 8
[data]
eval_fraction = 0.2
[train]
steps = 6
warmup_steps = 1
micro_batch_size = 2
gradient_accumulation = 2
learning_rate = 1e-3
weight_decay = 0.01
loss_chunk_tokens = 48
[eval]
max_new_tokens = 8
"#;

/// Builds a recipe for QLoRA of `tiny-llama` on the chats, into `output/run`, with `changes` as for `--set`.
pub fn recipe(output: &Path, changes: &[&str]) -> RunConfig {
    let set = |key: &str, path: &Path| format!("{key}='{}'", path.display());
    let mut overrides = vec![
        set("model", &fixture("tiny-llama")),
        set("data.path", &fixture("data").join("chat-tiny.jsonl")),
        set("output_dir", output),
    ];
    overrides.extend(changes.iter().map(|&change| change.to_owned()));
    RunConfig::from_toml(RECIPE, Path::new("run.toml"), &overrides).expect("the recipe is well formed")
}

/// Runs a recipe, from its start or from a checkpoint. An `interrupt` that is already requested lets it take one step.
///
/// # Errors
/// Any error that stops the run.
pub fn train(config: RunConfig, resume: Option<ResumeFrom>, interrupt: &Interrupt) -> Result<Outcome, RunError> {
    let interrupt = interrupt.clone();
    run(RunOptions {
        config,
        resume,
        console: Console::QUIET,
        interrupt,
        trace: None,
        force: false,
        ranks: Ranks::single(),
        report: Some(write_at_end),
    })
}

/// Takes one step, then ends as after a signal; returns the number of steps taken so far.
pub fn one_step(config: RunConfig, resume: Option<ResumeFrom>) -> u64 {
    let interrupt = Interrupt::detached();
    interrupt.request();
    match train(config, resume, &interrupt) {
        Ok(Outcome::Interrupted { step, .. }) => step,
        Ok(other) => panic!("the run was to be interrupted, but ended with {other:?}"),
        Err(error) => panic!("the run was to be interrupted, but: {error}"),
    }
}

/// Runs a recipe to its end.
pub fn finish(config: RunConfig, resume: Option<ResumeFrom>) -> Summary {
    match train(config, resume, &Interrupt::detached()) {
        Ok(Outcome::Finished(summary)) => *summary,
        Ok(other) => panic!("the run was to finish, but ended with {other:?}"),
        Err(error) => panic!("the run was to finish, but: {error}"),
    }
}

/// Runs a recipe to its end, with a trace of some steps.
pub fn finish_traced(config: RunConfig, steps: TraceSteps) -> Summary {
    let options = RunOptions {
        config,
        resume: NEW,
        console: Console::QUIET,
        interrupt: Interrupt::detached(),
        trace: Some(steps),
        force: false,
        ranks: Ranks::single(),
        report: Some(write_at_end),
    };
    match run(options) {
        Ok(Outcome::Finished(summary)) => *summary,
        other => panic!("the run was to finish, but ended with {other:?}"),
    }
}

/// Runs a recipe that must be refused; returns the error message with its causes.
pub fn refusal(config: RunConfig, resume: Option<ResumeFrom>) -> String {
    let error = match train(config, resume, &Interrupt::detached()) {
        Ok(outcome) => panic!("the run was to be refused, but ended with {outcome:?}"),
        Err(error) => error,
    };
    let causes = std::iter::successors(Some(&error as &dyn std::error::Error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

/// Returns the lines of a run's metrics.jsonl.
pub fn metrics(run: &Path) -> Vec<Value> {
    let text = fs::read_to_string(run.join("metrics.jsonl")).expect("the run wrote metrics.jsonl");
    text.lines().map(|line| serde_json::from_str(line).expect("each line is JSON")).collect()
}

/// Returns the training loss of each logged step.
pub fn step_losses(run: &Path) -> Vec<f64> {
    metrics(run).iter().filter_map(|line| line.get("loss")?.as_f64()).collect()
}

/// Returns the folder of the checkpoint after `step`.
pub fn checkpoint_folder(run: &Path, step: u64) -> PathBuf {
    run.join("checkpoints").join(format!("step-{step}"))
}

/// Reads every file below a folder, except the lock and the run's plan, which contains the free memory.
pub fn snapshot(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = BTreeMap::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(inner) = folders.pop() {
        for entry in fs::read_dir(&inner).unwrap_or_else(|error| panic!("{}: {error}", inner.display())) {
            let path = entry.expect("the folder can be listed").path();
            if path.is_dir() {
                folders.push(path);
            } else {
                let name = path.strip_prefix(folder).expect("it is below the folder").to_path_buf();
                files.insert(name, fs::read(&path).expect("the file can be read"));
            }
        }
    }
    files.retain(|name, _| ![Path::new("lock"), Path::new("plan.toml")].contains(&name.as_path()));
    files
}
