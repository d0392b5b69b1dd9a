//! The files of a tokenizer folder, and a small tokenizer that the other targets use.
//!
//! Trade-off: models of trained tokenizers are not covered.

use std::path::Path;

use firebrick_data::Tokenizer;
use serde_json::{Map, Value as Json, json};

use super::{Folder, Outcome, parts};

const CONFIG: &str = r#"{"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": "<pad>"}"#;
const TEMPLATE: &str = "{{ bos_token }}{% for message in messages %}\n\
    <|{{ message.role }}|>\n{{ message.content }}{{ eos_token }}\n{% endfor %}\n\
    {% if add_generation_prompt %}\n<|assistant|>\n{% endif %}\n";

/// `tokenizer_config.json`, `special_tokens_map.json`, `chat_template.json`, `chat_template.jinja`, a named template.
pub(crate) fn tokenizer_config(bytes: &[u8]) -> Outcome {
    let folder = Folder::new("tokenizer");
    folder.write("tokenizer.json", byte_level().to_string().as_bytes());
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

/// `tokenizer.json` itself, which the `tokenizers` crate reads. It panics on some (a `Precompiled` normalizer with damaged
/// tables), which must become an error.
pub(crate) fn tokenizer_json(bytes: &[u8]) -> Outcome {
    let folder = Folder::new("tokenizer");
    folder.write("tokenizer.json", bytes);
    load(folder.path())
}

fn load(folder: &Path) -> Outcome {
    let mut outcome = Outcome::default();
    if let Some(tokenizer) = outcome.note(Tokenizer::from_folder(folder)) {
        let ids = outcome.note(tokenizer.encode("Hi there <s> \u{e9}\n1", true));
        if let Some(ids) = ids {
            assert!(ids.iter().all(|&id| (id as usize) < tokenizer.vocab_size()), "a token outside the vocabulary");
            outcome.note(tokenizer.decode(&ids, false));
        }
        outcome.note(tokenizer.chat_template());
        assert!(!tokenizer.fingerprint().is_empty());
    }
    outcome
}

/// A token per byte, and a few special tokens.
pub(crate) fn small() -> Tokenizer {
    let folder = Folder::new("small-tokenizer");
    folder.write("tokenizer.json", byte_level().to_string().as_bytes());
    folder.write("tokenizer_config.json", CONFIG.as_bytes());
    folder.write("chat_template.jinja", TEMPLATE.as_bytes());
    let mut tokenizer = Tokenizer::from_folder(folder.path()).expect("a valid folder");
    tokenizer.set_date(0);
    tokenizer
}

/// A byte-level `tokenizer.json` without merges.
pub(crate) fn byte_level() -> Json {
    let added = ["<s>", "</s>", "<pad>", "<|user|>", "<|assistant|>", "<|system|>"];
    let added = added.into_iter().enumerate().map(|(index, content)| {
        json!({
            "id": 256 + index, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true
        })
    });
    let level = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added.collect::<Vec<_>>(),
        "normalizer": null, "pre_tokenizer": level, "post_processor": level, "decoder": level,
        "model": { "type": "BPE", "vocab": vocabulary(), "merges": [] }
    })
}

/// The printable characters that byte-level tokenizers use for bytes.
fn vocabulary() -> Json {
    let mut next_code = 256;
    let mut vocabulary = Map::new();
    for byte in 0..256_u32 {
        let code = if matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) {
            byte
        } else {
            next_code += 1;
            next_code - 1
        };
        let character = char::from_u32(code).expect("a code below the surrogates");
        vocabulary.insert(character.to_string(), byte.into());
    }
    Json::Object(vocabulary)
}
