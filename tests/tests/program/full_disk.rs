//! A run on a disk that becomes full: a small file system in memory, in the process's own namespace.
//!
//! Trade-off: nothing is tested where a user may not mount file systems, as in some containers.

use std::fs;
use std::process::Command;

use firebrick_tests::fixtures;
use tempfile::TempDir;

/// Mounts 1.2 MB: room for one checkpoint of about 0.8 MB and the rest of a run, not for two. Then it grows.
const SCRIPT: &str = "\
mount -t tmpfs -o size=1200k tmpfs small || exit 1
\"$@\" > out 2> err && exit 2
cp small/run/metrics.jsonl small/run/checkpoints/step-2/state.json .
mount -o remount,size=8m small || exit 3
\"$@\" --resume > out-resumed 2> err-resumed || exit 4
ls small/run small/run/checkpoints > left
";

fn may_mount() -> bool {
    let script = "mount -t tmpfs -o size=64k tmpfs \"$0\"";
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new("unshare");
    command.args(["--mount", "--map-root-user", "sh", "-c", script]).arg(folder.path());
    command.output().is_ok_and(|output| output.status.success())
}

/// Writes a recipe that saves into the folder `small`, with these settings of LoRA, training and checkpoints.
fn folder_of_run(lora: &str, train: &str, checkpoint: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let fixtures = fixtures();
    let fixtures = fixtures.display();
    let recipe = format!(
        "name='run'\noutput_dir='small'\nbackend='flex'\nmodel='{fixtures}/tiny-llama'\nmax_seq_len=64\n[lora]\n{lora}\n\
         [data]\npath='{fixtures}/data/chat-tiny.jsonl'\n[train]\n{train}\n[checkpoint]\nevery_steps=2\n{checkpoint}\n"
    );
    fs::write(folder.path().join("recipe.toml"), recipe).unwrap();
    fs::create_dir(folder.path().join("small")).unwrap();
    folder
}

/// Runs a script, which mounts `small`, with the command of a training as its arguments.
fn training(folder: &TempDir, script: &str) -> Command {
    let mut command = Command::new("unshare");
    command.current_dir(folder.path()).args(["--mount", "--map-root-user", "sh", "-c", script, "sh"]);
    command.args([env!("CARGO_BIN_EXE_firebrick-under-test"), "train", "--config", "recipe.toml"]);
    command
}

#[test]
fn a_disk_without_inodes_is_reported_as_that() {
    if !may_mount() {
        eprintln!("skipped: no file system can be mounted here");
        return;
    }
    let folder = folder_of_run("", "steps=4", "");
    // The run folder takes about ten, and a checkpoint more than twelve.
    for inodes in [14, 20, 30, 36] {
        let script = format!("mount -t tmpfs -o size=64m,nr_inodes={inodes} tmpfs small && \"$@\"");
        let output = training(&folder, &script).output().unwrap();
        let printed = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).join("\n");
        assert!(printed.contains("its inodes are used up") && !output.status.success(), "{inodes}: {printed}");
    }
}

#[test]
fn a_full_disk_before_the_end_is_a_warning_and_at_the_end_an_error_and_the_run_resumes_once_there_is_room() {
    if !may_mount() {
        eprintln!("skipped: no file system can be mounted here");
        return;
    }
    let divided = ["--ranks", "2", "--set", "train.zero_stage=1"];
    for options in [&[][..], &divided] {
        let folder = folder_of_run("r=32", "steps=6", "keep=1");
        let mut command = training(&folder, SCRIPT);
        let status = command.env("RAYON_NUM_THREADS", "1").args(options).status().unwrap();
        let read = |name: &str| fs::read_to_string(folder.path().join(name)).unwrap_or_default();
        let printed = ["out", "err", "out-resumed", "err-resumed"].map(read).join("\n");
        assert!(status.success(), "{status}: {printed}");

        let warning = "warning: step 4 was not saved: the disk that holds";
        assert_eq!(read("out").matches("was not saved").count(), 1, "{printed}");
        assert!(
            read("out").contains(warning) && read("out").contains("saves after step 6 if there is room"),
            "{printed}"
        );
        assert!(read("err").contains("is full"), "{printed}");
        assert!(
            read("metrics.jsonl").contains("\"step\":6,") && read("state.json").contains("\"step\": 2,"),
            "{printed}"
        );
        assert!(read("out-resumed").contains("resumed after step 2"), "{printed}");
        let left = read("left");
        let left: Vec<&str> = left.lines().collect();
        assert!(left.contains(&"summary.json") && left.contains(&"step-6") && !left.contains(&"step-2"), "{left:?}");
    }
}
