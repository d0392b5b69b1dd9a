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

const fn family(
    architecture: &'static str,
    model_type: &'static str,
    special_keys: &'static [&'static str],
    read_spec: ReadSpec,
) -> Family {
    Family { architecture, model_type, special_keys, read_spec }
}

/// The special keys of a family with experts.
const EXPERTS: &[&str] = &["num_local_experts", "num_experts"];
/// Those of a family that rotates a part of each head.
const PARTIAL: &[&str] = &["partial_rotary_factor"];
/// Those of a family with both.
const PARTIAL_EXPERTS: &[&str] = &["partial_rotary_factor", "num_local_experts", "num_experts"];
const GEMMA2: &[&str] = &["attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"];
const GEMMA3: &[&str] = &["final_logit_softcapping", "query_pre_attn_scalar"];
const GEMMA4: &[&str] = &["final_logit_softcapping", "use_bidirectional_attention", "num_experts"];
const GEMMA4_UNIFIED: &[&str] = &["final_logit_softcapping", "use_bidirectional_attention"];
const GLM4_MOE: &[&str] = &["partial_rotary_factor", "n_routed_experts", "num_local_experts"];
const GRANITE: &[&str] = &["attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"];

/// Every family.
pub const FAMILIES: [Family; 29] = [
    family("GemmaForCausalLM", "gemma", &[], gemma::spec),
    family("Gemma2ForCausalLM", "gemma2", GEMMA2, gemma2::spec),
    family("Gemma3ForCausalLM", "gemma3_text", GEMMA3, gemma3::spec),
    family("Gemma4ForCausalLM", "gemma4_text", GEMMA4, gemma4::spec),
    family("Gemma4UnifiedForCausalLM", "gemma4_unified_text", GEMMA4_UNIFIED, gemma4::unified_spec),
    family("GlmForCausalLM", "glm", PARTIAL, glm::spec),
    family("Glm4ForCausalLM", "glm4", PARTIAL, glm4::spec),
    family("Glm4MoeForCausalLM", "glm4_moe", GLM4_MOE, glm4_moe::spec),
    family("GptOssForCausalLM", "gpt_oss", EXPERTS, gpt_oss::spec),
    family("GraniteForCausalLM", "granite", GRANITE, granite::spec),
    family("Lfm2ForCausalLM", "lfm2", &[], lfm2::spec),
    family("Lfm2MoeForCausalLM", "lfm2_moe", EXPERTS, lfm2::moe_spec),
    family("Lfm3ForCausalLM", "lfm3", &[], lfm3::spec),
    family("LlamaForCausalLM", "llama", &[], llama::spec),
    family("Ministral3ForCausalLM", "ministral3", &[], ministral3::spec),
    family("MistralForCausalLM", "mistral", &[], mistral::spec),
    family("MixtralForCausalLM", "mixtral", EXPERTS, mixtral::spec),
    family("Olmo2ForCausalLM", "olmo2", &[], olmo2::spec),
    family("Olmo3ForCausalLM", "olmo3", &[], olmo3::spec),
    family("OlmoHybridForCausalLM", "olmo_hybrid", &[], olmo_hybrid::spec),
    family("Phi3ForCausalLM", "phi3", PARTIAL, phi3::spec),
    family("Qwen2ForCausalLM", "qwen2", &[], qwen2::spec),
    family("Qwen2MoeForCausalLM", "qwen2_moe", EXPERTS, qwen2_moe::spec),
    family("Qwen3ForCausalLM", "qwen3", &[], qwen3::spec),
    family("Qwen3MoeForCausalLM", "qwen3_moe", EXPERTS, qwen3_moe::spec),
    family("Qwen3_5ForCausalLM", "qwen3_5_text", PARTIAL, qwen3_5::spec),
    family("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", PARTIAL_EXPERTS, qwen3_5::moe_spec),
    family("Qwen3NextForCausalLM", "qwen3_next", PARTIAL_EXPERTS, qwen3_5::next_spec),
    family("SmolLM3ForCausalLM", "smollm3", &[], smollm3::spec),
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
