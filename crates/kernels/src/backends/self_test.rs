//! Runs one small case of every operation in its usual variant, before a run trusts the device.
//! Trade-off: errors that only larger sizes or rare variants show are not found here; the GPU test suite looks for those.

use super::kind::SelfTest;
use crate::Kernels;
use crate::conformance::{self, Case, Extent, Finding, attention, begin_attention};

/// Runs every operation, attention over documents of several lengths and of one. A backend may have several kernels of attention for
/// packed documents: `choose_other` makes it use the other ones, and those run as well.
pub(super) fn operations<B: Kernels>(test: SelfTest, device: &B::Device, choose_other: impl FnOnce()) -> Vec<Finding> {
    let case = Case { has_experts: test.has_experts, gemms: test.gemms, ..Case::small(test.dtype, test.head_dim) };
    let uniform = Case { documents: vec![64, 64], ..case.clone() };
    begin_attention::<B>(&case, device);
    begin_attention::<B>(&uniform, device);
    let mut findings = conformance::operations::<B>(&case, device, Extent::First);
    findings.extend(attention::<B>(&uniform, device, Extent::First));
    choose_other();
    findings.extend(attention::<B>(&case, device, Extent::First));
    findings
}
