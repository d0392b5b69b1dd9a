//! Imitates launchers: the variables of torchrun, `srun` and `mpirun`, and the scripts of `configs/launch`, each starting two or four processes that
//! train together.
//!
//! Trade-off: no launcher runs. The variables are those in their documentation, and all machines are this one.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use firebrick_parallel::supervisor::free_port;
use firebrick_tests::fixtures;
use serde_json::Value;
use tempfile::TempDir;

const TOKEN: &str = "the secret of a test";

/// A folder with a recipe of two steps.
struct Place {
    folder: TempDir,
}

impl Place {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let fixtures = fixtures().display().to_string();
        let recipe = format!(
            "name='run'\nbackend='flex'\nmodel='{fixtures}/tiny-llama'\nmax_seq_len=64\n[lora]\nr=4\n[data]\n\
             path='{fixtures}/data/chat-tiny.jsonl'\n[train]\nsteps=2\nmicro_batch_size=1\n"
        );
        fs::write(folder.path().join("recipe.toml"), recipe).unwrap();
        Self { folder }
    }

    /// Creates a command in that folder, in an environment without a launcher's variables.
    fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        let path = std::env::var_os("PATH").unwrap_or_default();
        command.env_clear().env("PATH", path).env("RAYON_NUM_THREADS", "1").env("HOME", self.folder.path());
        command.env("FIREBRICK_RENDEZVOUS_TIMEOUT", "60").current_dir(self.folder.path()).stdin(Stdio::null());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Starts the program as one rank of a job, with a launcher's variables.
    fn rank(&self, variables: &[(&str, String)]) -> Child {
        let mut command = self.command(Path::new(env!("CARGO_BIN_EXE_firebrick-under-test")));
        command.args(["train", "--config", "recipe.toml"]).envs(variables.iter().map(|(name, value)| (*name, value)));
        command.env("FIREBRICK_JOB_TOKEN", TOKEN).spawn().unwrap()
    }

    /// Creates the command of a script in `configs/launch`, with the program in `TRAIN`.
    fn script(&self, name: &str) -> Command {
        let mut command = self.command(Path::new("bash"));
        command.arg(root().join("configs/launch").join(name)).env("TRAIN", env!("CARGO_BIN_EXE_firebrick-under-test"));
        command
    }

    /// Asserts that all processes finished cleanly, and that this many ranks trained together.
    fn assert_trained(&self, outputs: Vec<Output>, ranks: usize) {
        for output in outputs {
            let printed = [&output.stdout[..], &output.stderr].concat();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&printed));
        }
        let summary = fs::read_to_string(self.folder.path().join("runs/run/summary.json")).unwrap();
        let summary: Value = serde_json::from_str(&summary).unwrap();
        assert_eq!(summary["ranks"]["own_ms"].as_array().unwrap().len(), ranks);
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().unwrap()
}

fn ended(children: Vec<Child>) -> Vec<Output> {
    children.into_iter().map(|child| child.wait_with_output().unwrap()).collect()
}

/// Returns torchrun's variables for a rank of a job on this machine.
fn torchrun(rank: usize, port: u16) -> Vec<(&'static str, String)> {
    let numbers = [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", 2), ("LOCAL_WORLD_SIZE", 2)];
    let mut all: Vec<_> = numbers.into_iter().map(|(name, number)| (name, number.to_string())).collect();
    all.extend([("MASTER_ADDR", "127.0.0.1".to_owned()), ("MASTER_PORT", port.to_string())]);
    all
}

/// The agent keeps a store on MASTER_PORT; here rank 0 of another job, whose other rank never comes, uses that port.
#[test]
fn torchruns_ranks_train_together_although_its_agent_uses_the_port() {
    let (here, port) = (Place::new(), free_port().unwrap());
    let mut store = here.rank(&torchrun(0, port));
    let is_used = format!("until (exec 3<>/dev/tcp/127.0.0.1/{port}) 2>/dev/null; do sleep 0.05; done");
    assert!(Command::new("bash").args(["-c", &is_used]).status().unwrap().success());
    let of_agent = [("TORCHELASTIC_USE_AGENT_STORE", "True".to_owned()), ("GROUP_RANK", "0".to_owned())];
    let ranks = [0, 1].map(|rank| here.rank(&[&torchrun(rank, port)[..], &of_agent].concat()));
    here.assert_trained(ended(ranks.into()), 2);
    store.kill().unwrap();
    store.wait().unwrap();
}

#[test]
fn sruns_tasks_train_together_across_two_nodes() {
    let (here, port) = (Place::new(), free_port().unwrap());
    // Two nodes with one task each; both names are this machine's.
    let variables = |rank: usize| {
        let text = |text: &str| text.to_owned();
        vec![
            ("SLURM_JOB_ID", text("71")),
            ("SLURM_STEP_ID", text("0")),
            ("SLURM_PROCID", rank.to_string()),
            ("SLURM_NTASKS", text("2")),
            ("SLURM_STEP_NUM_TASKS", text("2")),
            ("SLURM_LOCALID", text("0")),
            ("SLURM_NODEID", rank.to_string()),
            ("SLURM_STEP_TASKS_PER_NODE", text("1(x2)")),
            ("SLURM_STEP_NODELIST", text("localhost,localhost")),
            ("MASTER_PORT", port.to_string()),
        ]
    };
    here.assert_trained(ended(vec![here.rank(&variables(0)), here.rank(&variables(1))]), 2);
}

#[test]
fn mpiruns_ranks_train_together_on_one_machine() {
    let (here, port) = (Place::new(), free_port().unwrap());
    let variables = |rank: usize| {
        let of_rank = [("OMPI_COMM_WORLD_RANK", rank), ("OMPI_COMM_WORLD_LOCAL_RANK", rank)];
        let of_job = [("OMPI_COMM_WORLD_SIZE", 2), ("OMPI_COMM_WORLD_LOCAL_SIZE", 2), ("MASTER_PORT", port.into())];
        let all = of_rank.into_iter().chain(of_job);
        all.map(|(name, number)| (name, number.to_string())).collect::<Vec<_>>()
    };
    here.assert_trained(ended(vec![here.rank(&variables(0)), here.rank(&variables(1))]), 2);
}

/// `two-nodes.sh`, once for each of two machines with two cards.
#[test]
fn the_script_for_two_machines_starts_a_rank_for_each_card_of_both() {
    let (here, port) = (Place::new(), free_port().unwrap().to_string());
    let node = |node: &str| {
        let mut command = here.script("two-nodes.sh");
        command.args(["--config", "recipe.toml"]).envs([("NODES", "2"), ("NODE", node), ("GPUS", "2")]);
        command.envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port), ("FIREBRICK_JOB_TOKEN", TOKEN)]);
        command.spawn().unwrap()
    };
    here.assert_trained(ended(vec![node("0"), node("1")]), 4);
}

