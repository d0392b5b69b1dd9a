//! Tokenizes long texts in pieces, because the tokenizer needs about 250 bytes of memory per byte of text.
//!
//! A piece ends at a line break or a space, and only if the tokenizer gives the same tokens for the surrounding text in one piece and in two. So the
//! tokens equal those of the whole text, for every tokenizer that splits text into words by local context; one that prepends something to each text
//! (SentencePiece's space) never accepts a cut. Trade-off: from the point where no such position is found, the text is tokenized in one piece.

pub(crate) const PIECE_BYTES: usize = 256 << 10;
/// Bytes compared on either side of a cut.
const CONTEXT_BYTES: usize = 512;
/// Number of positions tried before the rest is tokenized in one piece.
const MAX_TRIES: usize = 32;

/// Tokenizes a text in pieces. `encode` tokenizes a text in one piece.
pub(crate) fn encode_in_pieces<E>(
    text: &str,
    piece_bytes: usize,
    encode: impl Fn(&str) -> Result<Vec<u32>, E>,
) -> Result<Vec<u32>, E> {
    let mut tokens = Vec::new();
    let mut rest = text;
    while rest.len() > 2 * piece_bytes
        && let Some(cut) = find_cut(rest, piece_bytes, &encode)?
    {
        tokens.extend(encode(&rest[..cut])?);
        rest = &rest[cut..];
    }
    let last = encode(rest)?;
    if tokens.is_empty() {
        return Ok(last);
    }
    tokens.extend(last);
    Ok(tokens)
}

/// Returns the last position in the second half of the first piece where the text may be cut; line breaks are preferred.
fn find_cut<E>(
    text: &str,
    piece_bytes: usize,
    encode: &impl Fn(&str) -> Result<Vec<u32>, E>,
) -> Result<Option<usize>, E> {
    let bytes = text.as_bytes();
    let is_word = |at: usize| !bytes[at].is_ascii_whitespace();
    let places = || (piece_bytes / 2 + 1..=piece_bytes).rev();
    let lines = places().filter(|&at| bytes[at - 1] == b'\n' && is_word(at) && text.is_char_boundary(at));
    let words = places().filter(|&at| bytes[at] == b' ' && is_word(at - 1) && is_word(at + 1));
    for cut in lines.take(MAX_TRIES).chain(words.take(MAX_TRIES)) {
        let from = text.floor_char_boundary(cut.saturating_sub(CONTEXT_BYTES));
        let to = text.ceil_char_boundary(cut + CONTEXT_BYTES);
        let mut halves = encode(&text[from..cut])?;
        halves.extend(encode(&text[cut..to])?);
        if halves == encode(&text[from..to])? {
            return Ok(Some(cut));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::path::Path;

    use tokenizers::Tokenizer as Inner;

    use super::*;
    use crate::error::DataError;
    use crate::tokenizer::Tokenizer;

    fn golden(name: &str) -> Inner {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
        Inner::from_file(folder.join("tokenizer.json")).unwrap()
    }

    /// Returns the tokens in pieces, the tokens of the whole text, and the length of the longest piece.
    fn both(inner: &Inner, text: &str, piece_bytes: usize) -> (Vec<u32>, Vec<u32>, usize) {
        let longest = Cell::new(0);
        let encode = |text: &str| {
            longest.set(longest.get().max(text.len()));
            inner.encode_fast(text, false).map(|encoding| encoding.get_ids().to_vec())
        };
        let whole = encode(text).unwrap();
        longest.set(0);
        (encode_in_pieces(text, piece_bytes, encode).unwrap(), whole, longest.get())
    }

    fn texts() -> [String; 4] {
        [
            "A line of words, 1234567 and ünïcode.\n\n  indented <s> here\nnext".repeat(200),
            "one line of words without an end ".repeat(300),
            "数字と文字。\n".repeat(500),
            "a\r\nb \n c\t\nd  e\n".repeat(600),
        ]
    }

    #[test]
    fn pieces_give_the_tokens_of_the_whole_text() {
        for name in ["byte_level", "metaspace"] {
            let inner = golden(name);
            for text in texts() {
                let (pieces, whole, longest) = both(&inner, &text, 2048);
                assert_eq!(pieces, whole, "{name}: {:?}", &text[..20]);
                assert!(name != "byte_level" || longest <= 2 * 2048, "{longest} bytes of {:?}", &text[..20]);
            }
        }
    }

    #[test]
    fn text_without_a_position_to_cut_is_tokenized_in_one_piece() {
        let text = "a".repeat(10_000);
        let (pieces, whole, longest) = both(&golden("byte_level"), &text, 2048);
        assert_eq!((pieces, longest), (whole, text.len()));
    }

    #[test]
    fn long_texts_get_the_special_tokens_of_short_ones() -> Result<(), DataError> {
        let tokenizer: Tokenizer = crate::test_tokenizer::TestTokenizer::default().load();
        let line = "some words\n";
        let text = line.repeat(2 * PIECE_BYTES / line.len() + 10);
        let (framed, plain) = (tokenizer.encode(&text, true)?, tokenizer.encode(&text, false)?);
        assert_eq!(framed[0], crate::test_tokenizer::BOS);
        assert_eq!(framed[1..], plain);
        assert_eq!(plain.len(), text.len());
        Ok(())
    }
}
