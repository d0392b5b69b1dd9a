//! `[preference]`: training on pairs of answers, under TRL's names.
//!
//! Trade-off: only those of TRL's losses that depend on a single pair; losses that sort a batch or compare pairs are missing. Whether the data
//! contains pairs is found when it is read.

use firebrick_data::{OverflowPolicy, RecordFormat, TrainOn};
use firebrick_kernels::{PairLoss, PairLossKind};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::config::RunConfig;
use crate::config::section::{AboveZero, FACTOR, Rule, ZeroOrMore, rules, section};
use crate::config::weights::Mode;

section! {
    /// `[preference]`: train on pairs of a chosen and a rejected answer instead of on single texts. Both answers with their prompt share a row,
    /// so `max_seq_len` is what TRL's `max_length` is twice.
    pub struct PreferenceSection in "preference." {
        /// "dpo": raise the chosen answer over the rejected one, measured against the model as it was before training. "orpo": the same without
        /// that reference, next to the cross entropy of the chosen answer. Default "dpo".
        loss: PreferenceLoss = PreferenceLoss::Dpo;
        /// DPO: how strongly the model is held to the reference (smaller: less). ORPO: the weight of the odds ratio (lambda in its paper).
        /// Default 0.1.
        beta: f64 = 0.1, AboveZero(FACTOR);
        /// DPO's loss of the margin: "sigmoid", "robust" (unbiased under labels that are wrong with probability `label_smoothing`), "hinge",
        /// or "ipo" (log-probabilities per token). Default "sigmoid".
        loss_type: LossType = LossType::Sigmoid;
        /// The probability that a pair's label is wrong, 0 or more and below 0.5, for "sigmoid" (conservative DPO) and "robust". Default 0.
        label_smoothing: f64 = 0.0;
        /// DPO: weight of the cross entropy of the chosen answers in addition (RPO; TRL's loss types "sigmoid" and "sft" with weights 1 and
        /// this). Default: absent, none.
        #[serde(skip_serializing_if = "Option::is_none")]
        rpo_alpha: Option<f64> = None, ZeroOrMore(FACTOR);
        /// ORPO: whether the prompt counts in the cross entropy of the chosen, as in TRL. The odds ratio is of the answers alone. Default true.
        #[serde(skip_serializing_if = "Option::is_none")]
        prompt_loss: Option<bool> = None;
        /// DPO: whether the log-probabilities of the reference are computed once before training instead of in every step. They are where the
        /// adapter does not start at zero, tokens are added, or every weight trains, and this must not be false there. Default: absent, only there.
        #[serde(skip_serializing_if = "Option::is_none")]
        precompute_ref_log_probs: Option<bool> = None;
    }
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

impl PreferenceSection {
    /// Returns the loss of a pair.
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

    /// Returns the weight of the mean cross entropy of the chosen answers.
    pub fn nll_weight(&self) -> f64 {
        match self.loss {
            PreferenceLoss::Orpo => 1.0,
            PreferenceLoss::Dpo => self.rpo_alpha.unwrap_or(0.0),
        }
    }

    /// Returns whether the prompt of the chosen answer counts in that cross entropy.
    pub fn counts_prompt(&self) -> bool {
        self.loss == PreferenceLoss::Orpo && self.prompt_loss.unwrap_or(true)
    }

    /// Returns whether the loss compares with the model as it was before training.
    pub fn has_reference(&self) -> bool {
        self.loss == PreferenceLoss::Dpo
    }
}

impl RunConfig {
    /// Returns whether the reference of a preference loss differs from the base without its adapter: the adapter starts from a folder or trains whole
    /// modules or rows of tokens (those of new tokens included), or there is no adapter.
    pub fn reference_is_precomputed_always(&self) -> bool {
        if self.data.adds_tokens() {
            return true;
        }
        let keeps_the_base = self.lora.as_ref().is_some_and(|lora| {
            let trains_base = lora.modules_to_save.as_ref().is_some_and(|names| !names.is_empty());
            lora.init_from.is_none()
                && lora.init_lora_weights.is_uniform()
                && !trains_base
                && lora.trainable_token_indices.is_none()
        });
        !(keeps_the_base || self.mode() != Mode::Full && self.lora.is_none())
    }
}

/// Returns the rules of pairs of answers. Without the section, no source may contain pairs.
pub(super) fn rules(config: &RunConfig) -> Vec<Rule> {
    let data = &config.data;
    let sources = data.training_sources().into_iter().chain(data.held_out_sources());
    let formats: Vec<RecordFormat> = sources.map(|source| source.format).collect();
    let Some(preference) = &config.preference else {
        return rules! {
            "data.format": !formats.contains(&RecordFormat::Preference),
                "\"preference\" is read by preference training alone" =>
                "add the section [preference] with loss = \"dpo\" or \"orpo\"";
        };
    };
    let is_dpo = preference.loss == PreferenceLoss::Dpo;
    let smoothing = preference.label_smoothing;
    let smooths = is_dpo && matches!(preference.loss_type, LossType::Sigmoid | LossType::Robust);
    let of_dpo = if preference.rpo_alpha.is_some() { "preference.rpo_alpha" } else { "preference.loss_type" };
    let more =
        if of_dpo.ends_with("alpha") && preference.loss_type != LossType::Sigmoid { ", like loss_type" } else { "" };
    let is_plain = preference.rpo_alpha.is_none() && preference.loss_type == LossType::Sigmoid;
    let is_false = preference.precompute_ref_log_probs == Some(false);
    let are_pairs = |format: &RecordFormat| matches!(format, RecordFormat::Auto | RecordFormat::Preference);
    rules! {
        "preference.label_smoothing": (0.0..0.5).contains(&smoothing),
            format!("must be 0 or more and below 0.5, got {smoothing}") =>
            "write a number such as 0.1, or remove this key";
        "preference.label_smoothing": smoothing == 0.0 || smooths,
            "only the loss types \"sigmoid\" and \"robust\" of DPO smooth labels" =>
            "remove it, or write loss_type = \"sigmoid\"";
        of_dpo: is_dpo || is_plain,
            format!("is a key of DPO{more}; ORPO has one loss, which includes the cross entropy of the chosen") =>
            "remove what only DPO has, or write loss = \"dpo\"";
        "preference.prompt_loss": !is_dpo || preference.prompt_loss.is_none(),
            "is a key of ORPO: in DPO only answers count" => "remove it, or write loss = \"orpo\"";
        "preference.precompute_ref_log_probs": is_dpo || preference.precompute_ref_log_probs.is_none(),
            "ORPO has no reference" => "remove it, or write loss = \"dpo\"";
        "preference.precompute_ref_log_probs": !(is_false && config.reference_is_precomputed_always()),
            "is false, and after the first step the reference could not be computed any more: only an adapter that \
             starts at zero leaves it in the base" =>
            "remove it, or train a new adapter without modules_to_save and without tokens of its own";
        "data.format": formats.iter().all(are_pairs),
            "[preference] trains on pairs of answers, and this format has one" =>
            "remove it: the shape of prompt and answers is recognized by the keys";
        "data.train_on": matches!(data.train_on, None | Some(TrainOn::Assistant | TrainOn::Last)),
            "[preference] compares answers, so that only what the assistant writes counts" =>
            "remove it; preference.prompt_loss is for ORPO's cross entropy";
        "data.overflow": data.overflow != Some(OverflowPolicy::Split),
            "is \"split\", and a pair is never divided" => "write \"truncate\" or \"drop\"";
        "eval.exact_match_prompts": config.eval.exact_match_prompts == 0,
            "[preference] has no reference answers; held-out pairs are evaluated by their rewards" => "remove it";
    }
}
