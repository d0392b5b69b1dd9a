//! W&B's log: its bytes are those of W&B's own package, and a resumed run goes on in the same run.

use super::*;
use crate::metrics::{EvalMetrics, Evaluation, StepMetrics};

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/run-golden01.wandb");

fn section() -> WandbSection {
    WandbSection { entity: Some("team".to_owned()), mode: WandbMode::Offline, project: "bricks".to_owned() }
}

fn step(step: u64) -> StepMetrics {
    StepMetrics { step, loss: 2.25, learning_rate: 0.5, grad_norm: f64::NAN, ..StepMetrics::default() }
}

fn eval(step: u64) -> EvalMetrics {
    EvalMetrics::new(step, &Evaluation { loss: Some(0.0), ..Evaluation::default() }).unwrap()
}

fn started(folder: &Path, resumed: bool) -> Wandb {
    Wandb::start(&section(), (folder, "run"), &[], resumed).unwrap()
}

/// Returns the messages of a log, without their records' numbers.
fn messages(log: &Path) -> Vec<(u32, Vec<u8>)> {
    let records = transaction_log::read(log).unwrap().0;
    records.iter().map(|record| fields(record).unwrap().pop().unwrap()).collect()
}

fn steps(log: &Path) -> Vec<u64> {
    messages(log).iter().filter(|(number, _)| *number == HISTORY).map(|(_, row)| step_of(row).unwrap()).collect()
}

fn exit_code(log: &Path) -> Vec<u8> {
    let (number, exit) = messages(log).pop().unwrap();
    assert_eq!(number, EXIT);
    fields(&exit).unwrap().into_iter().find(|(number, _)| *number == 1).map(|(_, code)| code).unwrap_or_default()
}

/// `make_wandb_golden.py` wrote the file with the messages and the log of the package `wandb`.
#[test]
fn a_run_is_written_as_the_package_of_wandb_writes_it() {
    let folder = tempfile::tempdir().unwrap();
    let parameters = [("learning_rate", "0.5"), ("name", "tiny run"), ("prompts", "[\"a\", \"b\"]")];
    // More than a block, so that a record is in pieces.
    let long = ("text".to_owned(), "x".repeat(40_000));
    let parameters: Vec<_> =
        parameters.map(|(key, value)| (key.to_owned(), value.to_owned())).into_iter().chain([long]).collect();
    let now = || Duration::from_millis(1_700_000_000_500);
    let mut sink = Wandb::create(folder.path(), "golden01", &section(), "tiny run", &parameters, now).unwrap();
    sink.eval(&eval(0)).unwrap();
    sink.step(&step(10)).unwrap();
    sink.eval(&eval(10)).unwrap();
    sink.end(RunEnd::Interrupted);
    let log = folder.path().join("offline-run-20231114_221320-golden01/run-golden01.wandb");
    let written = fs::read(&log).unwrap();
    assert!(written == fs::read(GOLDEN).unwrap(), "differs from the golden; written to {}", log.display());
}

#[test]
fn a_resumed_run_writes_no_step_twice() {
    let folder = tempfile::tempdir().unwrap();
    let mut killed = started(folder.path(), false);
    for number in 1..=4 {
        killed.step(&step(number)).unwrap();
    }
    killed.has_ended = true;
    drop(killed);
    let mut resumed = started(folder.path(), true);
    for number in 3..=5 {
        resumed.step(&step(number)).unwrap();
    }
    resumed.eval(&eval(5)).unwrap();
    resumed.end(RunEnd::Finished);
    let logs = earlier_logs(&folder.path().join("wandb"));
    assert_eq!((logs.len(), run_id_of(&logs[0])), (2, run_id_of(&logs[1])));
    // The kill took the row of step 4, which was not complete.
    assert_eq!((steps(&logs[0]), steps(&logs[1])), (vec![1, 2, 3], vec![4, 5]));
    assert_eq!((exit_code(&logs[0]), exit_code(&logs[1])), (1_u64.to_le_bytes().to_vec(), Vec::new()));
}

#[test]
fn a_run_that_fails_says_so() {
    let folder = tempfile::tempdir().unwrap();
    started(folder.path(), false).step(&step(1)).unwrap();
    let log = &earlier_logs(&folder.path().join("wandb"))[0];
    assert_eq!((steps(log), exit_code(log)), (vec![1], 1_u64.to_le_bytes().to_vec()));
}

#[cfg(unix)]
#[test]
fn the_program_is_waited_for() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("wandb.sh");
    // Reports its arguments, and marks the log as sent as soon as it has an exit.
    let script = "#!/bin/sh\necho \"$1 $2 $3 $WANDB_RESUME\"\nlog=$(ls \"$4\"/*.wandb)\nuntil [ -e \"$4/go\" ]; do sleep 0.05; done\n\
                  touch \"$log.synced\"\n";
    fs::write(&program, script).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let mut sink = started(folder.path(), false);
    sink.start_sync(program.to_str().unwrap());
    sink.step(&step(1)).unwrap();
    let home = sink.folder.clone();
    fs::write(home.join("go"), "").unwrap();
    sink.end(RunEnd::Finished);
    assert!(earlier_logs(&folder.path().join("wandb"))[0].with_extension("wandb.synced").exists());
    assert_eq!(fs::read_to_string(home.join("sync.log")).unwrap(), "beta sync --live allow\n");
    assert!(sink.sync.is_none());
}
