//! A tiny byte-level tokenizer folder for tests: 256 byte tokens, no merges, a few special tokens, a chat template.

use std::fs::{read, write};

use serde_json::{Value as Json, json};
use tempfile::TempDir;

use crate::tokenizer::Tokenizer;

/// A token per byte and special tokens. Its post-processor trims the offsets of spaces, which must not disturb the mask, and
/// it cuts texts at 8 tokens, which the crate must ignore.
const BYTES: &str = include_str!("../tests/golden/bytes/tokenizer.json");
/// Ids of the special tokens, after the 256 bytes.
pub(crate) const BOS: u32 = 256;
pub(crate) const EOS: u32 = 257;

/// `<s><|role|>\ncontent</s>\n...`, as in many instruction-tuned models.
pub(crate) const TEMPLATE: &str = "{{ bos_token }}{% for message in messages %}\n\
    <|{{ message.role }}|>\n{{ message.content }}{{ eos_token }}\n{% endfor %}\n\
    {% if add_generation_prompt %}\n<|assistant|>\n{% endif %}\n";

/// A post-processor that adds a token to the beginning of every text.
pub(crate) fn adding(token: u32) -> Json {
    json!({
        "type": "TemplateProcessing", "pair": [],
        "single": [{ "SpecialToken": { "id": "<s>", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }],
        "special_tokens": { "<s>": { "id": "<s>", "ids": [token], "tokens": ["<s>"] } }
    })
}

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
    pub(crate) fn write(&self) -> TempDir {
        let folder = TempDir::new().unwrap();
        let mut tokenizer: Json = serde_json::from_str(BYTES).unwrap();
        if self.adds_bos {
            tokenizer["post_processor"] = adding(BOS);
        }
        write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
        write(folder.path().join("tokenizer_config.json"), self.config.to_string()).unwrap();
        if let Some(template) = self.template {
            write(folder.path().join("chat_template.jinja"), template).unwrap();
        }
        folder
    }

    /// Writes the folder with another value of a key of `tokenizer.json`.
    pub(crate) fn write_with(&self, key: &str, value: Json) -> TempDir {
        let folder = self.write();
        let path = folder.path().join("tokenizer.json");
        let mut tokenizer: Json = serde_json::from_slice(&read(&path).unwrap()).unwrap();
        tokenizer[key] = value;
        write(&path, tokenizer.to_string()).unwrap();
        folder
    }

    pub(crate) fn load(&self) -> Tokenizer {
        Tokenizer::from_folder(self.write().path()).unwrap()
    }
}
