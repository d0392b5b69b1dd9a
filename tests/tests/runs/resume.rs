//! Tests that an interrupted run, however it was stopped, continues to the end that it would have reached.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use firebrick_hwprofile::usage::Gauge;
use firebrick_tests::{
    NEW, NEWEST, checkpoint_folder, finish, fixture, metrics, one_step, recipe, refusal, snapshot, step_losses, train,
};
use firebrick_trainer::config::RunConfig;
use firebrick_trainer::console::Outcome;
use firebrick_trainer::plan::PlanRequest;
use firebrick_trainer::run::interrupt::Interrupt;
use firebrick_trainer::run::prepare::prepare_for;
use firebrick_trainer::state::resume_point::{ResumeFrom, ResumePoint};
use serde_json::Value;
use tempfile::tempdir;

/// Changes of the recipe that give another kind of state to save. Rank 64 gives matrices of 4,096 elements, the minimum for 8-bit moments.
const KINDS: [&[&str]; 15] = [
    &[],
    &["lora.r=64", "train.optimizer=adamw_8bit"],
    &["base=nvfp4"],
    &["base=mxfp4"],
    &["base=fp8"],
    &["bnb_4bit=", "lora=", "mode=full"],
    &["bnb_4bit=", "lora=", "mode=full", "train.optimizer=adamw_8bit"],
    &[
        "lora.target='.*_proj'",
        "lora.exclude_modules=['1.self_attn.q_proj']",
        "lora.rank_pattern={down_proj=2}",
        "lora.modules_to_save=['lm_head', 'norm']",
        "lora.loraplus_lr_ratio=4",
        "lora.dropout=0.1",
    ],
    &["lora.use_dora=true", "lora.trainable_token_indices=[97, 101, 262]", "lora.dropout=0.1"],
    &["data.new_tokens=['th', 'a ']", "data.new_special_tokens=['in']"],
    &["lora.init_lora_weights=pissa"],
    &["lora.init_lora_weights=pissa_niter_2", "bnb_4bit=", "lora.use_rslora=true", "lora.rank_pattern={down_proj=2}"],
    &["bnb_4bit=", "lora=", "mode=full", "data.new_tokens=['th', 'a ', 'in']"],
    &["bnb_4bit=", "lora=", "mode=full", "train.weights=bfloat16_exact", "train.optimizer=adamw_8bit"],
    &["bnb_4bit=", "lora=", "mode=full", "train.weights=bfloat16_stochastic", "train.gradients=bfloat16"],
];

/// Builds a recipe with evaluations in between, which must not disturb the training, and a checkpoint of each step: steps go on while it is written,
/// except where the run ends or is interrupted.
fn evaluated(output: &Path, kind: &[&str]) -> RunConfig {
    let each_step = ["train.steps=4", "eval.every_steps=2", "checkpoint.every_steps=1", "checkpoint.keep=9"];
    recipe(output, &[kind, &each_step].concat())
}

/// Reads weights, optimizer state and the final weights, which must not differ by a bit.
pub(crate) fn tensors(run: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = snapshot(run);
    files.retain(|path, _| path.extension().is_some_and(|extension| extension == "safetensors"));
    files
}

/// Returns the metrics without the clock, the memory, and the usage of the machine.
fn numbers(run: &Path) -> Vec<Value> {
    let mut lines = metrics(run);
    for line in &mut lines {
        let line = line.as_object_mut().expect("each line is an object");
        let of_the_machine = ["tokens_per_s", "ms", "memory", "allocated", "throttle"];
        line.retain(|key, _| {
            !of_the_machine.contains(&key.as_str()) && !Gauge::ALL.iter().any(|(_, name)| name == key)
        });
    }
    lines
}

#[test]
fn run_interrupted_twice_equals_uninterrupted_run() {
    KINDS.into_iter().for_each(assert_interruptions_change_nothing);
}

#[test]
fn run_that_is_to_repeat_is_the_same_as_any_other_on_a_cpu() {
    let folders = [(); 2].map(|()| tempdir().unwrap());
    for (folder, key) in folders.iter().zip(["train.deterministic=false", "train.deterministic=true"]) {
        finish(recipe(folder.path(), &[key, "train.steps=2"]), NEW);
    }
    let [without, with] = folders.each_ref().map(|folder| tensors(&folder.path().join("run")));
    assert!(!without.is_empty() && without == with);
    let plan = fs::read_to_string(folders[1].path().join("run/plan.toml")).unwrap();
    assert!(
        plan.contains("[deterministic]\nvalue = true\nreason = \"the recipe: runs repeat on this backend anyway\""),
        "{plan}"
    );
}

