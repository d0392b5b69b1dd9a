//! NVIDIA through burn-cuda: the portable bodies on CubeCL's kernels.

use burn_cubecl::CubeBackend;
use cubecl::cuda::CudaRuntime;
use firebrick_cuda::Driver;

use crate::Kernels;

/// f32 defaults; half formats are chosen tensor by tensor.
pub type Cuda = CubeBackend<CudaRuntime, f32, i32, u8>;

impl Kernels for Cuda {}

/// Loads the driver and counts its devices, both of which CubeCL would panic over.
pub(crate) fn probe() -> Result<(), String> {
    let devices = Driver::load().and_then(|driver| driver.devices()).map_err(|error| error.to_string())?;
    if devices.is_empty() { Err("the NVIDIA driver is there, but it lists no device".to_owned()) } else { Ok(()) }
}
