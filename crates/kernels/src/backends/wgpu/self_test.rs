//! The self-test on wgpu. New memory is filled with NaN before each operation, because drivers have been seen whose kernels write nothing: what an
//! earlier tensor left there may look right.

use std::sync::OnceLock;
use std::sync::atomic::Ordering;

use burn_tensor::DType;
use cubecl::wgpu::WgpuDevice;

use super::attention::BY_MATRICES;
use super::engine::{Engine, Wgpu, lacks_matrices};
use crate::backends::kind::SelfTest;
use crate::backends::on_cubecl::DeviceFailure;
use crate::backends::self_test;
use crate::conformance::verdict;
use crate::linear::GemmFormat;
use crate::session::{RunShape, Session};

/// Implements [`crate::BackendKind::self_test`].
pub(in crate::backends) fn self_test(test: SelfTest) -> Result<(), String> {
    let findings = DeviceFailure::catch(|| {
        let engine = Engine::get();
        engine.fill_new_memory(true);
        Wgpu::open(&WgpuDevice::DefaultDevice, &RunShape { gemms: test.gemms, ..RunShape::default() });
        let findings = self_test::operations::<Wgpu>(test, &WgpuDevice::DefaultDevice, || ());
        engine.fill_new_memory(false);
        Wgpu::open(&WgpuDevice::DefaultDevice, &RunShape::default());
        findings
    });
    let rounding = if test.gemms == GemmFormat::F16 { DType::F16 } else { test.dtype };
    verdict(rounding, findings.map_err(|failure| failure.to_string())?)
}

/// Why products, and attention, do not use matrix units; `None` if they do.
pub(in crate::backends) struct Refusals {
    pub gemms: Option<String>,
    pub attention: Option<String>,
}

/// Finds out what uses matrix units: the device may have none, or compute wrong values with them. The first call tries them.
pub(in crate::backends) fn refusals() -> &'static Refusals {
    static FOUND: OnceLock<Refusals> = OnceLock::new();
    FOUND.get_or_init(|| {
        let refused = |reason: String| Refusals { gemms: Some(reason.clone()), attention: Some(reason) };
        if let Some(reason) = lacks_matrices() {
            return refused(reason.to_owned());
        }
        let of = |head_dim| SelfTest { dtype: DType::F32, gemms: GemmFormat::F16, head_dim, has_experts: false };
        BY_MATRICES.store(false, Ordering::Relaxed);
        if let Err(problem) = self_test(of(64)) {
            return refused(problem);
        }
        BY_MATRICES.store(true, Ordering::Relaxed);
        let attention = [64, 128].into_iter().find_map(|head_dim| self_test(of(head_dim)).err());
        BY_MATRICES.store(attention.is_none(), Ordering::Relaxed);
        Refusals { gemms: None, attention }
    })
}
