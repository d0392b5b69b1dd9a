//! Rows of any shape, turned into examples.

use std::path::PathBuf;
use std::sync::OnceLock;

use firebrick_data::{EncodeOptions, Encoded, Encoder, Overflow, Place, Shape, Tokenizer, TrainOn};
use serde_json::{Map, Value as Json};

use super::{Outcome, tokenizer};

const SHAPES: [Shape; 7] = [
    Shape::Auto,
    Shape::Messages,
    Shape::Sharegpt,
    Shape::Alpaca,
    Shape::Text,
    Shape::PromptCompletion,
    Shape::Pretokenized,
];

/// JSON objects, one a line; the first byte chooses the options. Each row is read as every shape.
pub(crate) fn rows(bytes: &[u8]) -> Outcome {
    static TOKENIZER: OnceLock<Tokenizer> = OnceLock::new();
    let tokenizer = TOKENIZER.get_or_init(tokenizer::small);
    let (&first, rest) = bytes.split_first().unwrap_or((&0, &[]));
    let mut outcome = Outcome::default();
    for (index, line) in rest.split(|&byte| byte == b'\n').enumerate().take(64) {
        let Ok(fields) = serde_json::from_slice::<Map<String, Json>>(line) else { continue };
        let place = Place { path: PathBuf::from("rows.jsonl"), line: index + 1 };
        for shape in SHAPES {
            let options = options(first, shape);
            let limit = options.max_seq_len;
            let encoder = match Encoder::new(tokenizer, options, &fields, &place) {
                Ok(encoder) => encoder,
                Err(error) => {
                    outcome.said.push(error.to_string());
                    continue;
                }
            };
            if let Some(encoded) = outcome.note(encoder.encode_fields(&fields, &place)) {
                check(&encoded, limit, tokenizer.vocab_size());
                outcome.said.extend(encoded.findings.into_iter().map(|finding| finding.detail));
            }
        }
    }
    outcome
}

fn options(bits: u8, shape: Shape) -> EncodeOptions {
    let train_on = [TrainOn::Assistant, TrainOn::LastTurn, TrainOn::All][usize::from(bits % 4).min(2)];
    let overflow = [Overflow::Truncate, Overflow::Split, Overflow::Drop][usize::from(bits / 4 % 4).min(2)];
    let train_end_of_turn = bits & 16 == 0;
    let max_seq_len = if bits & 32 == 0 { 1 << 20 } else { 2 + usize::from(bits >> 6) * 7 };
    EncodeOptions { shape, train_on, overflow, train_end_of_turn, ..EncodeOptions::new(max_seq_len) }
}

/// What [`Encoded`] promises.
pub(crate) fn check(encoded: &Encoded, limit: usize, vocab_size: usize) {
    for example in &encoded.examples {
        assert_eq!(example.tokens.len(), example.trained.len(), "as many marks as tokens");
        assert!((1..=limit).contains(&example.tokens.len()), "{} tokens of {limit}", example.tokens.len());
        assert!(example.trained.iter().any(|&trained| trained), "something is trained");
        assert!(!example.trained[0], "the first token has nothing before it");
        assert!(example.tokens.iter().all(|&token| (token as usize) < vocab_size), "tokens of the vocabulary");
    }
    assert!(!encoded.examples.is_empty() || !encoded.findings.is_empty(), "a row that vanished without a word");
}
