//! A tiny model for unit tests: its description, its folder, and its build options.

use std::collections::BTreeMap;
use std::path::Path;

use burn_tensor::DType;
use firebrick_arch::{ArchError, ModelConfig};
use firebrick_kernels::BaseStorage;
use firebrick_precision::FloatType;
use half::{bf16, f16};
use safetensors::Dtype;
use serde_json::{Value, json, to_string_pretty};

use crate::checkpoint::write::companions::Companions;
use crate::checkpoint::{Fetched, write_hf_folder};
use crate::error::ModelError;
use crate::load::BuildOptions;

/// Returns a tiny Llama's `config.json` with some keys replaced; a null removes the key.
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

pub(crate) fn shapes(config: &ModelConfig) -> BTreeMap<String, Vec<usize>> {
    config.spec.tensors().into_iter().map(|tensor| (tensor.name, tensor.shape)).collect()
}

/// Writes a model folder whose weights all have this value.
pub(crate) fn write_folder_of(
    value: f32,
    dir: &Path,
    config: &ModelConfig,
    dtype: FloatType,
    companions: Option<&Companions>,
) -> Result<(), ModelError> {
    let shapes = shapes(config);
    let fetch = |name: &str| Ok(Fetched::Values(vec![value; shapes[name].iter().product()]));
    write_hf_folder(dir, config, dtype, companions, None, fetch)
}

/// Returns build options with every weight in f32.
pub(crate) fn build_options(storage: BaseStorage, max_positions: usize) -> BuildOptions {
    BuildOptions { seed: 3, ..BuildOptions::new(storage, DType::F32, max_positions) }
}

pub(crate) fn encode(values: &[f32], dtype: Dtype) -> Vec<u8> {
    match dtype {
        Dtype::F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        Dtype::BF16 => values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes()).collect(),
    }
}
