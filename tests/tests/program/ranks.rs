//! Training on several ranks, each a separate process as users start them: the losses and weights equal those of one rank, and a failure of one rank
//! ends all with a clear reason.
//!
//! Trade-off: all ranks are on one machine, and compute on its CPU.

mod rewards;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use firebrick_parallel::supervisor::free_port;
use firebrick_precision::difference::largest_difference;
use firebrick_tests::{fixtures, is_slow, metrics, some_in_turn};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use tempfile::TempDir;

/// Longest wait for anything.
const PATIENCE: Duration = Duration::from_secs(60);
/// Maximum time from a lost rank to the end of all others.
const END: Duration = Duration::from_secs(30);
/// Tolerance of losses and weights.
const TOLERANCE: f64 = 1e-6;
/// LoRA, and every weight of a model whose head is its embedding.
const KINDS: [&[&str]; 2] =
    [&["lora={r=4,alpha=8}", "train.learning_rate=1e-3"], &["mode=full", "model='{fixtures}/tiny-qwen2'"]];
const LORA: &[&str] = KINDS[0];

/// A folder with a recipe of six steps.
struct Place {
    folder: TempDir,
    fixtures: String,
}

impl Place {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let fixtures = fixtures().display().to_string();
        let recipe = format!(
            "name='run'\nbackend='flex'\nmodel='{fixtures}/tiny-llama'\nmax_seq_len=64\nseed=7\n[data]\n\
             path='{fixtures}/data/chat-tiny.jsonl'\neval_fraction=0.2\n[train]\nsteps=6\nwarmup_steps=1\nmicro_batch_size=1\n\
             [eval]\nevery_steps=2\nexact_match_prompts=3\nmax_new_tokens=4\n[checkpoint]\nevery_steps=3\nkeep=9\n"
        );
        fs::write(folder.path().join("recipe.toml"), recipe).unwrap();
        Self { folder, fixtures }
    }

    fn program(&self, changes: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_firebrick-under-test"));
        command.current_dir(self.folder.path()).env_remove("FIREBRICK_CALLED_AS").env("RAYON_NUM_THREADS", "1");
        command.args(["train", "--config", "recipe.toml"]);
        for change in changes {
            command.args(["--set", &change.replace("{fixtures}", &self.fixtures)]);
        }
        command
    }

    /// Starts one rank as a launcher does.
    fn rank(&self, job: &Job, rank: usize, changes: &[&str]) -> Running {
        let mut command = self.program(changes);
        let log = self.folder.path().join(format!("log-{rank}"));
        command.envs(job.variables(rank)).stdin(Stdio::null());
        command.stdout(File::create(log.with_extension("out")).unwrap()).stderr(File::create(&log).unwrap());
        Running { child: command.spawn().unwrap(), log }
    }

    fn run(&self, name: &str) -> PathBuf {
        self.folder.path().join("runs").join(name)
    }
}

/// The shared state of a job's ranks.
struct Job {
    world_size: usize,
    port: u16,
    token: &'static str,
    timeout: u64,
    /// Seconds that a step has at least.
    stuck_timeout: u64,
}

impl Job {
    fn new(world_size: usize) -> Self {
        let (port, token) = (free_port().unwrap(), "the secret of a test");
        Self { world_size, port, token, timeout: 30, stuck_timeout: 15 }
    }

    fn variables(&self, rank: usize) -> Vec<(&'static str, String)> {
        let (rank, world_size) = (rank.to_string(), self.world_size.to_string());
        let master = ("127.0.0.1".to_owned(), self.port.to_string());
        vec![
            ("RANK", rank.clone()),
            ("WORLD_SIZE", world_size.clone()),
            ("LOCAL_RANK", rank),
            ("LOCAL_WORLD_SIZE", world_size),
            ("MASTER_ADDR", master.0),
            ("MASTER_PORT", master.1),
            ("FIREBRICK_JOB_TOKEN", self.token.to_owned()),
            ("FIREBRICK_RENDEZVOUS_TIMEOUT", self.timeout.to_string()),
            ("FIREBRICK_STUCK_TIMEOUT", self.stuck_timeout.to_string()),
        ]
    }
}

/// A started rank. It does not outlive its test.
struct Running {
    child: Child,
    log: PathBuf,
}

