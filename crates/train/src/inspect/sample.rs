//! A document as the texts of its tokens.
//!
//! Trade-off: a token that ends in the middle of a character has no text; the token that completes it has all of it.

use firebrick_data::{DataError, Example, Tokenizer};

/// Maximum tokens shown of a document.
const SHOWN_TOKENS: usize = 4096;

/// One packed row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SampleRow {
    /// Its number, the first is 0.
    pub number: usize,
    /// Its documents.
    pub documents: Vec<SampleDocument>,
}

/// One document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SampleDocument {
    /// File and line of its record; for a pair, followed by which answer it is.
    pub place: String,
    /// Number of tokens.
    pub len: usize,
    /// Number of tokens that count in the loss.
    pub loss_tokens: usize,
    /// The first tokens, in order.
    pub tokens: Vec<SampleToken>,
}

/// One token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SampleToken {
    /// The text that it adds, special tokens included.
    pub text: String,
    /// Whether it counts in the loss.
    pub in_loss: bool,
}

impl SampleRow {
    /// Returns the number of tokens without padding.
    pub fn tokens(&self) -> usize {
        self.documents.iter().map(|document| document.len).sum()
    }
}

impl SampleDocument {
    /// Returns the beginning of a document. Errors: the tokenizer cannot turn its tokens into text.
    pub(super) fn new(place: String, example: &Example, tokenizer: &Tokenizer) -> Result<Self, DataError> {
        let len = example.tokens.len();
        let tokens = &example.tokens[..len.min(SHOWN_TOKENS)];
        let (mut context, mut done) = (0, 0);
        // The text that a token adds. Some tokenizers drop a space before the first token, so each is decoded after those before it.
        let text = |index: usize| {
            let before = tokenizer.decode(&tokens[context..done], false)?;
            let with = tokenizer.decode(&tokens[context..=index], false)?;
            let is_last = index + 1 == tokens.len();
            let Some(added) = with.strip_prefix(&before).filter(|_| is_last || !with.ends_with('\u{FFFD}')) else {
                return Ok(String::new());
            };
            (context, done) = (done, index + 1);
            Ok(added.to_owned())
        };
        let texts = (0..tokens.len()).map(text).collect::<Result<Vec<String>, DataError>>()?;
        let tokens = texts.into_iter().zip(&example.loss_mask).map(|(text, &in_loss)| SampleToken { text, in_loss });
        Ok(Self { place, len, loss_tokens: example.loss_tokens(), tokens: tokens.collect() })
    }

    /// Returns the text in runs of tokens that either all count in the loss or all do not.
    pub(super) fn runs(&self) -> impl Iterator<Item = (bool, String)> + '_ {
        let runs = self.tokens.chunk_by(|one, other| one.in_loss == other.in_loss);
        runs.map(|run| (run[0].in_loss, run.iter().map(|token| token.text.as_str()).collect()))
    }
}