#[test]
fn run_of_a_checkpoint_with_a_vision_tower_or_in_fp8_resumes_like_any_other() {
    let full = ["bnb_4bit=", "lora=", "mode=full"];
    let cases = [
        ("tiny-gemma3-vl", &[][..]),
        ("tiny-gemma3-vl", &full),
        ("tiny-gemma4-vl", &full),
        ("quant-fp8-ministral3", &[]),
    ];
    for (checkpoint, kind) in cases {
        let model = format!("model='{}'", fixture(checkpoint).display());
        assert_interruptions_change_nothing(&[&[model.as_str()], kind].concat());
    }
}

#[test]
fn run_with_the_loss_that_balances_experts_resumes_like_any_other() {
    let model = format!("model='{}'", fixture("tiny-qwen3-moe").display());
    let kind = [model.as_str(), "bnb_4bit=", "lora.modules_to_save=['gate']"];
    let balanced = ["train.router_aux_loss=true", "train.router_aux_loss_coef=0.5"];
    assert_interruptions_change_nothing(&[&kind[..], &balanced].concat());
    let output = tempdir().unwrap();
    let losses = |run: &str, change| {
        let name = format!("name={run}");
        let changes = [&kind[..], &[change, "train.steps=2", &name]].concat();
        finish(recipe(output.path(), &changes), NEW);
        let lines = metrics(&output.path().join(run));
        lines.iter().filter(|line| line.get("loss").is_some()).map(|line| line["aux_loss"].as_f64()).collect::<Vec<_>>()
    };
    assert_eq!(losses("without", "train.router_aux_loss=false"), [None; 2]);
    // Three of six experts per token: even choices and probabilities give 3.
    let with = losses("with", "train.router_aux_loss=true");
    assert!(with.iter().all(|loss| loss.is_some_and(|loss| (3.0..6.0).contains(&loss))), "{with:?}");
}

fn assert_interruptions_change_nothing(kind: &[&str]) {
    let (whole, parts) = (tempdir().unwrap(), tempdir().unwrap());
    let whole_summary = finish(evaluated(whole.path(), kind), NEW);
    let config = evaluated(parts.path(), kind);
    assert_eq!([one_step(config.clone(), NEW), one_step(config.clone(), NEWEST)], [1, 2]);
    let summary = finish(config, NEWEST);

    let (whole, parts) = (whole.path().join("run"), parts.path().join("run"));
    let expected = tensors(&whole);
    let saved = expected.keys().filter(|path| path.ends_with("optimizer.safetensors")).count();
    assert_eq!(saved, 4, "{kind:?}");
    for (path, bytes) in expected {
        assert!(fs::read(parts.join(&path)).unwrap() == bytes, "{kind:?}: {} differs", path.display());
    }
    assert_eq!(numbers(&parts), numbers(&whole), "{kind:?}");
    assert_eq!(summary.eval_loss_before, whole_summary.eval_loss_before);
    assert_eq!(summary.eval_loss_after, whole_summary.eval_loss_after);
    assert_eq!(summary.loss_tokens, whole_summary.loss_tokens);
}

