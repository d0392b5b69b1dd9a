//! Tokens that are added to a model: ids, files and first rows, compared with transformers.

use std::fs;

use firebrick_data::Tokenizer;
use firebrick_kernels::GemmFormat;
use firebrick_kernels::backends::Flex;
use firebrick_model::{BuildOptions, Decoder, HfFolder, LoraConfig, ModelConfig};
use firebrick_tests::{FROZEN, Golden, fixture, host, largest_difference};
use tempfile::tempdir;

const NEW: [&str; 3] = ["<tool_call>", "</tool_call>", "two words"];
const NEW_SPECIAL: &str = "<|tool|>";

fn extended(base: &str) -> Tokenizer {
    let mut tokenizer = Tokenizer::from_folder(&fixture(base)).expect("the fixture has a tokenizer");
    tokenizer.add_tokens(&NEW.map(str::to_owned), false).expect("the tokens are new");
    tokenizer.add_tokens(&[NEW_SPECIAL.to_owned()], true).expect("the token is new");
    tokenizer
}

#[test]
fn new_tokens_have_the_ids_of_transformers_and_its_files_read_the_same() {
    let ours = extended("tiny-llama");
    let theirs = Tokenizer::from_folder(&fixture("tiny-llama-new")).expect("the fixture has a tokenizer");
    let folder = tempdir().expect("a temporary folder");
    for (name, text) in ours.changed_files().expect("the files are there") {
        fs::write(folder.path().join(name), text).expect("it is written");
    }
    let written = Tokenizer::from_folder(folder.path()).expect("a tokenizer was written");
    for text in
        ["a<tool_call>b two words</tool_call> <|tool|>c", "two  words", "<tool_call", "<|user|>two words<|end|>"]
    {
        let expected = theirs.encode(text, false).expect("it encodes");
        assert_eq!(ours.encode(text, false).expect("it encodes"), expected, "{text}");
        assert_eq!(written.encode(text, false).expect("it encodes"), expected, "{text}");
        let decoded = |tokenizer: &Tokenizer| tokenizer.decode(&expected, true).expect("it decodes");
        assert_eq!([decoded(&ours), decoded(&written)], [decoded(&theirs), decoded(&theirs)]);
    }
    let ids: Vec<u32> = ours.new_tokens().iter().map(|token| token.id).collect();
    assert_eq!((ids, ours.vocab_size()), (vec![262, 263, 264, 265], theirs.vocab_size()));
}

/// Their rows are drawn with 1e-9 of the covariance around the mean; so are ours, from other random numbers.
#[test]
fn rows_of_grown_tables_start_where_those_of_transformers_do() {
    for (base, golden) in [("tiny-llama", "tiny-llama-new"), ("tiny-llama-tied", "tiny-llama-tied-new")] {
        let (folder, golden) = (fixture(base), Golden::open(golden));
        let mut config = ModelConfig::read(&folder).expect("the model has a config");
        let lora =
            LoraConfig::default().with_new_tokens(&[262, 263, 264, 265], &config.spec).expect("nothing trains whole");
        config.add_tokens(&[262, 263, 264, 265]);
        let options = BuildOptions {
            storage: FROZEN,
            lora: Some(lora),
            seed: 7,
            compute_dtype: burn_tensor::DType::F32,
            gemms: GemmFormat::Compute,
            max_positions: 8,
            sequence_tokens: 8,
        };
        let weights = HfFolder::open(&folder).expect("the model has weights");
        let model =
            Decoder::<Flex>::load(&weights, config, &options, &Default::default(), &mut |_| ()).expect("it loads");
        let mut tables = 0;
        for parameter in model.parameters().into_iter().filter(|parameter| parameter.name.contains("token_adapter")) {
            let table = if parameter.name.contains("lm_head") { "lm_head" } else { "model.embed_tokens" };
            let expected = golden.f32s(&format!("start.{table}.weight"));
            let rows = host(parameter.value.clone());
            let (taken, grown) = rows.split_at(expected.len());
            let difference = [taken, grown].map(|rows| largest_difference(rows, &expected));
            assert!(difference.iter().all(|difference| *difference < 3e-4), "{table}: {difference:?}");
            assert!(difference.iter().all(|difference| *difference > 0.0), "the rows are drawn, not copied");
            tables += 1;
        }
        assert_eq!(tables, if base == "tiny-llama" { 2 } else { 1 });
    }
}
