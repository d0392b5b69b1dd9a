//! Tokens added to a model that trains an adapter: their rows of embedding and head train, and no others.
//!
//! Trade-off: an untied head trains a row for every new token, also for those that are never predicted. A table of the layers' own inputs has rows of
//! them, too, which stay as they start.

use crate::error::ArchError;
use crate::lora::LoraConfig;
use crate::spec::ModelSpec;
use crate::tensors::{EMBEDDING, HEAD};
use crate::token_rows::TokenIndices;

impl LoraConfig {
    /// Returns these settings with the rows of new tokens added, in every table that does not train whole.
    ///
    /// # Errors
    /// One of embedding and head trains whole where they share a table: the other would keep the rows of the new tokens as they start.
    pub fn with_new_tokens(&self, ids: &[usize], spec: &ModelSpec) -> Result<Self, ArchError> {
        let [embedding, head] = [EMBEDDING, HEAD].map(|table| !self.saves_tensor(table));
        let rows = |table: &str| -> Vec<usize> {
            let typed = self.trainable_token_indices.as_ref().map_or(&[][..], |indices| indices.of(table));
            typed.iter().chain(ids.iter().filter(|id| !typed.contains(id))).copied().collect()
        };
        let trainable_token_indices = match (embedding, head) {
            _ if ids.is_empty() => self.trainable_token_indices.clone(),
            (false, false) => None,
            (true, true) if spec.tie_word_embeddings => Some(TokenIndices::Embedding(rows(EMBEDDING))),
            _ if spec.tie_word_embeddings => {
                let whole = if embedding { "lm_head" } else { "embed_tokens" };
                let has = "one table for embedding and head, and new tokens: name both or none";
                let (key, value, has) = ("modules_to_save", whole.to_owned(), has.to_owned());
                return Err(ArchError::Unused { key, value, has });
            }
            _ => {
                let tables = [("embed_tokens", EMBEDDING, embedding), ("lm_head", HEAD, head)].into_iter();
                let tables = tables.filter(|(.., trains_rows)| *trains_rows);
                Some(TokenIndices::ByModule(tables.map(|(name, table, _)| (name.to_owned(), rows(table))).collect()))
            }
        };
        Ok(Self { trainable_token_indices, ..self.clone() })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::config::tests::tiny;
    use crate::token_rows::tests::lora;

    #[test]
    fn new_tokens_train_in_every_table_that_does_not_train_whole() {
        let spec = tiny(&[]).unwrap().spec;
        let tied = tiny(&[("tie_word_embeddings", true.into())]).unwrap().spec;
        let with = |lora: &LoraConfig, spec: &ModelSpec| {
            let lora = lora.with_new_tokens(&[9, 10], spec);
            lora.map(|lora| serde_json::to_value(lora.trainable_token_indices).unwrap())
        };
        let none = LoraConfig::default();
        assert_eq!(with(&none, &tied).unwrap(), json!([9, 10]));
        assert_eq!(with(&lora(json!([3, 9])), &tied).unwrap(), json!([3, 9, 10]));
        assert_eq!(with(&none, &spec).unwrap(), json!({"embed_tokens": [9, 10], "lm_head": [9, 10]}));
        assert_eq!(with(&lora(json!([3])), &spec).unwrap(), json!({"embed_tokens": [3, 9, 10], "lm_head": [9, 10]}));
        let whole = |names: &[&str]| LoraConfig {
            modules_to_save: Some(names.iter().map(|&name| name.to_owned()).collect()),
            ..LoraConfig::default()
        };
        assert_eq!(with(&whole(&["lm_head"]), &spec).unwrap(), json!({"embed_tokens": [9, 10]}));
        assert_eq!(with(&whole(&["lm_head", "embed_tokens"]), &tied).unwrap(), json!(null));
        assert!(with(&whole(&["lm_head"]), &tied).unwrap_err().to_string().contains("both or none"));
        assert_eq!(lora(json!([3])).with_new_tokens(&[], &tied).unwrap(), lora(json!([3])));
    }
}
