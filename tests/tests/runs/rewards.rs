//! Learning from rewards as a user runs it: rewards rise, stopped and killed runs go on to the same end, a step's loss follows from the files of its
//! round, held-out rewards choose the best checkpoint, and what does not fit together is refused.
//!
//! Trade-off: a kill is the folder that it leaves, or a reward that fails; `tests/program` kills a process.

use std::collections::BTreeSet;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use firebrick_tests::{
    NEW, NEWEST, checkpoint_folder, finish, fixture, metrics, recipe, refusal, snapshot, step_losses, train,
};
use firebrick_trainer::config::RunConfig;
use firebrick_trainer::console::{Console, Outcome};
use firebrick_trainer::run::interrupt::Interrupt;
use firebrick_trainer::run::replay;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use tempfile::{TempDir, tempdir};

use crate::resume::tensors;

const FULL: [&str; 3] = ["bnb_4bit=", "lora=", "mode=full"];
const REWARD: &str = "grpo.rewards=[{regex='a'}]";
/// Maximum tokens of a completion.
const TOKENS: usize = 12;

/// Two prompts with four completions of at most 12 bytes in each step.
fn rewarded(output: &Path, changes: &[&str]) -> RunConfig {
    let reward = number_of("[!-_]");
    let usual = [
        "max_seq_len=128",
        "train.micro_batch_size=4",
        "grpo.num_generations=4",
        "grpo.max_completion_length=12",
        reward.as_str(),
    ];
    recipe(output, &[&usual, changes].concat())
}

/// Returns the change that rewards the number of such characters, up to eight: an eighth for each.
fn number_of(characters: &str) -> String {
    let reward = |count: usize| format!("{{name='{count}', regex='(?s)({characters}.*){{{count}}}', weight=0.125}}");
    format!("grpo.rewards=[{}]", (1..=8).map(reward).collect::<Vec<_>>().join(", "))
}

fn quickstart(path: &str) -> String {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../assets/quickstart").join(path).display().to_string()
}

/// Returns the values of a key in metrics.jsonl, in the order of their steps.
fn values(run: &Path, key: &str) -> Vec<f64> {
    metrics(run).iter().filter_map(|line| line.get(key)?.as_f64()).collect()
}

fn round_file(run: &Path, step: u64) -> PathBuf {
    run.join("rounds").join(format!("step-{step:08}-rank-0.jsonl"))
}

