//! The types of files, and the type that each of a file's tensors is stored in.
//!
//! Norms, biases and routers stay in f32, and what projects the embedding to the layers' inputs has 16 bits at least. The k-quants are mixes, as
//! llama.cpp makes them: what matters most has more bits, which are values and the MLP's outputs of the first, the last and every third layer, and
//! the head. Where rows are no multiple of 256, a type with blocks of 32 stands in.

use std::fmt;
use std::str::FromStr;

use firebrick_arch::{MlpSpec, ModelConfig};

use super::blocks::GgmlType;

/// The type of a file: that of most of its matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GgufType {
    /// float32.
    F32,
    /// float16.
    F16,
    /// bfloat16.
    Bf16,
    /// 8 bits and a scale per 32 values.
    Q8_0,
    /// 4 bits and a scale per 32 values; embedding and head are `q8_0`.
    Q4_0,
    /// About 4.8 bits: `q4_k`, with `q6_k` where it matters most.
    Q4KM,
    /// About 5.7 bits: `q5_k`, with `q6_k` where it matters most.
    Q5KM,
    /// 6.6 bits: `q6_k`.
    Q6K,
}

impl GgufType {
    /// The types that are offered.
    pub const OFFERED: [Self; 8] =
        [Self::F32, Self::F16, Self::Bf16, Self::Q8_0, Self::Q6K, Self::Q5KM, Self::Q4KM, Self::Q4_0];

    /// Returns llama.cpp's name and number of the type, and the type of most matrices.
    const fn known_as(self) -> (&'static str, u32, GgmlType) {
        match self {
            Self::F32 => ("f32", 0, GgmlType::F32),
            Self::F16 => ("f16", 1, GgmlType::F16),
            Self::Q4_0 => ("q4_0", 2, GgmlType::Q4_0),
            Self::Q8_0 => ("q8_0", 7, GgmlType::Q8_0),
            Self::Q4KM => ("q4_k_m", 15, GgmlType::Q4K),
            Self::Q5KM => ("q5_k_m", 17, GgmlType::Q5K),
            Self::Q6K => ("q6_k", 18, GgmlType::Q6K),
            Self::Bf16 => ("bf16", 32, GgmlType::Bf16),
        }
    }

    /// Returns llama.cpp's name of the type.
    pub fn name(self) -> &'static str {
        self.known_as().0
    }

    /// Returns llama.cpp's number of the type.
    pub(super) fn number(self) -> u32 {
        self.known_as().1
    }
}

/// What the types of a file's tensors depend on.
#[derive(Clone, Copy, Debug)]
pub(super) struct TypesByTensor {
    kind: GgufType,
    layers: usize,
    experts: usize,
    is_tied: bool,
    /// Whether values are so few that they get more bits: Llama and Qwen2 of 80 layers with fewer key/value heads than query heads.
    values_are_few: bool,
}

impl TypesByTensor {
    pub(super) fn new(kind: GgufType, config: &ModelConfig) -> Self {
        let (spec, layer) = (&config.spec, &config.spec.layers[0]);
        let experts = if let MlpSpec::Experts { count, .. } = layer.mlp { count } else { 0 };
        let shares = match config.model_type.as_str() {
            "llama" | "mistral" => spec.attentions().any(|attention| attention.heads != attention.kv_heads),
            "qwen2" => true,
            _ => false,
        };
        let layers = spec.layers.len();
        Self { kind, layers, experts, is_tied: spec.tie_word_embeddings, values_are_few: shares && layers == 80 }
    }

    /// Returns the storage type of the tensor with this name in the file, from its shape with rows first.
    pub(super) fn type_of(&self, name: &str, shape: &[usize]) -> GgmlType {
        if shape.len() < 2 || !name.ends_with(".weight") || name.contains("ffn_gate_inp") {
            return GgmlType::F32;
        }
        if name == "per_layer_model_proj.weight" && self.kind.known_as().2.block() > 1 {
            return GgmlType::Bf16;
        }
        let wanted = self.wanted(name);
        let columns = shape[shape.len() - 1];
        let fits = |kind: GgmlType| columns.is_multiple_of(kind.block());
        let stands_in = match wanted {
            kind if fits(kind) => kind,
            GgmlType::Q4K if !self.is_head(name) => GgmlType::Q5_0,
            GgmlType::Q5K if !self.is_head(name) => GgmlType::Q5_1,
            _ => GgmlType::Q8_0,
        };
        if fits(stands_in) { stands_in } else { GgmlType::F16 }
    }

    /// Returns whether a tensor is the head, which the embedding is too if they share a weight; llama.cpp takes the layers' own table for one.
    fn is_head(&self, name: &str) -> bool {
        name == "output.weight" || (self.is_tied && name.ends_with("token_embd.weight"))
    }

