//! Published sizes of well-known models, for benchmarks, memory estimates and documentation.
//!
//! Trade-off: constants instead of files, so only values that decide arithmetic and memory are here; a run reads the model's config.json.

use crate::mixer::{AttentionSpec, Mixer, QkNorm};
use crate::naming::Naming;
use crate::rope::{Rope, RopeScaling};
use crate::spec::{Activation, LayerNorms, LayerSpec, MlpSpec, ModelSpec};

/// Describes Llama 3.1 8B: the config.json of <https://huggingface.co/meta-llama/Llama-3.1-8B>.
pub fn llama_3_1_8b() -> ModelSpec {
    let rope = Rope::new(500_000.0, llama3_scaling(8.0), 128);
    spec([128_256, 4096, 14_336, 32, 131_072], false, rope, 1e-5)
}

/// Describes Llama 3.2 1B: the config.json of <https://huggingface.co/meta-llama/Llama-3.2-1B>.
pub fn llama_3_2_1b() -> ModelSpec {
    let rope = Rope::new(500_000.0, llama3_scaling(32.0), 64);
    spec([128_256, 2048, 8192, 16, 131_072], true, rope, 1e-5)
}

/// Describes Qwen3 8B: the config.json of <https://huggingface.co/Qwen/Qwen3-8B>.
pub fn qwen3_8b() -> ModelSpec {
    let rope = Rope::new(1_000_000.0, RopeScaling::Default, 128);
    let mut spec = spec([151_936, 4096, 12_288, 36, 40_960], false, rope, 1e-6);
    spec.attentions_mut().for_each(|attention| attention.qk_norm = QkNorm::PerHead);
    spec
}

fn llama3_scaling(factor: f64) -> RopeScaling {
    RopeScaling::Llama3 { factor, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_position_embeddings: 8192 }
}

/// Builds a model of 32 query heads and 8 key heads with these sizes: vocabulary, hidden size, MLP width, layers, context.
fn spec(sizes: [usize; 5], tie_word_embeddings: bool, rope: Rope, rms_norm_eps: f64) -> ModelSpec {
    let [vocab_size, hidden_size, intermediate_size, layers, max_position_embeddings] = sizes;
    let attention = AttentionSpec::new(32, 8, rope.rotary_dim);
    let mlp = MlpSpec::Gated { intermediate_size, activation: Activation::Silu, fused: false, bias: false };
    let layer = LayerSpec { mixer: Mixer::Attention(attention), mlp, norms: LayerNorms::Pre, has_scalar: false };
    ModelSpec {
        vocab_size,
        hidden_size,
        layers: vec![layer; layers],
        ropes: vec![rope],
        rms_norm_eps,
        norm_offset: 0.0,
        naming: Naming::Llama,
        embedding_scale: None,
        rounds_embedding_scale: true,
        logits_scaling: 1.0,
        logit_soft_cap: None,
        tie_word_embeddings,
        max_position_embeddings,
        initializer_range: 0.02,
        per_layer_inputs: None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::config::tests::{family_json, parse};

    fn from_json(architecture: &str, model_type: &str, sizes: [usize; 5], more: &[(&str, Value)]) -> ModelSpec {
        let keys = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings"];
        let sizes: Vec<_> = keys.into_iter().zip(sizes.map(|size| json!(size))).collect();
        let heads = [("num_attention_heads", json!(32)), ("num_key_value_heads", json!(8))];
        parse(&family_json(architecture, model_type, &[&sizes[..], &heads, more].concat())).unwrap().spec
    }

    fn llama3(factor: f64) -> (&'static str, Value) {
        let scaling = json!({
            "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3"
        });
        ("rope_scaling", scaling)
    }

    #[test]
    fn shapes_equal_what_their_config_json_parses_to() {
        let llama = |sizes, more: &[_]| from_json("LlamaForCausalLM", "llama", sizes, more);
        let theta = ("rope_theta", json!(500_000.0));
        let sizes = [128_256, 4096, 14_336, 32, 131_072];
        assert_eq!(llama_3_1_8b(), llama(sizes, &[theta.clone(), llama3(8.0)]));
        let tied = ("tie_word_embeddings", json!(true));
        let sizes = [128_256, 2048, 8192, 16, 131_072];
        assert_eq!(llama_3_2_1b(), llama(sizes, &[theta, llama3(32.0), tied, ("head_dim", json!(64))]));
        let more = [("rope_theta", json!(1_000_000)), ("rms_norm_eps", json!(1e-6)), ("head_dim", json!(128))];
        assert_eq!(qwen3_8b(), from_json("Qwen3ForCausalLM", "qwen3", [151_936, 4096, 12_288, 36, 40_960], &more));
    }
}