impl Running {
    /// Waits for the end; returns the status and the text on standard error.
    fn end(mut self) -> (Option<i32>, String) {
        let mut status = None;
        wait(|| {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        (status.unwrap().code(), fs::read_to_string(&self.log).unwrap())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn wait(mut is_over: impl FnMut() -> bool) {
    let started = Instant::now();
    while !is_over() {
        assert!(started.elapsed() < PATIENCE, "nothing happens");
        sleep(Duration::from_millis(20));
    }
}

fn wait_for_step(run: &Path, step: u64) {
    let metrics = run.join("metrics.jsonl");
    wait(|| fs::read_to_string(&metrics).is_ok_and(|text| text.contains(&format!("\"step\":{step},"))));
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn succeeded(output: &Output) -> String {
    let printed = text(&output.stdout) + &text(&output.stderr);
    assert!(output.status.success(), "{printed}");
    printed
}

/// Returns the losses, norms and evaluations by step.
fn numbers(run: &Path) -> Vec<(u64, String, f64)> {
    let of_training =
        ["loss", "grad_norm", "loss_tokens", "learning_rate", "eval_loss", "token_accuracy", "exact_match"];
    let of_pairs = ["rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected", "nll_loss"];
    let of_rewards = ["reward", "reward_std", "frac_reward_zero_std", "completions/mean_length", "eval_reward"];
    let keys = [&of_training[..], &of_pairs, &of_rewards].concat();
    let of_line = |line: Value| {
        let step = line["step"].as_u64().unwrap();
        let of_key = |key: &&str| Some((step, (*key).to_owned(), line.get(*key)?.as_f64()?));
        keys.iter().filter_map(of_key).collect::<Vec<_>>()
    };
    metrics(run).into_iter().flat_map(of_line).collect()
}

/// Reads every f32 tensor of a checkpoint: trained weights and the optimizer's state, of all ranks if they divide it.
fn tensors(checkpoint: &Path) -> BTreeMap<String, Vec<f32>> {
    let parts = (1..4).map(|rank| format!("optimizer-{rank}.safetensors"));
    let files = ["adapter/adapter_model.safetensors", "model/model.safetensors", "optimizer.safetensors"];
    let all = tensors_of(checkpoint, files.into_iter().map(str::to_owned).chain(parts));
    assert!(!all.is_empty(), "{} has no tensors", checkpoint.display());
    all
}

fn tensors_of(folder: &Path, files: impl Iterator<Item = String>) -> BTreeMap<String, Vec<f32>> {
    let mut all = BTreeMap::new();
    for file in files {
        let Ok(bytes) = fs::read(folder.join(&file)) else { continue };
        for (name, view) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
            assert_eq!(view.dtype(), Dtype::F32);
            let values = view.data().chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()));
            assert!(all.insert(name.clone(), values.collect()).is_none(), "{name} is there twice");
        }
    }
    all
}

/// Asserts that two runs have the same result and the same printed texts.
fn assert_same_results(found: &Path, expected: &Path) {
    let read = |run: &Path| -> Value { serde_json::from_slice(&fs::read(run.join("summary.json")).unwrap()).unwrap() };
    let (found_summary, expected_summary) = (read(found), read(expected));
    assert_eq!(found_summary["exact_match_after"], expected_summary["exact_match_after"]);
    let state = |run: &Path| -> Value {
        serde_json::from_slice(&fs::read(run.join("checkpoints/step-6/state.json")).unwrap()).unwrap()
    };
    assert_eq!(state(found)["samples_before"], state(expected)["samples_before"]);
    let weights = |run: &Path| {
        let files = ["adapter/adapter_model.safetensors", "model/model.safetensors"];
        let sizes: Vec<_> = files.iter().filter_map(|file| Some(fs::metadata(run.join(file)).ok()?.len())).collect();
        assert_eq!(sizes.len(), 1, "{}", run.display());
        sizes
    };
    assert_eq!(weights(found), weights(expected));
}

fn assert_same_tensors(found: &Path, expected: &Path) {
    let (found, expected) = (tensors(found), tensors(expected));
    assert_eq!(found.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
    for (name, values) in expected {
        let largest = largest_difference(&found[&name], &values);
        assert!(largest <= TOLERANCE, "{name} differs by {largest:e}");
    }
}

fn assert_same_numbers(found: &[(u64, String, f64)], expected: &[(u64, String, f64)]) {
    assert_eq!(found.len(), expected.len());
    for ((step, key, value), (expected_step, expected_key, expected)) in found.iter().zip(expected) {
        assert_eq!((step, key), (expected_step, expected_key));
        assert!(
            (value - expected).abs() <= TOLERANCE * expected.abs().max(1.0),
            "step {step}: {key} {value}, {expected}"
        );
    }
}

#[test]
fn ranks_times_accumulation_equals_one_rank_with_all_of_it() {
    let dropout = [LORA, &["lora.dropout=0.2"]].concat();
    [&dropout, KINDS[1]].into_iter().for_each(|kind| assert_ranks_equal_one_rank(kind, &[("2", 2), ("4", 1)]));
}

#[test]
fn ranks_train_a_checkpoint_with_a_vision_tower_or_in_fp8_as_one_rank() {
    let full: &[&str] = &["mode=full", "model='{fixtures}/tiny-gemma3-vl'", "train.zero_stage=2"];
    let fp8: &[&str] = &["bnb_4bit={}", "model='{fixtures}/quant-fp8-ministral3'", "compute=float32"];
    assert_ranks_equal_one_rank(full, &[("2", 2)]);
    assert_ranks_equal_one_rank(&[LORA, fp8].concat(), &[("2", 2)]);
}

/// Pairs have two denominators, of pairs and of the chosen's tokens, and a reference: in the pass, or of all pairs before training. Four ranks run
/// where the reference is precomputed, and each computes a share of it; otherwise two.
#[test]
fn ranks_train_on_pairs_as_one_rank_with_all_of_them() {
    let pairs = ["data.path='{fixtures}/data/pairs-tiny.jsonl'", "max_seq_len=128", "eval.exact_match_prompts=0"];
    let kinds: [&[&str]; 4] = [
        &["preference={rpo_alpha=0.5}"],
        &["preference={loss_type='ipo', precompute_ref_log_probs=true}", "pack=false"],
        &["preference={loss='orpo'}", "train.zero_stage=2"],
        &["preference={}", "mode=full", "lora="],
    ];
    for (kind, ranks) in kinds.into_iter().zip([("2", 2), ("4", 1), ("2", 2), ("2", 2)]) {
        // Adam divides an almost zero gradient and its rounding by itself: a rate of 1e-3 turns that into 1e-6.
        assert_ranks_equal_one_rank(&[LORA, &pairs, kind, &["train.learning_rate=1e-4"]].concat(), &[ranks]);
    }
}

/// Takes numbers of ranks, each with the accumulation that makes four micro-batches per step.
fn assert_ranks_equal_one_rank(kind: &[&str], all: &[(&str, usize)]) {
    assert_ranks_equal_one_rank_in(&Place::new(), kind, all);
}

fn assert_ranks_equal_one_rank_in(here: &Place, kind: &[&str], all: &[(&str, usize)]) {
    let one = [kind, &["name='one'", "train.gradient_accumulation=4"]].concat();
    succeeded(&here.program(&one).output().unwrap());
    for &(ranks, accumulation) in all {
        let (name, accumulation) =
            (format!("name='ranks-{ranks}'"), format!("train.gradient_accumulation={accumulation}"));
        let changes = [kind, &[name.as_str(), accumulation.as_str()]].concat();
        let printed = succeeded(&here.program(&changes).args(["--ranks", ranks]).output().unwrap());
        assert!(printed.contains(&format!("[rank 0] {ranks} ranks, {ranks} of them here")), "{printed}");
        let run = here.run(&format!("ranks-{ranks}"));
        assert_same_numbers(&numbers(&run), &numbers(&here.run("one")));
        for step in ["checkpoints/step-3", "checkpoints/step-6"] {
            assert_same_tensors(&run.join(step), &here.run("one").join(step));
        }
        assert_ranks_are_in_the_metrics(&run, ranks.parse().unwrap());
    }
}

fn assert_ranks_are_in_the_metrics(run: &Path, ranks: usize) {
    let lists = ["own_ms", "collectives_ms", "comm_wait_ms"];
    let check = |found: &Value| {
        assert!(found["slowest"].as_u64().unwrap() < ranks as u64, "{found}");
        for list in lists {
            assert_eq!(found[list].as_array().unwrap().len(), ranks, "{list}: {found}");
        }
    };
    let lines = metrics(run);
    let steps: Vec<&Value> = lines.iter().filter(|line| line.get("loss").is_some()).collect();
    assert_eq!(steps.len(), 6);
    steps.iter().for_each(|step| check(&step["ranks"]));
    let summary: Value = serde_json::from_str(&fs::read_to_string(run.join("summary.json")).unwrap()).unwrap();
    check(&summary["ranks"]);
}

/// Its rate is far too high, so the held-out loss rises. With `train.zero_stage = 3` every rank takes part in reading the best weights back.
#[test]
fn two_ranks_end_early_together_with_the_best_weights() {
    let rising = ["train.steps=12", "train.learning_rate=0.3", "train.schedule=constant", "train.warmup_steps=6"];
    let best = ["eval.every_steps=1", "eval.exact_match_prompts=0", "best.patience=2", "checkpoint.keep=1"];
    for stage in ["train.zero_stage=0", "train.zero_stage=3"] {
        let here = Place::new();
        let changes = [LORA, &rising, &best, &[stage]].concat();
        succeeded(&here.program(&changes).args(["--ranks", "2"]).output().unwrap());
        let run = here.run("run");
        let summary: Value = serde_json::from_slice(&fs::read(run.join("summary.json")).unwrap()).unwrap();
        let (steps, best) = (summary["steps"].as_u64().unwrap(), summary["best_step"].as_u64().unwrap());
        assert!(steps == best + 2 && steps < 12, "{stage}: {summary}");
        let weights = |folder: &Path| fs::read(folder.join("adapter/adapter_model.safetensors")).unwrap();
        let of_step = |step: u64| weights(&run.join(format!("checkpoints/step-{step}")));
        assert!(weights(&run) == of_step(best) && weights(&run) != of_step(steps), "{stage}");
        assert_eq!(fs::read_dir(run.join("checkpoints")).unwrap().count(), 2, "{stage}: the best and the newest stay");
    }
}

#[test]
fn a_trace_of_two_ranks_is_one_file_with_both() {
    let here = Place::new();
    let printed = succeeded(&here.program(LORA).args(["--ranks", "2", "--trace", "2-3"]).output().unwrap());
    assert!(printed.contains("is slowest with") && printed.contains("exposed"), "{printed}");
    let file: Value = serde_json::from_str(&fs::read_to_string(here.run("run").join("trace.json")).unwrap()).unwrap();
    let events = file["traceEvents"].as_array().unwrap();
    for rank in 0..2 {
        let of_rank = |name: &str| events.iter().filter(|event| event["pid"] == rank && event["name"] == name).count();
        assert_eq!(
            (of_rank("process_name"), of_rank("queue step"), of_rank("wait for ranks")),
            (1, 2, 2),
            "rank {rank}"
        );
    }
}

/// In ZeRO stage 1 each rank has the state of its own parameters, and writes it. Any number of ranks continues, with or without it.
#[test]
fn a_divided_optimizer_equals_a_whole_one_and_resumes_on_other_ranks() {
    let in_8_bits = [KINDS[0], &["train.optimizer=adamw_8bit", "lora.r=64"]].concat();
    let exact = [KINDS[1], &["train.weights=bfloat16_exact"]].concat();
    let at_random = [KINDS[1], &["train.weights=bfloat16_stochastic", "train.gradients=bfloat16"]].concat();
    for kind in [&in_8_bits[..], KINDS[1], &exact, &at_random] {
        let here = Place::new();
        let run = |name: &str, ranks: &str, accumulation: usize, changes: &[&str], options: &[&str]| {
            let set = [format!("name='{name}'"), format!("train.gradient_accumulation={accumulation}")];
            let changes = [kind, &set.each_ref().map(String::as_str), changes].concat();
            succeeded(&here.program(&changes).args(["--ranks", ranks]).args(options).output().unwrap())
        };
        let zero: &[&str] = &["train.zero_stage=1"];
        run("whole", "2", 2, &[], &[]);
        let printed = run("divided", "2", 2, zero, &[]);
        assert!(printed.contains("ZeRO stage 1: the optimizer's state is divided over 2 ranks"), "{printed}");
        let bytes = |name: &str, file: &str| fs::read(here.run(name).join("checkpoints/step-6").join(file)).unwrap();
        for file in ["model/model.safetensors", "adapter/adapter_model.safetensors"] {
            if here.run("whole").join("checkpoints/step-6").join(file).exists() {
                assert!(bytes("divided", file) == bytes("whole", file), "{file} differs");
            }
        }
        let (one, two) = (bytes("divided", "optimizer.safetensors"), bytes("divided", "optimizer-1.safetensors"));
        let all = bytes("whole", "optimizer.safetensors").len();
        assert!(
            one.len() < all && two.len() < all && one.len() + two.len() > all * 9 / 10,
            "{} {}",
            one.len(),
            two.len()
        );
        assert_same_numbers(&numbers(&here.run("divided")), &numbers(&here.run("whole")));

        // From two ranks that divide it to four, and from those to one that has all of it.
        if kind == exact || kind == at_random {
            // Without accumulation and clipping, stage 3 has the same sums.
            let plain = "train.max_grad_norm=0";
            run("at-once", "2", 1, &[plain], &[]);
            run("stage-3", "2", 1, &[plain, "train.zero_stage=3"], &[]);
            let file = "model/model.safetensors";
            assert!(bytes("stage-3", file) == bytes("at-once", file), "{kind:?}");
            continue;
        }
        if kind == KINDS[1] && !is_slow() {
            continue;
        }
        let losses = numbers(&here.run("divided"));
        let resume = |step: &str| format!("runs/divided/checkpoints/step-{step}");
        run("divided", "4", 1, zero, &["--resume", &resume("3")]);
        assert_same_numbers(&numbers(&here.run("divided")), &losses);
        assert!(here.run("divided").join("checkpoints/step-6/optimizer-3.safetensors").is_file());
        let printed = run("divided", "1", 4, &["train.steps=8"], &["--resume", &resume("6")]);
        assert!(printed.contains("train.zero_stage 1 -> 0"), "{printed}");
    }
}

/// Under ZeRO stages 2 and 3, which the kinds of training take in turn, they have the numbers, weights and optimizer state of one rank that has
/// everything.
#[test]
fn divided_gradients_and_weights_train_as_one_rank_that_has_all_of_them() {
    let qlora: &[&str] = &["bnb_4bit={}", "lora={r=4,alpha=8}", "train.learning_rate=1e-3", "compute=float32"];
    let dense: &[&str] = &["mode=full", "model='{fixtures}/tiny-llama'", "train.recompute=selective"];
    for (turn, kind) in [KINDS[0], KINDS[1], dense, qlora].into_iter().enumerate() {
        let here = Place::new();
        let run = |name: &str, ranks: &str, accumulation: usize, changes: &[&str]| {
            let set = [format!("name='{name}'"), format!("train.gradient_accumulation={accumulation}")];
            let changes = [kind, &set.each_ref().map(String::as_str), changes].concat();
            succeeded(&here.program(&changes).args(["--ranks", ranks]).output().unwrap())
        };
        run("one", "1", 4, &[]);
        for (stage, ranks, accumulation) in some_in_turn(&[(2, "2", 2), (3, "4", 1)], 1, turn) {
            let name = format!("stage-{stage}-{ranks}");
            let printed = run(&name, ranks, accumulation, &[&format!("train.zero_stage={stage}")]);
            assert!(printed.contains(&format!("ZeRO stage {stage}: ")), "{printed}");
            assert_same_numbers(&numbers(&here.run(&name)), &numbers(&here.run("one")));
            for step in ["checkpoints/step-3", "checkpoints/step-6"] {
                assert_same_tensors(&here.run(&name).join(step), &here.run("one").join(step));
            }
            assert_same_results(&here.run(&name), &here.run("one"));
        }
    }
}

/// Under each stage, the weights and the optimizer's state of routers and experts are those of one rank. The first stage of each kind is always taken.
#[test]
fn a_mixture_of_experts_trains_under_every_zero_stage_as_on_one_rank() {
    let steps = ["train.steps=2", "eval.every_steps=0", "eval.exact_match_prompts=0", "checkpoint.every_steps=2"];
    let mixtral = "model='{fixtures}/tiny-mixtral'";
    let router: &[&str] = &[mixtral, "lora={r=4,alpha=8,modules_to_save=['gate']}", "train.learning_rate=1e-3"];
    let kinds: [(&[&str], &[usize]); 5] = [
        (&[mixtral, "mode=full"], &[2, 0, 1, 3]),
        (&["model='{fixtures}/tiny-qwen3-moe'", "mode=full"], &[0, 1, 2, 3]),
        (&["model='{fixtures}/tiny-qwen2-moe'", "mode=full"], &[3]),
        (&["model='{fixtures}/tiny-glm4-moe'", "mode=full"], &[3, 2]),
        (router, &[1, 2]),
    ];
    for (kind, stages) in kinds {
        let here = Place::new();
        let run = |name: &str, ranks: &str, accumulation: usize, stage: usize| {
            let set = [
                format!("name='{name}'"),
                format!("train.gradient_accumulation={accumulation}"),
                format!("train.zero_stage={stage}"),
            ];
            let changes = [kind, &steps, &set.each_ref().map(String::as_str)].concat();
            succeeded(&here.program(&changes).args(["--ranks", ranks]).output().unwrap());
            here.run(name)
        };
        let one = run("one", "1", 2, 0);
        for stage in some_in_turn(stages, 1, 0) {
            let found = run(&format!("stage-{stage}"), "2", 1, stage);
            assert_same_numbers(&numbers(&found), &numbers(&one));
            assert_same_tensors(&found.join("checkpoints/step-2"), &one.join("checkpoints/step-2"));
        }
    }
}

/// Checkpoints are by tensor name: four ranks that divide everything continue as two, and those as one that has all of it.
#[test]
fn four_ranks_that_divide_weights_continue_as_two_and_as_one() {
    let here = Place::new();
    let run = |ranks: &str, accumulation: usize, changes: &[&str], options: &[&str]| {
        let accumulation = format!("train.gradient_accumulation={accumulation}");
        let changes = [KINDS[1], &[accumulation.as_str()], changes].concat();
        succeeded(&here.program(&changes).args(["--ranks", ranks]).args(options).output().unwrap())
    };
    let resume = ["--resume", "runs/run/checkpoints/step-3"];
    run("4", 1, &["train.zero_stage=3"], &[]);
    let (run_folder, whole) = (here.run("run"), here.run("whole"));
    assert!(Command::new("cp").arg("-r").args([&run_folder, &whole]).status().unwrap().success());
    for (ranks, accumulation, stage) in [("2", 2, 3), ("1", 4, 0)] {
        let printed = run(ranks, accumulation, &[&format!("train.zero_stage={stage}")], &resume);
        assert!(printed.contains("resumed after step 3"), "{printed}");
        assert_same_numbers(&numbers(&run_folder), &numbers(&whole));
        assert_same_tensors(&run_folder.join("checkpoints/step-6"), &whole.join("checkpoints/step-6"));
    }
}

#[test]
fn a_killed_rank_that_has_weights_of_the_others_ends_them_with_the_reason() {
    let (here, job) = (Place::new(), Job::new(3));
    let changes = [KINDS[1], &["train.steps=1000000", "train.zero_stage=3", "eval.every_steps=0"]].concat();
    let mut ranks: Vec<Running> = (0..3).map(|rank| here.rank(&job, rank, &changes)).collect();
    wait_for_step(&here.run("run"), 4);
    drop(ranks.remove(1));
    for (rank, running) in [0, 2].into_iter().zip(ranks) {
        let (status, log) = running.end();
        assert_eq!(status, Some(1), "{log}");
        assert!(log.contains("rank 1 (127.0.0.1) closed its connection"), "{log}");
        assert_only_rank_0_says_what_is_saved(rank, &log);
    }
}

#[test]
fn four_ranks_continue_as_two_over_the_same_sequence_of_data() {
    let here = Place::new();
    let four = [LORA, &["train.gradient_accumulation=1"]].concat();
    succeeded(&here.program(&four).args(["--ranks", "4"]).output().unwrap());
    let (run, whole) = (here.run("run"), here.run("whole"));
    assert!(Command::new("cp").arg("-r").args([&run, &whole]).status().unwrap().success());

    let two = [LORA, &["train.gradient_accumulation=2"]].concat();
    let resume = ["--ranks", "2", "--resume", "runs/run/checkpoints/step-3"];
    let printed = succeeded(&here.program(&two).args(resume).output().unwrap());
    assert!(printed.contains("ranks 4 -> 2") && printed.contains("resumed after step 3"), "{printed}");
    assert_same_numbers(&numbers(&run), &numbers(&whole));
    assert_same_tensors(&run.join("checkpoints/step-6"), &whole.join("checkpoints/step-6"));
    // Half the rows per step would be another run.
    let refused = here.program(&four).args(resume).output().unwrap();
    assert!(!refused.status.success());
    assert!(
        text(&refused.stderr).contains("train.gradient_accumulation = 4, now it is 2"),
        "{}",
        text(&refused.stderr)
    );
}

#[test]
fn a_killed_rank_ends_the_others_with_the_reason_and_the_last_step_is_saved() {
    for killed in [1, 0] {
        let (here, job) = (Place::new(), Job::new(3));
        let changes = [LORA, &["train.steps=1000000", "checkpoint.every_steps=7", "eval.every_steps=0"]].concat();
        let mut ranks: Vec<Running> = (0..3).map(|rank| here.rank(&job, rank, &changes)).collect();
        // The save of step 14 has waited for that of step 7.
        wait_for_step(&here.run("run"), 15);
        let started = Instant::now();
        drop(ranks.remove(killed));
        for (rank, running) in (0..3).filter(|rank| *rank != killed).zip(ranks) {
            let (status, log) = running.end();
            assert_eq!(status, Some(1), "{log}");
            assert!(log.contains(&format!("rank {killed} (127.0.0.1) closed its connection")), "{log}");
            assert_only_rank_0_says_what_is_saved(rank, &log);
        }
        assert!(started.elapsed() < END, "{:?}", started.elapsed());
        let checkpoints = fs::read_dir(here.run("run").join("checkpoints")).unwrap();
        let steps: Vec<u64> = checkpoints
            .filter_map(|entry| entry.unwrap().file_name().to_str()?.strip_prefix("step-")?.parse().ok())
            .collect();
        let newest = *steps.iter().max().unwrap();
        tensors(&here.run("run").join(format!("checkpoints/step-{newest}")));
        // Rank 0 saves the current step; without rank 0, the last checkpoint stays.
        let printed = fs::read_to_string(here.folder.path().join("log-0.out")).unwrap();
        assert_eq!(printed.contains(&format!("saved step {newest} before ending")), killed == 1, "{printed}");
        assert!(newest >= 7 && (killed == 1 || newest.is_multiple_of(7)), "{steps:?}");
    }
}

/// The other ranks cannot know it, because rank 0 may be saving just then.
fn assert_only_rank_0_says_what_is_saved(rank: usize, log: &str) {
    assert!(log.contains("start it again as it was, with --resume"), "{log}");
    assert_eq!(log.contains("Everything up to step"), rank == 0, "{log}");
    assert!(!log.contains("Nothing was saved"), "{log}");
}

/// A batch system suspends all processes of a job like this, for longer than a step may take.
#[test]
fn a_job_that_is_suspended_as_a_whole_goes_on_when_it_continues() {
    let (here, job) = (Place::new(), Job { stuck_timeout: 3, ..Job::new(2) });
    let changes = [LORA, &["train.steps=1000000", "eval.every_steps=0"]].concat();
    let ranks = [0, 1].map(|rank| here.rank(&job, rank, &changes));
    let ids = ranks.each_ref().map(|rank| rank.child.id().to_string());
    let send = |signal: &str| assert!(Command::new("kill").arg(signal).args(&ids).status().unwrap().success());
    wait_for_step(&here.run("run"), 5);
    send("-STOP");
    sleep(Duration::from_secs(5));
    let metrics = fs::read_to_string(here.run("run").join("metrics.jsonl")).unwrap();
    send("-CONT");
    wait_for_step(&here.run("run"), metrics.lines().count() as u64 + 20);
    send("-INT");
    for rank in ranks {
        let (status, log) = rank.end();
        assert_eq!(status, Some(130), "{log}");
    }
}

/// Its connections stay open but carry nothing any more.
#[test]
fn a_stopped_rank_ends_the_others_with_the_reason_within_30_seconds() {
    let (here, job) = (Place::new(), Job::new(2));
    let changes = [LORA, &["train.steps=1000000", "eval.every_steps=0"]].concat();
    let [first, second] = [0, 1].map(|rank| here.rank(&job, rank, &changes));
    wait_for_step(&here.run("run"), 5);
    let started = Instant::now();
    assert!(Command::new("kill").args(["-STOP", &second.child.id().to_string()]).status().unwrap().success());
    let (status, log) = first.end();
    assert_eq!(status, Some(1), "{log}");
    assert!(log.contains("rank 1 (127.0.0.1) gave no sign of life for 15 s"), "{log}");
    assert!(log.contains("is saved: start it again as it was, with --resume"), "{log}");
    assert!(started.elapsed() < END, "{:?}", started.elapsed());
}

#[test]
fn garbage_at_the_rendezvous_is_refused_and_the_job_goes_on() {
    let (here, job) = (Place::new(), Job::new(2));
    let first = here.rank(&job, 0, LORA);
    for garbage in ["GET / HTTP/1.1\\r\\n\\r\\n", "\\xff%.0s' {1..4096} '", "FBRANKS\\n\\x01\\x00"] {
        // Rank 0 may close the connection before all is written.
        let send = format!("exec 3<>/dev/tcp/127.0.0.1/{} && {{ printf '{garbage}' >&3 || true; }}", job.port);
        wait(|| Command::new("bash").args(["-c", &send]).stderr(Stdio::null()).status().unwrap().success());
    }
    let second = here.rank(&job, 1, LORA);
    for rank in [first, second] {
        let (status, log) = rank.end();
        assert_eq!(status, Some(0), "{log}");
        assert!(!log.contains('\u{1b}'), "warnings in a file have no colors: {log}");
    }
    assert!(here.run("run").join("summary.json").is_file());
}

/// Sums over all ranks decide whether a step is finite, and they are the same bits everywhere.
#[test]
fn a_run_that_diverges_ends_on_all_ranks_at_the_same_step() {
    let (here, job) = (Place::new(), Job::new(3));
    let changes = [LORA, &["train.learning_rate=1e30", "train.steps=50", "eval.every_steps=0"]].concat();
    let ranks: Vec<Running> = (0..3).map(|rank| here.rank(&job, rank, &changes)).collect();
    let ends = ranks.into_iter().map(|rank| {
        let (status, log) = rank.end();
        assert_eq!(status, Some(1), "{log}");
        log.split("error: ").nth(1).unwrap_or_else(|| panic!("no error: {log}")).trim().to_owned()
    });
    let ends: Vec<String> = ends.collect();
    assert!(ends[0].contains("training has diverged") && ends.iter().all(|end| *end == ends[0]), "{ends:?}");
    let step: serde_json::Value =
        serde_json::from_slice(&fs::read(here.run("run").join("replay.json")).unwrap()).unwrap();
    assert_eq!(step["ranks"].as_array().unwrap().len(), 3, "the rows of each rank are kept");
    let checkpoints = here.run("run").join("checkpoints");
    assert!(fs::read_dir(checkpoints).unwrap().next().is_none(), "nothing of such a step is saved");
}

#[test]
fn a_rank_that_never_comes_is_named() {
    let (here, job) = (Place::new(), Job { timeout: 1, ..Job::new(3) });
    let ranks: Vec<Running> = [0, 2].map(|rank| here.rank(&job, rank, LORA)).into();
    for rank in ranks {
        let (status, log) = rank.end();
        assert_eq!(status, Some(1), "{log}");
        assert!(log.contains("rank 1 of 3 did not come to 127.0.0.1") && log.contains("MASTER_ADDR"), "{log}");
    }
    assert!(!here.run("run").exists(), "nothing was to be written");
}

#[test]
fn a_rank_with_a_wrong_token_is_refused_and_does_not_end_the_job() {
    let (here, job) = (Place::new(), Job::new(2));
    let first = here.rank(&job, 0, LORA);
    let stranger = Job { token: "the secret of another job", ..Job { port: job.port, ..Job::new(2) } };
    let (status, log) = here.rank(&stranger, 1, LORA).end();
    assert_eq!(status, Some(1), "{log}");
    assert!(log.contains("its FIREBRICK_JOB_TOKEN is not the one of this job"), "{log}");
    let second = here.rank(&job, 1, LORA);
    for rank in [first, second] {
        let (status, log) = rank.end();
        assert_eq!(status, Some(0), "{log}");
    }
    assert!(here.run("run").join("summary.json").is_file());
}

#[test]
fn ranks_with_another_recipe_model_or_data_are_refused_before_training() {
    for (change, expected) in [
        ("train.learning_rate=2e-3", "rank 1 has train.learning_rate = 0.002, rank 0 has 0.001"),
        ("model='{fixtures}/tiny-mistral'", "rank 1 has model config = "),
        ("data.path='{fixtures}/data/text-tiny.jsonl'", "rank 1 has data = rows "),
    ] {
        let (here, job) = (Place::new(), Job::new(2));
        let same = [LORA, &["eval.exact_match_prompts=0"]].concat();
        let ranks = [here.rank(&job, 0, &same), here.rank(&job, 1, &[&same[..], &[change]].concat())];
        for rank in ranks {
            let (status, log) = rank.end();
            assert_eq!(status, Some(1), "{log}");
            assert!(log.contains(expected) && log.contains("Nothing was trained"), "{change}: {log}");
        }
        assert!(!here.run("run").exists(), "nothing was to be written");
    }
}

/// Simulates two machines, each with its own folder under the same name.
#[test]
fn ranks_without_a_common_folder_are_refused_before_training_where_all_of_them_write_to_it() {
    for (stage, expected) in [(1, Some(1)), (0, Some(0))] {
        let (here, there, job) = (Place::new(), Place::new(), Job::new(2));
        let stage = format!("train.zero_stage={stage}");
        let changes = [LORA, &[stage.as_str(), "train.steps=2", "eval.every_steps=0"]].concat();
        for rank in [here.rank(&job, 0, &changes), there.rank(&job, 1, &changes)] {
            let (status, log) = rank.end();
            assert_eq!(status, expected, "{log}");
            let is_refused =
                log.contains("rank 1 does not see the folder runs of rank 0") && log.contains("output_dir");
            assert_eq!(is_refused, expected != Some(0), "{log}");
        }
        assert_eq!(here.run("run").exists(), expected == Some(0), "nothing was to be written");
        let left = |place: &Place| fs::read_dir(place.folder.path().join("runs")).map_or(0, Iterator::count);
        assert_eq!((left(&here), left(&there)), (usize::from(expected == Some(0)), 0));
    }
}

#[test]
fn a_signal_reaches_all_ranks_and_the_run_is_saved_and_continues() {
    let here = Place::new();
    let changes = [LORA, &["train.steps=1000000", "eval.every_steps=0"]].concat();
    let log = here.folder.path().join("log");
    let mut command = here.program(&changes);
    command.args(["--ranks", "2"]).stdout(File::create(&log).unwrap()).stderr(Stdio::null());
    let supervisor = Running { child: command.spawn().unwrap(), log };
    wait_for_step(&here.run("run"), 5);
    let id = supervisor.child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &id]).status().unwrap().success());
    let (status, log) = supervisor.end();
    assert_eq!(status, Some(130), "{log}");
    assert!(log.contains("everything is saved. Continue with") && log.contains("--ranks 2 --resume"), "{log}");

