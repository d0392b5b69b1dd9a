//! The guarantees of the crate, tested through its public interface, and a small tokenizer for these tests.
//!
//! Trade-off: the tokenizer is written to a folder for each test, like a model's. The words of recipes, their defaults and
//! descriptions are compared with docs/config.schema.json, by `trainer`.

mod containers;
mod corpus;
mod encoder;
mod record_formats;
mod tables;
mod template_golden;

use std::fs::{copy, write};
use std::path::Path;

use firebrick_data::Tokenizer;
use serde_json::{Value as Json, json};
use tempfile::TempDir;

pub(crate) const TEMPLATE: &str = "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}\
    {{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}";

/// Returns the `tokenizer_config.json` of a tokenizer that adds a beginning-of-text token and pads with the end-of-text token.
pub(crate) fn config() -> Json {
    json!({ "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>", "add_bos_token": true })
}

/// Returns the tokenizer of a folder of the goldens with a template and a configuration.
pub(crate) fn tokenizer(golden: &str, template: Option<&str>, config: &Json) -> Tokenizer {
    let folder = TempDir::new().unwrap();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(golden).join("tokenizer.json");
    copy(golden, folder.path().join("tokenizer.json")).unwrap();
    write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    if let Some(template) = template {
        write(folder.path().join("chat_template.jinja"), template).unwrap();
    }
    Tokenizer::from_folder(folder.path()).unwrap()
}
