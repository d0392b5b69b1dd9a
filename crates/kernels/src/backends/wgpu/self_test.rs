//! The self-test on wgpu. New memory is filled with NaN before each operation, because drivers have been seen whose kernels write nothing: what an
//! earlier tensor left there may look right.

use cubecl::wgpu::WgpuDevice;

use super::engine::{Engine, Wgpu};
use crate::backends::kind::SelfTest;
use crate::backends::on_cubecl::DeviceFailure;
use crate::backends::self_test;
use crate::conformance::verdict;

/// Implements [`crate::BackendKind::self_test`].
pub(in crate::backends) fn self_test(test: SelfTest) -> Result<(), String> {
    let findings = DeviceFailure::catch(|| {
        let engine = Engine::get();
        engine.fill_new_memory(true);
        let findings = self_test::operations::<Wgpu>(test, &WgpuDevice::DefaultDevice, || ());
        engine.fill_new_memory(false);
        findings
    });
    verdict(test.dtype, findings.map_err(|failure| failure.to_string())?)
}
