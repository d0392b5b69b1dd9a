//! `data.eos_token` and `data.pad_token`: they reach the data, what is saved, and what is exported from it.

use std::fs;
use std::path::Path;

use firebrick_data::Tokenizer;
use firebrick_model::GgufType;
use firebrick_precision::FloatType;
use firebrick_tests::{FROZEN, NEW, finish, fixture, recipe, refusal};
use firebrick_train::export::{ExportOptions, MergeBase, export};
use firebrick_trainer::plan::PlanRequest;
use firebrick_trainer::run::generate::LoadOptions;
use firebrick_trainer::run::prepare::prepare_for;
use serde_json::{Value, json};
use tempfile::tempdir;

/// The fixture's `<|user|>`, which is no end anywhere, and `<|eos|>`.
const CHOSEN: u32 = 259;
const OLD_EOS: u32 = 257;
const CHOICE: [&str; 3] = ["data.eos_token='<|user|>'", "data.pad_token='<|eos|>'", "train.steps=1"];

fn json_of(folder: &Path, file: &str) -> Value {
    serde_json::from_str(&fs::read_to_string(folder.join(file)).unwrap()).unwrap()
}

/// Asserts that a saved folder has the chosen tokens in its tokenizer and its generation settings.
fn assert_saved(folder: &Path) {
    let tokenizer = Tokenizer::from_folder(folder).unwrap();
    assert_eq!((tokenizer.eos_token_id(), tokenizer.pad_token_id()), (Some(CHOSEN), Some(OLD_EOS)));
    let settings = json_of(folder, "tokenizer_config.json");
    assert_eq!((&settings["eos_token"], &settings["pad_token"]), (&json!("<|user|>"), &json!("<|eos|>")));
    assert_eq!(settings["bos_token"], "<|bos|>");
    let generation = json_of(folder, "generation_config.json");
    assert_eq!(generation["pad_token_id"], OLD_EOS);
    let ends = generation["eos_token_id"].as_array().unwrap();
    assert!(ends.contains(&json!(CHOSEN)) && ends.contains(&json!(OLD_EOS)), "{generation}");
    // With this mark, transformers may replace them by what config.json says.
    assert!(generation.get("_from_model_config").is_none(), "{generation}");
    if folder.join("config.json").exists() {
        let config = json_of(folder, "config.json");
        let settings = config.get("text_config").unwrap_or(&config);
        for key in ["pad_token_id", "eos_token_id"] {
            assert_eq!(settings[key], generation[key], "{key}: {config}");
        }
    }
}

#[test]
fn chosen_tokens_are_in_the_adapter_in_its_merge_and_in_a_gguf_file() {
    let output = tempdir().unwrap();
    finish(recipe(output.path(), &[&CHOICE[..], &["bnb_4bit="]].concat()), NEW);
    let (model, adapter, merged) = (fixture("tiny-llama"), output.path().join("run/adapter"), output.path().join("m"));
    assert_saved(&adapter);
    let load =
        LoadOptions { model: model.clone(), adapter: Some(adapter.clone()), storage: FROZEN, compute: FloatType::F32 };
    assert_eq!(load.tokenizer().unwrap().eos_token_id(), Some(CHOSEN));
    let merge = ExportOptions {
        merge: true,
        bnb_4bit: None,
        mxfp4: false,
        gguf: None,
        model,
        adapter: Some(adapter),
        out: merged.clone(),
        dtype: None,
        base: MergeBase(None),
    };
    export(&merge).unwrap();
    assert_saved(&merged);
    let (kind, gguf) = (Some(GgufType::F16), output.path().join("m.gguf"));
    export(&ExportOptions { merge: false, gguf: kind, model: merged, adapter: None, out: gguf.clone(), ..merge })
        .unwrap();
    let (file, key) = (fs::read(&gguf).unwrap(), b"tokenizer.ggml.eos_token_id");
    let at = file.windows(key.len()).position(|bytes| bytes == key).unwrap() + key.len();
    // The type of the value is 4, for u32.
    assert_eq!(file[at..at + 8], [4_u32.to_le_bytes(), CHOSEN.to_le_bytes()].concat());
}

#[test]
fn a_model_that_trains_whole_is_saved_with_the_chosen_tokens() {
    for model in ["tiny-llama", "tiny-gemma3-vl"] {
        let output = tempdir().unwrap();
        let model = format!("model='{}'", fixture(model).display());
        finish(recipe(output.path(), &[&CHOICE[..], &["bnb_4bit=", "lora=", "mode=full", &model]].concat()), NEW);
        assert_saved(&output.path().join("run/model"));
        assert_saved(&output.path().join("run/checkpoints/step-1/model"));
    }
}

#[test]
fn texts_end_with_the_chosen_token_and_nothing_else_of_them_changes() {
    let output = tempdir().unwrap();
    let texts = output.path().join("texts.jsonl");
    fs::write(&texts, "{\"text\": \"once upon a time\"}\n{\"text\": \"there was a brick\"}\n").unwrap();
    let path = format!("data.path='{}'", texts.display());
    let documents = |changes: &[&str]| {
        let config = recipe(output.path(), &[&[&path[..], "data.eval_fraction="], changes].concat());
        let prepared = prepare_for(config, 1, &PlanRequest::default()).unwrap();
        assert_eq!(prepared.model_config.eos_token_ids.contains(&CHOSEN), !changes.is_empty());
        (0..2).map(|index| prepared.train.documents().document(index).to_example().tokens).collect::<Vec<_>>()
    };
    for (old, new) in documents(&[]).iter().zip(documents(&CHOICE)) {
        let (last, before) = old.split_last().unwrap();
        assert_eq!((*last, before, new.last()), (OLD_EOS, &new[..new.len() - 1], Some(&CHOSEN)));
    }
}

#[test]
fn a_token_that_is_none_is_refused_with_those_that_are_and_can_be_added() {
    let output = tempdir().unwrap();
    let unknown = refusal(recipe(output.path(), &["data.pad_token='[PAD]'"]), NEW);
    for part in ["pad_token = \"[PAD]\"", "\"<|end|>\"", "data.new_special_tokens = [\"[PAD]\"]"] {
        assert!(unknown.contains(part), "{unknown}");
    }
    let added = ["data.pad_token='[PAD]'", "data.new_special_tokens=['[PAD]']", "train.steps=1"];
    finish(recipe(output.path(), &added), NEW);
    let adapter = output.path().join("run/adapter");
    assert_eq!(Tokenizer::from_folder(&adapter).unwrap().pad_token_id(), Some(262));
    assert_eq!(json_of(&adapter, "generation_config.json")["pad_token_id"], 262);
}
