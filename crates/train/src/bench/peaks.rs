//! The peak rates of a device, measured in the same minute as the steps that are compared with them.
//!
//! A large GEMM through [`LinearOps::project`](firebrick_kernels::LinearOps::project), in the format of the steps, and large
//! streams through memory. Of an 8-bit GEMM the device's own time counts, without the quantization of its operands, as makers and other
//! libraries count it.
//! Trade-off: these are the peaks of this project's own operations; a library that is faster does not show.

use std::time::Instant;

use burn_tensor::{DType, Distribution, Tensor};
use firebrick_hwprofile::roofline::{RateSource, Rates};
use firebrick_kernels::{Epilogue, GemmFormat, Group, Keep, Kernels, Module, Prologue, Weight, WeightGradient};
use firebrick_trainer::RunError;
use firebrick_trainer::run::device::wait;
use serde::Serialize;

/// Measurements of each rate; the best counts.
const ROUNDS: usize = 4;

/// Measured rates.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Peaks {
    /// GEMMs, 1e12 operations per second.
    pub gemm_tflops: f64,
    /// GEMMs of 8-bit floats, without the quantization of their operands; only where the layers' GEMMs are of that kind.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fp8_gemm_tflops: Option<f64>,
    /// Rows, columns and length of the sums of the GEMMs that reached it.
    pub gemm_size: usize,
    /// Memory traffic of a copy-like pass, 1e12 bytes per second, reads and writes together.
    pub copy_tb_s: f64,
}

/// Sizes of the work that is timed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Probe {
    pub(super) gemm_size: usize,
    pub(super) copy_bytes: usize,
    pub(super) launches: usize,
}

impl Probe {
    /// For a GPU through operations that are slow to tune at large sizes.
    pub(super) const MEDIUM: Self = Self { gemm_size: 4096, copy_bytes: 512 << 20, launches: 4 };

    /// Large enough for the best rate of the device, small enough to take milliseconds; copies well beyond its caches.
    pub(super) fn of(is_cpu: bool) -> Self {
        if is_cpu {
            Self { gemm_size: 1024, copy_bytes: 128 << 20, launches: 1 }
        } else {
            Self { gemm_size: 8192, copy_bytes: 1 << 30, launches: 10 }
        }
    }
}

impl Peaks {
    /// Measures both on a device that has nothing else to do.
    ///
    /// # Errors
    /// The device failed.
    pub(super) fn measure<B: Kernels>(
        device: &B::Device,
        dtype: DType,
        gemms: GemmFormat,
        probe: Probe,
    ) -> Result<Self, RunError> {
        let tflops = |format| Self::gemm_tflops::<B>(probe, dtype, format, device);
        Ok(Self {
            gemm_tflops: tflops(GemmFormat::Compute)?,
            fp8_gemm_tflops: (gemms == GemmFormat::Fp8).then(|| tflops(gemms)).transpose()?,
            gemm_size: probe.gemm_size,
            copy_tb_s: Self::copy_tb_s::<B>(probe, device)?,
        })
    }

    /// The best rate of square GEMMs, 1e12 operations per second.
    pub(super) fn gemm_tflops<B: Kernels>(
        probe: Probe,
        dtype: DType,
        format: GemmFormat,
        device: &B::Device,
    ) -> Result<f64, RunError> {
        let seconds = gemm_seconds::<B>(probe.gemm_size, probe.launches, dtype, format, device)?;
        Ok(2.0 * (probe.gemm_size as f64).powi(3) / seconds / 1e12)
    }

    /// The best rate of memory traffic, 1e12 bytes per second.
    pub(super) fn copy_tb_s<B: Kernels>(probe: Probe, device: &B::Device) -> Result<f64, RunError> {
        Ok(copy_rate::<B>(probe.copy_bytes, probe.launches, device)? / 1e12)
    }

