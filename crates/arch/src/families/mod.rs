//! Model families: each family file reads one family's `config.json` into a [`ModelSpec`], top to bottom.
//!
//! [`FAMILIES`] is the registry: a family is one file and one line here. What a family cannot express in a [`ModelSpec`] it refuses by
//! the key that asks for it, never computes approximately.
//! Trade-off: a checkpoint is recognized by `architectures` and `model_type` alone, so a model that is the same under another name
//! must be renamed in its config.json.

mod keys;
mod llama;
mod mistral;
mod qwen2;
mod qwen3;
mod recognize;
mod rope_keys;

pub use recognize::family_of;

use crate::error::ArchError;
use crate::json::JsonObject;
use crate::spec::ModelSpec;

/// Reads a family's keys into a spec.
type ReadSpec = fn(&JsonObject) -> Result<ModelSpec, ArchError>;

/// A model family: its names in `config.json`, and how the rest is read.
#[derive(Clone, Copy, Debug)]
pub struct Family {
    /// The name in `architectures`, such as "LlamaForCausalLM".
    pub architecture: &'static str,
    /// The name in `model_type`, such as "llama".
    pub model_type: &'static str,
    read_spec: ReadSpec,
}

/// Every family.
pub const FAMILIES: [Family; 4] = [
    Family { architecture: "LlamaForCausalLM", model_type: "llama", read_spec: llama::spec },
    Family { architecture: "MistralForCausalLM", model_type: "mistral", read_spec: mistral::spec },
    Family { architecture: "Qwen2ForCausalLM", model_type: "qwen2", read_spec: qwen2::spec },
    Family { architecture: "Qwen3ForCausalLM", model_type: "qwen3", read_spec: qwen3::spec },
];

impl Family {
    /// Reads a `config.json` of this family.
    ///
    /// # Errors
    /// Missing or ill-typed keys, sizes that contradict each other, and features without arithmetic here.
    pub fn spec(&self, json: &JsonObject) -> Result<ModelSpec, ArchError> {
        (self.read_spec)(json)
    }
}