    /// Returns the type of a matrix whose rows are whole blocks.
    fn wanted(&self, name: &str) -> GgmlType {
        let most = self.kind.known_as().2;
        let is_table = name.ends_with("token_embd.weight") || name == "output.weight";
        match self.kind {
            GgufType::Q4_0 if is_table => GgmlType::Q8_0,
            GgufType::Q4KM | GgufType::Q5KM | GgufType::Q6K => self.wanted_in_k_mix(name, most),
            _ => most,
        }
    }

    fn wanted_in_k_mix(&self, name: &str, most: GgmlType) -> GgmlType {
        let is = |module: &str| name.ends_with(&format!(".{module}.weight"));
        let is_value = is("attn_v") || is("attn_qkv");
        let is_down = is("ffn_down") || is("ffn_down_exps");
        if self.is_head(name) {
            return GgmlType::Q6K;
        }
        // Eight experts make what is not theirs a small part of the file.
        if self.experts == 8 && (is_value || is("attn_k")) {
            return GgmlType::Q8_0;
        }
        if self.experts == 8 && is("attn_output") && most == GgmlType::Q4K {
            return GgmlType::Q5K;
        }
        let layer = name.strip_prefix("blk.").and_then(|rest| rest.split('.').next()?.parse().ok());
        match layer {
            Some(layer) if (is_value || is_down) && self.has_more_bits(layer) => GgmlType::Q6K,
            _ if is_value && self.values_are_few && most == GgmlType::Q4K => GgmlType::Q5K,
            _ => most,
        }
    }

    /// Returns whether a layer is among the first eighth, the last eighth, or every third between.
    fn has_more_bits(&self, layer: usize) -> bool {
        let eighth = self.layers / 8;
        layer < eighth || layer >= 7 * self.layers / 8 || (layer - eighth) % 3 == 2
    }
}

impl fmt::Display for GgufType {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

impl FromStr for GgufType {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = Self::OFFERED.into_iter().find(|kind| kind.name() == name.to_lowercase());
        found.ok_or_else(|| format!("'{name}' is not one of {}", Self::OFFERED.map(Self::name).join(", ")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_config::tiny;

    fn mix(kind: GgufType, layers: usize) -> TypesByTensor {
        TypesByTensor { layers, ..TypesByTensor::new(kind, &tiny(&[]).unwrap()) }
    }

    #[test]
    fn the_mix_has_more_bits_where_they_matter() {
        let mix = mix(GgufType::Q4KM, 16);
        let of = |module: &str, layer: usize| mix.type_of(&format!("blk.{layer}.{module}.weight"), &[256, 256]);
        let more: Vec<usize> = (0..16).filter(|&layer| of("attn_v", layer) == GgmlType::Q6K).collect();
        assert_eq!(more, [0, 1, 4, 7, 10, 13, 14, 15]);
        assert!((0..16).all(|layer| of("attn_v", layer) == of("ffn_down", layer)));
        assert!((0..16).all(|layer| of("attn_q", layer) == GgmlType::Q4K));
        assert_eq!(mix.type_of("output.weight", &[9, 256]), GgmlType::Q6K);
        assert_eq!(mix.type_of("token_embd.weight", &[9, 256]), GgmlType::Q4K);
        let tied = TypesByTensor { is_tied: true, ..mix };
        assert_eq!(tied.type_of("token_embd.weight", &[9, 256]), GgmlType::Q6K);
        assert_eq!(tied.type_of("per_layer_token_embd.weight", &[9, 512]), GgmlType::Q6K);
        assert_eq!(mix.type_of("per_layer_model_proj.weight", &[512, 256]), GgmlType::Bf16);
        assert_eq!(mix.type_of("blk.0.attn_norm.weight", &[256]), GgmlType::F32);
        assert_eq!(mix.type_of("blk.0.ffn_gate_inp.weight", &[8, 256]), GgmlType::F32);
        assert_eq!(mix.type_of("blk.0.ffn_gate_exps.bias", &[8, 256]), GgmlType::F32);
    }

    #[test]
    fn rows_of_no_whole_blocks_get_another_type() {
        let of = |kind, name: &str, columns| mix(kind, 16).type_of(name, &[64, columns]);
        assert_eq!(of(GgufType::Q4KM, "blk.3.attn_q.weight", 576), GgmlType::Q5_0);
        assert_eq!(of(GgufType::Q5KM, "blk.3.attn_q.weight", 576), GgmlType::Q5_1);
        assert_eq!(of(GgufType::Q4KM, "blk.0.attn_v.weight", 576), GgmlType::Q8_0);
        assert_eq!(of(GgufType::Q4KM, "output.weight", 576), GgmlType::Q8_0);
        assert_eq!(of(GgufType::Q6K, "blk.3.attn_q.weight", 40), GgmlType::F16);
        assert_eq!(of(GgufType::Q8_0, "blk.3.attn_q.weight", 40), GgmlType::F16);
    }
}
