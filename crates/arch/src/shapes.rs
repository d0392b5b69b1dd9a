//! Published sizes of well-known models, for benchmarks, memory estimates and documentation.
//!
//! Trade-off: `shapes/*.json` have only the keys that decide arithmetic and memory; a run reads the model's own config.json.

use std::path::Path;

use crate::config::ModelConfig;
use crate::spec::ModelSpec;

/// Describes Llama 3.1 8B: the config.json of <https://huggingface.co/meta-llama/Llama-3.1-8B>.
pub fn llama_3_1_8b() -> ModelSpec {
    spec(include_str!("shapes/llama-3.1-8b.json"))
}

/// Describes Llama 3.2 1B: the config.json of <https://huggingface.co/meta-llama/Llama-3.2-1B>.
pub fn llama_3_2_1b() -> ModelSpec {
    spec(include_str!("shapes/llama-3.2-1b.json"))
}

/// Describes Qwen3 8B: the config.json of <https://huggingface.co/Qwen/Qwen3-8B>.
pub fn qwen3_8b() -> ModelSpec {
    spec(include_str!("shapes/qwen3-8b.json"))
}

fn spec(config: &str) -> ModelSpec {
    // Invariant: the files are part of the program, and a test counts the parameters of each.
    ModelConfig::parse(config, Path::new("config.json")).expect("it is a config.json").spec
}
