//! The parts of a mixture of experts besides its experts: the arithmetic of its router, and the MLP that every token goes through.
//!
//! Scores, choice and weights are separate, because families combine them freely. Names and formulas are those of transformers.
//! Trade-off: a router without weights, as for hashed tokens, cannot be described.

use serde::{Deserialize, Serialize};

/// How a router turns its logits into choices and weights: scores, the experts with the largest ones, and their weights.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RouterSpec {
    /// The scores of experts.
    pub scores: RouterScores,
    /// Whether the scores of the chosen experts are divided by their sum, plus `epsilon`. After a softmax over all experts, this is
    /// the softmax over the chosen ones alone (gpt-oss).
    pub normalizes: bool,
    /// What is added to that sum: sigmoids may all be zero.
    pub epsilon: f64,
    /// Factor of the weights, `routed_scaling_factor`: 1 in most families.
    pub scale: f64,
    /// Whether a vector `e_score_correction_bias` is added to the scores for the choice, and not for the weights (DeepSeek-V3). It never trains.
    pub corrects: bool,
    /// Whether the router's linear module has a bias.
    pub bias: bool,
    /// The groups among which a choice is made first; `None`: among all experts.
    pub groups: Option<ExpertGroups>,
    /// Whether its input is normalized without the layer's weight, times a vector `router.scale` `[hidden]` and `hidden^-0.5`, and each
    /// expert's weight is multiplied by `router.per_expert_scale` `[experts]` after all else (Gemma 4).
    pub scaled: bool,
}

impl RouterSpec {
    /// Describes a softmax over all experts without more.
    pub const fn softmax(normalizes: bool) -> Self {
        let scores = RouterScores::Softmax;
        Self { scores, normalizes, epsilon: 0.0, scale: 1.0, corrects: false, bias: false, groups: None, scaled: false }
    }

    /// Describes the gate of a shared expert: a router with one expert, whose weight is the sigmoid of its logit.
    pub const fn gate() -> Self {
        Self { scores: RouterScores::Sigmoid, ..Self::softmax(false) }
    }
}

/// Scores of experts from the router's logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RouterScores {
    /// The softmax over all experts.
    Softmax,
    /// The sigmoid of each logit (DeepSeek-V3).
    Sigmoid,
}

/// Experts in groups of equal size: a token chooses among those of the groups whose two largest scores have the largest sums (DeepSeek-V3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ExpertGroups {
    /// Number of groups, `n_group`.
    pub count: usize,
    /// Groups that a token chooses experts from, `topk_group`.
    pub chosen: usize,
}

impl ExpertGroups {
    /// The largest number of groups.
    pub const MAX: usize = 32;
}

/// A dense gated MLP next to routed experts; its activation is theirs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedExpertSpec {
    /// Its hidden width.
    pub intermediate_size: usize,
    /// Whether its output is multiplied by the sigmoid of one more linear module, from the hidden size to 1 (Qwen2-MoE).
    pub gated: bool,
    /// Whether it, the experts and their sum have norms of their own, and it is the layer's dense MLP `mlp.*` (Gemma 4).
    pub normed: bool,
}
