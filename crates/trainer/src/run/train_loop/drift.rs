//! Warns where training and sampling give a token log-probabilities that differ by more than rounding.
//!
//! The same weights compute both before the first update of a round. If they differ, completions are learned from as if another model had written them,
//! which no other number of the run shows.
//! Trade-off: the limits are rules of thumb for the mean over tokens.

use firebrick_kernels::GemmFormat;
use firebrick_precision::FloatType;

use crate::metrics::PolicyMetrics;
use crate::plan::Plan;

/// The highest mean difference of float32 without a warning, in nats.
const EXACT: f64 = 1e-4;
/// The same where values are rounded to 16 bits or fewer.
const ROUNDED: f64 = 0.02;

/// Returns a warning if the step's completions were sampled with other probabilities than training has.
pub(super) fn warning(plan: &Plan, step: u64, policy: &PolicyMetrics) -> Option<String> {
    judge(step, policy, (plan.compute.value, plan.gemms.value), plan.experts.is_some())
}

fn judge(
    step: u64,
    policy: &PolicyMetrics,
    (compute, gemms): (FloatType, GemmFormat),
    has_experts: bool,
) -> Option<String> {
    let is_exact = compute == FloatType::F32 && gemms == GemmFormat::Compute;
    let limit = if is_exact { EXACT } else { ROUNDED };
    let advice = match gemms {
        _ if is_exact => {
            "Rounding in float32 is far smaller: a device or this program is wrong, report it with the recipe"
        }
        GemmFormat::Fp8 => "8-bit floats round most: set compute = \"bfloat16\"",
        GemmFormat::Compute | GemmFormat::F16 => {
            "A few steps with compute = \"float32\" show whether it is rounding; if it stays, report it with the recipe"
        }
    };
    let experts = if has_experts { "; routers that choose other experts in sampling are a usual reason" } else { "" };
    (policy.drift > limit).then(|| {
        format!(
            "WARNING: in step {step} the log-probabilities of training and of sampling differ by {:.1e} nats per token on average, by {:.1e} at most; \
             usual is a mean below {limit:.0e}. The step learns from completions as if another model had written them{experts}. {advice}. This is \
             said once; metrics.jsonl has sampling/sampling_logp_difference/mean of every step",
            policy.drift, policy.max_drift
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(drift: f64, compute: FloatType, gemms: GemmFormat, has_experts: bool) -> Option<String> {
        judge(7, &PolicyMetrics { drift, max_drift: 1.5, ..PolicyMetrics::default() }, (compute, gemms), has_experts)
    }

    #[test]
    fn rounding_is_no_drift() {
        assert_eq!(of(9e-5, FloatType::F32, GemmFormat::Compute, false), None);
        for (compute, gemms) in [
            (FloatType::Bf16, GemmFormat::Compute),
            (FloatType::Bf16, GemmFormat::Fp8),
            (FloatType::F32, GemmFormat::F16),
        ] {
            assert_eq!(of(0.019, compute, gemms, true), None);
        }
    }

    #[test]
    fn drift_is_warned_of_with_its_numbers_and_what_to_do() {
        let warning = |drift, compute, gemms, experts| of(drift, compute, gemms, experts).unwrap();
        let exact = warning(2e-4, FloatType::F32, GemmFormat::Compute, false);
        assert!(exact.starts_with("WARNING: in step 7 the log-probabilities"), "{exact}");
        assert!(exact.contains("by 2.0e-4 nats per token on average, by 1.5e0 at most"), "{exact}");
        assert!(exact.contains("report it with the recipe") && !exact.contains("experts"), "{exact}");
        let rounded = warning(0.03, FloatType::Bf16, GemmFormat::Compute, true);
        assert!(rounded.contains("compute = \"float32\"") && rounded.contains("other experts"), "{rounded}");
        assert!(warning(0.03, FloatType::Bf16, GemmFormat::Fp8, false).contains("compute = \"bfloat16\""));
    }
}