/// Reads the completions of the round that begins with a step.
fn rollouts(run: &Path, step: u64) -> Vec<Value> {
    let text = fs::read_to_string(round_file(run, step)).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Asserts that weights, optimizer states and rounds have the same bytes, and that the metrics tell the same.
fn assert_same_run(found: &Path, expected: &Path, what: &str) {
    for (path, bytes) in tensors(expected) {
        assert!(fs::read(found.join(&path)).unwrap() == bytes, "{what}: {} differs", path.display());
    }
    let rounds = |run: &Path| {
        let mut files = snapshot(&run.join("rounds"));
        files.retain(|path, _| path.extension().is_some_and(|extension| extension == "jsonl"));
        files
    };
    assert!(!rounds(expected).is_empty() && rounds(found) == rounds(expected), "{what}: the rounds differ");
    for key in ["step", "loss", "grad_norm", "reward", "eval_reward", "kl", "clip_ratio/low_mean", "entropy"] {
        assert_eq!(values(found, key), values(expected, key), "{what}: {key}");
    }
}

#[test]
fn the_reward_of_the_quickstarts_base_rises() {
    let output = tempdir().unwrap();
    let set = |key: &str, path: &str| format!("{key}='{}'", quickstart(path));
    let (model, data, vowels) = (set("model", "base"), set("data.path", "train.jsonl"), number_of("[aeiou]"));
    let changes = [
        model.as_str(),
        &data,
        "data.eval_fraction=",
        "bnb_4bit=",
        "lora={r=16, alpha=32}",
        "max_seq_len=64",
        "train.steps=10",
        "train.schedule=constant",
        "train.micro_batch_size=32",
        "train.gradient_accumulation=1",
        "train.learning_rate=3e-3",
        "train.weight_decay=0",
        "grpo.num_generations=8",
        "grpo.max_completion_length=8",
        &vowels,
    ];
    finish(rewarded(output.path(), &changes), NEW);
    let rewards = values(&output.path().join("run"), "reward");
    let mean = |rewards: &[f64]| rewards.iter().sum::<f64>() / rewards.len() as f64;
    assert_eq!(rewards.len(), 10);
    assert!(mean(&rewards[7..]) > mean(&rewards[..3]) + 0.2, "{rewards:?}");
}

/// A reward by number that a process computes, which keeps the numbers of its requests. Once it may fail.
struct Asked(TempDir);

impl Asked {
    fn new() -> Self {
        let script = r#"echo '{"firebrick_reward": 1, "batch": false}'
            cd "$1"
            while read -r line; do
                id=${line#*:}; id=${id%%,*}
                echo "$id" >>asked
                if [ "$(cat fails 2>/dev/null)" = "$id" ]; then rm fails; exit 3; fi
                echo "{\"id\": $id, \"reward\": $((id * 7 % 5))}"
            done"#;
        let asked = Self(tempdir().unwrap());
        fs::write(asked.0.path().join("reward.sh"), script).unwrap();
        asked
    }

    fn reward(&self) -> String {
        let folder = self.0.path().display();
        format!("grpo.rewards=[{{name='number', command=['sh', '{folder}/reward.sh', '{folder}']}}]")
    }

    fn fail_at(&self, id: u64) {
        fs::write(self.0.path().join("fails"), id.to_string()).unwrap();
    }

    /// Returns what was asked since the last call.
    fn take(&self) -> Vec<u64> {
        let file = self.0.path().join("asked");
        let text = fs::read_to_string(&file).unwrap_or_default();
        fs::write(file, "").unwrap();
        text.lines().map(|line| line.parse().unwrap()).collect()
    }
}

#[test]
fn a_killed_run_goes_on_to_the_same_end_and_asks_no_reward_twice() {
    let (output, asked) = (tempdir().unwrap(), Asked::new());
    let (run, reward) = (output.path().join("run"), asked.reward());
    let changes = [reward.as_str(), "data.eval_fraction=", "checkpoint.every_steps=2", "checkpoint.keep=9"];
    let config = || rewarded(output.path(), &changes);
    finish(config(), NEW);
    assert_eq!(asked.take(), (0..48).collect::<Vec<u64>>());
    let whole = output.path().join("whole");
    for (path, bytes) in snapshot(&run) {
        let path = whole.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }

    type Damage = fn(&Path);
    let gone: Damage = |checkpoint| fs::remove_dir_all(checkpoint).unwrap();
    let temporary: Damage = |checkpoint| fs::rename(checkpoint, checkpoint.with_extension("tmp")).unwrap();
    let without_manifest: Damage = |checkpoint| fs::remove_file(checkpoint.join("manifest.json")).unwrap();
    // Step 4 is saved. A round has a file once its rewards are known: what is left of it, and what is asked again.
    let kills: [(&str, Damage, &[u64], Range<u64>); 5] = [
        ("in the sampling of step 5", gone, &[5, 6], 32..48),
        ("in the update of step 5", gone, &[6], 40..48),
        ("after the last update", gone, &[], 48..48),
        ("in a save", temporary, &[], 48..48),
        ("at the end of a save", without_manifest, &[], 48..48),
    ];
    for (when, damage, no_rounds, again) in kills {
        damage(&checkpoint_folder(&run, 6));
        no_rounds.iter().for_each(|&step| fs::remove_file(round_file(&run, step)).unwrap());
        fs::remove_dir_all(run.join("adapter")).unwrap();
        fs::remove_file(run.join("summary.json")).unwrap();
        finish(config(), NEWEST);
        assert_eq!(asked.take(), again.collect::<Vec<_>>(), "{when}");
        assert_same_run(&run, &whole, when);
    }

    fs::remove_dir_all(&run).unwrap();
    asked.fail_at(35);
    let message = refusal(config(), NEW);
    assert!(message.contains("reward 'number'") && message.contains("before id 35 was answered"), "{message}");
    assert_eq!(asked.take(), (0..=35).collect::<Vec<_>>());
    finish(config(), NEWEST);
    assert_eq!(asked.take(), (32..48).collect::<Vec<_>>(), "in the rewards");
    assert_same_run(&run, &whole, "in the rewards");
}

#[test]
fn a_run_that_stops_after_each_step_ends_as_one_that_does_not() {
    let kinds: [&[&str]; 4] = [
        &["eval.every_steps=2"],
        // A round has four steps, and stops lie in it.
        &["grpo.num_iterations=2", "grpo.steps_per_generation=2", "train.steps=6"],
        &["bnb_4bit=", "grpo.beta=0.1", "grpo.importance_sampling_level=sequence"],
        &FULL,
    ];
    for kind in kinds {
        let (whole, parts) = (tempdir().unwrap(), tempdir().unwrap());
        let changes = [&["train.steps=4"], kind].concat();
        let steps = finish(rewarded(whole.path(), &changes), NEW).steps;
        let short = rewarded(parts.path(), &[&changes[..], &["train.max_time_hours=1e-9"]].concat());
        for step in 1..steps {
            let outcome = train(short.clone(), if step == 1 { NEW } else { NEWEST }, &Interrupt::detached()).unwrap();
            assert!(matches!(outcome, Outcome::Interrupted { step: taken, .. } if taken == step), "{outcome:?}");
        }
        finish(rewarded(parts.path(), &changes), NEWEST);
        assert_same_run(&parts.path().join("run"), &whole.path().join("run"), &format!("{kind:?}"));
    }
}

/// Copies the tiny model with so many tokens that end a text that some completions are whole and some are cut.
fn often_ending(ends: &BTreeSet<u64>) -> TempDir {
    let copy = tempdir().unwrap();
    for entry in fs::read_dir(fixture("tiny-llama")).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, copy.path().join(path.file_name().unwrap())).unwrap();
    }
    let text = serde_json::json!({ "eos_token_id": ends }).to_string();
    fs::write(copy.path().join("generation_config.json"), text).unwrap();
    copy
}

