//! Measures the peak rates of a device: large GEMMs in each format, and large streams through memory. A benchmark measures them in the same minute as
//! the steps that it compares with them; `profile --measure` stores them.
//!
//! The time of an 8-bit GEMM is the device's own, without the quantization of its operands, as makers and other libraries count it.
//! Trade-off: these are the peaks of this project's own operations; a faster library does not show.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use burn_tensor::{DType, Distribution, Tensor};
use firebrick_hwprofile::peaks::{MeasuredGemm, MeasuredPeaks, processor_key};
use firebrick_hwprofile::roofline::{RateSource, Rates};
use firebrick_hwprofile::spec::{HardwareKind, MathFormat};
use firebrick_hwprofile::{Gpu, HardwareProfile};
use firebrick_kernels::{
    BackendKind, Epilogue, GemmFormat, Group, Keep, Kernels, MemoryOps, Module, Prologue, SelfTest, Weight,
    WeightGradient,
};
use firebrick_precision::FloatType;
use serde::Serialize;

use crate::RunError;
use crate::plan::compute_format;
use crate::run::device::{device_work, dtype_of, self_test, wait};
use crate::with_backend;

/// Measurements of each rate; the best counts.
const ROUNDS: usize = 4;
/// Width of an attention head in [`try_gemm`]'s self-test: the most common one of small models.
const HEAD_DIM: usize = 64;

/// Measured rates.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Peaks {
    /// GEMMs, 1e12 operations per second.
    pub gemm_tflops: f64,
    /// GEMMs of 8-bit floats; only if the layers' GEMMs multiply them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fp8_gemm_tflops: Option<f64>,
    /// Rows, columns and inner dimension of the GEMMs that reached it.
    pub gemm_size: usize,
    /// Memory traffic of a copy-like pass, 1e12 bytes per second, reads and writes together.
    pub copy_tb_s: f64,
}

impl Peaks {
    /// Returns the rates for the roofline. Attention is compared with the rate of GEMMs, which it does not reach.
    pub fn rates(&self) -> Rates {
        Rates {
            matmul_flops_per_s: self.gemm_tflops * 1e12,
            fp8_flops_per_s: self.fp8_gemm_tflops.unwrap_or(self.gemm_tflops) * 1e12,
            attention_flops_per_s: self.gemm_tflops * 1e12,
            bytes_per_s: self.copy_tb_s * 1e12,
            source: RateSource::Measured,
        }
    }
}

/// Sizes of the work that is timed.
#[derive(Clone, Copy, Debug)]
pub struct Probe {
    /// Rows, columns and inner dimension of a GEMM.
    pub gemm_size: usize,
    /// Bytes of a stream.
    pub copy_bytes: usize,
    /// Launches between two waits.
    pub launches: usize,
}

impl Probe {
    /// Sizes for a GPU whose operations are slow to tune at large sizes.
    pub const MEDIUM: Self = Self { gemm_size: 4096, copy_bytes: 512 << 20, launches: 4 };
    /// Sizes for processors.
    pub const SMALL: Self = Self { gemm_size: 1024, copy_bytes: 128 << 20, launches: 1 };
    /// Sizes that are large enough for the best rate of a GPU and small enough to take milliseconds; copies far exceed its caches.
    pub const LARGE: Self = Self { gemm_size: 8192, copy_bytes: 1 << 30, launches: 10 };

    /// Returns the sizes for a backend on this machine.
    pub fn of(backend: BackendKind) -> Self {
        // Software on the CPU binds less than a large copy.
        let is_small = |most| most < Self::LARGE.copy_bytes as u64;
        if backend.is_cpu() || backend.largest_tensor_bytes().is_some_and(is_small) { Self::SMALL } else { Self::LARGE }
    }

    /// Measures all peaks of an otherwise idle device.
    pub fn peaks<B: Kernels>(self, device: &B::Device, dtype: DType, gemms: GemmFormat) -> Result<Peaks, RunError> {
        let tflops = |format| self.gemm_tflops::<B>(device, dtype, format);
        Ok(Peaks {
            gemm_tflops: tflops(if gemms == GemmFormat::F16 { gemms } else { GemmFormat::Compute })?,
            fp8_gemm_tflops: (gemms == GemmFormat::Fp8).then(|| tflops(gemms)).transpose()?,
            gemm_size: self.gemm_size,
            copy_tb_s: self.copy_tb_s::<B>(device)?,
        })
    }

