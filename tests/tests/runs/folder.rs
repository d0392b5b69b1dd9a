//! Tests the files that a run leaves, and that other programs can use them.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use firebrick_hwprofile::usage::Gauge;
use firebrick_kernels::backends::Flex;
use firebrick_model::ModelConfig;
use firebrick_model::peft::read_adapter;
use firebrick_tests::{
    NEW, NEWEST, NF4, checkpoint_folder, finish, finish_traced, fixture, load, metrics, one_step, recipe, snapshot,
    step_losses,
};
use firebrick_trainer::plan::PlanRequest;
use firebrick_trainer::run::prepare::prepare_for;
use firebrick_trainer::run::trace::TraceSteps;
use firebrick_trainer::state::checkpoint::read_state;
use serde_json::Value;
use tempfile::tempdir;

fn keys(value: &Value) -> Vec<&str> {
    value.as_object().expect("an object").keys().map(String::as_str).collect()
}

fn json(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn run_folder_holds_all_its_files() {
    let output = tempdir().unwrap();
    let changes = [
        "train.steps=5",
        "checkpoint.every_steps=2",
        "checkpoint.keep=2",
        "eval.exact_match_prompts=3",
        "eval.prompts=['2+2?']",
    ];
    let summary = finish(recipe(output.path(), &changes), NEW);
    let run = output.path().join("run");
    for file in
        ["config.toml", "plan.toml", "metrics.jsonl", "summary.json", "report.html", "adapter/adapter_config.json"]
    {
        assert!(run.join(file).is_file(), "{file}");
    }
    // The summary is written after it.
    assert_eq!(fs::read_to_string(run.join("report.html")).unwrap(), firebrick_train::report::page(&run).unwrap());
    let checkpoints = fs::read_dir(run.join("checkpoints")).unwrap().count();
    assert_eq!(checkpoints, 2, "the newest two, and no unfinished ones");
    let parts = [
        "manifest.json",
        "state.json",
        "config.toml",
        "plan.toml",
        "optimizer.safetensors",
        "adapter/adapter_model.safetensors",
    ];
    for step in [4, 5] {
        for file in parts {
            assert!(checkpoint_folder(&run, step).join(file).is_file(), "step {step}: {file}");
        }
    }
    let events: Vec<_> = fs::read_dir(run.join("tensorboard")).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(events.len(), 1);
    assert!(events[0].to_string_lossy().contains("tfevents") && events[0].metadata().unwrap().len() > 500);
    assert_eq!(summary.weights, run.join("adapter").display().to_string());
}

/// A resumed run may ask other prompts than its first part did.
#[test]
fn a_summary_has_each_prompt_with_its_own_answers() {
    let output = tempdir().unwrap();
    one_step(recipe(output.path(), &["eval.prompts=['2+2?']"]), NEW);
    let before = read_state(&checkpoint_folder(&output.path().join("run"), 1)).unwrap().samples_before;
    let summary = finish(recipe(output.path(), &["eval.prompts=['3+3?', '2+2?']"]), NEWEST);
    let found: Vec<_> = summary.samples.iter().map(|one| (one.prompt.as_str(), one.before.as_deref())).collect();
    assert_eq!(found, [("3+3?", None), ("2+2?", Some(before[0].as_str()))]);
    let page = fs::read_to_string(output.path().join("run/report.html")).unwrap();
    assert!(page.contains("answer before training") && page.contains(&summary.ended), "{page}");
}

#[test]
fn summary_and_metrics_hold_the_promised_keys() {
    let output = tempdir().unwrap();
    let changes = ["train.steps=3", "eval.every_steps=2", "eval.exact_match_prompts=3"];
    let summary = finish(recipe(output.path(), &changes), NEW);
    let run = output.path().join("run");
    let on_disk = json(&run.join("summary.json"));
    assert_eq!(
        keys(&on_disk),
        [
            "steps",
            "train_loss",
            "eval_loss_before",
            "eval_loss_after",
            "token_accuracy_before",
            "token_accuracy_after",
            "exact_match_before",
            "exact_match_after",
            "loss_tokens",
            "tokens_per_s",
            "wall_s",
            "waited_for_saves_s",
            "backend",
            "arithmetic",
            "weights",
            "ended"
        ]
    );
    assert_eq!((on_disk["steps"].as_u64(), on_disk["backend"].as_str()), (Some(3), Some("flex")));
    assert!(on_disk.as_object().unwrap().values().all(|value| !value.is_null()), "{on_disk}");
    assert_eq!(on_disk["eval_loss_after"].as_f64(), summary.eval_loss_after);

    let lines = metrics(&run);
    let steps_of = |key: &str| -> Vec<u64> {
        lines.iter().filter(|line| line.get(key).is_some()).map(|line| line["step"].as_u64().unwrap()).collect()
    };
    assert_eq!(steps_of("loss"), [1, 2, 3]);
    assert_eq!(steps_of("eval_loss"), [0, 2, 3]);
    for line in &lines {
        let expected: &[&str] = if line.get("loss").is_some() {
            &["step", "loss", "lr", "grad_norm", "loss_tokens", "tokens_per_s", "ms", "memory"]
        } else {
            &["step", "eval_loss", "perplexity", "token_accuracy", "exact_match"]
        };
        let found = keys(line);
        let (always, sampled) = found.split_at(expected.len());
        assert_eq!(always, expected);
        // Steps shorter than a sample have no usage; a processor has no throttling.
        let usage = Gauge::ALL.map(|(_, name)| name);
        assert!(sampled.iter().all(|key| usage.contains(key)), "{sampled:?}");
        assert!(line.as_object().unwrap().values().all(Value::is_number), "{line}");
    }
    let last = lines.iter().rfind(|line| line.get("loss").is_some()).unwrap();
    assert_eq!(last["loss_tokens"].as_u64(), Some(summary.loss_tokens));
}

#[test]
fn evaluation_may_start_late_and_come_by_fractions_of_an_epoch() {
    let output = tempdir().unwrap();
    let changes = ["train.steps=4", "eval.on_start=false", "eval.every_epochs=0.001", "eval.prompts=['2+2?']"];
    let summary = finish(recipe(output.path(), &changes), NEW);
    assert!(summary.eval_loss_before.is_none() && summary.eval_loss_after.is_some());
    let lines = metrics(&output.path().join("run"));
    let evaluated = lines.iter().filter(|line| line.get("eval_loss").is_some());
    assert_eq!(evaluated.map(|line| line["step"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 2, 3, 4]);
}

#[test]
fn adapter_has_the_names_and_settings_of_peft() {
    let output = tempdir().unwrap();
    finish(recipe(output.path(), &["train.steps=1", "lora.use_rslora=true"]), NEW);
    let folder = output.path().join("run/adapter");
    let (config, tensors) = read_adapter(&folder).unwrap();
    let model = ModelConfig::read(&fixture("tiny-llama")).unwrap();
    let tensors_of_the_model = model.spec.adapter_tensors(&config).unwrap();
    let expected: BTreeMap<String, ()> = tensors_of_the_model.into_iter().map(|tensor| (tensor.name, ())).collect();
    assert_eq!(expected.len(), 28);
    assert!(tensors.keys().eq(expected.keys()));

    let settings = json(&folder.join("adapter_config.json"));
    assert_eq!((settings["peft_type"].as_str(), settings["task_type"].as_str()), (Some("LORA"), Some("CAUSAL_LM")));
    assert_eq!((settings["r"].as_u64(), settings["lora_alpha"].as_f64()), (Some(4), Some(8.0)));
    assert_eq!(settings["use_rslora"].as_bool(), Some(true));
}

#[test]
fn saved_adapter_loads_back_to_the_model_that_was_trained() {
    let output = tempdir().unwrap();
    let config = recipe(output.path(), &[]);
    let summary = finish(config.clone(), NEW);
    let prepared = prepare_for(config, 1, &PlanRequest::default()).unwrap();
    let adapter = output.path().join("run/adapter");
    let model = load::<Flex>("tiny-llama", Some(adapter.to_str().unwrap()), NF4);
    let again = prepared.evaluation.evaluate(&model, &prepared.tokenizer).unwrap();
    assert_eq!(again.loss, summary.eval_loss_after);
    assert_ne!(again.loss, summary.eval_loss_before);
}

#[test]
fn second_run_of_the_same_name_does_not_touch_the_first() {
    let output = tempdir().unwrap();
    finish(recipe(output.path(), &["train.steps=1"]), NEW);
    let before = firebrick_tests::snapshot(&output.path().join("run"));
    let second = finish(recipe(output.path(), &["train.steps=2"]), NEW);
    assert!(firebrick_tests::snapshot(&output.path().join("run")) == before);
    assert_eq!(second.weights, output.path().join("run-2/adapter").display().to_string());
}

/// A CPU backend has no device to trace, but the host's spans exist.
#[test]
fn a_traced_run_has_the_spans_of_its_steps_and_the_numbers_of_one_that_is_not_traced() {
    let (traced, plain) = (tempdir().unwrap(), tempdir().unwrap());
    finish_traced(recipe(traced.path(), &[]), TraceSteps { first: 2, last: 4 });
    finish(recipe(plain.path(), &[]), NEW);
    let (traced, plain) = (traced.path().join("run"), plain.path().join("run"));
    assert_eq!(step_losses(&traced), step_losses(&plain));
    assert!(!plain.join("trace.json").exists());
    let file: serde_json::Value = serde_json::from_slice(&fs::read(traced.join("trace.json")).unwrap()).unwrap();
    let steps_of = |name: &str| -> Vec<u64> {
        let events = file["traceEvents"].as_array().unwrap().iter();
        events.filter(|event| event["name"] == name).map(|event| event["args"]["step"].as_u64().unwrap()).collect()
    };
    assert_eq!((steps_of("queue step"), steps_of("wait for data")), (vec![2, 3, 4], vec![2, 3, 4]));
    let read = steps_of("wait for numbers");
    assert_eq!(read, [2, 3], "numbers are read once the next step is queued, those of the first step of a run at once");
}

#[test]
fn a_run_whose_checkpoint_has_no_room_on_the_disk_is_refused_before_weights_are_read() {
    let output = tempdir().unwrap();
    let model = output.path().join("model");
    fs::create_dir(&model).unwrap();
    for (name, bytes) in snapshot(&fixture("tiny-llama")) {
        fs::write(model.join(name), bytes).unwrap();
    }
    let mut config = json(&model.join("config.json"));
    config["intermediate_size"] = (1u64 << 28).into();
    config["hidden_size"] = (1u64 << 20).into();
    fs::write(model.join("config.json"), config.to_string()).unwrap();
    let model = format!("model='{}'", model.display());
    let changes = [model.as_str(), "init=random", "mode=full", "lora=", "bnb_4bit="];
    let request = PlanRequest { force: true, ..PlanRequest::default() };
    let refused = prepare_for(recipe(output.path(), &changes), 1, &request).map(|prepared| prepared.plan.disk_bytes);
    let message = refused.unwrap_err().to_string();
    assert!(message.contains("one checkpoint of this run takes") && message.contains("TiB"), "{message}");
}