/// In the first step after sampling each ratio is 1, so its loss follows from advantages and lengths: TRL's formulas, over the tokens that were
/// sampled, the end among them, and over no others.
#[test]
fn a_steps_loss_is_that_of_its_round_whatever_is_masked_and_however_it_is_divided() {
    let ends: BTreeSet<u64> = (128..256).step_by(8).chain([257, 261]).collect();
    let model = often_ending(&ends);
    let model = format!("model='{}'", model.path().display());
    let divided: [&[&str]; 3] = [
        &["train.micro_batch_size=16", "train.gradient_accumulation=1"],
        &["train.micro_batch_size=1", "train.gradient_accumulation=16"],
        &["train.micro_batch_size=4", "train.gradient_accumulation=4", "pack=false"],
    ];
    for (loss_type, masks) in [("dapo", false), ("dapo", true), ("grpo", true), ("dr_grpo", true)] {
        let (of_type, masking) =
            (format!("grpo.loss_type={loss_type}"), format!("grpo.mask_truncated_completions={masks}"));
        let mut norms = Vec::new();
        for division in divided {
            let output = tempdir().unwrap();
            let kind = [model.as_str(), &of_type, &masking, "train.steps=1", "data.eval_fraction="];
            finish(rewarded(output.path(), &[&kind, division].concat()), NEW);
            let run = output.path().join("run");
            let rollouts = rollouts(&run, 1);
            let is_cut = |rollout: &Value| rollout["is_truncated"].as_bool().unwrap();
            let tokens = |rollout: &Value| rollout["tokens"].as_array().unwrap().len();
            for rollout in &rollouts {
                let last = rollout["tokens"].as_array().unwrap().last().unwrap().as_u64().unwrap();
                assert_eq!(is_cut(rollout), !ends.contains(&last), "{rollout}");
                assert!(tokens(rollout) == TOKENS || tokens(rollout) < TOKENS && !is_cut(rollout), "{rollout}");
            }
            let cut = values(&run, "completions/clipped_ratio")[0];
            assert!(rollouts.len() == 16 && cut > 0.0 && cut < 1.0, "{cut}: some are cut and some are not");
            let kept: Vec<_> = rollouts.iter().filter(|rollout| !(masks && is_cut(rollout))).collect();
            let counted: usize = kept.iter().map(|rollout| tokens(rollout)).sum();
            let weight = |count: usize| match loss_type {
                "dapo" => 1.0 / counted as f64,
                "grpo" => 1.0 / (16 * count) as f64,
                _ => 1.0 / (16 * TOKENS) as f64,
            };
            let part = |rollout: &&Value| {
                -rollout["advantage"].as_f64().unwrap() * tokens(rollout) as f64 * weight(tokens(rollout))
            };
            let (loss, expected) = (step_losses(&run)[0], kept.iter().map(part).sum::<f64>());
            assert!((loss - expected).abs() < 1e-5, "{loss_type}, {masks}, {division:?}: {loss}, not {expected}");
            assert_eq!(values(&run, "loss_tokens"), [counted as f64], "{loss_type}, {masks}, {division:?}");
            let drift = values(&run, "sampling/sampling_logp_difference/max")[0];
            assert!(drift < 1e-3, "training and sampling differ by {drift}");
            norms.push(values(&run, "grad_norm")[0]);
        }
        assert!(norms[0] > 0.0 && norms.iter().all(|norm| (norm / norms[0] - 1.0).abs() < 1e-3), "{norms:?}");
    }
}

