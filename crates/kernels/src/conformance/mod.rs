//! Every operation of a backend against the reference bodies on the CPU, on small random input.
//!
//! A backend's self-test runs one [`Case`] before training; test suites run many, with odd sizes. Each subject's checks
//! are next to its trait. The reference computes in f32 from the same values, already rounded to the format under test,
//! so only the error of the operation itself is measured. Composed references (a group of linear modules) call the CPU
//! backend's norm, rotation and gated activation, which are compared with their own references first.

pub(crate) mod check;

use burn_tensor::DType;
use firebrick_precision::difference::is_within;

pub use self::check::{Case, Extent, Finding, tolerance};

use self::check::Check;
#[cfg(any(feature = "cuda", feature = "wgpu"))]
use crate::Hint;
use crate::Kernels;

/// Runs every operation.
pub fn operations<B: Kernels>(case: &Case, device: &B::Device, extent: Extent) -> Vec<Finding> {
    let mut check = Check::<B>::new(case, device, extent);
    crate::norm::conformance::check(&mut check);
    crate::embedding::conformance::check(&mut check);
    crate::weights::conformance::check(&mut check);
    crate::linear::conformance::check(&mut check);
    if case.has_experts {
        crate::moe::conformance::check(&mut check);
    }
    crate::memory::conformance::check(&mut check);
    // No family has convolutions or the delta rule yet, and their reference bodies would compile kernels of CubeCL at each start.
    if extent == Extent::All {
        crate::conv::conformance::check(&mut check);
        crate::delta::conformance::check(&mut check);
    }
    crate::loss::conformance::check(&mut check);
    crate::optimizer::conformance::check(&mut check);
    // Attention is last: its preparation takes longest, and may have started before.
    crate::attention::conformance::check(&mut check);
    check.findings
}

/// Starts to prepare the attention that [`operations`] or [`attention`] will need for a case.
#[cfg(any(feature = "cuda", feature = "wgpu"))]
pub(crate) fn begin_attention<B: Kernels>(case: &Case, device: &B::Device) {
    let check = Check::<B>::new(case, device, Extent::First);
    let (spec, documents) = (case.attention(), check.documents().0);
    B::hint(device, Hint::Attention { spec: &spec, dtype: case.dtype, documents: &documents });
}

/// Runs attention alone: documents of one length may use another kernel than packed ones.
pub fn attention<B: Kernels>(case: &Case, device: &B::Device, extent: Extent) -> Vec<Finding> {
    let mut check = Check::<B>::new(case, device, extent);
    crate::attention::conformance::check(&mut check);
    check.findings
}

/// Runs the products that reference bodies compose. A backend that overrides `project` whole never runs them.
pub fn products<B: Kernels>(case: &Case, device: &B::Device) -> Vec<Finding> {
    let mut check = Check::<B>::new(case, device, Extent::All);
    crate::linear::conformance::products::check(&mut check);
    check.findings
}

/// Names the first operation of a format whose error exceeds [`tolerance`].
///
/// # Errors
/// Describes the operation, its error and the tolerance.
pub fn verdict(dtype: DType, findings: Vec<Finding>) -> Result<(), String> {
    let tolerance = tolerance(dtype);
    let wrong = findings.into_iter().find(|finding| !is_within(finding.relative_error, tolerance));
    wrong.map_or(Ok(()), |finding| {
        Err(format!(
            "{} is wrong on this device: relative error {:.1e}, at most {tolerance:.0e} is rounding",
            finding.what, finding.relative_error
        ))
    })
}

#[cfg(test)]
mod tests {
    use burn_flex::Flex;

    use super::*;

    fn assert_case(case: &Case) {
        let findings = operations::<Flex>(case, &Default::default(), Extent::All);
        assert!(findings.len() > 100, "{} findings", findings.len());
        for finding in findings {
            // Gradients that are exactly zero are compared with an absolute 1e-3 (see `Check::compare`). Rounding
            // leaves 1.2e-7 in the key gradients of a document of one token.
            let is_zero = case.documents == [1] && finding.what == "attention_backward: keys";
            let bound = if is_zero { 2e-4 } else { 1e-4 };
            assert!(finding.relative_error < bound, "{case:?}: {finding:?}");
        }
    }

    /// Tests sizes that break loops: one row, odd widths, documents around the query block size, windows, one shared key/value head.
    #[test]
    fn the_cpu_loops_equal_the_reference_bodies_over_odd_sizes() {
        let small = || Case::small(DType::F32, 32);
        let cases = [
            small(),
            Case { window: Some(5), ..small() },
            Case { documents: vec![1], ..small() },
            Case { documents: vec![1, 2, 63, 1, 65, 130], heads: 4, kv_heads: 1, head_dim: 10, ..small() },
            Case { documents: vec![200], heads: 6, kv_heads: 2, head_dim: 16, window: Some(70), ..small() },
            // More values than one task takes, in rows of 33 too.
            Case {
                documents: vec![500],
                hidden_size: 33,
                intermediate_size: 257,
                vocab_size: 1003,
                rank: 3,
                ..small()
            },
            Case { documents: vec![129], heads: 3, kv_heads: 3, window: Some(1), ..small() },
        ];
        cases.iter().for_each(assert_case);
    }

    #[test]
    fn the_usual_operations_are_of_every_subject() {
        let findings = operations::<Flex>(&Case::small(DType::F32, 32), &Default::default(), Extent::First);
        for subject in [
            "rms_norm",
            "embed",
            "quantize_weight",
            "project_backward (qkv)",
            "project_backward (down)",
            "route",
            "combine_backward",
            "attention_backward",
            "linear_cross_entropy",
            "adamw_foreach",
            "adamw_foreach, 8 bits",
            "squared_norm",
        ] {
            assert!(findings.iter().any(|finding| finding.what.starts_with(subject)), "{subject} is missing");
        }
        let all = operations::<Flex>(&Case::small(DType::F32, 32), &Default::default(), Extent::All);
        assert!(findings.len() * 2 < all.len(), "{} of {}", findings.len(), all.len());
    }

    #[test]
    fn half_formats_take_the_reference_bodies() {
        let case = Case { window: Some(9), ..Case::small(DType::BF16, 32) };
        verdict(DType::BF16, operations::<Flex>(&case, &Default::default(), Extent::All)).unwrap();
    }

    #[test]
    fn a_wrong_operation_is_named_with_its_error() {
        let finding = |relative_error| Finding { what: "rms_norm".to_owned(), relative_error };
        assert_eq!(verdict(DType::F32, vec![finding(1e-4)]), Ok(()));
        let message = verdict(DType::F32, vec![finding(0.5)]).unwrap_err();
        assert!(message.contains("rms_norm") && message.contains("5.0e-1"), "{message}");
    }
}
