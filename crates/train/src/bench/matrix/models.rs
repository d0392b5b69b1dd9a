//! The models whose sizes the matrix uses, as the `config.json` that a folder of theirs has.
//!
//! Sizes of SmolLM2 135M and 360M, Llama 3.2 1B and Llama 3.1 8B, from their config.json files on the Hub.
//! Trade-off: a model that is too large for the time of a run is cut after some layers, and its name says so.

use std::path::Path;

use firebrick_arch::{ArchError, AttentionSpec, ModelConfig};
use serde_json::json;

/// A decoder of Llama's shape.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Model {
    name: &'static str,
    pub hidden: usize,
    pub intermediate: usize,
    all_layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub vocab: usize,
    tied: bool,
    theta: f64,
    /// Layers that are used.
    pub layers: usize,
}

pub(super) const SMOLLM2_135M: Model = Model {
    name: "smollm2-135m",
    hidden: 576,
    intermediate: 1536,
    all_layers: 30,
    heads: 9,
    kv_heads: 3,
    head_dim: 64,
    vocab: 49_152,
    tied: true,
    theta: 100_000.0,
    layers: 30,
};

pub(super) const SMOLLM2_360M: Model = Model {
    name: "smollm2-360m",
    hidden: 960,
    intermediate: 2560,
    all_layers: 32,
    heads: 15,
    kv_heads: 5,
    head_dim: 64,
    vocab: 49_152,
    tied: true,
    theta: 100_000.0,
    layers: 32,
};

pub(super) const LLAMA_1B: Model = Model {
    name: "llama-3.2-1b",
    hidden: 2048,
    intermediate: 8192,
    all_layers: 16,
    heads: 32,
    kv_heads: 8,
    head_dim: 64,
    vocab: 128_256,
    tied: true,
    theta: 500_000.0,
    layers: 16,
};

pub(super) const LLAMA_8B: Model = Model {
    name: "llama-3.1-8b",
    hidden: 4096,
    intermediate: 14_336,
    all_layers: 32,
    heads: 32,
    kv_heads: 8,
    head_dim: 128,
    vocab: 128_256,
    tied: false,
    theta: 500_000.0,
    layers: 32,
};

/// A linear group of a layer: its name, and `[inputs, outputs]`.
pub(super) type GroupShape = (&'static str, [usize; 2]);

impl Model {
    /// The same model with fewer layers.
    pub(super) const fn first_layers(self, layers: usize) -> Self {
        Self { layers, ..self }
    }

    /// Its name, with the layers where not all are used.
    pub(super) fn name(&self) -> String {
        let Self { name, layers, all_layers, .. } = *self;
        if layers == all_layers { name.to_owned() } else { format!("{name} ({layers} of {all_layers} layers)") }
    }

    /// The four GEMMs of a layer.
    pub(super) fn groups(&self) -> [GroupShape; 4] {
        let (query, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        [
            ("qkv", [self.hidden, query + 2 * kv]),
            ("o", [query, self.hidden]),
            ("gate_up", [self.hidden, 2 * self.intermediate]),
            ("down", [self.intermediate, self.hidden]),
        ]
    }

    /// Attention of a layer.
    pub(super) fn attention(&self) -> AttentionSpec {
        self.config().expect("a config.json of ours parses").spec.layers[0].attention.clone()
    }

    /// Parameters of the layers that are used, embedding and head.
    pub(super) fn parameters(&self) -> u64 {
        self.config().expect("a config.json of ours parses").spec.parameters()
    }

    /// The description that a model folder would give.
    ///
    /// # Errors
    /// None that a test of this file would not find.
    pub(super) fn config(&self) -> Result<ModelConfig, ArchError> {
        ModelConfig::parse(&self.config_json(), Path::new("config.json"))
    }

    /// The text of `config.json`, for a folder or for another program.
    pub(super) fn config_json(&self) -> String {
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
            assert_eq!(model.attention().scale, spec.layers[0].attention.scale);
        }
        assert_eq!(SMOLLM2_135M.parameters(), 134_515_008);
        assert_eq!(SMOLLM2_360M.parameters(), 361_821_120);
    }

    #[test]
    fn a_model_that_is_cut_says_so() {
        assert_eq!(LLAMA_8B.name(), "llama-3.1-8b");
        assert_eq!(LLAMA_8B.first_layers(4).name(), "llama-3.1-8b (4 of 32 layers)");
        assert_eq!(LLAMA_8B.first_layers(4).config().unwrap().spec.layers.len(), 4);
    }
}