    let step: u64 = log.split("stopped after step ").nth(1).unwrap().split(';').next().unwrap().parse().unwrap();
    let steps = format!("train.steps={}", step + 2);
    let changes = [LORA, &[steps.as_str(), "eval.every_steps=0"]].concat();
    let printed = succeeded(&here.program(&changes).args(["--ranks", "2", "--resume"]).output().unwrap());
    assert!(printed.contains(&format!("resumed after step {step}")), "{printed}");
}

#[test]
fn ranks_whose_supervisor_is_killed_save_and_end() {
    let here = Place::new();
    let changes = [LORA, &["train.steps=1000000", "eval.every_steps=0", "checkpoint.every_steps=0"]].concat();
    let mut command = here.program(&changes);
    command.args(["--ranks", "2"]).stdout(Stdio::null()).stderr(Stdio::null());
    let mut supervisor = command.spawn().unwrap();
    let run = here.run("run");
    wait_for_step(&run, 5);
    supervisor.kill().unwrap();
    supervisor.wait().unwrap();
    wait(|| File::open(run.join("lock")).unwrap().try_lock().is_ok());
    assert!(fs::read_dir(run.join("checkpoints")).unwrap().next().is_some(), "nothing was saved");
}

#[test]
fn a_benchmark_of_two_ranks_counts_the_tokens_of_both() {
    let here = Place::new();
    let mut command = Command::new(env!("CARGO_BIN_EXE_firebrick-under-test"));
    command.args(["bench", "--seq", "32", "--micro-batch", "1", "--steps", "2", "--warmup", "1", "--backend", "flex"]);
    command.args(["--compute", "fp32", "--json", "--ranks", "2", "--model", &format!("{}/tiny-llama", here.fixtures)]);
    let output = command.env("RAYON_NUM_THREADS", "1").output().unwrap();
    succeeded(&output);
    let report: Value = serde_json::from_str(text(&output.stdout).trim()).unwrap();
    let (tokens_per_s, step_s) = (report["tok_s"].as_f64().unwrap(), report["step_s"]["median"].as_f64().unwrap());
    assert_eq!(report["ranks"].as_u64(), Some(2));
    assert!((tokens_per_s * step_s - 64.0).abs() < 1e-6, "{report}");
}