    /// Measures the best rate of square GEMMs, in 1e12 operations per second.
    fn gemm_tflops<B: Kernels>(self, device: &B::Device, dtype: DType, gemms: GemmFormat) -> Result<f64, RunError> {
        let size = self.gemm_size;
        let random = |dtype| Tensor::<B, 2>::random([size, size], Distribution::Uniform(-1.0, 1.0), device).cast(dtype);
        // As a run holds them: frozen weights of GEMMs in float16 are that already.
        let weight = Weight::Dense(random(if gemms == GemmFormat::F16 { DType::F16 } else { dtype }));
        let (x_ni, weight_gradient) = (random(dtype), WeightGradient::Frozen);
        let module = Module { columns: 0..size, weight, weight_gradient, bias: None, adapter: None };
        let group = Group { modules: vec![module], parts: vec![size], gemms, dropout: None, rows: None };
        let work = || {
            B::section(device, || {
                for _ in 0..self.launches {
                    B::project(Prologue::None { x: x_ni.clone() }, &group, Epilogue::None, Keep::Nothing);
                }
            });
        };
        let seconds = match gemms {
            GemmFormat::Compute | GemmFormat::F16 => self.min_seconds::<B>(device, work)?,
            // Only CUDA has GEMMs of 8-bit floats, and it can trace: the mean of a round on the device, without that of the first round.
            GemmFormat::Fp8 => {
                let mut minimum = f64::INFINITY;
                for round in 0..=ROUNDS {
                    let ((), operations) = B::trace(device, work);
                    wait::<B>(device)?;
                    let gemms = operations.iter().filter(|operation| operation.gemm.is_some());
                    let (count, ms) = gemms.fold((0, 0.0), |(count, sum), gemm| (count + 1, sum + gemm.milliseconds));
                    assert!(count > 0, "a backend with 8-bit GEMMs traces them");
                    if round > 0 {
                        minimum = minimum.min(ms / f64::from(count) / 1e3);
                    }
                }
                minimum
            }
        };
        Ok(2.0 * (size as f64).powi(3) / seconds / 1e12)
    }

    /// Measures the best rate of two streaming passes, in 1e12 bytes per second: one reads and writes, the other reads two and writes one.
    fn copy_tb_s<B: Kernels>(self, device: &B::Device) -> Result<f64, RunError> {
        let elements = self.copy_bytes / size_of::<f32>();
        let x = Tensor::<B, 1>::ones([elements], device);
        let rate = |seconds: f64, streams: usize| (streams * self.copy_bytes) as f64 / seconds;
        let written = self.min_seconds::<B>(device, || {
            for _ in 0..self.launches {
                drop(x.clone().add_scalar(1.0));
            }
        })?;
        let mut sum = Some(Tensor::<B, 1>::zeros([elements], device));
        let added = self.min_seconds::<B>(device, || {
            B::section(device, || {
                for _ in 0..self.launches {
                    sum = sum.take().map(|sum| B::accumulate(sum, x.clone()));
                }
            });
        })?;
        Ok(rate(written, 2).max(rate(added, 3)) / 1e12)
    }

    /// Measures the minimum seconds of a launch in `work`, after one round that does not count.
    fn min_seconds<B: Kernels>(self, device: &B::Device, mut work: impl FnMut()) -> Result<f64, RunError> {
        let mut minimum = f64::INFINITY;
        for round in 0..=ROUNDS {
            wait::<B>(device)?;
            let started = Instant::now();
            work();
            wait::<B>(device)?;
            if round > 0 {
                minimum = minimum.min(started.elapsed().as_secs_f64() / self.launches as f64);
            }
        }
        Ok(minimum)
    }
}

/// Runs the backend's self-test, then a GEMM in float16 if the backend computes in it, else in float32, on the device that a run of rank 0 would
/// use. Returns the format and the rate, in 1e12 operations per second.
pub fn try_gemm(backend: BackendKind) -> Result<(FloatType, f64), RunError> {
    let dtype = dtype_of(compute_format(FloatType::F16, backend, None).value);
    let is_half = dtype == DType::F16 || backend.half_gemms_refusal().is_none();
    let gemms = if dtype == DType::F32 && is_half { GemmFormat::F16 } else { GemmFormat::Compute };
    let probe = if backend.is_cpu() { Probe::SMALL } else { Probe::MEDIUM };
    let test = SelfTest { dtype, gemms, head_dim: HEAD_DIM, has_experts: false };
    device_work(|| self_test(backend, 0, test))?;
    let tflops = with_backend!(backend, B => device_work(|| {
        probe.gemm_tflops::<B>(&B::device_of(0), dtype, gemms)
    }))?;
    Ok((if is_half { FloatType::F16 } else { FloatType::F32 }, tflops))
}

