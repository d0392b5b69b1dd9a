//! The files of a tokenizer folder, and a small tokenizer that the other targets use.
//!
//! Trade-off: models of trained tokenizers are not covered.

use std::path::Path;

use firebrick_data::Tokenizer;

use super::{Folder, Outcome, parts};

/// A token per byte and a few special tokens.
const BYTES: &str = include_str!("../../../tests/golden/bytes/tokenizer.json");
const CONFIG: &str = r#"{"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": "<pad>"}"#;
const TEMPLATE: &str = "{{ bos_token }}{% for message in messages %}\n\
    <|{{ message.role }}|>\n{{ message.content }}{{ eos_token }}\n{% endfor %}\n\
    {% if add_generation_prompt %}\n<|assistant|>\n{% endif %}\n";

/// Reads `tokenizer_config.json`, `special_tokens_map.json`, `chat_template.json`, `chat_template.jinja`, and a named template.
pub(crate) fn tokenizer_config(bytes: &[u8]) -> Outcome {
    let folder = Folder::new();
    folder.write("tokenizer.json", BYTES.as_bytes());
    let names = [
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.json",
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
    ];
    for (name, part) in names.into_iter().zip(parts(bytes)).filter(|(_, part)| !part.is_empty()) {
        folder.write(name, part);
    }
    load(folder.path())
}

/// Reads `tokenizer.json`. The `tokenizers` crate panics on some (a `Precompiled` normalizer with damaged tables); that must become an error.
pub(crate) fn tokenizer_json(bytes: &[u8]) -> Outcome {
    let folder = Folder::new();
    folder.write("tokenizer.json", bytes);
    load(folder.path())
}

/// Loads a folder and uses everything that depends on its files.
pub(crate) fn load(folder: &Path) -> Outcome {
    let mut outcome = Outcome::default();
    if let Some(tokenizer) = outcome.note(Tokenizer::from_folder(folder)) {
        let ids = outcome.note(tokenizer.encode("Hi there <s> <tool> \u{e9}\n1", true));
        if let Some(ids) = ids {
            assert!(ids.iter().all(|&id| (id as usize) < tokenizer.vocab_size()), "a token outside the vocabulary");
            outcome.note(tokenizer.decode(&ids, false));
        }
        outcome.note(tokenizer.changed_files());
        outcome.note(tokenizer.token_before_text());
        outcome.note(tokenizer.chat_template());
        assert!(!tokenizer.fingerprint().is_empty());
    }
    outcome
}

/// Returns a tokenizer with a token per byte and a few special tokens.
pub(crate) fn small() -> Tokenizer {
    let folder = Folder::new();
    folder.write("tokenizer.json", BYTES.as_bytes());
    folder.write("tokenizer_config.json", CONFIG.as_bytes());
    folder.write("chat_template.jinja", TEMPLATE.as_bytes());
    let mut tokenizer = Tokenizer::from_folder(folder.path()).expect("a valid folder");
    tokenizer.set_date(0);
    tokenizer
}
