//! The self-test on CUDA: which kernels it compiles first, and which kernels of attention it chooses.
//! Trade-off: all programs of a run are compiled here, also those that only later launches need.

use cubecl::cuda::CudaDevice;

use super::attention::library::CudnnLimits;
use super::device::{Device, limit_cudnn};
use super::engine::Cuda;
use super::fp8_self_test::fp8_groups;
use crate::GemmFormat;
use crate::backends::kind::SelfTest;
use crate::backends::on_cubecl::DeviceFailure;
use crate::backends::self_test;
use crate::conformance::verdict;

/// Implements [`crate::BackendKind::self_test`]. Documents of one length, and of several short or long lengths, use
/// different attention kernels: all of them run.
pub(in crate::backends) fn self_test(device: &CudaDevice, test: SelfTest) -> Result<(), String> {
    let SelfTest { dtype, gemms, head_dim, has_experts } = test;
    let of = caught(|| Device::of(device))?;
    let of_experts = if has_experts { of.expert_sources() } else { Vec::new() };
    let in_half = [of.usual_low_rank(), of_experts].concat();
    of.programs.prepare(dtype, head_dim, of.flash_programs(dtype, head_dim), in_half);
    let findings = caught(|| {
        // Packed documents, if short, go to the flash kernels even if cuDNN is installed; those of this test do.
        let limits = limit_cudnn(device, CudnnLimits { min_mean_tokens: 0, ..CudnnLimits::default() });
        // Groups in 8-bit floats have a test of their own: their rounding is that of their codes, and none has magnitudes.
        let test = SelfTest { gemms: GemmFormat::Compute, ..test };
        self_test::operations::<Cuda>(test, device, || _ = limit_cudnn(device, limits))
    });
    // All sources for later launches are ready, and no thread compiles when a short process ends.
    of.programs.finish();
    of.library.finish();
    verdict(dtype, findings?)?;
    match gemms {
        GemmFormat::Compute | GemmFormat::F16 => Ok(()),
        GemmFormat::Fp8 => caught(|| fp8_groups::<Cuda>(test, device))?,
    }
}

/// Runs `work` and describes the failure that ended it, if any.
fn caught<R>(work: impl FnOnce() -> R) -> Result<R, String> {
    DeviceFailure::catch(work).map_err(|failure| failure.to_string())
}
