//! Tokens added to a tokenizer. Each is one id wherever its text occurs, and the tokenizer's files record it for other programs, as they do
//! another end-of-text or padding token.
//!
//! They get the ids that transformers' `add_tokens` assigns, and are found in the text before anything normalizes it. Trade-off: the changed files
//! are read and parsed again on each request, so that no copy of a tokenizer holds them.

use std::collections::BTreeMap;
use std::fs::read_to_string;

use firebrick_arch::folder::{SPECIAL_TOKENS_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE};
use firebrick_arch::python_json::to_string_pretty;
use serde_json::{Map, Value, json};
use tokenizers::AddedToken;

use crate::error::DataError;
use crate::tokenizer::added_tokens::{bad_file, read_json};
use crate::tokenizer::{NewToken, Tokenizer};

impl Tokenizer {
    /// Adds tokens in this order, either `special` or ordinary ones. Errors: an empty text, a text that occurs twice, or a token that the tokenizer
    /// already has.
    pub fn add_tokens(&mut self, new_tokens: &[String], special: bool) -> Result<(), DataError> {
        for content in new_tokens {
            if content.trim().is_empty() {
                return Err(DataError::Tokenizer("a new token is empty: write the text that it stands for".to_owned()));
            }
            if let Some(id) = self.inner.token_to_id(content) {
                let what = if self.new_tokens.iter().any(|token| token.content == *content) {
                    "is among the new tokens twice: name it once".to_owned()
                } else {
                    format!(
                        "is no new token: the tokenizer in {} has it, with id {id}. Leave it out; to train its row alone, write \
                         lora.trainable_token_indices = [{id}]",
                        self.folder.display()
                    )
                };
                return Err(DataError::Tokenizer(format!("{content:?} {what}")));
            }
            let token = AddedToken::from(content.as_str(), special).normalized(false);
            self.inner.add_tokens(&[token]);
            let Some(id) = self.inner.token_to_id(content) else {
                return Err(DataError::Tokenizer(format!("{content:?} cannot be a token of this tokenizer")));
            };
            if special {
                self.special_ids.insert(id);
            }
            self.vocab_size = self.vocab_size.max(id as usize + 1);
            self.new_tokens.push(NewToken { content: content.clone(), id, special });
        }
        self.before_text.take();
        Ok(())
    }

    /// Returns the tokens that the folder does not have.
    pub fn new_tokens(&self) -> &[NewToken] {
        &self.new_tokens
    }

    /// Returns the tokens that files other than `tokenizer.json` add or describe differently: id, text, and whether it is special.
    pub fn tokens_of_other_files(&self) -> Vec<(u32, String, bool)> {
        self.of_other_files.iter().map(|(id, token)| (*id, token.content.clone(), token.special)).collect()
    }

