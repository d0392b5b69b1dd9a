//! One small case of every operation in its usual variant, before a run trusts the device.
//! Trade-off: a wrong result that only larger sizes or rare variants show is not found here; the GPU test suite looks for those.

use burn_tensor::DType;
use cubecl::cuda::CudaDevice;

use super::engine::engine;
use super::failure::DeviceFailure;
use super::matrix::Cuda;
use crate::conformance::{Case, attention, begin_attention, usual_operations, verdict};

/// See [`crate::Kernels::self_test`]. Documents of one length and of several take different ways through attention: both run.
pub(super) fn run(device: &CudaDevice, dtype: DType, head_dim: usize) -> Result<(), String> {
    let case = Case::small(dtype, head_dim);
    let engine = DeviceFailure::catch(|| engine(device)).map_err(|failure| failure.to_string())?;
    // Packed documents may go to the flash kernels even where cuDNN is installed.
    engine.programs.prepare(dtype, head_dim, super::flash::takes(dtype, head_dim));
    let uniform = Case { documents: vec![64, 64], ..case.clone() };
    let findings = DeviceFailure::catch(|| {
        begin_attention::<Cuda>(&case, device);
        begin_attention::<Cuda>(&uniform, device);
        let mut findings = usual_operations::<Cuda>(&case, device);
        findings.extend(attention::<Cuda>(&uniform, device));
        findings
    });
    // What a later launch needs is ready, and no thread compiles when a short process ends.
    engine.programs.finish();
    engine.library.finish();
    verdict(dtype, findings.map_err(|failure| failure.to_string())?)
}
