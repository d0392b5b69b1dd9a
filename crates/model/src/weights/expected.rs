//! Which tensors a Llama has, by Hugging Face's names, and the comparison of a folder with that list.

use std::collections::BTreeSet;

use super::HfFolder;
use crate::config::{LlamaConfig, PROJECTIONS};
use crate::error::ModelError;

/// The token embedding, `[vocab_size, hidden_size]`.
const EMBEDDING: &str = "model.embed_tokens.weight";
/// The head, `[vocab_size, hidden_size]`; absent where it shares the embedding.
const HEAD: &str = "lm_head.weight";
/// A buffer that old checkpoints carry; it is computed from config.json instead.
const OLD_BUFFER: &str = "rotary_emb.inv_freq";

/// Name and shape of every tensor, in the order in which the model uses them.
pub fn expected_tensors(config: &LlamaConfig) -> Vec<(String, Vec<usize>)> {
    let (width, vocab) = (config.hidden_size, config.vocab_size);
    let mut tensors = vec![(EMBEDDING.to_owned(), vec![vocab, width])];
    for layer in 0..config.num_hidden_layers {
        let mut norm = |name: &str| tensors.push((format!("model.layers.{layer}.{name}.weight"), vec![width]));
        norm("input_layernorm");
        norm("post_attention_layernorm");
        for projection in PROJECTIONS {
            let name = format!("model.layers.{layer}.{projection}.weight");
            tensors.push((name, config.projection_shape(projection).to_vec()));
        }
    }
    tensors.push(("model.norm.weight".to_owned(), vec![width]));
    if !config.tie_word_embeddings {
        tensors.push((HEAD.to_owned(), vec![vocab, width]));
    }
    tensors
}

/// Number of weights; a shared embedding counts once.
pub fn parameter_count(config: &LlamaConfig) -> u64 {
    expected_tensors(config).iter().map(|(_, shape)| shape.iter().product::<usize>() as u64).sum()
}

impl HfFolder {
    /// Compares the folder's tensors with what config.json asks for, before any weight is read.
    ///
    /// # Errors
    /// One error for all tensors that are missing, wrongly shaped, or not part of the model: a bias or a quantisation
    /// constant that were passed over silently would change the numbers. An unused `lm_head.weight` of a tied model and
    /// the `rotary_emb.inv_freq` of old checkpoints are passed over.
    pub fn check_complete(&self, config: &LlamaConfig) -> Result<(), ModelError> {
        let expected = expected_tensors(config);
        let mut problems = Vec::new();
        for (name, shape) in &expected {
            if !self.contains(name) {
                let hint = "; if the model shares its embedding, set tie_word_embeddings to true in config.json";
                problems.push(format!("`{name}` is missing{}", if name == HEAD { hint } else { "" }));
                continue;
            }
            let got = self.info(name)?.shape;
            if got != *shape {
                problems.push(format!("`{name}` has shape {got:?}, but {} ask for {shape:?}", deciding_keys(name)));
            }
        }
        let known = expected.iter().map(|(name, _)| name.as_str()).collect::<BTreeSet<_>>();
        let unknown = self.names().filter(|name| !known.contains(name) && *name != HEAD && !name.ends_with(OLD_BUFFER));
        problems.extend(unknown.map(|name| format!("`{name}` is there, but config.json has no place for it")));
        if problems.is_empty() {
            Ok(())
        } else {
            Err(ModelError::DoesNotFit { dir: self.dir().to_path_buf(), problems })
        }
    }
}

/// The keys of config.json that decide a tensor's shape.
pub(super) fn deciding_keys(name: &str) -> &'static str {
    match name.trim_end_matches(".weight").rsplit('.').next() {
        Some("embed_tokens" | "lm_head") => "vocab_size and hidden_size",
        Some("q_proj" | "o_proj") => "num_attention_heads x head_dim and hidden_size",
        Some("k_proj" | "v_proj") => "num_key_value_heads x head_dim and hidden_size",
        Some("gate_proj" | "up_proj" | "down_proj") => "intermediate_size and hidden_size",
        Some("input_layernorm" | "post_attention_layernorm" | "norm") => "hidden_size and num_hidden_layers",
        _ => "the sizes",
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::config::tests::tiny;

    #[test]
    fn names_and_shapes_are_hugging_faces() {
        let tensors = expected_tensors(&tiny(&[]).unwrap());
        assert_eq!(tensors.len(), 1 + 2 * 9 + 1 + 1);
        assert_eq!(tensors[0], ("model.embed_tokens.weight".to_owned(), vec![11, 8]));
        assert_eq!(tensors[4], ("model.layers.0.self_attn.k_proj.weight".to_owned(), vec![4, 8]));
        assert_eq!(tensors[18], ("model.layers.1.mlp.down_proj.weight".to_owned(), vec![8, 12]));
        assert_eq!(tensors[20], ("lm_head.weight".to_owned(), vec![11, 8]));
    }

    #[test]
    fn llama_3_1_8b_has_8_030_261_248_parameters() {
        let sizes = [
            ("vocab_size", 128_256),
            ("hidden_size", 4096),
            ("intermediate_size", 14_336),
            ("num_hidden_layers", 32),
            ("num_attention_heads", 32),
            ("num_key_value_heads", 8),
        ];
        let config = tiny(&sizes.map(|(key, size)| (key, json!(size)))).unwrap();
        assert_eq!(parameter_count(&config), 8_030_261_248);
    }
}
