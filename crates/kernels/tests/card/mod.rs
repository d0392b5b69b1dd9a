//! The card for a test of the CUDA backend and the formats that it has, or a printed line with the reason why there is none.

use burn_tensor::DType;
use firebrick_kernels::backends::cuda::{Cuda, probe};

pub(crate) type Device = <Cuda as burn_tensor::backend::BackendTypes>::Device;

/// Returns the device for one test; `None` after printing why there is none.
#[expect(clippy::print_stderr, reason = "a test that is not run must be seen")]
pub(crate) fn device() -> Option<Device> {
    match probe() {
        Ok(()) => Some(Device::default()),
        Err(reason) => {
            eprintln!("skipped: {reason}");
            None
        }
    }
}

fn compute_capability(device: &Device) -> (u32, u32) {
    let card = firebrick_cuda::Driver::load().and_then(|driver| driver.device(device.index));
    card.expect("the properties of a card that was opened").compute_capability
}

/// Returns an error that names what the card lacks to multiply 8-bit floats.
pub(crate) fn has_fp8(device: &Device) -> Result<(), String> {
    match compute_capability(device) {
        (8, 9) | (9.., _) => Ok(()),
        capability => Err(format!("8-bit floats need compute capability 8.9, this is {capability:?}")),
    }
}

/// Returns the 16-bit formats that a card computes in: bf16 only from compute capability 8.0 on.
pub(crate) fn halves(device: &Device) -> &'static [DType] {
    if compute_capability(device) < (8, 0) { &[DType::F16] } else { &[DType::BF16, DType::F16] }
}

/// Returns the 16-bit format in which a card usually computes.
pub(crate) fn half(device: &Device) -> DType {
    halves(device)[0]
}
