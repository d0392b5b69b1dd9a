//! What a device can do at best, measured in the same minute as the steps that are held against it.
//!
//! A large product through [`Kernels::project`], in the format of the steps, and large streams through memory. The roofs are
//! those of this project's own operations: a library that is faster still does not show here.

use std::time::Instant;

use burn_tensor::{DType, Distribution, Tensor};
use firebrick_hwprofile::roofline::{RateSource, Rates};
use firebrick_kernels::{Kernels, Projection, Weight};
use serde::Serialize;

use crate::backend::wait;
use crate::error::RunError;

/// Measurements of each roof; the best counts.
const ROUNDS: usize = 4;

/// Measured rates.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Roofs {
    /// Matrix products, 1e12 operations a second.
    pub product_tflops: f64,
    /// Rows, columns and length of the sums of the product that reached it.
    pub product_size: usize,
    /// Memory traffic of a copy-like pass, 1e12 bytes a second, reads and writes together.
    pub copy_tb_s: f64,
}

impl Roofs {
    /// Measures both on a device that has nothing else to do.
    ///
    /// # Errors
    /// The device failed.
    pub(super) fn measure<B: Kernels>(device: &B::Device, dtype: DType, is_cpu: bool) -> Result<Self, RunError> {
        // Large enough for the best rate of the device, small enough to take milliseconds; copies well beyond its caches.
        let (product_size, copy_bytes) = if is_cpu { (1024, 128 << 20) } else { (8192, 1 << 30) };
        let launches = if is_cpu { 1 } else { 10 };
        let product_s = product_seconds::<B>(product_size, launches, dtype, device)?;
        Ok(Self {
            product_tflops: 2.0 * (product_size as f64).powi(3) / product_s / 1e12,
            product_size,
            copy_tb_s: copy_rate::<B>(copy_bytes, launches, device)? / 1e12,
        })
    }

    /// For the roofline. Attention is held against the product's rate, which it does not reach.
    pub(super) fn rates(&self) -> Rates {
        Rates {
            matmul_flops_per_s: self.product_tflops * 1e12,
            attention_flops_per_s: self.product_tflops * 1e12,
            bytes_per_s: self.copy_tb_s * 1e12,
            source: RateSource::Measured,
        }
    }

    pub(super) fn product_name(&self) -> String {
        format!("a product of {0} x {0} x {0} on this device", self.product_size)
    }
}

/// Least seconds of `x Wᵀ`, square.
fn product_seconds<B: Kernels>(
    size: usize,
    launches: usize,
    dtype: DType,
    device: &B::Device,
) -> Result<f64, RunError> {
    let random = || Tensor::<B, 2>::random([size, size], Distribution::Uniform(-1.0, 1.0), device).cast(dtype);
    let x_ni = random();
    let projection = Projection { weight: Weight::Dense(random()), lora: None, weight_gradient: false };
    least_seconds::<B>(launches, device, || {
        B::section(device, || {
            for _ in 0..launches {
                B::project(x_ni.clone(), std::slice::from_ref(&projection));
            }
        });
    })
}

/// Most bytes a second of two streaming passes: one that reads and writes, and one that reads two and writes one.
fn copy_rate<B: Kernels>(bytes: usize, launches: usize, device: &B::Device) -> Result<f64, RunError> {
    let elements = bytes / size_of::<f32>();
    let x = Tensor::<B, 1>::ones([elements], device);
    let passes = |seconds: f64, streams: usize| (streams * bytes) as f64 / seconds;
    let written = least_seconds::<B>(launches, device, || {
        for _ in 0..launches {
            drop(x.clone().add_scalar(1.0));
        }
    })?;
    let mut sum = Some(Tensor::<B, 1>::zeros([elements], device));
    let added = least_seconds::<B>(launches, device, || {
        B::section(device, || {
            for _ in 0..launches {
                sum = sum.take().map(|sum| B::accumulate(sum, x.clone()));
            }
        });
    })?;
    Ok(passes(written, 2).max(passes(added, 3)))
}

/// Least seconds of one of the `launches` in `work`, after one round that does not count.
fn least_seconds<B: Kernels>(launches: usize, device: &B::Device, mut work: impl FnMut()) -> Result<f64, RunError> {
    let mut least = f64::INFINITY;
    for round in 0..=ROUNDS {
        wait::<B>(device)?;
        let started = Instant::now();
        work();
        wait::<B>(device)?;
        if round > 0 {
            least = least.min(started.elapsed().as_secs_f64() / launches as f64);
        }
    }
    Ok(least)
}
