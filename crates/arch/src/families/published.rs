//! Published models of each family, under the names and sizes that users know: what docs/models.md lists.
//!
//! Trade-off: written by hand from the models' config.json files. A name says that the family reads the model's config.json, not that every one of
//! them was run here.

#[cfg(test)]
use super::FAMILIES;

/// The `model_type` of each family, and its models.
pub const PUBLISHED: [(&str, &str); 29] = [
    ("gemma", "Gemma 2B, 7B; CodeGemma 2B, 7B"),
    ("gemma2", "Gemma 2 2B, 9B, 27B"),
    ("gemma3_text", "Gemma 3 270M, 1B; Gemma 3 4B, 12B, 27B: text"),
    ("gemma4_text", "Gemma 4 E2B, E4B, 26B-A4B, 31B: text"),
    ("gemma4_unified_text", "Gemma 4 12B: text"),
    ("glm", "GLM-4 9B of 2024 (repositories in -hf)"),
    ("glm4", "GLM-4 and GLM-Z1 9B, 32B (0414)"),
    ("glm4_moe", "GLM-4.5 and 4.6 355B-A32B; GLM-4.5-Air 106B-A12B"),
    ("gpt_oss", "gpt-oss 20B, 120B"),
    ("granite", "Granite 3.0 to 3.3 2B, 8B"),
    ("lfm2", "LFM2 350M, 700M, 1.2B, 2.6B; LFM2.5 350M, 1.2B"),
    ("lfm2_moe", "LFM2 8B-A1B; LFM2 24B-A2B"),
    ("lfm3", "LFM3 1.7B"),
    (
        "llama",
        "Llama 2 7B, 13B, 70B; Llama 3 and 3.1 8B, 70B, 405B; Llama 3.2 1B, 3B; Llama 3.3 70B; SmolLM2 135M, 360M, 1.7B; \
         TinyLlama 1.1B; DeepSeek-R1-Distill-Llama 8B, 70B",
    ),
    ("ministral3", "Devstral 2 123B; Ministral 3 3B, 8B, 14B and Devstral Small 2 24B: text"),
    (
        "mistral",
        "Mistral 7B; Ministral 8B (2410); Mistral NeMo 12B; Codestral 22B; Mistral Small 22B (2409), 24B (2501); Devstral and \
         Magistral Small 24B (2505 to 2507); Mistral Large 123B (2407, 2411); Mistral Small 3.1, 3.2 24B \
         and Magistral Small 24B (2509): text",
    ),
    ("mixtral", "Mixtral 8x7B, 8x22B"),
    ("olmo2", "OLMo 2 1B, 7B, 13B, 32B"),
    ("olmo3", "OLMo 3 7B, 32B; OLMo 3.1 32B"),
    ("phi3", "Phi-3 mini 3.8B, medium 14B; Phi-3.5 mini 3.8B; Phi-4 14B; Phi-4-mini 3.8B"),
    (
        "qwen2",
        "Qwen2 0.5B, 1.5B, 7B, 72B; Qwen2.5 and Qwen2.5-Coder 0.5B, 1.5B, 3B, 7B, 14B, 32B; Qwen2.5 72B; QwQ 32B; \
         DeepSeek-R1-Distill-Qwen 1.5B, 7B, 14B, 32B; Qwen2.5-VL 3B, 7B, 32B, 72B: text",
    ),
    ("qwen2_moe", "Qwen1.5-MoE A2.7B; Qwen2 57B-A14B"),
    ("qwen3", "Qwen3 0.6B, 1.7B, 4B, 8B, 14B, 32B; Qwen3-VL 2B, 4B, 8B, 32B: text"),
    ("qwen3_moe", "Qwen3 and Qwen3-Coder 30B-A3B; Qwen3 235B-A22B"),
    ("qwen3_5_text", "Qwen3.5 0.8B, 2B, 4B, 9B, 27B; Qwen3.6 and 3.8 27B: text"),
    ("qwen3_5_moe_text", "Qwen3.5 35B-A3B, 122B-A10B, 397B-A17B: text"),
    ("qwen3_next", "Qwen3-Next 80B-A3B"),
    ("olmo_hybrid", "OLMo Hybrid 7B"),
    ("smollm3", "SmolLM3 3B"),
];

#[test]
fn every_family_names_its_published_models_once() {
    let sorted = |mut names: Vec<&'static str>| {
        names.sort_unstable();
        names
    };
    let listed = sorted(PUBLISHED.iter().map(|(model_type, _)| *model_type).collect());
    let families = sorted(FAMILIES.iter().map(|family| family.model_type).collect());
    assert_eq!(listed, families, "PUBLISHED has a line for each family of the registry");
}
