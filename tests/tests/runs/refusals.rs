//! Tests that bad input is one clear error, and changes nothing that was saved before.

use std::fs;
use std::path::{Path, PathBuf};

use firebrick_tests::{
    NEW, NEWEST, checkpoint_folder, finish, fixture, one_step, recipe, refusal, snapshot, step_losses,
};
use tempfile::{TempDir, tempdir};

/// Returns the error of a recipe with these changes, after checking that an earlier run of its name is unchanged. A file stands in for that run; the
/// first test trains one.
fn refused(changes: &[&str]) -> String {
    let output = tempdir().unwrap();
    let checkpoint = checkpoint_folder(&output.path().join("run"), 1);
    fs::create_dir_all(&checkpoint).unwrap();
    fs::write(checkpoint.join("state.json"), "saved").unwrap();
    refused_in(output.path(), changes)
}

/// Returns the error of a recipe with these changes next to the run in this folder.
fn refused_in(output: &Path, changes: &[&str]) -> String {
    let run = output.join("run");
    let before = snapshot(&run);
    assert!(!before.is_empty());
    let message = refusal(recipe(output, changes), NEW);
    assert!(snapshot(&run) == before, "the earlier run was touched");
    message
}

fn assert_says(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
}

fn data(name: &str) -> String {
    format!("data.path='{}'", fixture("data").join(name).display())
}

/// Copies a model fixture so that a test may break it.
fn copy_of(model: &str) -> TempDir {
    let copy = tempdir().unwrap();
    for entry in fs::read_dir(fixture(model)).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, copy.path().join(path.file_name().unwrap())).unwrap();
    }
    copy
}

/// Returns the error of a run over plain texts with this model folder.
fn refused_model(folder: &Path) -> String {
    refused(&[&format!("model='{}'", folder.display()), &data("text-tiny.jsonl")])
}

fn rewrite(path: PathBuf, change: impl FnOnce(String) -> String) {
    let text = fs::read_to_string(&path).unwrap();
    let changed = change(text.clone());
    assert_ne!(changed, text);
    fs::write(path, changed).unwrap();
}

#[test]
fn a_recipe_that_is_refused_changes_no_file_of_a_trained_run_of_its_name() {
    let output = tempdir().unwrap();
    finish(recipe(output.path(), &["train.steps=1"]), NEW);
    for change in ["model=./some-model", &data("corrupt.jsonl"), "eval.extract='last words: (.*)'"] {
        refused_in(output.path(), &["eval.exact_match_prompts=2", change]);
    }
}

#[test]
fn missing_shard_is_named() {
    let model = copy_of("tiny-llama-sharded");
    fs::remove_file(model.path().join("model-00002-of-00004.safetensors")).unwrap();
    assert_says(&refused_model(model.path()), &["lacks 1 shard", "model-00002-of-00004.safetensors", "Download"]);
}

#[test]
fn truncated_shard_is_named_with_both_sizes() {
    let model = copy_of("tiny-llama-sharded");
    let path = model.path().join("model-00003-of-00004.safetensors");
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() - 100]).unwrap();
    let sizes = [bytes.len(), bytes.len() - 100].map(|size| size.to_string());
    assert_says(
        &refused_model(model.path()),
        &["model-00003-of-00004.safetensors", &sizes[0], &sizes[1], "did not finish"],
    );
}

#[test]
fn weights_of_another_shape_than_the_config_says_are_listed() {
    let model = copy_of("tiny-llama");
    rewrite(model.path().join("config.json"), |text| {
        text.replace("\"intermediate_size\": 96", "\"intermediate_size\": 128")
    });
    assert_says(
        &refused_model(model.path()),
        &["config.json", "6 tensors", "gate_proj.weight", "[96, 64]", "[128, 64]"],
    );
}

#[test]
fn another_architecture_is_refused_by_name() {
    let model = copy_of("tiny-llama");
    rewrite(model.path().join("config.json"), |text| text.replace("LlamaForCausalLM", "MambaForCausalLM"));
    assert_says(&refused_model(model.path()), &["config.json", "MambaForCausalLM", "docs/models.md"]);
}

#[test]
fn corrupt_record_is_named_by_file_and_line() {
    assert_says(&refused(&[&data("corrupt.jsonl")]), &["corrupt.jsonl:3:", "not valid JSON"]);
}

#[test]
fn empty_dataset_is_refused() {
    assert_says(&refused(&[&data("empty.jsonl")]), &["empty.jsonl", "has no records"]);
}

#[test]
fn record_without_loss_tokens_is_named_by_file_and_line() {
    assert_says(
        &refused(&[&data("masked.jsonl")]),
        &["1 of 1 record", "masked.jsonl:1", "nothing to train", "the role \"assistant\"", "max_bad_share"],
    );
}

#[test]
fn unknown_recompute_policy_gets_the_list_of_known_ones() {
    let output = tempdir().unwrap();
    let overrides = ["model=m", "data.path=d", "train.recompute=some"].map(str::to_owned);
    let error = firebrick_trainer::config::RunConfig::from_toml("", output.path(), &overrides).unwrap_err().to_string();
    assert_says(&error, &["train.recompute", "'some'", "'full', 'projections', 'selective', 'none'"]);
}

#[test]
fn a_loss_that_balances_experts_needs_a_model_that_has_one() {
    for (model, why) in [("tiny-llama", "has no experts"), ("tiny-glm4-moe", "by a correction of their scores")] {
        let model = format!("model='{}'", fixture(model).display());
        let message = refused(&[&model, "bnb_4bit=", "train.router_aux_loss=true", "train.router_aux_loss_coef=0.01"]);
        assert_says(&message, &["train.router_aux_loss", why, "Remove this key"]);
    }
}

