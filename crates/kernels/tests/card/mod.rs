//! The card for a test of the CUDA backend, or a printed line with the reason why there is none.

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
