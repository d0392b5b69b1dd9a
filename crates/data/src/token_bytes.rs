//! Where each token of a text stands, from how many bytes each token of the vocabulary is.
//!
//! The tokenizers library keeps places beside tokens all the way through, and needs a sixth more time for it than for
//! tokens alone. For byte-level vocabularies (GPT-2's alphabet: Llama 3, Qwen, and most since) they follow from the tokens:
//! each has a fixed number of bytes, and together they are the text. A text that they do not add up to (an added token
//! took white space beside it, say) is asked for again with places. Gives up other vocabularies: they always are.

use std::collections::HashMap;
use std::sync::Arc;

use tokenizers::{NormalizerWrapper, PreTokenizerWrapper, Tokenizer as Inner};

/// Token ids and the byte range of the text that each came from.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Located {
    pub(crate) ids: Vec<u32>,
    pub(crate) offsets: Vec<(usize, usize)>,
}

/// Bytes of each token of a byte-level vocabulary, by id.
#[derive(Debug, Clone)]
pub(crate) struct TokenBytes {
    lengths: Arc<[u32]>,
    /// Only ASCII is sure to pass the normalizer unchanged.
    ascii_only: bool,
}

impl TokenBytes {
    /// `None` if the tokenizer is not byte-level, or may change the text before it cuts it.
    pub(crate) fn of(inner: &Inner, vocabulary: &HashMap<String, u32>) -> Option<Self> {
        let ascii_only = match inner.get_normalizer() {
            None => false,
            Some(NormalizerWrapper::NFC(_)) => true,
            Some(_) => return None,
        };
        if !is_byte_level(inner.get_pre_tokenizer()?) {
            return None;
        }
        let mut lengths = vec![0; vocabulary.values().max().map_or(0, |&id| id as usize + 1)];
        for (token, &id) in vocabulary {
            // A character of the alphabet is a byte.
            lengths[id as usize] = u32::try_from(token.chars().count()).ok()?;
        }
        for (id, token) in inner.get_added_tokens_decoder() {
            lengths[id as usize] = u32::try_from(token.content.len()).ok()?;
        }
        Some(Self { lengths: lengths.into(), ascii_only })
    }

    /// The tokens' places in a text; gives the ids back if they do not add up to it.
    pub(crate) fn locate(&self, text: &str, ids: Vec<u32>) -> Result<Located, Vec<u32>> {
        if self.ascii_only && !text.is_ascii() {
            return Err(ids);
        }
        let mut end = 0;
        let place = |&id: &u32| {
            let start = end;
            end += self.lengths.get(id as usize).map_or(0, |&length| length as usize);
            (start, end)
        };
        let offsets: Vec<_> = ids.iter().map(place).collect();
        if end == text.len() { Ok(Located { ids, offsets }) } else { Err(ids) }
    }
}

/// Whether a text becomes the characters of the byte-level alphabet, with nothing put before it.
fn is_byte_level(pre_tokenizer: &PreTokenizerWrapper) -> bool {
    match pre_tokenizer {
        PreTokenizerWrapper::ByteLevel(bytes) => !bytes.add_prefix_space,
        PreTokenizerWrapper::Sequence(sequence) => {
            let (last, before) = match sequence.as_ref().split_last() {
                Some((last, before)) => (last, before),
                None => return false,
            };
            let only_cuts = |part: &PreTokenizerWrapper| {
                matches!(part, PreTokenizerWrapper::Split(_) | PreTokenizerWrapper::Digits(_))
            };
            is_byte_level(last) && before.iter().all(only_cuts)
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::test_tokenizer::TestTokenizer;

    /// A byte-level tokenizer with some merges and added tokens; `change` edits its JSON.
    fn tokenizer(change: impl Fn(&mut Value)) -> Inner {
        let folder = TestTokenizer::default().write();
        let text = std::fs::read_to_string(folder.path().join("tokenizer.json")).unwrap();
        let mut json: Value = serde_json::from_str(&text).unwrap();
        json["truncation"] = Value::Null;
        change(&mut json);
        Inner::from_bytes(json.to_string()).unwrap()
    }

    fn located(inner: &Inner, text: &str) -> Option<Located> {
        let ids = inner.encode_fast(text, false).unwrap().get_ids().to_vec();
        TokenBytes::of(inner, &inner.get_vocab(true))?.locate(text, ids).ok()
    }

    /// The library's places, where it cuts no character; its own are those of whole characters.
    fn asked(inner: &Inner, text: &str) -> Located {
        let encoding = inner.encode(text, false).unwrap();
        Located { ids: encoding.get_ids().to_vec(), offsets: encoding.get_offsets().to_vec() }
    }

    fn whole_characters(text: &str, mut located: Located) -> Located {
        for (start, end) in &mut located.offsets {
            *start = text.floor_char_boundary(*start);
            *end = text.ceil_char_boundary(*end);
        }
        located
    }

    #[test]
    fn places_from_lengths_are_those_that_the_library_gives() {
        let inner = tokenizer(|_| ());
        for text in ["", "a", "  two words\n", "<s>ab</s>\n", "é😀数字 and <|user|>ü", "\u{301}e\u{301}"] {
            let ours = located(&inner, text).expect("a byte-level tokenizer");
            assert_eq!(whole_characters(text, ours), asked(&inner, text), "{text:?}");
        }
    }

    #[test]
    fn whatever_may_change_the_text_is_asked_for_again() {
        let stripping = tokenizer(|json| {
            let bos = json["added_tokens"].as_array_mut().unwrap().iter_mut().find(|token| token["content"] == "<s>");
            bos.unwrap()["lstrip"] = true.into();
        });
        assert!(located(&stripping, "a  <s>b").is_none() && located(&stripping, "a<s>b").is_some());
        let composing = tokenizer(|json| json["normalizer"] = json!({ "type": "NFC" }));
        assert!(located(&composing, "e\u{301}").is_none() && located(&composing, "plain").is_some());
        let lower = tokenizer(|json| json["normalizer"] = json!({ "type": "Lowercase" }));
        assert!(located(&lower, "plain").is_none());
        let spaced = json!({ "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true });
        let prefixing = tokenizer(|json| json["pre_tokenizer"] = spaced.clone());
        assert!(located(&prefixing, "plain").is_none());
    }
}
