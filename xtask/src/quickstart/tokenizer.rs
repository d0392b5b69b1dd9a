//! The base folder without its weights: shape, tokenizer, chat template. One token per byte, so that every text can be written and a small model can
//! see the spelling. Settings are the shipped files themselves; the tokenizer is computed.
//!
//! Trade-off: longer sequences than with a learned vocabulary.

use std::fmt::Write;

/// Special tokens, with ids from 256 on: the ids below are the bytes themselves.
/// `<|end|>` ends a document of the pretraining text and a turn of a chat, so the base knows it before it sees a chat.
const SPECIAL_TOKENS: [&str; 8] =
    ["<|begin|>", "<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|reserved_0|>", "<|reserved_1|>"];

/// A Llama model of 1.6 million parameters. `vocab_size` is the tokenizer's: 256 bytes and 8 special tokens.
pub(super) const CONFIG: &str = include_str!("../../../assets/quickstart/base/config.json");

/// Greedy: the answers are facts.
pub(super) const GENERATION_CONFIG: &str = include_str!("../../../assets/quickstart/base/generation_config.json");

/// The chat template is here, where transformers looks for it.
pub(super) const TOKENIZER_CONFIG: &str = include_str!("../../../assets/quickstart/base/tokenizer_config.json");

/// Returns the printable character that represents a byte in a byte-level vocabulary: printable Latin-1 represents itself, the
/// other 68 bytes take U+0100 onwards in order (the convention of GPT-2's vocabulary, which `tokenizers` implements).
fn printable(byte: u8) -> char {
    let is_printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    if is_printable(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|&other| !is_printable(other)).count() as u32;
    char::from_u32(0x100 + before).expect("U+0100 to U+0143 are characters")
}

/// Returns a JSON string literal. The text holds no control characters: the data is plain ASCII, the vocabulary is printable.
pub(super) fn json_string(text: &str) -> String {
    assert!(!text.chars().any(char::is_control), "a control character would need an escape that is not written here");
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}

/// Builds `tokenizer.json`: byte-level BPE without merges; a text begins with `<|begin|>` if special tokens are requested.
pub(super) fn tokenizer_json() -> String {
    let mut added = String::new();
    for (token, id) in SPECIAL_TOKENS.iter().zip(256..) {
        let separator = if added.is_empty() { "" } else { "," };
        write!(
            added,
            "{separator}\n    {{\"id\": {id}, \"content\": \"{token}\", \"single_word\": false, \"lstrip\": false, \
             \"rstrip\": false, \"normalized\": false, \"special\": true}}"
        )
        .expect("writing to a String cannot fail");
    }
    let vocabulary: Vec<String> =
        (0..=u8::MAX).map(|byte| format!("{}: {byte}", json_string(&printable(byte).to_string()))).collect();
    let level = r#"{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}"#;
    format!(
        r#"{{
  "version": "1.0",
  "truncation": null,
  "padding": null,
  "added_tokens": [{added}
  ],
  "normalizer": null,
  "pre_tokenizer": {level},
  "post_processor": {{
    "type": "TemplateProcessing",
    "single": [{{"SpecialToken": {{"id": "<|begin|>", "type_id": 0}}}}, {{"Sequence": {{"id": "A", "type_id": 0}}}}],
    "pair": [{{"SpecialToken": {{"id": "<|begin|>", "type_id": 0}}}}, {{"Sequence": {{"id": "A", "type_id": 0}}}}, {{"Sequence": {{"id": "B", "type_id": 1}}}}],
    "special_tokens": {{"<|begin|>": {{"id": "<|begin|>", "ids": [256], "tokens": ["<|begin|>"]}}}}
  }},
  "decoder": {level},
  "model": {{
    "type": "BPE",
    "dropout": null,
    "unk_token": null,
    "continuing_subword_prefix": null,
    "end_of_word_suffix": null,
    "fuse_unk": false,
    "byte_fallback": false,
    "ignore_merges": false,
    "vocab": {{{vocabulary}}},
    "merges": []
  }}
}}
"#,
        vocabulary = vocabulary.join(", "),
    )
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_byte_has_a_different_character() {
        let characters: HashSet<char> = (0..=u8::MAX).map(printable).collect();
        assert_eq!(characters.len(), 256);
        assert_eq!((printable(b'a'), printable(b' '), printable(b'\n')), ('a', 'Ġ', 'Ċ'));
    }

    #[test]
    fn special_tokens_fill_the_vocabulary_that_the_shape_declares() {
        assert!(CONFIG.contains(&format!("\"vocab_size\": {},", 256 + SPECIAL_TOKENS.len())));
        for (key, token) in [("bos", "<|begin|>"), ("eos", "<|end|>"), ("pad", "<|pad|>")] {
            let id = 256 + SPECIAL_TOKENS.iter().position(|special| *special == token).expect("a special token");
            assert!(CONFIG.contains(&format!("\"{key}_token_id\": {id},")));
            assert!(TOKENIZER_CONFIG.contains(&format!("\"{key}_token\": \"{token}\",")));
        }
    }
}
