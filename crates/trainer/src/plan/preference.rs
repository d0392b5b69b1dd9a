//! What pairs of answers are trained for, and where the reference of their loss comes from.
//!
//! Trade-off: an adapter that starts at zero is its own reference in every step, which costs a forward pass and needs no second copy of
//! the base; log-probabilities that were computed before cost that pass once per document instead of once per epoch.

use firebrick_kernels::PairPasses;
use serde::Serialize;

use crate::config::{PreferenceLoss, PreferenceSection, RunConfig};
use crate::plan::chosen::Chosen;

/// Where the reference's log-probabilities come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PlannedReference {
    /// Of the base without its adapter, in every pass.
    BaseWithoutAdapter,
    /// Computed once, before the first step.
    Precomputed,
}

/// The loss of pairs.
pub(super) fn preference(config: &RunConfig) -> Option<Chosen<PreferenceSection>> {
    let section = config.preference.clone()?;
    let why = match section.loss {
        PreferenceLoss::Dpo => "the head runs twice over each micro-batch: for log-probabilities, then for gradients",
        PreferenceLoss::Orpo => {
            "no reference; the head runs twice over each micro-batch: for log-probabilities, then for gradients"
        }
    };
    Some(Chosen::new(section, why))
}

/// The reference of that loss; none where it has none.
pub(super) fn reference(config: &RunConfig) -> Option<Chosen<PlannedReference>> {
    let section = config.preference.as_ref().filter(|section| section.has_reference())?;
    if config.reference_is_precomputed_always() {
        let why = match &config.lora {
            None => "every weight trains: one forward pass over all pairs before the first step",
            Some(_) => "more than zeros is added to the base: one forward pass over all pairs before the first step",
        };
        return Some(Chosen::new(PlannedReference::Precomputed, why));
    }
    Some(match section.precompute_ref_log_probs {
        Some(true) => Chosen::new(
            PlannedReference::Precomputed,
            "the recipe: one forward pass over all pairs before the first step",
        ),
        _ => Chosen::new(
            PlannedReference::BaseWithoutAdapter,
            "one more forward pass per micro-batch, with adapters off; no second copy of the base",
        ),
    })
}

/// What that adds to a step.
pub(super) fn passes(config: &RunConfig) -> Option<PairPasses> {
    config.preference.as_ref()?;
    let in_step = reference(config).is_some_and(|chosen| chosen.value == PlannedReference::BaseWithoutAdapter);
    Some(PairPasses { reference: in_step })
}
