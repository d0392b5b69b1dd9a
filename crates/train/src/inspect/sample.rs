//! A row as text, cut where training begins and ends.

use firebrick_data::{DataError, Example, PackedDataset, Tokenizer};

/// One row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SampleRow {
    /// Its number, the first is 0.
    pub number: usize,
    /// What is in it.
    pub documents: Vec<SampleDocument>,
}

/// One document of a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SampleDocument {
    /// How many tokens it has.
    pub tokens: usize,
    /// How many of them are trained.
    pub trained_tokens: usize,
    /// Its text in order; trained and untrained pieces alternate.
    pub pieces: Vec<Piece>,
}

/// Text of neighbouring tokens that are all trained or all not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// The text, special tokens included.
    pub text: String,
    /// Whether its tokens count in the loss.
    pub trained: bool,
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
            trained_tokens: example.trained_tokens(),
            pieces: pieces(&example, tokenizer)?,
        })
    });
    Ok(SampleRow { number, documents: documents.collect::<Result<_, DataError>>()? })
}

fn pieces(example: &Example, tokenizer: &Tokenizer) -> Result<Vec<Piece>, DataError> {
    let mut pieces = Vec::new();
    let mut before = String::new();
    let mut end = 0;
    for run in example.trained.chunk_by(|one, other| one == other) {
        let start = end;
        end += run.len();
        // Some tokenizers leave out a space in front of the first token, so a piece is what it adds to those before.
        let whole = tokenizer.decode(&example.tokens[..end], false)?;
        let text = match whole.strip_prefix(&before) {
            Some(added) => added.to_owned(),
            None => tokenizer.decode(&example.tokens[start..end], false)?,
        };
        pieces.push(Piece { text, trained: run[0] });
        before = whole;
    }
    Ok(pieces)
}
