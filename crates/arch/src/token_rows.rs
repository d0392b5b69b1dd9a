//! Single rows of embedding and head that train next to an adapter, by token id: PEFT's `trainable_token_indices`.
//!
//! Where embedding and head share one table, they share the rows too.
//! Not supported: other rows of the head than of the embedding, where they share a table.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::error::ArchError;
use crate::spec::ModelSpec;
use crate::tensors::{EMBEDDING, HEAD};

/// Tokens whose rows train.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
#[serde(
    untagged,
    expecting = "must be a list of token ids, or such lists by module: { embed_tokens = [1], lm_head = [1] }"
)]
pub enum TokenIndices {
    /// Ids of tokens, for the embedding.
    Embedding(Vec<usize>),
    /// Ids of tokens by module: "embed_tokens", "lm_head".
    ByModule(BTreeMap<String, Vec<usize>>),
}

impl TokenIndices {
    /// Returns the tokens of the table with this name.
    pub fn of(&self, table: &str) -> &[usize] {
        let path = table.strip_suffix(".weight").unwrap_or(table);
        match self {
            Self::Embedding(ids) if table == EMBEDDING => ids,
            Self::Embedding(_) => &[],
            Self::ByModule(modules) => {
                let named = modules.iter().find(|(name, _)| path.ends_with(name.as_str()));
                named.map_or(&[], |(_, ids)| ids)
            }
        }
    }

    /// Checks ids and modules against a model.
    ///
    /// # Errors
    /// A token or a table that the model does not have, a token named twice, a table all of whose rows train, and other rows of the head than of
    /// the embedding where they share a table.
    pub(crate) fn check(&self, spec: &ModelSpec, trains_whole: impl Fn(&str) -> bool) -> Result<(), ArchError> {
        let refused = |value: String, has: &str| {
            Err(ArchError::Unused { key: "trainable_token_indices", value, has: has.to_owned() })
        };
        if let Self::ByModule(modules) = self {
            let is_table =
                |name: &str| [EMBEDDING, HEAD].iter().any(|table| table.trim_end_matches(".weight").ends_with(name));
            if let Some(name) = modules.keys().find(|name| !is_table(name)) {
                return refused(name.clone(), "embed_tokens and lm_head");
            }
            if spec.tie_word_embeddings && modules.values().any(|ids| ids != self.of(EMBEDDING)) {
                let has = "one table for embedding and head: name the same tokens for both, or embed_tokens alone";
                return refused("lm_head".to_owned(), has);
            }
        }
        for table in [EMBEDDING, HEAD] {
            let mut ids = self.of(table).to_vec();
            ids.sort_unstable();
            if let Some(id) = ids.iter().find(|id| **id >= spec.vocab_size) {
                return refused(id.to_string(), &format!("tokens 0 to {}", spec.vocab_size - 1));
            }
            if let Some(pair) = ids.windows(2).find(|pair| pair[0] == pair[1]) {
                return refused(pair[1].to_string(), "one row per token: name each once");
            }
            if !ids.is_empty() && trains_whole(table) {
                return refused(table.to_owned(), "it in modules_to_save already, which trains all rows");
            }
        }
        Ok(())
    }
}

/// Splits ids into runs of neighbors, in their order.
pub fn token_runs(ids: &[usize]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for &id in ids {
        match runs.last_mut() {
            Some(run) if run.end == id => run.end += 1,
            _ => runs.push(id..id + 1),
        }
    }
    runs
}

#[cfg(test)]
pub(crate) mod tests {
    use serde_json::{from_value, json};

    use super::*;
    use crate::config::tests::tiny;
    use crate::lora::LoraConfig;
    use crate::tensor_spec::Role;

    pub(crate) fn lora(indices: serde_json::Value) -> LoraConfig {
        LoraConfig { trainable_token_indices: Some(from_value(indices).unwrap()), ..LoraConfig::default() }
    }

    #[test]
    fn rows_follow_the_adapter_under_pefts_names_and_a_tied_head_shares_them() {
        let spec = tiny(&[]).unwrap().spec;
        let names = |lora: &LoraConfig, spec: &ModelSpec| -> Vec<(String, Vec<usize>)> {
            let rows = spec.adapter_tensors(lora).unwrap().into_iter().filter(|tensor| tensor.role == Role::TokenRows);
            rows.map(|tensor| (tensor.name, tensor.shape)).collect()
        };
        let embedding = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta".to_owned();
        let head = "base_model.model.lm_head.token_adapter.trainable_tokens_delta".to_owned();
        assert_eq!(names(&lora(json!([9, 3])), &spec), [(embedding.clone(), vec![2, 8])]);
        let both = lora(json!({"embed_tokens": [1], "lm_head": [1]}));
        assert_eq!(names(&both, &spec), [(embedding.clone(), vec![1, 8]), (head, vec![1, 8])]);
        let tied = tiny(&[("tie_word_embeddings", true.into())]).unwrap().spec;
        assert_eq!(names(&both, &tied), [(embedding, vec![1, 8])]);
    }

    #[test]
    fn ids_that_are_not_there_twice_there_or_of_another_table_are_refused() {
        let spec = tiny(&[]).unwrap().spec;
        let tied = tiny(&[("tie_word_embeddings", true.into())]).unwrap().spec;
        let error = |lora: LoraConfig, spec: &ModelSpec| spec.adapter_tensors(&lora).unwrap_err().to_string();
        assert!(error(lora(json!([11])), &spec).contains("tokens 0 to 10"));
        assert!(error(lora(json!([3, 1, 3])), &spec).contains("`3`"));
        assert!(error(lora(json!({"q_proj": [1]})), &spec).contains("embed_tokens and lm_head"));
        assert!(error(lora(json!({"lm_head": [1]})), &tied).contains("one table"));
        let whole = LoraConfig { modules_to_save: Some(vec!["embed_tokens".to_owned()]), ..lora(json!([1])) };
        assert!(error(whole, &spec).contains("modules_to_save"));
    }

    #[test]
    fn runs_are_neighbors_in_the_order_of_the_list() {
        assert_eq!(token_runs(&[5, 6, 7, 2, 4, 3]), [5..8, 2..3, 4..5, 3..4]);
        assert!(token_runs(&[]).is_empty());
    }
}
