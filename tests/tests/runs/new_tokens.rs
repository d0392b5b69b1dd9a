//! Runs that add tokens to their model: every command can read their results.

use std::fs;
use std::path::Path;

use firebrick_data::Tokenizer;
use firebrick_kernels::backends::Flex;
use firebrick_model::peft::{read_adapter, read_adapter_config};
use firebrick_model::{Companions, HfFolder, Merge, ModelConfig, merge_adapter};
use firebrick_precision::FloatType;
use firebrick_precision::difference::largest_difference;
use firebrick_tests::{FROZEN, NEW, finish, fixture, recipe, refusal};
use firebrick_trainer::run::generate::LoadOptions;
use serde_json::Value;
use tempfile::tempdir;

/// Two tokens use spare rows of the model's tables of 264 rows; two make the tables grow.
const TOKENS: [&str; 2] = ["data.new_tokens=['th', 'e ', 'an']", "data.new_special_tokens=['in']"];

fn options(model: &Path, adapter: Option<&Path>) -> LoadOptions {
    let (model, adapter) = (model.to_path_buf(), adapter.map(Path::to_path_buf));
    LoadOptions { model, adapter, storage: FROZEN, compute: FloatType::F32 }
}

/// Computes the logits after a text, whose ids must be below this number of rows.
fn logits(load: &LoadOptions, text: &str, rows: usize) -> Vec<f32> {
    let ids = load.tokenizer().unwrap().encode(text, false).unwrap();
    let model = load.load::<Flex>(ids.len(), ids.len(), &Default::default()).unwrap();
    assert_eq!(model.config.spec.vocab_size, rows);
    let positions: Vec<u32> = (0..ids.len() as u32).collect();
    let targets = vec![-100; ids.len()];
    let batch = model.upload(&ids, &targets, &positions, &[0, ids.len() as u32]).unwrap();
    firebrick_tests::host(model.logits(&batch))
}

#[test]
fn an_adapter_with_new_tokens_has_their_rows_and_tokenizer_and_merges_into_a_larger_model() {
    let output = tempdir().unwrap();
    finish(recipe(output.path(), &[&TOKENS[..], &["bnb_4bit=", "train.learning_rate=1e-2"]].concat()), NEW);
    let (model, adapter) = (fixture("tiny-llama"), output.path().join("run/adapter"));
    let tokenizer = Tokenizer::from_folder(&adapter).unwrap();
    let ids = tokenizer.encode("then in a", false).unwrap();
    assert_eq!((ids[0], tokenizer.vocab_size()), (262, 266));
    assert!(ids.contains(&265) && tokenizer.is_special(265));
    let (lora, tensors) = read_adapter(&adapter).unwrap();
    let rows = serde_json::to_value(&lora.trainable_token_indices).unwrap();
    let all: Vec<Value> = (262..266).map(Value::from).collect();
    assert_eq!((&rows["embed_tokens"], &rows["lm_head"]), (&Value::from(all.clone()), &Value::from(all)));
    let rows = tensors.iter().filter(|(name, _)| name.contains("trainable_tokens_delta"));
    assert!(rows.clone().count() == 2 && rows.clone().all(|(_, rows)| rows.shape == [4, 64]));

    let companions = Companions {
        from: model.clone(),
        chat_template: None,
        chat_settings: Default::default(),
        tokenizer: Companions::tokenizer_of(&adapter).unwrap(),
    };
    let merge = Merge {
        model: &model,
        adapter: &adapter,
        requantized: None,
        dtype: Some(FloatType::F32),
        bnb_4bit: None,
        mxfp4: false,
        companions,
    };
    let merged = output.path().join("merged");
    merge_adapter(&merge, &merged).unwrap();
    let config: Value = serde_json::from_str(&fs::read_to_string(merged.join("config.json")).unwrap()).unwrap();
    assert_eq!(config["vocab_size"], 266);
    let [one, two] =
        [options(&model, Some(&adapter)), options(&merged, None)].map(|load| logits(&load, "then in a", 266));
    let largest = largest_difference(&one, &two);
    assert!(largest < 1e-4, "a logit of the merged model differs by {largest:e}");
}

#[test]
fn a_model_that_trains_whole_is_saved_with_the_rows_and_tokenizer_of_new_tokens() {
    let output = tempdir().unwrap();
    finish(recipe(output.path(), &[&TOKENS[..], &["bnb_4bit=", "lora=", "mode=full"]].concat()), NEW);
    let model = output.path().join("run/model");
    let config = ModelConfig::read(&model).unwrap();
    HfFolder::open(&model).unwrap().check_complete(&config).unwrap();
    assert_eq!(config.spec.vocab_size, 266);
    assert_eq!(logits(&options(&model, None), "an in", 266).len() % 266, 0);
}

#[test]
fn a_run_continues_from_an_adapter_with_the_same_new_tokens_and_from_no_other() {
    let output = tempdir().unwrap();
    finish(recipe(output.path(), &TOKENS), NEW);
    let adapter = output.path().join("run/adapter");
    let from = format!("lora.init_from='{}'", adapter.display());
    let again =
        |changes: &[&str]| recipe(output.path(), &[changes, &[&from, "name='again'", "train.steps=1"]].concat());
    finish(again(&TOKENS), NEW);
    let saved = |run: &str| read_adapter_config(&output.path().join(run).join("adapter")).unwrap();
    assert_eq!(saved("again").trainable_token_indices, saved("run").trainable_token_indices);
    let other = refusal(again(&["data.new_tokens=['e ', 'th', 'an']", TOKENS[1]]), NEW);
    assert!(other.contains("\"e \"") && other.contains("token 263"), "{other}");
    let none = refusal(again(&[]), NEW);
    assert!(none.contains("trainable_token_indices"), "{none}");
    let known = refusal(recipe(output.path(), &["data.new_tokens=['<|end|>']"]), NEW);
    assert!(known.contains("lora.trainable_token_indices = [261]"), "{known}");
}
