//! Chat rows against Hugging Face transformers: the rendered text, the token ids, and which tokens are the assistant's.
//!
//! Goldens and the script that made them are in `tests/golden/`. Gives up the trained vocabularies of real models: the
//! two tokenizers there are small, but of the two kinds that Llama-like models have (byte level, and
//! SentencePiece-like).

use std::collections::BTreeMap;
use std::fs::{copy, read_to_string, write};
use std::path::{Path, PathBuf};

use firebrick_data::{Dataset, Message, ReadOptions, Tokenizer};
use serde::Deserialize;
use serde_json::json;
use tempfile::TempDir;

#[derive(Deserialize)]
struct Style {
    tokenizer: String,
    special_tokens: BTreeMap<String, String>,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    messages: Vec<Message>,
    text: String,
    text_with_prompt: String,
    ids: Vec<u32>,
    assistant_mask: Vec<u8>,
}

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

fn styles() -> BTreeMap<String, Style> {
    serde_json::from_str(&read_to_string(golden().join("chat.json")).unwrap()).unwrap()
}

/// A tokenizer folder with a template. Without `blocks`, the template's generation tags become plain conditions.
fn folder(name: &str, style: &Style, blocks: bool) -> TempDir {
    let folder = TempDir::new().unwrap();
    let source = golden().join(&style.tokenizer).join("tokenizer.json");
    copy(source, folder.path().join("tokenizer.json")).unwrap();
    write(folder.path().join("tokenizer_config.json"), json!(style.special_tokens).to_string()).unwrap();
    let mut template = read_to_string(golden().join(format!("templates/{name}.jinja"))).unwrap();
    if !blocks {
        template = template.replace("endgeneration", "endif").replace(" generation ", " if true ");
        template = template.replace("- generation", "- if true");
        assert!(!template.contains(" generation"));
    }
    write(folder.path().join("chat_template.jinja"), template).unwrap();
    folder
}

/// The example of one conversation, and a file that lives until it is read.
fn example(tokenizer: &Tokenizer, messages: &[Message]) -> Result<(Vec<u32>, Vec<u8>), String> {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("chat.jsonl");
    write(&path, json!({ "messages": messages }).to_string()).unwrap();
    let dataset = Dataset::read_jsonl(&path, tokenizer, &ReadOptions::new(4096)).map_err(|error| error.to_string())?;
    let example = dataset.examples.into_iter().next().unwrap();
    Ok((example.tokens, example.trained.into_iter().map(u8::from).collect()))
}

#[test]
fn text_and_ids_are_those_of_transformers() {
    for (name, style) in styles() {
        let folder = folder(&name, &style, true);
        let tokenizer = Tokenizer::from_folder(folder.path()).unwrap();
        let template = tokenizer.chat_template().unwrap();
        for case in style.cases {
            assert_eq!(template.render(&case.messages, false).unwrap(), case.text, "{name}");
            assert_eq!(template.render(&case.messages, true).unwrap(), case.text_with_prompt, "{name}");
            assert_eq!(tokenizer.encode(&case.text, false).unwrap(), case.ids, "{name}");
        }
    }
}

#[test]
fn mask_from_generation_blocks_is_that_of_transformers() {
    for (name, style) in styles() {
        let folder = folder(&name, &style, true);
        let tokenizer = Tokenizer::from_folder(folder.path()).unwrap();
        for case in style.cases {
            assert_eq!(
                example(&tokenizer, &case.messages),
                Ok((case.ids, case.assistant_mask)),
                "{name}: {}",
                case.text
            );
        }
    }
}

#[test]
fn mask_from_prefixes_is_that_of_transformers() {
    for (name, style) in styles().into_iter().filter(|(name, _)| name != "reasoning") {
        let folder = folder(&name, &style, false);
        let tokenizer = Tokenizer::from_folder(folder.path()).unwrap();
        for case in style.cases {
            assert_eq!(
                example(&tokenizer, &case.messages),
                Ok((case.ids, case.assistant_mask)),
                "{name}: {}",
                case.text
            );
        }
    }
}

#[test]
fn template_that_rewrites_earlier_turns_needs_its_blocks() {
    let style = &styles()["reasoning"];
    let folder = folder("reasoning", style, false);
    let tokenizer = Tokenizer::from_folder(folder.path()).unwrap();
    let error = example(&tokenizer, &style.cases[1].messages).unwrap_err();
    assert!(error.contains("chat.jsonl:1:") && error.contains("{% generation %}"), "{error}");
}
