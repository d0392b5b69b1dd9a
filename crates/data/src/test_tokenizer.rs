//! A tiny byte-level tokenizer folder for tests: 256 byte tokens, no merges, a few special tokens, a chat template.
//!
//! Trade-off: unlike a trained vocabulary, every byte is a token, so counts in tests are easy to read.

use std::fs::write;

use serde_json::{Value as Json, json};
use tempfile::TempDir;

use crate::tokenizer::Tokenizer;

/// Ids of the special tokens, after the 256 bytes.
pub(crate) const BOS: u32 = 256;
pub(crate) const EOS: u32 = 257;
pub(crate) const PAD: u32 = 258;

/// `<s><|role|>\ncontent</s>\n...`, as in many instruction-tuned models.
pub(crate) const TEMPLATE: &str = "{{ bos_token }}{% for message in messages %}\n\
    <|{{ message.role }}|>\n{{ message.content }}{{ eos_token }}\n{% endfor %}\n\
    {% if add_generation_prompt %}\n<|assistant|>\n{% endif %}\n";

/// The content of the folder.
pub(crate) struct TestTokenizer<'a> {
    /// `chat_template.jinja`.
    pub(crate) template: Option<&'a str>,
    /// Whether a post-processor adds the beginning-of-text token to every text.
    pub(crate) adds_bos: bool,
    /// `tokenizer_config.json`.
    pub(crate) config: Json,
}

impl Default for TestTokenizer<'_> {
    fn default() -> Self {
        let config = json!({ "bos_token": { "content": "<s>" }, "eos_token": "</s>", "pad_token": "<pad>" });
        Self { template: Some(TEMPLATE), adds_bos: true, config }
    }
}

impl TestTokenizer<'_> {
    /// Writes the folder.
    pub(crate) fn write(&self) -> TempDir {
        let folder = TempDir::new().unwrap();
        // Trims the offsets of spaces, which must not disturb the mask.
        let byte_level = json!({
            "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true
        });
        let post_processor = if self.adds_bos {
            json!({
                "type": "TemplateProcessing",
                "single": [
                    { "SpecialToken": { "id": "<s>", "type_id": 0 } },
                    { "Sequence": { "id": "A", "type_id": 0 } }
                ],
                "pair": [],
                "special_tokens": { "<s>": { "id": "<s>", "ids": [BOS], "tokens": ["<s>"] } }
            })
        } else {
            byte_level.clone()
        };
        let tokenizer = json!({
            "version": "1.0",
            // A cut at 8 tokens that the crate must ignore.
            "truncation": { "direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0 },
            "padding": null,
            "added_tokens": special_tokens(),
            "normalizer": null,
            "pre_tokenizer": byte_level,
            "post_processor": post_processor,
            "decoder": byte_level,
            "model": { "type": "BPE", "vocab": byte_vocabulary(), "merges": [] }
        });
        write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
        write(folder.path().join("tokenizer_config.json"), self.config.to_string()).unwrap();
        if let Some(template) = self.template {
            write(folder.path().join("chat_template.jinja"), template).unwrap();
        }
        folder
    }

    /// Writes the folder, reads it and deletes it.
    pub(crate) fn load(&self) -> Tokenizer {
        Tokenizer::from_folder(self.write().path()).unwrap()
    }
}

fn special_tokens() -> Json {
    let names = ["<s>", "</s>", "<pad>", "<|user|>", "<|assistant|>", "<|system|>"];
    let token = |(index, name)| {
        json!({
            "id": 256 + index, "content": name, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true
        })
    };
    names.into_iter().enumerate().map(token).collect()
}

/// The 256 printable characters that byte-level tokenizers use for bytes, with the byte as id.
fn byte_vocabulary() -> Json {
    let prints = |byte: &u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let mut next_code = 256;
    let mut vocabulary = serde_json::Map::new();
    for byte in 0..256_u32 {
        let code = if prints(&byte) {
            byte
        } else {
            next_code += 1;
            next_code - 1
        };
        let character = char::from_u32(code).unwrap();
        vocabulary.insert(character.to_string(), byte.into());
    }
    Json::Object(vocabulary)
}