    /// Returns the id of a token.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Returns the text of each file of the tokenizer that new tokens, other special tokens or tokens of other files have changed; none without them.
    /// Errors: a file of the folder is missing or damaged.
    pub fn changed_files(&self) -> Result<BTreeMap<String, String>, DataError> {
        let mut files = BTreeMap::new();
        if self.new_tokens.is_empty() && self.chosen_tokens.is_empty() && self.of_other_files.is_empty() {
            return Ok(files);
        }
        let path = self.folder.join(TOKENIZER_FILE);
        let text = read_to_string(&path).map_err(|reason| DataError::Io { path: path.clone(), reason })?;
        let mut json: Map<String, Value> = serde_json::from_str(&text).map_err(|reason| bad_file(&path, reason))?;
        let added = json.entry("added_tokens").or_insert_with(|| json!([]));
        let added = added.as_array_mut().ok_or_else(|| bad_file(&path, "added_tokens is no list"))?;
        // In other programs too, the ids of new tokens follow those of all that the folder has.
        added.retain(|token| !self.of_other_files.values().any(|other| token["content"] == *other.content));
        let others = self.of_other_files.iter().map(|(id, token)| (*id, json!(token)));
        let new = self.new_tokens.iter().map(|token| (token.id, Value::Object(described(token))));
        let tokens: Vec<(u32, Value)> = others.chain(new).collect();
        added.extend(tokens.iter().cloned().map(|(id, mut entry)| {
            entry["id"] = json!(id);
            entry
        }));
        added.sort_by_key(|token| token["id"].as_u64());
        self.mark_chosen(added.iter_mut());
        files.insert(TOKENIZER_FILE.to_owned(), printed(&json));
        let mut config = read_json(&self.folder.join(TOKENIZER_CONFIG_FILE))?.unwrap_or_default();
        let decoder = config.get_mut("added_tokens_decoder").and_then(Value::as_object_mut);
        if decoder.is_some() || !self.chosen_tokens.is_empty() {
            if let Some(decoder) = decoder {
                decoder.extend(tokens.into_iter().map(|(id, token)| (id.to_string(), token)));
                self.mark_chosen(decoder.values_mut());
            }
            self.write_chosen(&mut config);
            files.insert(TOKENIZER_CONFIG_FILE.to_owned(), printed(&config));
        }
        if let Some(mut map) =
            read_json(&self.folder.join(SPECIAL_TOKENS_FILE))?.filter(|_| !self.chosen_tokens.is_empty())
        {
            self.write_chosen(&mut map);
            files.insert(SPECIAL_TOKENS_FILE.to_owned(), printed(&map));
        }
        Ok(files)
    }
}

/// Returns a token as both files write it.
fn described(token: &NewToken) -> Map<String, Value> {
    let NewToken { content, special, .. } = token;
    let flag = |name: &str, value: bool| (name.to_owned(), json!(value));
    let flags = ["single_word", "lstrip", "rstrip", "normalized"].map(|name| flag(name, false));
    flags.into_iter().chain([("content".to_owned(), json!(content)), flag("special", *special)]).collect()
}

fn printed(json: &Map<String, Value>) -> String {
    to_string_pretty(json) + "\n"
}

#[cfg(test)]
mod tests {
    use std::fs::write;

    use super::*;
    use crate::test_tokenizer::TestTokenizer;

    fn texts(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|&text| text.to_owned()).collect()
    }

    #[test]
    fn a_new_token_is_one_id_here_and_in_written_files() {
        let folder = TestTokenizer::default().write();
        let mut tokenizer = Tokenizer::from_folder(folder.path()).unwrap();
        let (before, first) = (tokenizer.fingerprint(), tokenizer.vocab_size() as u32);
        tokenizer.add_tokens(&texts(&["<tool_call>", "a b"]), false).unwrap();
        tokenizer.add_tokens(&texts(&["<|turn|>"]), true).unwrap();
        assert_ne!(tokenizer.fingerprint(), before);
        let text = "xa b<tool_call><|turn|>x";
        let x = u32::from(b'x');
        let ids = [x, first + 1, first, first + 2, x];
        for (name, text) in tokenizer.changed_files().unwrap() {
            write(folder.path().join(name), text).unwrap();
        }
        let read = Tokenizer::from_folder(folder.path()).unwrap();
        for tokenizer in [&tokenizer, &read] {
            assert_eq!(tokenizer.encode(text, false).unwrap(), ids);
            assert_eq!(tokenizer.encode_with_offsets(text).unwrap().get_ids(), ids);
            assert_eq!(tokenizer.decode(&ids, false).unwrap(), text);
            assert_eq!(tokenizer.decode(&ids, true).unwrap(), "xa b<tool_call>x");
            assert_eq!((tokenizer.vocab_size(), tokenizer.is_special(first + 2)), (first as usize + 3, true));
        }
        assert!(read.changed_files().unwrap().is_empty());
    }

    #[test]
    fn what_is_no_new_token_is_refused_with_its_id() {
        let mut tokenizer = TestTokenizer::default().load();
        let mut error = |texts_: &[&str]| tokenizer.add_tokens(&texts(texts_), false).unwrap_err().to_string();
        assert!(error(&["a"]).contains("trainable_token_indices = [97]"));
        assert!(error(&[" "]).contains("empty"));
        assert!(error(&["<x>", "<x>"]).contains("twice"));
    }
}
