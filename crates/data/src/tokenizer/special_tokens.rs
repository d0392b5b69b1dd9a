//! The end-of-text and padding token of a run, where they are not those of the tokenizer's files.
//!
//! Not supported: tokens that are ordinary text. In every program that reads the saved files they would no longer be tokenized as text.

use serde_json::{Map, Value, json};

use crate::error::DataError;
use crate::tokenizer::{SpecialToken, Tokenizer};

/// Maximum number of tokens that an error lists.
const MAX_LISTED: usize = 12;

impl Tokenizer {
    /// Makes an existing token the end-of-text or padding token, and marks it as special. Call [`Tokenizer::add_tokens`] before, for new tokens.
    ///
    /// # Errors
    /// A text that is no token, or one that is ordinary text.
    pub fn set_special_token(&mut self, role: SpecialToken, content: &str) -> Result<(), DataError> {
        let key = role.key();
        let advice = || self.special_token_advice();
        let Some(id) = self.inner.token_to_id(content) else {
            return Err(DataError::Tokenizer(format!(
                "{key} = {content:?} is no token of the tokenizer in {}. {}, or add it: data.new_special_tokens = [{content:?}]",
                self.folder.display(),
                advice()
            )));
        };
        let Some(mut token) = self.inner.get_added_tokens_decoder().remove(&id) else {
            return Err(DataError::Tokenizer(format!(
                "{key} = {content:?} is ordinary text to the tokenizer in {}, as token {id}: texts that contain it would no longer mean \
                 themselves. {}",
                self.folder.display(),
                advice()
            )));
        };
        if !token.special {
            token.special = true;
            self.inner.add_special_tokens(&[token]);
            self.special_ids.insert(id);
            self.new_tokens.iter_mut().filter(|new| new.id == id).for_each(|new| new.special = true);
        }
        self.templates.special_tokens.insert(key.to_owned(), content.to_owned());
        self.chosen_tokens.insert(role, content.to_owned());
        self.templates.apply();
        Ok(())
    }

    /// Returns the id of the token that was given a role; `None` if the role is as in the folder.
    pub fn chosen_token_id(&self, role: SpecialToken) -> Option<u32> {
        self.chosen_tokens.get(&role).and_then(|token| self.inner.token_to_id(token))
    }

    fn special_token_advice(&self) -> String {
        let added = self.inner.get_added_tokens_decoder();
        let mut special: Vec<_> = added.into_iter().filter(|(_, token)| token.special).collect();
        special.sort_by_key(|(id, _)| *id);
        let shown: Vec<String> =
            special.iter().take(MAX_LISTED).map(|(_, token)| format!("{:?}", token.content)).collect();
        match special.len() {
            0 => "It has no special tokens".to_owned(),
            count if count > MAX_LISTED => {
                format!("Name one of its {count} special tokens ({}, ...)", shown.join(", "))
            }
            _ => format!("Name one of its special tokens ({})", shown.join(", ")),
        }
    }

    /// Writes the chosen roles into the settings of a tokenizer: `tokenizer_config.json`, or `special_tokens_map.json`.
    pub(crate) fn write_chosen(&self, settings: &mut Map<String, Value>) {
        for (role, content) in &self.chosen_tokens {
            settings.insert(role.key().to_owned(), json!(content));
        }
    }

    /// Marks the chosen tokens as special in the descriptions of a file's added tokens.
    pub(crate) fn mark_chosen<'a>(&self, described: impl Iterator<Item = &'a mut Value>) {
        for token in described {
            if self.chosen_tokens.values().any(|content| token["content"] == **content) {
                token["special"] = json!(true);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::write;

    use super::*;
    use crate::record_format::Chat;
    use crate::test_tokenizer::TestTokenizer;

    #[test]
    fn a_chosen_end_is_in_templates_and_written_files() {
        let folder = TestTokenizer::default().write();
        write(
            folder.path().join("special_tokens_map.json"),
            json!({"eos_token": "</s>", "unk_token": "<s>"}).to_string(),
        )
        .unwrap();
        let mut tokenizer = Tokenizer::from_folder(folder.path()).unwrap();
        let (before, bos) = (tokenizer.fingerprint(), tokenizer.bos_token_id());
        tokenizer.add_tokens(&["<|end|>".to_owned()], false).unwrap();
        let end = tokenizer.token_to_id("<|end|>").unwrap();
        tokenizer.set_special_token(SpecialToken::Eos, "<|end|>").unwrap();
        tokenizer.set_special_token(SpecialToken::Pad, "</s>").unwrap();
        assert_ne!(tokenizer.fingerprint(), before);
        assert_eq!(tokenizer.chosen_token_id(SpecialToken::Eos), Some(end));
        let old_eos = tokenizer.token_to_id("</s>");
        for (name, text) in tokenizer.changed_files().unwrap() {
            write(folder.path().join(name), text).unwrap();
        }
        let read = Tokenizer::from_folder(folder.path()).unwrap();
        for tokenizer in [&tokenizer, &read] {
            assert_eq!((tokenizer.eos_token_id(), tokenizer.pad_token_id()), (Some(end), old_eos));
            assert_eq!(tokenizer.bos_token_id(), bos);
            assert!(tokenizer.is_special(end) && tokenizer.is_special(old_eos.unwrap()));
            assert_eq!(tokenizer.decode(&[97, end], true).unwrap(), "a");
            let rendered = tokenizer.chat_template().unwrap().render(&Chat::new(&[("user", "hi")]), false).unwrap();
            assert_eq!(rendered, "<s><|user|>\nhi<|end|>\n");
        }
        let map = std::fs::read_to_string(folder.path().join("special_tokens_map.json")).unwrap();
        let map: Value = serde_json::from_str(&map).unwrap();
        assert_eq!(map, json!({"eos_token": "<|end|>", "pad_token": "</s>", "unk_token": "<s>"}));
    }

    #[test]
    fn the_folders_own_roles_change_no_file_but_its_settings() {
        let mut tokenizer = TestTokenizer::default().load();
        let before = tokenizer.encode("a</s>", true).unwrap();
        tokenizer.set_special_token(SpecialToken::Eos, "</s>").unwrap();
        assert_eq!(tokenizer.encode("a</s>", true).unwrap(), before);
    }

    #[test]
    fn a_token_of_ordinary_text_is_no_special_token() {
        let mut tokenizer = TestTokenizer::default().load();
        let ordinary = tokenizer.set_special_token(SpecialToken::Pad, "a").unwrap_err().to_string();
        assert!(ordinary.contains("ordinary text") && ordinary.contains("token 97"), "{ordinary}");
    }
}