    /// For the roofline. Attention is compared with the rate of GEMMs, which it does not reach.
    pub(super) fn rates(&self) -> Rates {
        Rates {
            matmul_flops_per_s: self.gemm_tflops * 1e12,
            fp8_flops_per_s: self.fp8_gemm_tflops.unwrap_or(self.gemm_tflops) * 1e12,
            attention_flops_per_s: self.gemm_tflops * 1e12,
            bytes_per_s: self.copy_tb_s * 1e12,
            source: RateSource::Measured,
        }
    }

    pub(super) fn gemm_name(&self) -> String {
        format!("a GEMM of {0} x {0} x {0} on this device", self.gemm_size)
    }
}

/// Minimum seconds of `x Wᵀ`, square.
fn gemm_seconds<B: Kernels>(
    size: usize,
    launches: usize,
    dtype: DType,
    gemms: GemmFormat,
    device: &B::Device,
) -> Result<f64, RunError> {
    let random = || Tensor::<B, 2>::random([size, size], Distribution::Uniform(-1.0, 1.0), device).cast(dtype);
    let x_ni = random();
    let module = Module {
        columns: 0..size,
        weight: Weight::Dense(random()),
        weight_gradient: WeightGradient::Frozen,
        bias: None,
        adapter: None,
    };
    let group = Group { modules: vec![module], parts: vec![size], gemms, dropout: None };
    let work = || {
        B::section(device, || {
            for _ in 0..launches {
                B::project(Prologue::None { x: x_ni.clone() }, &group, Epilogue::None, Keep::Nothing);
            }
        });
    };
    match gemms {
        GemmFormat::Compute => min_seconds::<B>(launches, device, work),
        GemmFormat::Fp8 => min_traced_gemm::<B>(device, work),
    }
}

/// Seconds of a GEMM on the device: the mean of a round, the minimum of the rounds after one that does not count. Only CUDA has GEMMs of
/// 8-bit floats, and it can trace.
fn min_traced_gemm<B: Kernels>(device: &B::Device, work: impl Fn()) -> Result<f64, RunError> {
    let mut minimum = f64::INFINITY;
    for round in 0..=ROUNDS {
        let ((), operations) = B::trace(device, &work);
        wait::<B>(device)?;
        let gemms = operations.iter().filter(|operation| operation.gemm.is_some());
        let (count, milliseconds) = gemms.fold((0, 0.0), |(count, sum), gemm| (count + 1, sum + gemm.milliseconds));
        assert!(count > 0, "a backend with 8-bit GEMMs traces them");
        if round > 0 {
            minimum = minimum.min(milliseconds / f64::from(count) / 1e3);
        }
    }
    Ok(minimum)
}

/// Maximum bytes per second of two streaming passes: one that reads and writes, and one that reads two and writes one.
fn copy_rate<B: Kernels>(bytes: usize, launches: usize, device: &B::Device) -> Result<f64, RunError> {
    let elements = bytes / size_of::<f32>();
    let x = Tensor::<B, 1>::ones([elements], device);
    let rate = |seconds: f64, streams: usize| (streams * bytes) as f64 / seconds;
    let written = min_seconds::<B>(launches, device, || {
        for _ in 0..launches {
            drop(x.clone().add_scalar(1.0));
        }
    })?;
    let mut sum = Some(Tensor::<B, 1>::zeros([elements], device));
    let added = min_seconds::<B>(launches, device, || {
        B::section(device, || {
            for _ in 0..launches {
                sum = sum.take().map(|sum| B::accumulate(sum, x.clone()));
            }
        });
    })?;
    Ok(rate(written, 2).max(rate(added, 3)))
}

/// Minimum seconds of one of the `launches` in `work`, after one round that does not count.
fn min_seconds<B: Kernels>(launches: usize, device: &B::Device, mut work: impl FnMut()) -> Result<f64, RunError> {
    let mut minimum = f64::INFINITY;
    for round in 0..=ROUNDS {
        wait::<B>(device)?;
        let started = Instant::now();
        work();
        wait::<B>(device)?;
        if round > 0 {
            minimum = minimum.min(started.elapsed().as_secs_f64() / launches as f64);
        }
    }
    Ok(minimum)
}
