//! Decodes tokens that come one at a time: returns the text that each adds, as soon as it is whole characters.
//!
//! A token may be part of a character, and the text of a token may depend on those before it, so a window of the last tokens is decoded
//! with each new one.
//! Trade-off: two short decodings per token.

use firebrick_data::{DataError, Tokenizer};

/// The decoded text of an incomplete character.
const REPLACEMENT: char = '\u{fffd}';

/// Decodes a stream of tokens with a window of the last ones.
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    tokens: Vec<u32>,
    /// First token of the window.
    start: usize,
    /// First token whose text has not been returned.
    next: usize,
    returned: String,
}

impl<'a> TextStream<'a> {
    /// Creates an empty stream.
    pub fn new(tokenizer: &'a Tokenizer) -> Self {
        Self { tokenizer, tokens: Vec::new(), start: 0, next: 0, returned: String::new() }
    }

    /// Adds a token and returns its text; empty while a character is incomplete. Special tokens have no text.
    pub fn push(&mut self, token: u32) -> Result<String, DataError> {
        self.tokens.push(token);
        let before = self.tokenizer.decode(&self.tokens[self.start..self.next], true)?;
        let now = self.tokenizer.decode(&self.tokens[self.start..], true)?;
        if now.ends_with(REPLACEMENT) {
            return Ok(String::new());
        }
        let Some(added) = now.strip_prefix(before.as_str()) else { return Ok(String::new()) };
        (self.start, self.next) = (self.next, self.tokens.len());
        self.returned.push_str(added);
        Ok(added.to_owned())
    }

    /// Returns the text of all tokens, and the end of it that was not returned yet.
    pub fn finish(self) -> Result<(String, String), DataError> {
        let whole = self.tokenizer.decode(&self.tokens, true)?;
        let rest = whole.strip_prefix(self.returned.as_str()).unwrap_or_default().to_owned();
        Ok((whole, rest))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn the_parts_are_whole_characters_and_together_the_whole_text() {
        let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/tiny-llama"));
        let tokenizer = Tokenizer::from_folder(folder).unwrap();
        for text in ["plain words", "añ ö 日本語 🙂🙂 end", " leading", "two\n\nlines "] {
            let tokens = tokenizer.encode(text, false).unwrap();
            let mut stream = TextStream::new(&tokenizer);
            let parts: Vec<String> = tokens.iter().map(|&token| stream.push(token).unwrap()).collect();
            let (whole, rest) = stream.finish().unwrap();
            assert_eq!(parts.concat() + &rest, tokenizer.decode(&tokens, true).unwrap());
            assert_eq!((whole.as_str(), rest.as_str()), (text, ""));
            assert!(parts.iter().all(|part| !part.contains(REPLACEMENT)), "{parts:?}");
            assert!(parts.iter().filter(|part| !part.is_empty()).count() > 3, "{parts:?}");
        }
    }

    #[test]
    fn a_character_that_never_becomes_whole_comes_at_the_end() {
        let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/tiny-llama"));
        let tokenizer = Tokenizer::from_folder(folder).unwrap();
        let tokens = tokenizer.encode("a🙂", false).unwrap();
        let mut stream = TextStream::new(&tokenizer);
        let cut = &tokens[..tokens.len() - 1];
        let parts: String = cut.iter().map(|&token| stream.push(token).unwrap()).collect();
        let (whole, rest) = stream.finish().unwrap();
        assert_eq!((parts.as_str(), whole.starts_with('a')), ("a", true));
        assert!(rest.contains(REPLACEMENT), "{rest:?}");
    }
}
