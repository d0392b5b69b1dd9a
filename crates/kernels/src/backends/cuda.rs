//! NVIDIA through burn-cuda: the portable bodies on CubeCL's kernels.

use burn_cubecl::CubeBackend;
use cubecl::cuda::CudaRuntime;

use crate::Kernels;

/// f32 defaults; half formats are chosen tensor by tensor.
pub type Cuda = CubeBackend<CudaRuntime, f32, i32, u8>;

impl Kernels for Cuda {}
