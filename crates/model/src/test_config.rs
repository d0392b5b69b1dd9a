//! A tiny model's description for unit tests.

use std::path::Path;

use firebrick_arch::{ArchError, ModelConfig};
use serde_json::{Value, json, to_string_pretty};

/// A tiny Llama's `config.json` with some keys replaced; a null removes the key.
pub(crate) fn tiny(changes: &[(&str, Value)]) -> Result<ModelConfig, ArchError> {
    let mut value = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "vocab_size": 11, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "max_position_embeddings": 64, "tie_word_embeddings": false, "bos_token_id": 1, "eos_token_id": 2,
        "torch_dtype": "float32"
    });
    for (key, change) in changes {
        value[*key] = change.clone();
    }
    value.as_object_mut().expect("an object").retain(|_, value| !value.is_null());
    ModelConfig::parse(&to_string_pretty(&value).expect("JSON prints"), Path::new("m/config.json"))
}

/// Name and shape of every tensor, in the order of the forward pass.
pub(crate) fn shapes(config: &ModelConfig) -> Vec<(String, Vec<usize>)> {
    config.spec.tensors().into_iter().map(|tensor| (tensor.name, tensor.shape)).collect()
}
