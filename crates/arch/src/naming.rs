//! The names of families that call the modules of a layer otherwise than Llama does.
//!
//! Everything else in this crate says Llama's names; [`ModelSpec`](crate::ModelSpec) translates them where it lists tensors and modules, so a
//! run, its messages, its checkpoints and its adapters all have the family's own. The names inside a mixture of experts are
//! [`ExpertNames`](crate::ExpertNames).

use serde::{Deserialize, Serialize};

use crate::tensor_spec::{Role, TensorSpec};

/// Name of the final norm in a checkpoint of most families ([`ModelSpec::final_norm`](crate::ModelSpec::final_norm)).
pub const FINAL_NORM: &str = "model.norm.weight";

/// How a family names what Llama has, too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Naming {
    /// As Llama.
    #[default]
    Llama,
    /// LFM2 and LFM2-MoE.
    Lfm2,
    /// LFM3.
    Lfm3,
    /// OLMo Hybrid, whose layers with attention have Llama's names.
    OlmoHybrid,
}

impl Naming {
    /// Lists paths inside a layer: Llama's, and this family's.
    const fn table(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::Llama => &[],
            Self::Lfm2 => &[
                ("input_layernorm", "operator_norm"),
                ("post_attention_layernorm", "ffn_norm"),
                ("self_attn.q_norm", "self_attn.q_layernorm"),
                ("self_attn.k_norm", "self_attn.k_layernorm"),
                ("self_attn.o_proj", "self_attn.out_proj"),
                ("mlp.gate_proj", "feed_forward.w1"),
                ("mlp.up_proj", "feed_forward.w3"),
                ("mlp.down_proj", "feed_forward.w2"),
            ],
            Self::Lfm3 => &[
                ("input_layernorm", "operator_norm"),
                ("post_attention_layernorm", "post_operator_norm"),
                ("pre_feedforward_layernorm", "ffn_norm"),
                ("post_feedforward_layernorm", "post_ffn_norm"),
                ("mlp.gate_proj", "feed_forward.w1"),
                ("mlp.up_proj", "feed_forward.w3"),
                ("mlp.down_proj", "feed_forward.w2"),
            ],
            Self::OlmoHybrid => {
                &[("input_layernorm", "attention_layer_norm"), ("post_attention_layernorm", "feedforward_layer_norm")]
            }
        }
    }

    pub(crate) fn final_norm(self) -> &'static str {
        match self {
            Self::Llama | Self::OlmoHybrid => FINAL_NORM,
            Self::Lfm2 | Self::Lfm3 => "model.embedding_norm.weight",
        }
    }
}

/// A layer of a model: the start of the names of what is in it.
#[derive(Clone, Copy, Debug)]
pub struct LayerPath {
    pub(crate) layer: usize,
    pub(crate) naming: Naming,
}

impl LayerPath {
    /// Returns the name of what Llama has under this path in a layer, such as `self_attn.q_proj`.
    pub(crate) fn name(self, path: &str) -> String {
        let own = |(llama, own): &(&str, &str)| {
            let rest = path.strip_prefix(llama).filter(|rest| rest.is_empty() || rest.starts_with('.'))?;
            Some(format!("model.layers.{}.{own}{rest}", self.layer))
        };
        let own = self.naming.table().iter().find_map(own);
        own.unwrap_or_else(|| format!("model.layers.{}.{path}", self.layer))
    }

    pub(crate) fn vector(self, path: &str, width: usize, role: Role) -> TensorSpec {
        TensorSpec { name: self.name(path), shape: vec![width], role, layer: Some(self.layer) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_paths_are_translated() {
        let own = |naming: Naming, path: &str| LayerPath { layer: 13, naming }.name(path);
        assert_eq!(own(Naming::Llama, "mlp.up_proj"), "model.layers.13.mlp.up_proj");
        assert_eq!(own(Naming::Lfm2, "self_attn.o_proj"), "model.layers.13.self_attn.out_proj");
        assert_eq!(own(Naming::Lfm2, "mlp.up_proj.weight"), "model.layers.13.feed_forward.w3.weight");
        assert_eq!(own(Naming::Lfm2, "mlp.up_projection"), "model.layers.13.mlp.up_projection");
        assert_eq!(own(Naming::Lfm3, "self_attn.o_proj"), "model.layers.13.self_attn.o_proj");
    }
}
