//! `[preference]`: training on pairs of answers, under TRL's names.
//!
//! Trade-off: of TRL's losses those that one pair decides alone; losses that sort a batch or look at other pairs are not there.

use firebrick_kernels::{PairLoss, PairLossKind};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// `[preference]`: train on pairs of a chosen and a rejected answer instead of on single texts. Both answers with their prompt share a row,
/// so `max_seq_len` is what TRL's `max_length` is twice.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct PreferenceSection {
    /// "dpo": raise the chosen answer over the rejected one, measured against the model as it was before training. "orpo": the same without
    /// that reference, next to the cross entropy of the chosen answer. Default "dpo".
    pub loss: PreferenceLoss,
    /// DPO: how strongly the model is held to the reference (smaller: less). ORPO: the weight of the odds ratio (lambda in its paper).
    /// Default 0.1.
    pub beta: f64,
    /// DPO's loss of the margin: "sigmoid", "robust" (unbiased under labels that are wrong with probability `label_smoothing`), "hinge",
    /// or "ipo" (log-probabilities per token). Default "sigmoid".
    pub loss_type: LossType,
    /// The probability that a pair's label is wrong, 0 or more and below 0.5, for "sigmoid" (conservative DPO) and "robust". Default 0.
    pub label_smoothing: f64,
    /// DPO: weight of the cross entropy of the chosen answers in addition (RPO; TRL's loss types "sigmoid" and "sft" with weights 1 and
    /// this). Default: absent, none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rpo_alpha: Option<f64>,
    /// ORPO: whether the prompt counts in the cross entropy of the chosen, as in TRL. The odds ratio is of the answers alone. Default true.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_loss: Option<bool>,
    /// DPO: whether the log-probabilities of the reference are computed once before training instead of in every step. They are where the
    /// adapter does not start at zero, tokens are added, or every weight trains, and this must not be false there. Default: absent, only there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub precompute_ref_log_probs: Option<bool>,
}

/// `preference.loss`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PreferenceLoss {
    /// Direct preference optimization.
    #[default]
    Dpo,
    /// Odds ratio preference optimization.
    Orpo,
}

/// `preference.loss_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LossType {
    /// The logistic loss of the margin.
    #[default]
    Sigmoid,
    /// The same, unbiased under wrong labels.
    Robust,
    /// The hinge loss.
    Hinge,
    /// The squared distance to a margin of `1 / (2 beta)`.
    Ipo,
}

impl Default for PreferenceSection {
    fn default() -> Self {
        Self {
            loss: PreferenceLoss::Dpo,
            beta: 0.1,
            loss_type: LossType::Sigmoid,
            label_smoothing: 0.0,
            rpo_alpha: None,
            prompt_loss: None,
            precompute_ref_log_probs: None,
        }
    }
}

impl PreferenceSection {
    /// The loss of a pair.
    #[must_use]
    pub fn pair_loss(&self) -> PairLoss {
        let kind = match (self.loss, self.loss_type) {
            (PreferenceLoss::Orpo, _) => PairLossKind::OddsRatio,
            (_, LossType::Sigmoid) => PairLossKind::Sigmoid,
            (_, LossType::Robust) => PairLossKind::Robust,
            (_, LossType::Hinge) => PairLossKind::Hinge,
            (_, LossType::Ipo) => PairLossKind::Ipo,
        };
        PairLoss { kind, beta: self.beta, label_smoothing: self.label_smoothing }
    }

    /// Weight of the mean cross entropy of the chosen.
    #[must_use]
    pub fn nll_weight(&self) -> f64 {
        match self.loss {
            PreferenceLoss::Orpo => 1.0,
            PreferenceLoss::Dpo => self.rpo_alpha.unwrap_or(0.0),
        }
    }

    /// Whether the prompt of the chosen counts in that cross entropy.
    #[must_use]
    pub fn counts_prompt(&self) -> bool {
        self.loss == PreferenceLoss::Orpo && self.prompt_loss.unwrap_or(true)
    }

    /// Whether the loss compares with the model as it was before training.
    #[must_use]
    pub fn has_reference(&self) -> bool {
        self.loss == PreferenceLoss::Dpo
    }
}
