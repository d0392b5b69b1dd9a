//! Compares a folder's tensors with the model's description before any weight is read.

use std::collections::BTreeSet;

use firebrick_arch::{HEAD, ModelConfig, TensorSpec};
use firebrick_precision::QuantFormat;

use crate::checkpoint::read::HfFolder;
use crate::error::ModelError;

/// A buffer in old checkpoints; here it is computed from config.json instead.
pub(crate) const OLD_BUFFER: &str = "rotary_emb.inv_freq";

impl HfFolder {
    /// Compares the folder's tensors with those that config.json describes.
    ///
    /// # Errors
    /// One error for all tensors that are missing, wrongly shaped, or not part of the model: a bias or a quantization constant that was
    /// ignored would change the numbers. The `lm_head.weight` of a tied model and the `rotary_emb.inv_freq` of old checkpoints
    /// are not read, nor are layers that predict more tokens than the next ([`HfFolder::read_config`] compares or names them), nor keys and values of
    /// layers that read another's; other parts than the text model have a place if config.json describes a checkpoint with such parts.
    pub fn check_complete(&self, config: &ModelConfig) -> Result<(), ModelError> {
        let expected = config.stored_spec().tensors();
        let mut problems = Vec::new();
        for TensorSpec { name, shape, .. } in &expected {
            if !self.contains(name) {
                let hint = "; if the model shares its embedding, set tie_word_embeddings to true in config.json";
                problems.push(format!("`{name}` is missing{}", if name == HEAD { hint } else { "" }));
                continue;
            }
            if config.spec.is_mxfp4(name) && self.stored_format(name) != Some(QuantFormat::Mxfp4) {
                problems.push(format!("`{name}` is not stored in mxfp4, as quantization_config says; remove that key"));
            }
            let got = self.info(name)?.shape;
            if got != *shape {
                problems.push(format!("`{name}` has shape {got:?}, but {} require {shape:?}", deciding_keys(name)));
            }
        }
        let known = expected.iter().map(|tensor| tensor.name.as_str()).collect::<BTreeSet<_>>();
        let is_ignored = |name: &str| {
            name == HEAD || name.ends_with(OLD_BUFFER) || config.skips(name) || config.spec.is_ignored(name)
        };
        let unknown = self.names().filter(|name| !known.contains(name) && !is_ignored(name));
        let unknown = unknown.chain(self.other_parts().filter(|_| config.wrapper.is_none()));
        problems.extend(unknown.map(|name| format!("`{name}` is there, but config.json has no place for it")));
        if problems.is_empty() {
            Ok(())
        } else {
            Err(ModelError::DoesNotFit { dir: self.dir().to_path_buf(), problems })
        }
    }
}

/// Returns the keys of config.json that decide a tensor's shape.
pub(crate) fn deciding_keys(name: &str) -> &'static str {
    let module = name.trim_end_matches(".weight").trim_end_matches(".bias");
    match module.rsplit('.').next() {
        Some("embed_tokens" | "lm_head") => "vocab_size and hidden_size",
        Some("embed_tokens_per_layer") => {
            "vocab_size_per_layer_input, hidden_size_per_layer_input and num_hidden_layers"
        }
        Some("per_layer_model_projection") => "hidden_size_per_layer_input, num_hidden_layers and hidden_size",
        Some("per_layer_input_gate" | "per_layer_projection" | "per_layer_projection_norm") => {
            "hidden_size_per_layer_input and hidden_size"
        }
        Some("q_proj" | "o_proj") => "num_attention_heads x head_dim and hidden_size",
        Some("k_proj" | "v_proj") => "num_key_value_heads x head_dim and hidden_size",
        Some("q_norm" | "k_norm") => "head_dim and the number of heads",
        Some("qkv_proj") => "num_attention_heads, num_key_value_heads, head_dim and hidden_size",
        Some("gate_proj" | "up_proj" | "gate_up_proj" | "down_proj") => "intermediate_size and hidden_size",
        Some(name) if name == "norm" || name.ends_with("_layernorm") => "hidden_size and num_hidden_layers",
        _ => "the sizes",
    }
}