/// There are no weights: the folder contains only a config, and each rank builds its share.
#[test]
fn a_benchmark_of_a_divided_random_base_needs_no_weights_and_plans_what_is_borrowed() {
    let here = Place::new();
    let model = here.folder.path().join("shape");
    fs::create_dir(&model).unwrap();
    fs::copy(format!("{}/tiny-llama/config.json", here.fixtures), model.join("config.json")).unwrap();
    let report = |options: &[&str]| -> Value {
        let mut command = Command::new(env!("CARGO_BIN_EXE_firebrick-under-test"));
        command.args(["bench", "--seq", "32", "--micro-batch", "1", "--steps", "1", "--warmup", "1", "--random-base"]);
        command.args(["--backend", "flex", "--compute", "fp32", "--json", "--model"]).arg(&model).args(options);
        let output = command.env("RAYON_NUM_THREADS", "1").output().unwrap();
        succeeded(&output);
        serde_json::from_str(text(&output.stdout).trim()).unwrap()
    };
    let line = |report: &Value, what: &str| {
        let lines = report["planned"].as_array().unwrap();
        let found = lines.iter().find(|line| line["what"] == what);
        found.map_or(0, |line| line["bytes"].as_u64().unwrap())
    };
    let (whole, divided) = (report(&[]), report(&["--ranks", "2", "--zero", "3"]));
    assert!(line(&divided, "base weights") < line(&whole, "base weights"), "{divided} {whole}");
    assert_eq!(line(&whole, "weights of other ranks"), 0);
    assert!(line(&divided, "weights of other ranks") > 0, "{divided}");
    assert!(divided["loss_last"].as_f64().unwrap().is_finite());
}

#[test]
fn a_rank_that_fails_gives_its_reason_to_all() {
    let (here, job) = (Place::new(), Job::new(2));
    fs::write(here.folder.path().join("runs"), "a file where the folder of runs should be").unwrap();
    let ranks = [0, 1].map(|rank| here.rank(&job, rank, LORA));
    for (rank, running) in ranks.into_iter().enumerate() {
        let (status, log) = running.end();
        assert_eq!(status, Some(1), "{log}");
        assert!(log.contains("cannot write the run folder"), "rank {rank}: {log}");
        assert!(rank == 0 || log.contains("rank 0 failed"), "{log}");
    }
}