#[test]
fn held_out_rewards_are_in_the_metrics_and_choose_the_best_checkpoint() {
    let output = tempdir().unwrap();
    let run = output.path().join("run");
    let changes =
        ["best={metric='eval_reward'}", "eval.every_steps=1", "checkpoint.keep=1", "train.learning_rate=3e-2"];
    let summary = finish(rewarded(output.path(), &changes), NEW);
    let rewards = values(&run, "eval_reward");
    assert_eq!((rewards.len(), values(&run, "eval_loss").len()), (7, 0), "before the first step and after each");
    let best = (1..7).fold(1, |best, step| if rewards[step] > rewards[best] { step } else { best });
    assert_eq!(summary.best_step, Some(best as u64), "{rewards:?}");
    assert_eq!((summary.eval_reward_before, summary.eval_reward_after), (Some(rewards[0]), Some(rewards[best])));
    let weights = |folder: &Path| fs::read(folder.join("adapter/adapter_model.safetensors")).unwrap();
    assert!(weights(&run) == weights(&checkpoint_folder(&run, best as u64)));
}

/// The base is in bfloat16, where a weight of 0.1 moves by 5e-4 or not at all.
#[test]
fn weights_of_a_16_bit_model_move_at_a_rate_of_1e_6() {
    let output = tempdir().unwrap();
    let base = quickstart("base");
    let model = format!("model='{base}'");
    let vowels = number_of("[aeiou]");
    let once = ["train.steps=1", "train.warmup_steps=0", "train.schedule=constant", "train.learning_rate=1e-6"];
    let kind = [model.as_str(), &vowels, "data.eval_fraction="];
    finish(rewarded(output.path(), &[&kind, &FULL[..], &once].concat()), NEW);
    let saved = checkpoint_folder(&output.path().join("run"), 1).join("model/model.safetensors");
    let name = "model.layers.0.mlp.down_proj.weight";
    let read = |path: &Path, dtype: Dtype, skipped: usize| -> Vec<f32> {
        let bytes = fs::read(path).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let tensor = file.tensor(name).unwrap();
        assert_eq!(tensor.dtype(), dtype, "{}", path.display());
        let value = |bytes: &[u8]| {
            let mut whole = [0; 4];
            whole[skipped..].copy_from_slice(bytes);
            f32::from_le_bytes(whole)
        };
        tensor.data().chunks(4 - skipped).map(value).collect()
    };
    let before = read(&Path::new(&base).join("model.safetensors"), Dtype::BF16, 2);
    let after = read(&saved, Dtype::F32, 0);
    let moved = before.iter().zip(&after).filter(|(before, after)| before != after).count();
    assert!(moved > before.len() * 9 / 10, "{moved} of {} moved", before.len());
    assert!(before.iter().zip(&after).all(|(before, after)| (before - after).abs() < 2e-6));
}

