//! The optimizer of a run and its constants.

use firebrick_kernels::BaseStorage;
use serde::{Deserialize, Serialize};

/// The optimizers, under the names that recipes use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
pub enum OptimizerKind {
    /// AdamW with moments in f32: 8 bytes per parameter.
    #[serde(rename = "adamw")]
    AdamW,
    /// AdamW with moments in 8 bits: about 2 bytes per parameter.
    #[serde(rename = "adamw_8bit")]
    AdamW8bit,
    /// The same update as `adamw_8bit`. On CUDA, state beyond a budget waits in pinned host memory; elsewhere nothing is paged.
    #[serde(rename = "paged_adamw_8bit")]
    PagedAdamW8bit,
}

impl OptimizerKind {
    /// Returns whether state beyond a budget waits in host memory, on a backend that can copy while other work runs.
    pub const fn is_paged(self) -> bool {
        matches!(self, Self::PagedAdamW8bit)
    }

    /// Describes its state for the reader of a plan.
    pub const fn state(self) -> &'static str {
        match self {
            Self::AdamW => "moments in f32",
            Self::AdamW8bit => "moments in 8 bits; parameters below 4,096 elements keep f32",
            Self::PagedAdamW8bit => {
                "moments in 8 bits, paged to host memory beyond a budget; parameters below 4,096 elements keep f32"
            }
        }
    }
}

/// How the matrices of a model are stored of which every weight trains; everything else trains in f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
pub enum TrainedWeights {
    /// In f32.
    #[default]
    #[serde(rename = "float32")]
    Float32,
    /// In bf16; each update is rounded up or down at random, so that the mean is right.
    #[serde(rename = "bfloat16_stochastic")]
    Bf16Stochastic,
    /// In bf16, with the other half of an f32 in the optimizer's state: updates are those of float32.
    #[serde(rename = "bfloat16_exact")]
    Bf16Exact,
}

impl TrainedWeights {
    /// Returns how the model stores them.
    pub const fn storage(self) -> BaseStorage {
        match self {
            Self::Float32 => BaseStorage::Trained,
            Self::Bf16Stochastic | Self::Bf16Exact => BaseStorage::TrainedBf16,
        }
    }
}

/// The optimizer of a run and its constants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OptimizerConfig {
    /// The optimizer.
    pub kind: OptimizerKind,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Decoupled weight decay. Norms and biases do not decay.
    pub weight_decay: f64,
    /// How matrices are stored, if every weight trains; without effect on parameters in f32.
    pub weights: TrainedWeights,
    /// Largest global norm of the gradients: larger ones are scaled down to it. `None`: no clipping.
    pub max_grad_norm: Option<f64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn serde_names_are_those_of_recipes() {
        let kinds = [OptimizerKind::AdamW, OptimizerKind::AdamW8bit, OptimizerKind::PagedAdamW8bit];
        let text = serde_json::to_string(&kinds).unwrap();
        assert_eq!(text, r#"["adamw","adamw_8bit","paged_adamw_8bit"]"#);
        assert_eq!(serde_json::from_str::<[OptimizerKind; 3]>(&text).unwrap(), kinds);
    }
}
