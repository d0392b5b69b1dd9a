//! Checks the first loss of preference training, which is known in advance: the model is still its own reference.
//!
//! All margins are zero then, so the mean of a logistic loss is ln 2, for any `beta` and label smoothing. Another value means that the
//! log-probabilities of the reference are those of another model.
//! Trade-off: losses of another shape and runs with dropout are not checked. If values are rounded more than in f32, or rounding chooses experts, a
//! note only reports how close the loss is.

use std::f64::consts::LN_2;
use std::path::Path;

use firebrick_kernels::GemmFormat;
use firebrick_precision::FloatType;

use crate::config::{LossType, PreferenceSection};
use crate::error::RunError;
use crate::metrics::PairMetrics;
use crate::plan::Plan;
use crate::run::step::StepNumbers;

/// Tolerance of f32.
const EXACT: f64 = 1e-5;
/// The same as a fraction of the subtracted numbers, if they are large: eight roundings of f32.
const EXACT_FRACTION: f64 = 1e-6;
/// A distance above the usual rounding of half precision and FP8.
const NOTABLE: f64 = 5e-3;

/// Checks the numbers of the first step of a run. Returns a note if more is not possible. `found_in` is the file with the log-probabilities of the
/// reference, if this run did not compute them.
pub(super) fn check(plan: &Plan, numbers: &StepNumbers, found_in: Option<&Path>) -> Result<Option<String>, RunError> {
    let (Some(preference), Some(pairs)) = (&plan.preference, &numbers.pairs) else { return Ok(None) };
    if plan.adapter_dropout.is_some() {
        return Ok(None);
    }
    let is_exact =
        plan.compute.value == FloatType::F32 && plan.gemms.value == GemmFormat::Compute && plan.experts.is_none();
    judge(&preference.value, f64::from(numbers.loss), pairs, is_exact, found_in)
}

fn judge(
    preference: &PreferenceSection,
    loss: f64,
    pairs: &PairMetrics,
    is_exact: bool,
    found_in: Option<&Path>,
) -> Result<Option<String>, RunError> {
    let is_logistic = matches!(preference.loss_type, LossType::Sigmoid | LossType::Robust);
    if !preference.has_reference() || !is_logistic || !loss.is_finite() {
        return Ok(None);
    }
    let of_margins = loss - preference.nll_weight() * pairs.nll_loss;
    let distance = (of_margins - LN_2).abs();
    let advice = match found_in {
        Some(file) => format!(
            "Its log-probabilities were found in {}: delete or rename that file and start the run again, which \
             computes them",
            file.display()
        ),
        None => "This run computed it, so a device or this program is wrong: report it with the recipe".to_owned(),
    };
    let subtracted = preference.beta * (pairs.chosen_log_prob.abs() + pairs.rejected_log_prob.abs());
    let tolerance = EXACT.max(EXACT_FRACTION * (loss.abs() + subtracted));
    if is_exact && distance <= tolerance {
        return Ok(None);
    }
    if is_exact {
        return Err(RunError::WrongNumbers(format!(
            "the first loss of pairs is {of_margins:.6}, and it must be ln 2 = 0.693147 within {tolerance:.0e}, because \
             before its first step the model is its own reference: what it was compared with is another model. {advice}"
        )));
    }
    let said = format!("the first loss of pairs is {of_margins:.6}, {distance:.1e} from ln 2");
    Ok(Some(match distance > NOTABLE {
        true => format!(
            "WARNING: {said}, which it would be if nothing were rounded, because the model is still its own reference. \
             {advice}"
        ),
        false => format!("{said}: the model is still its own reference"),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::PreferenceLoss;

    const PAIRS: PairMetrics = PairMetrics {
        chosen_reward: 0.0,
        rejected_reward: 0.0,
        margin: 0.0,
        accuracy: 0.0,
        chosen_log_prob: -20.0,
        rejected_log_prob: -25.0,
        nll_loss: 4.0,
    };

    fn of(preference: PreferenceSection, loss: f64, is_exact: bool) -> Result<Option<String>, String> {
        judge(&preference, loss, &PAIRS, is_exact, Some(Path::new("kept.reference"))).map_err(|error| error.to_string())
    }

    #[test]
    fn in_f32_the_first_loss_is_ln_2_or_the_file_of_the_reference_is_named() {
        let dpo = PreferenceSection::default();
        let smoothed = PreferenceSection { label_smoothing: 0.1, loss_type: LossType::Robust, ..dpo.clone() };
        let with_nll = PreferenceSection { rpo_alpha: Some(0.5), ..dpo.clone() };
        for (preference, right) in [(dpo, LN_2), (smoothed, LN_2), (with_nll, LN_2 + 2.0)] {
            assert_eq!(of(preference.clone(), right + 9e-6, true), Ok(None));
            for wrong in [right + 1.2e-5, right - 1.5e-2] {
                let message = of(preference.clone(), wrong, true).unwrap_err();
                assert!(message.contains("kept.reference") && message.contains("delete or rename"), "{message}");
            }
        }
    }

    #[test]
    fn half_precision_reports_the_distance_and_warns_where_it_is_large() {
        let note = of(PreferenceSection::default(), LN_2 + 1e-3, false).unwrap().unwrap();
        assert!(note.starts_with("the first loss of pairs is 0.694147, 1.0e-3 from ln 2"), "{note}");
        let warning = of(PreferenceSection::default(), LN_2 - 1.5e-2, false).unwrap().unwrap();
        assert!(warning.starts_with("WARNING: ") && warning.contains("kept.reference"), "{warning}");
    }

    #[test]
    fn losses_whose_start_is_not_ln_2_are_left_alone() {
        let ipo = PreferenceSection { loss_type: LossType::Ipo, ..PreferenceSection::default() };
        let orpo = PreferenceSection { loss: PreferenceLoss::Orpo, ..PreferenceSection::default() };
        for preference in [ipo, orpo] {
            assert_eq!(of(preference, 9.0, true), Ok(None));
        }
        assert_eq!(of(PreferenceSection::default(), f64::NAN, false), Ok(None), "a step that float16 skips");
    }
}
