//! `[wandb]`: the logs that a run leaves for W&B's program. Their bytes are tested in the trainer, and against the program by `check_wandb.py`.

use std::fs;
use std::path::{Path, PathBuf};

use firebrick_tests::{NEW, NEWEST, finish, one_step, recipe};
use tempfile::tempdir;

const SECTION: [&str; 3] = ["wandb={project='bricks', mode='offline'}", "train.steps=3", "eval.every_steps=1"];

/// Returns the logs of a run, oldest first.
fn logs(run: &Path) -> Vec<PathBuf> {
    let list = |folder: &Path| fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect::<Vec<_>>();
    let mut parts = list(&run.join("wandb"));
    parts.sort();
    assert!(parts.iter().all(|part| part.file_name().unwrap().to_str().unwrap().starts_with("offline-run-")));
    let of_part = |part: PathBuf| list(&part).into_iter().find(|path| path.is_file()).unwrap();
    parts.into_iter().map(of_part).collect()
}

#[test]
fn a_resumed_run_leaves_two_logs_of_one_run_that_share_its_steps() {
    let output = tempdir().unwrap();
    assert_eq!(one_step(recipe(output.path(), &SECTION), NEW), 1);
    finish(recipe(output.path(), &SECTION), NEWEST);
    let logs = logs(&output.path().join("run"));
    assert_eq!((logs.len(), logs[0].file_name()), (2, logs[1].file_name()));
    let rows = |log: &Path, step: u64| {
        let (log, key) = (fs::read(log).unwrap(), [&b"_step\x82\x01\x01"[..], step.to_string().as_bytes()].concat());
        // Each row is followed by the summary, which repeats it.
        log.windows(key.len()).filter(|bytes| *bytes == key).count() / 2
    };
    assert_eq!([0, 1, 2, 3].map(|step| rows(&logs[0], step)), [1, 1, 0, 0]);
    assert_eq!([0, 2, 3].map(|step| rows(&logs[1], step)), [0, 1, 1]);
    let text = |log: &Path| String::from_utf8_lossy(&fs::read(log).unwrap()).into_owned();
    for part in ["bricks", "learning_rate", "train/loss", "eval/loss"] {
        assert!(logs.iter().all(|log| text(log).contains(part)), "{part}");
    }
}