#[test]
fn the_script_for_two_machines_names_what_is_missing() {
    let here = Place::new();
    let output = here.script("two-nodes.sh").env("FIREBRICK_JOB_TOKEN", TOKEN).output().unwrap();
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("the number of machines"), "{output:?}");
}

/// Runs the command of a container in `kubernetes.yaml`, with the variables that it and an indexed Job set.
#[test]
fn the_pods_of_the_indexed_job_train_together() {
    let (here, port) = (Place::new(), free_port().unwrap().to_string());
    let yaml = fs::read_to_string(root().join("configs/launch/kubernetes.yaml")).unwrap();
    let line = yaml.lines().find(|line| line.contains("two-nodes.sh --config")).unwrap();
    let program = line.trim_start_matches([' ', '-']).replace("/srv/firebrick/recipe.toml", "recipe.toml");
    for variable in ["TRAIN", "NODES", "GPUS", "MASTER_ADDR", "FIREBRICK_JOB_TOKEN"] {
        assert!(yaml.contains(&format!("name: {variable}")), "the pods have no {variable}");
    }
    let pod = |index: &str| {
        let mut command = here.command(Path::new("bash"));
        let path = format!("{}:{}", root().join("configs/launch").display(), std::env::var("PATH").unwrap());
        command.args(["-c", &program]).env("PATH", path).env("JOB_COMPLETION_INDEX", index);
        command.envs([("TRAIN", env!("CARGO_BIN_EXE_firebrick-under-test")), ("NODES", "2"), ("GPUS", "1")]);
        command.envs([("MASTER_ADDR", "localhost"), ("MASTER_PORT", &port), ("FIREBRICK_JOB_TOKEN", TOKEN)]);
        command.spawn().unwrap()
    };
    here.assert_trained(ended(vec![pod("0"), pod("1")]), 2);
}

/// Runs `slurm.sbatch` as SLURM does: `srun` starts the tasks with the variables of each.
#[test]
fn the_batch_script_starts_the_tasks_of_a_slurm_job() {
    const SRUN: &str = r#"#!/usr/bin/env bash
printf '%s\n' "$@" > srun-arguments
while [[ $1 == --* ]]; do shift; done
for task in 0 1; do
  SLURM_STEP_ID=0 SLURM_PROCID=$task SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=$task SLURM_NODEID=0 \
    SLURM_STEP_TASKS_PER_NODE=2 SLURM_STEP_NODELIST=localhost "$@" &
  tasks+=($!)
done
status=0
for task in "${tasks[@]}"; do wait "$task" || status=$?; done
exit $status
"#;
    let here = Place::new();
    let programs = here.folder.path().join("bin");
    fs::create_dir(&programs).unwrap();
    for (name, text) in [("srun", SRUN), ("openssl", "#!/bin/sh\necho 0123456789abcdef0123456789abcdef\n")] {
        fs::write(programs.join(name), text).unwrap();
        fs::set_permissions(programs.join(name), fs::Permissions::from_mode(0o755)).unwrap();
    }
    // The script derives the port from the job's number.
    let port = std::iter::repeat_with(|| free_port().unwrap()).find(|port| (20_000..40_000).contains(port)).unwrap();
    let path = format!("{}:{}", programs.display(), std::env::var("PATH").unwrap());
    let mut command = here.script("slurm.sbatch");
    command.args(["--config", "recipe.toml"]).env("PATH", path);
    command.env("SLURM_JOB_ID", (port - 20_000).to_string()).env("SLURM_CPUS_PER_TASK", "8");
    here.assert_trained(vec![command.output().unwrap()], 2);
    let arguments = fs::read_to_string(here.folder.path().join("srun-arguments")).unwrap();
    assert!(arguments.starts_with("--kill-on-bad-exit=1\n--cpus-per-task=8\n--label\n"), "{arguments}");
}