#[test]
fn recipes_that_do_not_fit_together_are_refused() {
    let of = |changes: &[&str]| {
        let usual = ["output_dir='x'", "model='m'", "data.path='d'", "data.eval_fraction=0.1", "mode=lora"];
        let overrides: Vec<String> = [&usual, changes].concat().iter().map(|&change| change.to_owned()).collect();
        RunConfig::from_toml("", Path::new("x.toml"), &overrides).map(|_| ()).map_err(|error| error.to_string())
    };
    let cases: [(&[&str], &str); 20] = [
        (&["data.format=prompt"], "is read by learning from rewards alone"),
        (&["grpo={}"], "there is none; write for example [[grpo.rewards]]"),
        (&["grpo.rewards=[{regex='(a'}]"], "unclosed group"),
        (&["grpo.rewards=[{regex='a'}, {regex='b'}]"], "another reward has the same name"),
        (&[REWARD, "preference={}"], "[preference] is there too"),
        (&[REWARD, "max_seq_len=512"], "a row of max_seq_len = 512 tokens holds a prompt as well"),
        (&[REWARD, "train.rows_per_step=12"], "is no multiple of grpo.num_generations = 8"),
        (&[REWARD, "grpo.beta=0.1", "mode=full"], "the base without its adapter"),
        (&[REWARD, "grpo.beta=0.1", "lora.modules_to_save=['lm_head']"], "the base without its adapter"),
        (&[REWARD, "grpo.beta=0.1", "data.new_tokens=['th']"], "the base without its adapter"),
        (&[REWARD, "lora.dropout=0.1"], "the probabilities of sampling and training would differ"),
        (&[REWARD, "data.format=chat"], "trains on prompts, whose answers the model writes"),
        (&[REWARD, "data.overflow=split"], "a prompt is never divided"),
        (&[REWARD, "eval.exact_match_prompts=5"], "evaluates held-out prompts by their reward"),
        (&[REWARD, "grpo.num_generations=1"], "grpo.num_generations"),
        (&[REWARD, "grpo.temperature=0"], "grpo.temperature"),
        (&[REWARD, "grpo.top_p=1.5"], "grpo.top_p"),
        (&[REWARD, "grpo.loss_type=ppo"], "dr_grpo"),
        (&[REWARD, "best={}", "eval.every_steps=2"], "write \"eval_reward\""),
        (&["best={metric='eval_reward'}", "eval.every_steps=2"], "is measured in learning from rewards alone"),
    ];
    assert_eq!(of(&[REWARD, "max_seq_len=1024"]), Ok(()), "one alone fits");
    for (changes, part) in cases {
        let changes = [&["max_seq_len=1024"], changes].concat();
        let Err(message) = of(&changes) else { panic!("{changes:?} are accepted") };
        assert!(message.contains(part), "`{part}` is not in the error of {changes:?}: {message}");
    }
}

#[test]
fn a_step_that_is_no_whole_groups_is_refused() {
    let output = tempdir().unwrap();
    for rows in ["train.gradient_accumulation=1", "train.gradient_accumulation=3"] {
        let message = refusal(rewarded(output.path(), &[rows, "grpo.num_generations=8"]), NEW);
        assert!(message.contains("each rank needs whole groups of grpo.num_generations = 8"), "{message}");
    }
    assert!(!output.path().join("run").exists(), "nothing was to be written");
}

#[test]
fn completions_of_a_step_that_ends_its_run_are_learned_from_again() {
    let output = tempdir().unwrap();
    // Many usual steps are above such a limit.
    let changes = ["train.steps=60", "train.spike_factor=1.0001", "train.max_skipped_steps=0", "eval.on_start=false"];
    let config = rewarded(output.path(), &changes);
    let found = ["all of its values are finite", "the gradient of"];
    for message in
        [refusal(config.clone(), NEW), replay(config, &output.path().join("run"), Console::QUIET).unwrap().concat()]
    {
        assert!(found.iter().all(|part| message.contains(part)), "{message}");
    }
}
