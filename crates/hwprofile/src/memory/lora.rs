//! Which linear layers an adapter sits on, and how many parameters it has.

use serde::{Deserialize, Serialize};

use super::ModelShape;
use super::shape::elements;

/// The linear layers of a block, under Hugging Face's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LinearLayer {
    /// `self_attn.q_proj`
    QProj,
    /// `self_attn.k_proj`
    KProj,
    /// `self_attn.v_proj`
    VProj,
    /// `self_attn.o_proj`
    OProj,
    /// `mlp.gate_proj`
    GateProj,
    /// `mlp.up_proj`
    UpProj,
    /// `mlp.down_proj`
    DownProj,
}

impl LinearLayer {
    /// All of them, in the order of a block's forward.
    pub const ALL: [Self; 7] =
        [Self::QProj, Self::KProj, Self::VProj, Self::OProj, Self::GateProj, Self::UpProj, Self::DownProj];

    /// Hugging Face's name, such as `q_proj`.
    pub fn name(self) -> &'static str {
        match self {
            Self::QProj => "q_proj",
            Self::KProj => "k_proj",
            Self::VProj => "v_proj",
            Self::OProj => "o_proj",
            Self::GateProj => "gate_proj",
            Self::UpProj => "up_proj",
            Self::DownProj => "down_proj",
        }
    }
}

/// A target module that no block has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "there is no linear layer {name:?} in a block: name some of {}, or all-linear for all of them",
    LinearLayer::ALL.map(LinearLayer::name).join(", ")
)]
pub struct UnknownLinear {
    /// What was asked for.
    pub name: String,
}

/// An adapter: its rank, and the layers it sits on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoraShape {
    /// Rank.
    pub r: usize,
    /// Layers with an adapter, each once.
    pub targets: Vec<LinearLayer>,
}

impl LoraShape {
    /// An adapter of rank `r` on all seven linear layers of every block.
    pub fn all_linear(r: usize) -> Self {
        Self { r, targets: LinearLayer::ALL.to_vec() }
    }

    /// An adapter of rank `r` on the layers of these names; `all-linear` means all.
    ///
    /// # Errors
    /// [`UnknownLinear`], with the names there are.
    pub fn named<S: AsRef<str>>(r: usize, names: &[S]) -> Result<Self, UnknownLinear> {
        let mut targets = Vec::new();
        for name in names.iter().map(AsRef::as_ref) {
            if name == "all-linear" {
                return Ok(Self::all_linear(r));
            }
            let layer = LinearLayer::ALL.into_iter().find(|layer| layer.name() == name);
            targets.push(layer.ok_or_else(|| UnknownLinear { name: name.to_string() })?);
        }
        targets.sort_unstable();
        targets.dedup();
        Ok(Self { r, targets })
    }

    /// Parameters of A `[r, in]` and B `[out, r]` over all targets and blocks.
    pub fn parameters(&self, model: &ModelShape) -> u64 {
        let block = self.targets.iter().map(|&target| {
            let [rows, columns] = model.linear_shape(target);
            elements([rows + columns, self.r])
        });
        block.sum::<u64>() * model.num_hidden_layers as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::shape::llama_3_1_8b;

    #[test]
    fn rank_16_on_all_linear_layers_of_llama_3_1_8b() {
        assert_eq!(LoraShape::all_linear(16).parameters(&llama_3_1_8b()), 41_943_040);
    }

    #[test]
    fn rank_8_on_queries_and_values_of_llama_3_1_8b() {
        let lora = LoraShape::named(8, &["v_proj", "q_proj", "v_proj"]).expect("both exist");
        assert_eq!(lora.targets, [LinearLayer::QProj, LinearLayer::VProj]);
        assert_eq!(lora.parameters(&llama_3_1_8b()), 3_407_872);
    }

    #[test]
    fn all_linear_means_every_layer() {
        assert_eq!(LoraShape::named(16, &["all-linear"]), Ok(LoraShape::all_linear(16)));
    }

    #[test]
    fn an_unknown_target_is_told_the_names_there_are() {
        let message = LoraShape::named(8, &["c_attn"]).expect_err("GPT-2's name").to_string();
        assert!(message.contains("c_attn") && message.contains("q_proj, k_proj") && message.contains("all-linear"));
    }
}