#[test]
fn eight_bit_moments_are_saved_in_eight_bits() {
    let output = tempdir().unwrap();
    finish(recipe(output.path(), &[KINDS[1], &["train.steps=1"]].concat()), NEW);
    let bytes = fs::read(checkpoint_folder(&output.path().join("run"), 1).join("optimizer.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let is_byte = |name: &&str| file.tensor(name).unwrap().dtype() == safetensors::Dtype::U8;
    // A and B of 14 projections; the smaller B of k_proj and v_proj (32 wide) stay below 4,096 elements.
    assert_eq!(file.names().into_iter().filter(|name| name.ends_with("exp_avg.codes")).filter(is_byte).count(), 24);
}

/// A process that is killed leaves metrics, and maybe an unfinished checkpoint, later than its newest complete one.
#[test]
fn killed_run_continues_from_its_newest_complete_checkpoint() {
    let output = tempdir().unwrap();
    let run = output.path().join("run");
    let config = recipe(output.path(), &["checkpoint.every_steps=2", "checkpoint.keep=9"]);
    finish(config.clone(), NEW);
    let (expected, expected_numbers) = (tensors(&run), numbers(&run));

    fs::remove_file(checkpoint_folder(&run, 4).join("manifest.json")).unwrap();
    fs::rename(checkpoint_folder(&run, 6), run.join("checkpoints/step-6.tmp")).unwrap();
    fs::remove_dir_all(run.join("adapter")).unwrap();
    fs::remove_file(run.join("summary.json")).unwrap();
    let point = ResumePoint::open(&ResumeFrom::Newest, output.path(), "run").unwrap();
    let notes = point.notes.join("\n");
    assert!(notes.contains("step-4/manifest.json` is missing"), "{notes}");
    assert!(notes.contains("step-6.tmp was still being written when the run ended"), "{notes}");
    assert_eq!((point.state.step, notes.matches("continues from").count()), (2, 2), "{notes}");
    drop(point);
    finish(config, NEWEST);
    assert!(tensors(&run) == expected);
    assert_eq!(numbers(&run), expected_numbers);
    assert!(run.join("summary.json").is_file());
}

/// A process that is killed after its last evaluation has not written its results, or left a part of them under other names.
#[test]
fn a_run_that_is_killed_at_its_end_ends_again_as_if_it_were_not() {
    let evaluations = |run: &Path| {
        let files = snapshot(&run.join("tensorboard")).into_values();
        files.map(|file| file.windows(9).filter(|bytes| bytes == b"eval/loss").count()).sum::<usize>()
    };
    for kind in [&[][..], &["best={}", "eval.every_steps=2"], &["bnb_4bit=", "lora=", "mode=full"]] {
        let output = tempdir().unwrap();
        let run = output.path().join("run");
        let config = recipe(output.path(), &[kind, &["train.steps=4"]].concat());
        finish(config.clone(), NEW);
        let names = || snapshot(&run).into_keys().filter(|path| !path.starts_with("tensorboard")).collect::<Vec<_>>();
        let all = || (names(), tensors(&run), numbers(&run), evaluations(&run));
        let expected = all();
        let result = if run.join("model").exists() { "model" } else { "adapter" };
        for left in [result, &format!("{result}.partial-1")] {
            fs::create_dir_all(run.join(left)).unwrap();
            fs::write(run.join(left).join(".lock"), "").unwrap();
        }
        fs::write(run.join(".partial-1"), "").unwrap();
        fs::remove_file(run.join("summary.json")).unwrap();
        finish(config, NEWEST);
        assert!(all() == expected, "{kind:?}: {:?} {:?}", names(), numbers(&run));
    }
}

/// What a user changes after running out of memory.
#[test]
fn a_run_goes_on_with_the_same_rows_whatever_the_new_division_of_its_steps_and_its_memory() {
    let output = tempdir().unwrap();
    let texts = output.path().join("texts.jsonl");
    let text =
        |row: usize| format!("{{\"text\": \"{}\"}}\n", "brick by brick ".repeat(1 + row * 7 % 11) + &row.to_string());
    fs::write(&texts, (0..1300).map(text).collect::<String>()).unwrap();
    let path = format!("data.path='{}'", texts.display());
    let of = |run: &str, changes: &[&str]| {
        let name = format!("name={run}");
        let common = [&name[..], &path, "data.eval_fraction=0.01", "pack=false", "max_seq_len=192", "train.steps=2"];
        recipe(output.path(), &[&common, changes].concat())
    };
    let whole = ["train.micro_batch_size=20", "train.gradient_accumulation=1"];
    finish(of("whole", &whole), NEW);
    let expected = step_losses(&output.path().join("whole"));
    let smaller: [&[&str]; 5] = [
        &["train.micro_batch_size=4", "train.gradient_accumulation=5"],
        &["train.micro_batch_size=1", "train.gradient_accumulation=20", "eval.micro_batch_size=1"],
        &["train.micro_batch_size=auto", "train.gradient_accumulation=", "train.rows_per_step=20"],
        &[
            "train.micro_batch_size=20",
            "train.gradient_accumulation=1",
            "train.recompute=full",
            "train.loss_chunk_tokens=9",
        ],
        &["train.micro_batch_size=10", "train.gradient_accumulation=2", "train.recompute=none", "train.offload=false"],
    ];
    for (number, smaller) in smaller.into_iter().enumerate() {
        let name = format!("run{number}x");
        one_step(of(&name, &whole), NEW);
        finish(of(&name, smaller), NEWEST);
        let losses = step_losses(&output.path().join(&name));
        let differ = expected.iter().zip(&losses).any(|(one, other)| (one - other).abs() > 1e-5 * one);
        assert!(losses.len() == 2 && !differ, "{smaller:?}: {losses:?}, not {expected:?}");
    }
    let rows = |ranks, changes: &[&str]| {
        prepare_for(of("new", changes), ranks, &PlanRequest::default()).unwrap().train.fingerprint()
    };
    assert_eq!(rows(2, &["train.micro_batch_size=5"]), rows(1, &whole), "ranks divide a step too");
}

#[test]
fn resuming_a_finished_run_changes_nothing() {
    let output = tempdir().unwrap();
    let run = output.path().join("run");
    let first = finish(recipe(output.path(), &[]), NEW);
    let all = || (snapshot(&run), fs::read(run.join("plan.toml")).unwrap());
    let before = all();
    assert_eq!(finish(recipe(output.path(), &[]), NEWEST), first);
    assert!(all() == before);
}

#[test]
fn a_finished_run_trains_on_with_more_steps_and_ends_again_where_its_summary_is_gone() {
    let output = tempdir().unwrap();
    let run = output.path().join("run");
    let first = finish(recipe(output.path(), &["train.steps=2"]), NEW);
    // A kill before the last file leaves the folder like this.
    for last in ["report.html", "summary.json"] {
        fs::remove_file(run.join(last)).unwrap();
    }
    let second = finish(recipe(output.path(), &["train.steps=2"]), NEWEST);
    assert!(run.join("report.html").is_file());
    assert_eq!((second.steps, second.tokens_per_s), (first.steps, first.tokens_per_s));
    assert!(first.tokens_per_s > 0.0);

    let longer = recipe(output.path(), &["train.steps=4"]);
    assert_eq!(one_step(longer.clone(), NEWEST), 3);
    assert!(!run.join("summary.json").exists(), "the run has no end yet");
    assert_eq!(finish(longer, NEWEST).steps, 4);
    assert!(run.join("summary.json").exists() && !run.join("summary.json.set-aside").exists());
}

#[test]
fn resuming_another_run_is_refused_by_key_and_changes_nothing() {
    let output = tempdir().unwrap();
    one_step(recipe(output.path(), &[]), NEW);
    let before = snapshot(output.path());
    let other_data = format!("data.path='{}'", firebrick_tests::fixture("data/text-tiny.jsonl").display());
    let changes = [
        ("train.optimizer=adamw_8bit", "train.optimizer"),
        ("train.gradient_accumulation=3", "train.micro_batch_size x train.gradient_accumulation"),
        ("train.micro_batch_size=4", "train.micro_batch_size x train.gradient_accumulation"),
        ("lora.r=8", "lora.r"),
        ("lora.alpha=16", "lora.alpha"),
        ("bnb_4bit=", "base"),
        ("bnb_4bit.double_quant=false", "base"),
        ("base=nvfp4", "base"),
        ("seed=8", "seed"),
        ("max_seq_len=48", "max_seq_len"),
        (other_data.as_str(), "data"),
    ];
    for (change, key) in changes {
        let message = refusal(recipe(output.path(), &[change]), NEWEST);
        assert!(message.contains(&format!("was made with {key} = ")), "{change}: {message}");
        assert!(message.contains("a resumed run must be the same run"), "{change}: {message}");
        assert!(snapshot(output.path()) == before, "{change} touched the run folder");
    }
    finish(recipe(output.path(), &[]), NEWEST);
}

#[test]
fn a_run_whose_time_is_up_is_saved_after_its_step_and_continues() {
    let (whole, parts) = (tempdir().unwrap(), tempdir().unwrap());
    let expected = finish(recipe(whole.path(), &[]), NEW);
    let short = recipe(parts.path(), &["train.max_time_hours=1e-9"]);
    for step in 1..=2 {
        let resume = if step == 1 { NEW } else { NEWEST };
        let outcome = train(short.clone(), resume, &Interrupt::detached()).unwrap();
        let Outcome::Interrupted { step: taken, status, .. } = outcome else {
            panic!("the time was not up: {outcome:?}")
        };
        assert_eq!((taken, status), (step, 124));
    }
    let found = finish(recipe(parts.path(), &[]), NEWEST);
    assert_eq!((found.steps, found.train_loss), (expected.steps, expected.train_loss));
}
