//! Checkpoints on a disk that is imitated as slow: steps go on, the next checkpoint waits, and a process that is killed meanwhile loses nothing else.
//!
//! Trade-off: the disk is a pause in the thread that writes, `FIREBRICK_SAVE_DELAY_MS`.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::thread::sleep;
use std::time::{Duration, Instant};

use firebrick_tests::{fixtures, snapshot};
use tempfile::TempDir;

/// Longest wait for a checkpoint.
const PATIENCE: Duration = Duration::from_secs(120);
/// What a checkpoint on the slow disk takes at least.
const DELAY_MS: u64 = 2000;

/// A folder with a recipe.
struct Place(TempDir);

impl Place {
    fn new(steps: u64, every: u64) -> Self {
        let place = Self(tempfile::tempdir().unwrap());
        let (fixtures, output) = (fixtures(), place.0.path().join("runs"));
        let (fixtures, output) = (fixtures.display(), output.display());
        let recipe = format!(
            "name='run'\noutput_dir='{output}'\nbackend='flex'\nmodel='{fixtures}/tiny-llama'\nmax_seq_len=64\n[lora]\nr=4\n\
             [data]\npath='{fixtures}/data/chat-tiny.jsonl'\n[train]\nsteps={steps}\n[checkpoint]\nevery_steps={every}\nkeep=9\n"
        );
        fs::write(place.0.path().join("recipe.toml"), recipe).unwrap();
        place
    }

    fn training(&self, delay_ms: u64) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_firebrick-under-test"));
        command.args(["train", "--config"]).arg(self.0.path().join("recipe.toml"));
        command.env("FIREBRICK_SAVE_DELAY_MS", delay_ms.to_string());
        command
    }

    fn run(&self) -> PathBuf {
        self.0.path().join("runs/run")
    }

    /// Returns weights and optimizer state of all checkpoints, and the result.
    fn tensors(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        let mut files = snapshot(&self.run());
        files.retain(|path, _| path.extension().is_some_and(|extension| extension == "safetensors"));
        files
    }
}

fn printed(output: Output) -> String {
    let text = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).join("\n");
    assert!(output.status.success(), "{text}");
    text
}

#[test]
fn steps_go_on_while_a_slow_disk_takes_a_checkpoint_and_the_next_one_waits() {
    // Nothing is saved after the last step but the end of the run, which waits.
    let place = Place::new(3, 2);
    let text = printed(place.training(DELAY_MS).output().unwrap());
    assert!(text.contains("step 3 waited") && text.contains("until the checkpoint of step 2"), "{text}");
    let summary: serde_json::Value =
        serde_json::from_slice(&fs::read(place.run().join("summary.json")).unwrap()).unwrap();
    let waited = summary["waited_for_saves_s"].as_f64().unwrap();
    assert!(waited > 0.0 && waited < DELAY_MS as f64 / 1e3, "{waited}");
    // The checkpoint of step 4 waits for that of step 2, and steps wait with it.
    let place = Place::new(5, 2);
    let text = printed(place.training(DELAY_MS).output().unwrap());
    assert!(text.contains("step 4 waited") && text.contains("step 5 waited"), "{text}");
}

#[test]
fn a_process_that_is_killed_while_its_thread_writes_resumes_from_the_checkpoint_before() {
    let (whole, killed) = (Place::new(6, 2), Place::new(6, 2));
    printed(whole.training(0).output().unwrap());
    let mut process = killed.training(DELAY_MS).spawn().unwrap();
    let checkpoints = killed.run().join("checkpoints");
    let started = Instant::now();
    while !checkpoints.join("step-4.tmp").exists() {
        assert!(process.try_wait().unwrap().is_none() && started.elapsed() < PATIENCE, "step 4 is not saved");
        sleep(Duration::from_millis(20));
    }
    process.kill().unwrap();
    process.wait().unwrap();
    assert!(checkpoints.join("step-2").exists() && !checkpoints.join("step-4").exists());
    let text = printed(killed.training(0).arg("--resume").output().unwrap());
    assert!(text.contains("step-4.tmp was still being written when the run ended"), "{text}");
    assert!(text.contains("resumed after step 2"), "{text}");
    assert!(killed.tensors() == whole.tensors());
}
