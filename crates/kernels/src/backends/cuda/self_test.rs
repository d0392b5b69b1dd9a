//! One small case of every operation, before a run trusts the device.

use burn_tensor::DType;
use cubecl::cuda::CudaDevice;

use super::Cuda;
use super::engine::engine;
use super::failure::DeviceFailure;
use crate::check::{Case, attention, every_operation, verdict};

/// See [`crate::Kernels::self_test`]. Documents of one length and of several take different ways through attention: both run.
pub(super) fn run(device: &CudaDevice, dtype: DType, head_dim: usize) -> Result<(), String> {
    let case = Case::small(dtype, head_dim);
    let engine = DeviceFailure::catch(|| engine(device)).map_err(|failure| failure.to_string())?;
    // Packed documents go to our own kernels even where there is a library.
    engine.programs.prepare(dtype, head_dim, super::launch_flash::takes(dtype, head_dim));
    let findings = DeviceFailure::catch(|| {
        let mut findings = every_operation::<Cuda>(&case, device);
        findings.extend(attention::<Cuda>(&Case { documents: vec![64, 64], ..case }, device));
        findings
    });
    verdict(dtype, findings.map_err(|failure| failure.to_string())?)
}
