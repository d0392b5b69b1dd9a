//! Work on a device: the self-test, waiting, failures, and the one place where concrete backends are named.
//!
//! Trade-off: only CUDA reports failures in a form that can be caught; other backends panic.

use std::time::Instant;

use burn_tensor::DType;
use firebrick_arch::ModelSpec;
use firebrick_kernels::{BackendKind, GemmFormat, Kernels, SelfTest};
use firebrick_precision::FloatType;

use crate::console::Failure;
use crate::error::RunError;

/// Converts a type to Burn's.
pub fn dtype_of(float: FloatType) -> DType {
    match float {
        FloatType::F32 => DType::F32,
        FloatType::F16 => DType::F16,
        FloatType::Bf16 => DType::BF16,
    }
}

/// Prepares the process for its backends. A program calls it before it starts a thread: with backend cuda it names the folder of CUDA's headers in the
/// environment, which is only possible while there are no other threads.
pub fn prepare_process() {
    #[cfg(feature = "cuda")]
    firebrick_cuda::name_headers();
}

/// Returns what [`self_test`] runs for a model in these formats.
pub fn tested(spec: &ModelSpec, dtype: DType, gemms: GemmFormat) -> SelfTest {
    let head_dim = spec.attentions().next().map_or(0, |attention| attention.head_dim);
    SelfTest { dtype, gemms, head_dim, has_experts: spec.is_mixture() }
}

/// Runs every operation of a run on small input before the device is trusted. Returns the seconds it took; `None` if the backend has nothing to test.
///
/// # Errors
/// A format that the device does not have, or the operation that computes wrong results.
pub fn self_test(backend: BackendKind, local_rank: usize, test: SelfTest) -> Result<Option<f64>, RunError> {
    if let Some(reason) = backend.format_refusal(local_rank, test.dtype) {
        return Err(RunError::Refused(reason));
    }
    let started = Instant::now();
    let Some(result) = backend.self_test(local_rank, test) else { return Ok(None) };
    result.map_err(|problem| {
        RunError::Refused(format!(
            "the self-test of backend `{backend}` failed: {problem}. Results of this device cannot be trusted, so nothing was \
             trained. Reinstall the driver and the CUDA libraries in matching versions, and report it with this line; or train on \
             the CPU with backend = \"flex\""
        ))
    })?;
    Ok(Some(started.elapsed().as_secs_f64()))
}

/// Returns once everything queued on the device is done.
pub fn wait<B: Kernels>(device: &B::Device) -> Result<(), RunError> {
    B::sync(device).map_err(|error| RunError::DeviceFailed {
        operation: "waiting for the device".to_owned(),
        message: error.to_string(),
        advice: "Start it again.".to_owned(),
    })
}

/// Runs device work. A device that cannot do an operation unwinds; this function catches that as a [`Failure`]. Other panics are bugs and continue.
pub fn catch_failure<T>(work: impl FnOnce() -> T) -> Result<T, Failure> {
    #[cfg(any(feature = "cuda", feature = "wgpu"))]
    {
        use std::sync::Once;

        use firebrick_kernels::backends::DeviceFailure;

        static QUIET: Once = Once::new();
        QUIET.call_once(DeviceFailure::quiet_hook);
        DeviceFailure::catch(work).map_err(|failure| Failure {
            operation: failure.operation.to_owned(),
            out_of_memory: failure.out_of_memory,
            message: failure.message,
        })
    }
    #[cfg(not(any(feature = "cuda", feature = "wgpu")))]
    {
        Ok(work())
    }
}

/// Runs device work as [`catch_failure`] does, for work that saves nothing and has no plan.
pub fn device_work<T>(work: impl FnOnce() -> Result<T, RunError>) -> Result<T, RunError> {
    catch_failure(work).unwrap_or_else(|Failure { operation, out_of_memory, message }| {
        let advice = if out_of_memory {
            "Give it less to do at once, use --nf4 or --base, or free memory of the device."
        } else {
            "Start it again."
        };
        Err(RunError::DeviceFailed { operation, message, advice: advice.to_owned() })
    })
}

/// Runs `$body` with `$B` as the backend's type. A kind that is not compiled in was refused when it was chosen.
#[macro_export]
macro_rules! with_backend {
    ($kind:expr, $B:ident => $body:expr) => {
        match $kind {
            #[cfg(feature = "flex")]
            ::firebrick_kernels::BackendKind::Flex => {
                type $B = ::firebrick_kernels::backends::Flex;
                $body
            }
            #[cfg(feature = "candle")]
            ::firebrick_kernels::BackendKind::Candle => {
                type $B = ::firebrick_kernels::backends::Candle;
                $body
            }
            #[cfg(feature = "wgpu")]
            ::firebrick_kernels::BackendKind::Wgpu => {
                type $B = ::firebrick_kernels::backends::Wgpu;
                $body
            }
            #[cfg(feature = "cuda")]
            ::firebrick_kernels::BackendKind::Cuda => {
                type $B = ::firebrick_kernels::backends::Cuda;
                $body
            }
            #[allow(unreachable_patterns, reason = "reachable in builds that leave a backend out")]
            other => unreachable!("backend {other} is not compiled in and was refused when it was chosen"),
        }
    };
}
