//! Records of every format, encoded as examples.

use std::path::PathBuf;
use std::sync::OnceLock;

use firebrick_data::{EncodeOptions, Encoder, OverflowPolicy, Record, RecordFormat, RecordPlace, Tokenizer, TrainOn};
use serde_json::{Map, Value as Json};

use super::{Outcome, tokenizer};

const FORMATS: [RecordFormat; 8] = [
    RecordFormat::Auto,
    RecordFormat::Chat,
    RecordFormat::Sharegpt,
    RecordFormat::Alpaca,
    RecordFormat::AlpacaPrompt,
    RecordFormat::Text,
    RecordFormat::PromptCompletion,
    RecordFormat::Pretokenized,
];

/// Reads JSON objects, one per line; the first byte chooses the options. Each record is parsed as every format.
pub(crate) fn rows(bytes: &[u8]) -> Outcome {
    static TOKENIZER: OnceLock<Tokenizer> = OnceLock::new();
    let tokenizer = TOKENIZER.get_or_init(tokenizer::small);
    let (&first, rest) = bytes.split_first().unwrap_or((&0, &[]));
    let mut outcome = Outcome::default();
    for (index, line) in rest.split(|&byte| byte == b'\n').enumerate().take(64) {
        let Ok(fields) = serde_json::from_slice::<Map<String, Json>>(line) else { continue };
        let record = Record::new(fields, RecordPlace { path: PathBuf::from("rows.jsonl"), line: index + 1 });
        for record_format in FORMATS {
            match Encoder::new(tokenizer, options(first, record_format), &record) {
                Ok(encoder) => encode(&encoder, &record, &mut outcome),
                Err(error) => outcome.messages.push(error.to_string()),
            }
        }
    }
    outcome
}

fn options(bits: u8, record_format: RecordFormat) -> EncodeOptions {
    let train_on = [TrainOn::Assistant, TrainOn::Last, TrainOn::All][usize::from(bits % 4).min(2)];
    let overflow =
        [OverflowPolicy::Truncate, OverflowPolicy::Split, OverflowPolicy::Drop][usize::from(bits / 4 % 4).min(2)];
    let train_end_of_turn = bits & 16 == 0;
    let max_seq_len = if bits & 32 == 0 { 1 << 20 } else { 2 + usize::from(bits >> 6) * 7 };
    EncodeOptions {
        record_format,
        train_on,
        overflow: Some(overflow),
        train_end_of_turn,
        ..EncodeOptions::new(max_seq_len)
    }
}

/// Encodes a record and checks the guarantees of [`Encoded`](firebrick_data::Encoded).
pub(crate) fn encode(encoder: &Encoder<'_>, record: &Record, outcome: &mut Outcome) {
    let (limit, vocab_size) = (encoder.options().max_seq_len, encoder.tokenizer().vocab_size());
    let Some(encoded) = outcome.note(encoder.encode(record)) else { return };
    for example in &encoded.examples {
        assert_eq!(example.tokens.len(), example.loss_mask.len(), "one mask entry per token");
        assert!((1..=limit).contains(&example.tokens.len()), "{} tokens of {limit}", example.tokens.len());
        assert!(example.loss_mask.iter().any(|&counts| counts), "something counts in the loss");
        assert!(!example.loss_mask[0], "the first token has no input");
        assert!(example.tokens.iter().all(|&token| (token as usize) < vocab_size), "tokens of the vocabulary");
    }
    assert!(!encoded.examples.is_empty() || !encoded.findings.is_empty(), "a dropped record without a finding");
    outcome.messages.extend(encoded.findings.into_iter().map(|finding| finding.detail));
}
