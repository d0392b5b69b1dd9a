//! Tests that the recipe which `firebrick new` writes plans for every family, and says what the model and the data need.

use std::fs;
use std::path::Path;

use firebrick_tests::{FAMILIES, fixture};
use firebrick_trainer::config::{PreferenceLoss, RunConfig};
use firebrick_trainer::new_recipe::{NewRecipe, new_recipe};
use firebrick_trainer::plan::PlanRequest;
use firebrick_trainer::run::prepare::prepare_for;
use serde_json::Value;
use tempfile::tempdir;

const FILE: &str = "new.toml";

/// Returns the recipe for a model and a data fixture, read again, after checking that its run fits and is the one that was planned.
fn recipe_for(model: &Path, data: &str) -> (RunConfig, String) {
    let data = fixture("data").join(data);
    let made = new_recipe(model.to_str().unwrap(), data.to_str().unwrap(), Path::new(FILE));
    let NewRecipe { text, prepared } = made.unwrap_or_else(|error| panic!("{}: {error}", model.display()));
    let config = RunConfig::from_toml(&text, Path::new(FILE), &[]).unwrap();
    let planned = prepare_for(config.clone(), 1, &PlanRequest::default()).unwrap().plan;
    assert_eq!(planned.steps, prepared.plan.steps, "{text}");
    assert_eq!((planned.base, planned.row_len), (prepared.plan.base, prepared.plan.row_len), "{text}");
    (config, text)
}

#[test]
fn a_new_recipe_plans_for_each_family() {
    for family in FAMILIES {
        let (config, text) = recipe_for(&fixture(family), "chat-tiny.jsonl");
        assert!(text.starts_with("# LoRA of ") && text.contains("format = \"chat\""), "{text}");
        assert!(config.max_seq_len() <= 256 && config.data.chat_template.is_none(), "{text}");
        assert!(config.has_eval_data() && text.contains("eval_fraction = \"auto\""), "{text}");
        assert!(
            config.train.epochs.is_some_and(|epochs| epochs > 1.0),
            "two dozen examples are read several times: {text}"
        );
    }
}

#[test]
fn texts_and_pairs_are_recognized_by_their_first_record() {
    let (_, text) = recipe_for(&fixture("tiny-llama"), "text-tiny.jsonl");
    assert!(text.contains("format = \"text\"") && !text.contains("[preference]"), "{text}");
    let (config, text) = recipe_for(&fixture("tiny-llama"), "pairs-tiny.jsonl");
    assert_eq!(config.preference.map(|section| section.loss), Some(PreferenceLoss::Dpo), "{text}");
    assert!(text.starts_with("# DPO with LoRA of ") && text.contains("learning_rate = 1e-5"), "{text}");
}

#[test]
fn a_tokenizer_without_a_chat_template_gets_the_built_in_one_of_its_tokens() {
    let model = tempdir().unwrap();
    for entry in fs::read_dir(fixture("tiny-llama")).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, model.path().join(path.file_name().unwrap())).unwrap();
    }
    let file = model.path().join("tokenizer_config.json");
    let mut settings: Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    settings.as_object_mut().unwrap().remove("chat_template").expect("it had one");
    fs::write(&file, settings.to_string()).unwrap();
    let (config, text) = recipe_for(model.path(), "chat-tiny.jsonl");
    assert!(text.contains("the tokenizer has none"), "{text}");
    let template = config.data.chat_template.unwrap();
    assert!(["phi3", "zephyr"].contains(&template.as_str()), "{template}");
    assert!(!recipe_for(model.path(), "text-tiny.jsonl").1.contains("chat_template"), "texts need none");
}

#[test]
fn data_that_cannot_be_read_is_one_error_about_the_data() {
    let model = fixture("tiny-llama");
    for (data, expected) in [("empty.jsonl", "empty.jsonl"), ("absent.jsonl", "absent.jsonl")] {
        let data = fixture("data").join(data);
        let error = new_recipe(model.to_str().unwrap(), data.to_str().unwrap(), Path::new(FILE)).err();
        let message = error.map(|error| error.to_string()).expect("there is nothing to train on");
        assert!(message.contains(expected), "{message}");
    }
}