/// Times GEMMs of each format and copies on the device that a run of rank 0 would use, for `profile --measure`.
pub fn measure_peaks(
    backend: BackendKind,
    profile: &HardwareProfile,
    print: &dyn Fn(&str),
) -> Result<MeasuredPeaks, RunError> {
    with_backend!(backend, B => device_work(|| of_backend::<B>(backend, profile, print)))
}

fn of_backend<B: Kernels>(
    backend: BackendKind,
    profile: &HardwareProfile,
    print: &dyn Fn(&str),
) -> Result<MeasuredPeaks, RunError> {
    let (device, probe) = (B::device_of(0), Probe::of(backend));
    let mut gemms = Vec::new();
    for (format, dtype, kind) in formats(backend, profile) {
        let tflops = match device_work(|| probe.gemm_tflops::<B>(&device, dtype, kind)) {
            // Untested on some generations that should have them; the other peaks are still worth measuring.
            Err(error @ RunError::DeviceFailed { .. }) if kind == GemmFormat::Fp8 => {
                print(&format!("{} GEMM: {error}", format.name()));
                continue;
            }
            measured => measured?,
        };
        print(&format!("{} GEMM of {}: {tflops:.3} TFLOP/s", format.name(), probe.gemm_size));
        gemms.push(MeasuredGemm { format, tflops });
    }
    let copy_tb_s = probe.copy_tb_s::<B>(&device)?;
    print(&format!("copy: {copy_tb_s:.3} TB/s"));
    let (device, driver) = key(backend, profile);
    let measured_at = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let (backend, gemm_size) = (backend.to_string(), probe.gemm_size);
    Ok(MeasuredPeaks { backend, device, driver, measured_at, gemm_size, gemms, copy_tb_s })
}

/// Returns the formats that the backend multiplies on this machine.
fn formats(backend: BackendKind, profile: &HardwareProfile) -> Vec<(MathFormat, DType, GemmFormat)> {
    let half = [(FloatType::F16, MathFormat::F16, DType::F16), (FloatType::Bf16, MathFormat::Bf16, DType::BF16)];
    let kind = profile.cuda_card().and_then(Gpu::kind);
    let half = half.into_iter().filter(|(format, ..)| compute_format(*format, backend, kind).value == *format);
    let half = half.map(|(_, math, dtype)| (math, dtype, GemmFormat::Compute));
    let fp8 = has_fp8(backend, profile).then_some((MathFormat::Fp8, DType::BF16, GemmFormat::Fp8));
    let by_matrices = backend.half_gemms_refusal().is_none();
    let half = half.chain(by_matrices.then_some((MathFormat::F16, DType::F32, GemmFormat::F16)));
    std::iter::once((MathFormat::F32, DType::F32, GemmFormat::Compute)).chain(half).chain(fp8).collect()
}

/// Returns whether the device that the backend computes on multiplies 8-bit floats.
pub fn has_fp8(backend: BackendKind, profile: &HardwareProfile) -> bool {
    let capability = profile.cuda_card().and_then(|card| card.compute_capability);
    let has_them = |capability| HardwareKind::of_compute_capability(capability).has_fp8();
    backend == BackendKind::Cuda && capability.is_some_and(has_them)
}

/// Returns name and driver of the device that the backend computes on.
fn key(backend: BackendKind, profile: &HardwareProfile) -> (String, String) {
    let card = match backend {
        BackendKind::Cuda => profile.cuda_card(),
        BackendKind::Wgpu => profile.gpus.first(),
        BackendKind::Flex | BackendKind::Candle => return (processor_key(profile), String::new()),
    };
    let adapter = || profile.adapters.first().map(|adapter| (adapter.name.clone(), adapter.driver.clone()));
    card.map(|card| (card.name.clone(), card.driver_version.clone()))
        .or_else(adapter)
        .unwrap_or_else(|| (backend.to_string(), String::new()))
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;

    #[test]
    fn a_processor_is_measured_in_f32_and_known_by_its_name_and_threads() {
        let profile = HardwareProfile::described(2, 1 << 34, Vec::new());
        let peaks = measure_peaks(BackendKind::Flex, &profile, &|_| ()).unwrap();
        assert_eq!((peaks.backend.as_str(), peaks.device.as_str()), ("flex", "a processor, 2 threads"));
        assert_eq!(peaks.gemms.iter().map(|gemm| gemm.format).collect::<Vec<_>>(), [MathFormat::F32]);
        assert!(peaks.gemms[0].tflops > 0.0 && peaks.copy_tb_s > 0.0, "{peaks:?}");
        assert!(peaks.is_of(&profile));
    }
}
