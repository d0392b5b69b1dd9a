//! Model families: each family file reads one family's `config.json` into a [`ModelSpec`], top to bottom.
//!
//! [`FAMILIES`] is the registry: a family is one file and one line here. A family refuses what a [`ModelSpec`] cannot express, naming the key, and
//! never approximates it.
//! Trade-off: checkpoints are recognized by `architectures` and `model_type` alone; an identical model with another name must be renamed there.

mod gemma;
mod gemma2;
mod gemma3;
mod gemma4;
mod glm;
mod glm4;
mod glm4_moe;
mod gpt_oss;
mod granite;
mod keys;
mod lfm2;
mod lfm3;
mod llama;
mod ministral3;
mod mistral;
mod mixtral;
mod olmo2;
mod olmo3;
mod olmo_hybrid;
mod phi3;
mod published;
mod qwen2;
mod qwen2_moe;
mod qwen3;
mod qwen3_5;
mod qwen3_moe;
mod recognize;
mod smollm3;
pub(crate) mod wrapper;

pub use published::PUBLISHED;
pub use recognize::family_of;
use recognize::refuse_foreign_keys;
pub use wrapper::{WRAPPERS, Wrapper};

use crate::error::ArchError;
use crate::json::JsonObject;
use crate::spec::ModelSpec;

/// Reads a family's keys into a spec.
type ReadSpec = fn(&JsonObject) -> Result<ModelSpec, ArchError>;

/// A model family: its names in `config.json`, and the function that reads the rest.
#[derive(Clone, Copy, Debug)]
pub struct Family {
    /// The name in `architectures`, such as "LlamaForCausalLM".
    pub architecture: &'static str,
    /// The name in `model_type`, such as "llama".
    pub model_type: &'static str,
    /// The keys for uncommon arithmetic that this family reads.
    special_keys: &'static [&'static str],
    read_spec: ReadSpec,
}

const fn family(architecture: &'static str, model_type: &'static str, read_spec: ReadSpec) -> Family {
    Family { architecture, model_type, special_keys: &[], read_spec }
}

/// Every family.
pub const FAMILIES: [Family; 29] = [
    family("GemmaForCausalLM", "gemma", gemma::spec),
    Family {
        special_keys: &["attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"],
        ..family("Gemma2ForCausalLM", "gemma2", gemma2::spec)
    },
    Family {
        special_keys: &["final_logit_softcapping", "query_pre_attn_scalar"],
        ..family("Gemma3ForCausalLM", "gemma3_text", gemma3::spec)
    },
    Family {
        special_keys: &["final_logit_softcapping", "use_bidirectional_attention", "num_experts"],
        ..family("Gemma4ForCausalLM", "gemma4_text", gemma4::spec)
    },
    Family {
        special_keys: &["final_logit_softcapping", "use_bidirectional_attention"],
        ..family("Gemma4UnifiedForCausalLM", "gemma4_unified_text", gemma4::unified_spec)
    },
    Family { special_keys: &["partial_rotary_factor"], ..family("GlmForCausalLM", "glm", glm::spec) },
    Family { special_keys: &["partial_rotary_factor"], ..family("Glm4ForCausalLM", "glm4", glm4::spec) },
    Family {
        special_keys: &["partial_rotary_factor", "n_routed_experts", "num_local_experts"],
        ..family("Glm4MoeForCausalLM", "glm4_moe", glm4_moe::spec)
    },
    Family {
        special_keys: &["num_local_experts", "num_experts"],
        ..family("GptOssForCausalLM", "gpt_oss", gpt_oss::spec)
    },
    Family {
        special_keys: &["attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"],
        ..family("GraniteForCausalLM", "granite", granite::spec)
    },
    family("Lfm2ForCausalLM", "lfm2", lfm2::spec),
    Family {
        special_keys: &["num_local_experts", "num_experts"],
        ..family("Lfm2MoeForCausalLM", "lfm2_moe", lfm2::moe_spec)
    },
    family("Lfm3ForCausalLM", "lfm3", lfm3::spec),
    family("LlamaForCausalLM", "llama", llama::spec),
    family("Ministral3ForCausalLM", "ministral3", ministral3::spec),
    family("MistralForCausalLM", "mistral", mistral::spec),
    Family {
        special_keys: &["num_local_experts", "num_experts"],
        ..family("MixtralForCausalLM", "mixtral", mixtral::spec)
    },
    family("Olmo2ForCausalLM", "olmo2", olmo2::spec),
    family("Olmo3ForCausalLM", "olmo3", olmo3::spec),
    family("OlmoHybridForCausalLM", "olmo_hybrid", olmo_hybrid::spec),
    Family { special_keys: &["partial_rotary_factor"], ..family("Phi3ForCausalLM", "phi3", phi3::spec) },
    family("Qwen2ForCausalLM", "qwen2", qwen2::spec),
    Family {
        special_keys: &["num_local_experts", "num_experts"],
        ..family("Qwen2MoeForCausalLM", "qwen2_moe", qwen2_moe::spec)
    },
    family("Qwen3ForCausalLM", "qwen3", qwen3::spec),
    Family {
        special_keys: &["num_local_experts", "num_experts"],
        ..family("Qwen3MoeForCausalLM", "qwen3_moe", qwen3_moe::spec)
    },
    Family { special_keys: &["partial_rotary_factor"], ..family("Qwen3_5ForCausalLM", "qwen3_5_text", qwen3_5::spec) },
    Family {
        special_keys: &["partial_rotary_factor", "num_local_experts", "num_experts"],
        ..family("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", qwen3_5::moe_spec)
    },
    Family {
        special_keys: &["partial_rotary_factor", "num_local_experts", "num_experts"],
        ..family("Qwen3NextForCausalLM", "qwen3_next", qwen3_5::next_spec)
    },
    family("SmolLM3ForCausalLM", "smollm3", smollm3::spec),
];

impl Family {
    /// Reads a `config.json` of this family.
    ///
    /// # Errors
    /// Missing or ill-typed keys, sizes that contradict each other, and features without arithmetic here.
    pub fn spec(&self, json: &JsonObject) -> Result<ModelSpec, ArchError> {
        refuse_foreign_keys(json, self)?;
        if self.model_type != "gpt_oss" {
            keys::refuse_quantized(json)?;
        }
        (self.read_spec)(json)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use serde_json::Value;

    use super::FAMILIES;
    use crate::config::ModelConfig;
    use crate::config::tests::{family_json, parse};

    /// Reads a tiny model of a family with some keys replaced.
    pub(crate) fn read(model_type: &str, changes: Value) -> ModelConfig {
        let family = FAMILIES.iter().find(|family| family.model_type == model_type).unwrap();
        let changes: Vec<_> = changes.as_object().unwrap().iter().map(|(key, value)| (&**key, value.clone())).collect();
        parse(&family_json(family.architecture, model_type, &changes)).unwrap()
    }
}
