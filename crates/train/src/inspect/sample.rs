//! A row as text, cut where the loss begins and ends.
//!
//! Trade-off: a document is decoded once per piece, which is quadratic in its pieces; only samples are decoded.

use firebrick_data::{DataError, Example, PackedDataset, Tokenizer};

/// One row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SampleRow {
    /// Its number, the first is 0.
    pub number: usize,
    /// Its documents.
    pub documents: Vec<SampleDocument>,
}

/// One document of a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SampleDocument {
    /// Number of tokens.
    pub tokens: usize,
    /// Number of tokens that count in the loss.
    pub loss_tokens: usize,
    /// Its text in order; pieces inside and outside of the loss alternate.
    pub pieces: Vec<Piece>,
}

/// Text of adjacent tokens that are all in the loss or all not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// The text, special tokens included.
    pub text: String,
    /// Whether its tokens count in the loss.
    pub in_loss: bool,
}

impl SampleRow {
    /// Tokens without padding.
    pub fn tokens(&self) -> usize {
        self.documents.iter().map(|document| document.tokens).sum()
    }
}

/// A row of a set. Errors: the tokenizer cannot turn its tokens to text.
pub(super) fn row(packed: &PackedDataset, number: usize, tokenizer: &Tokenizer) -> Result<SampleRow, DataError> {
    let documents = packed.row_documents(number).map(|index| {
        let example = packed.documents().example(index);
        Ok(SampleDocument {
            tokens: example.tokens.len(),
            loss_tokens: example.loss_tokens(),
            pieces: pieces(&example, tokenizer)?,
        })
    });
    Ok(SampleRow { number, documents: documents.collect::<Result<_, DataError>>()? })
}

fn pieces(example: &Example, tokenizer: &Tokenizer) -> Result<Vec<Piece>, DataError> {
    let mut pieces = Vec::new();
    let mut previous = String::new();
    let mut end = 0;
    for run in example.loss_mask.chunk_by(|one, other| one == other) {
        let start = end;
        end += run.len();
        // Some tokenizers drop a space before the first token, so a piece is what it adds to the preceding ones.
        let whole = tokenizer.decode(&example.tokens[..end], false)?;
        let text = match whole.strip_prefix(&previous) {
            Some(added) => added.to_owned(),
            None => tokenizer.decode(&example.tokens[start..end], false)?,
        };
        pieces.push(Piece { text, in_loss: run[0] });
        previous = whole;
    }
    Ok(pieces)
}
