//! The models whose sizes the matrix uses, as the `config.json` in their folders.
//!
//! Sizes of SmolLM2 135M and 360M, Llama 3.2 1B and Llama 3.1 8B, from their config.json files on the Hub.
//! Trade-off: a model that is too large for the time of a run is cut after some layers, and its name says so.

use std::path::Path;

use firebrick_arch::{AttentionSpec, ModelConfig};
use serde_json::json;

/// A decoder of Llama's shape.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Model {
    name: &'static str,
    pub(crate) hidden: usize,
    pub(crate) intermediate: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) vocab: usize,
    tied: bool,
    theta: f64,
    all_layers: usize,
    /// Layers that are used.
    pub(crate) layers: usize,
}

/// Creates a model from its name, `[hidden, intermediate, heads, kv_heads, head_dim, layers]`, vocabulary, whether the head is tied to the embedding,
/// and the base of its rotation.
const fn model(name: &'static str, sizes: [usize; 6], vocab: usize, tied: bool, theta: f64) -> Model {
    let [hidden, intermediate, heads, kv_heads, head_dim, layers] = sizes;
    let all_layers = layers;
    Model { name, hidden, intermediate, heads, kv_heads, head_dim, vocab, tied, theta, all_layers, layers }
}

pub(crate) const SMOLLM2_135M: Model = model("smollm2-135m", [576, 1536, 9, 3, 64, 30], 49_152, true, 1e5);
pub(crate) const SMOLLM2_360M: Model = model("smollm2-360m", [960, 2560, 15, 5, 64, 32], 49_152, true, 1e5);
pub(crate) const LLAMA_1B: Model = model("llama-3.2-1b", [2048, 8192, 32, 8, 64, 16], 128_256, true, 5e5);
pub(crate) const LLAMA_8B: Model = model("llama-3.1-8b", [4096, 14_336, 32, 8, 128, 32], 128_256, false, 5e5);

/// A linear group of a layer: its name, and `[inputs, outputs]`.
pub(crate) type GroupShape = (&'static str, [usize; 2]);

impl Model {
    /// Cuts the model to its first layers.
    pub(crate) const fn first_layers(self, layers: usize) -> Self {
        Self { layers, ..self }
    }

    /// Returns its name, with the number of layers if not all are used.
    pub(crate) fn name(&self) -> String {
        let Self { name, layers, all_layers, .. } = *self;
        if layers == all_layers { name.to_owned() } else { format!("{name} ({layers} of {all_layers} layers)") }
    }

    /// Returns the four GEMMs of a layer.
    pub(crate) fn groups(&self) -> [GroupShape; 4] {
        let (query, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        [
            ("qkv", [self.hidden, query + 2 * kv]),
            ("o", [query, self.hidden]),
            ("gate_up", [self.hidden, 2 * self.intermediate]),
            ("down", [self.intermediate, self.hidden]),
        ]
    }

    /// Describes the attention of a layer.
    pub(crate) fn attention(&self) -> AttentionSpec {
        self.config().spec.attentions().next().expect("every layer has attention").clone()
    }

    /// Counts the parameters of the layers in use, embedding and head.
    pub(crate) fn parameters(&self) -> u64 {
        self.config().spec.parameters()
    }

    /// Returns the description that its model folder would give.
    pub(crate) fn config(&self) -> ModelConfig {
        ModelConfig::parse(&self.config_json(), Path::new("config.json")).expect("a config.json of ours parses")
    }

    /// Returns the text of `config.json`, for a folder or for another program.
    pub(crate) fn config_json(&self) -> String {
        let config = json!({
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": false,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": 131_072,
            "mlp_bias": false,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": 1e-5,
            "rope_theta": self.theta,
            "tie_word_embeddings": self.tied,
            "vocab_size": self.vocab,
        });
        config.to_string()
    }
}

#[cfg(test)]
mod tests {
    use firebrick_arch::shapes::{llama_3_1_8b, llama_3_2_1b};

    use super::*;

    #[test]
    fn sizes_are_those_of_the_published_models() {
        for (model, spec) in [(LLAMA_1B, llama_3_2_1b()), (LLAMA_8B, llama_3_1_8b())] {
            assert_eq!(model.parameters(), spec.parameters(), "{}", model.name());
            let groups: Vec<_> = spec.groups(0).iter().map(|group| [group.in_features, group.out_features()]).collect();
            assert_eq!(model.groups().map(|(_, shape)| shape)[..], groups, "{}", model.name());
            assert_eq!(model.attention().scale, spec.attentions().next().unwrap().scale);
        }
        assert_eq!(SMOLLM2_135M.parameters(), 134_515_008);
        assert_eq!(SMOLLM2_360M.parameters(), 361_821_120);
    }

    #[test]
    fn a_model_that_is_cut_says_so() {
        assert_eq!(LLAMA_8B.name(), "llama-3.1-8b");
        assert_eq!(LLAMA_8B.first_layers(4).name(), "llama-3.1-8b (4 of 32 layers)");
        assert_eq!(LLAMA_8B.first_layers(4).config().spec.layers.len(), 4);
    }
}