#[test]
fn missing_dataset_is_named() {
    assert_says(&refused(&[&data("absent.jsonl")]), &["absent.jsonl"]);
}

#[test]
fn chats_need_a_chat_template() {
    let model = format!("model='{}'", fixture("tiny-llama-sharded").display());
    assert_says(&refused(&[&model]), &["no chat template", "data.chat_template = \""]);
}

#[test]
fn missing_model_folder_is_named_with_what_to_write() {
    assert_says(&refused(&["model=./some-model"]), &["./some-model", "config.json", "id of the Hub"]);
}

/// A file is in the way, because a test that runs as root may write everywhere.
#[test]
fn run_folder_that_cannot_be_created_is_one_clear_error() {
    let output = tempdir().unwrap();
    let file = output.path().join("file");
    fs::write(&file, "kept").unwrap();
    assert_says(&refusal(recipe(&file, &[]), NEW), &["cannot write the run folder", "output_dir"]);
    assert_eq!(fs::read(&file).unwrap(), b"kept");
}

#[test]
fn unusable_backend_is_refused_with_what_would_make_it_work() {
    if !cfg!(feature = "cuda") {
        assert_says(&refused(&["backend=cuda"]), &["`cuda` is not in this program", "which contains"]);
    }
    #[cfg(feature = "cuda")]
    if firebrick_kernels::backends::BackendKind::Cuda.probe().is_err() {
        assert_says(&refused(&["backend=cuda"]), &["`cuda` finds no device", "NVIDIA driver", "--set backend=flex"]);
    }
    if !cfg!(feature = "wgpu") {
        assert_says(&refused(&["backend=wgpu"]), &["`wgpu` is not in this program", "which contains"]);
    }
    #[cfg(feature = "wgpu")]
    if firebrick_kernels::backends::BackendKind::Wgpu.probe().is_err() {
        assert_says(&refused(&["backend=wgpu"]), &["`wgpu` finds no device", "Vulkan driver", "--set backend=flex"]);
    }
}

#[test]
fn exact_match_without_anything_to_answer_is_refused_with_the_reasons() {
    let message = refused(&["eval.exact_match_prompts=2", "data.train_end_of_turn=false"]);
    assert_says(&message, &["none of the", "have no complete last answer", "eval.exact_match_prompts"]);
    let message = refused(&["eval.exact_match_prompts=2", "eval.extract='last words: (.*)'"]);
    assert_says(&message, &["none of the", "eval.extract finds nothing"]);
}

/// A rate that makes weights of 1e30 in one update.
const TOO_FAST: [&str; 2] = ["train.learning_rate=1e30", "train.warmup_steps=0"];

#[test]
fn loss_that_is_not_finite_stops_the_run_and_leaves_the_last_checkpoint() {
    let output = tempdir().unwrap();
    let run = output.path().join("run");
    one_step(recipe(output.path(), &[]), NEW);
    let checkpoint = snapshot(&checkpoint_folder(&run, 1));
    let message = refusal(recipe(output.path(), &TOO_FAST), NEWEST);
    assert_says(&message, &["step 3", "loss is", "diverged", "train.learning_rate"]);
    assert_eq!(step_losses(&run).len(), 2);
    assert!(snapshot(&checkpoint_folder(&run, 1)) == checkpoint);
}

/// The step's loss and gradient are finite, because they precede the update.
#[test]
fn weights_that_an_update_has_ruined_are_saved_nowhere_and_the_run_fails() {
    let output = tempdir().unwrap();
    let run = output.path().join("run");
    one_step(recipe(output.path(), &[]), NEW);
    let checkpoint = snapshot(&checkpoint_folder(&run, 1));
    let changes = [TOO_FAST[0], TOO_FAST[1], "checkpoint.every_steps=1"];
    let message = refusal(recipe(output.path(), &changes), NEWEST);
    assert_says(&message, &["step 2", "weights", "diverged", "train.learning_rate"]);
    assert_eq!(fs::read_dir(run.join("checkpoints")).unwrap().count(), 1);
    assert!(snapshot(&checkpoint_folder(&run, 1)) == checkpoint);
    assert_eq!(finish(recipe(output.path(), &[]), NEWEST).steps, 6, "the earlier checkpoint continues");

    let changes = [TOO_FAST[0], TOO_FAST[1], "train.steps=1"];
    assert_says(&refusal(recipe(output.path(), &changes), NEW), &["step 1", "weights", "diverged"]);
    for result in ["adapter", "summary.json"] {
        assert!(!output.path().join("run-2").join(result).exists(), "{result}");
    }
}

#[test]
fn model_that_became_damaged_changes_nothing_and_the_run_resumes_once_it_is_whole() {
    let (output, model) = (tempdir().unwrap(), copy_of("tiny-llama-sharded"));
    let changes = [format!("model='{}'", model.path().display()), data("text-tiny.jsonl")];
    let config = || recipe(output.path(), &[changes[0].as_str(), &changes[1]]);
    assert_eq!(one_step(config(), NEW), 1);
    let before = snapshot(output.path());
    let shard = model.path().join("model-00004-of-00004.safetensors");
    fs::rename(&shard, model.path().join("elsewhere")).unwrap();
    assert_says(&refusal(config(), NEWEST), &["model-00004-of-00004.safetensors"]);
    assert!(snapshot(output.path()).into_iter().all(|(path, bytes)| before.get(&path).is_none_or(|old| *old == bytes)));
    fs::rename(model.path().join("elsewhere"), &shard).unwrap();
    assert_eq!(finish(config(), NEWEST).steps, 6);
}
