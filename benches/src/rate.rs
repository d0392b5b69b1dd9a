//! How fast this machine multiplies f32 matrices of given sizes, through the backends' own matmul: the roofline of a step.
//!
//! Each size is timed with its operands as stored and with either one transposed, and the fastest counts, whichever backend reached it: a
//! layout or a library that the step does not use does not excuse the step. GEMMs too small to be timed separately from the call around
//! them take the best rate of all.
//! Trade-off: operands stay in the cache between repetitions, which makes the roofline higher than a step can reach.

use std::collections::BTreeMap;
use std::time::Instant;

use burn_tensor::backend::Backend;
use burn_tensor::{Distribution, Shape, Tensor};
use firebrick_kernels::backends::BackendKind;
use firebrick_train::bench::timed;
use firebrick_trainer::with_backend;

use crate::shapes::{Gemm, Part, Products};

/// GEMMs of fewer operations are not timed: at 100 GFLOP/s this is 20 µs, of which the call is a visible part.
const SMALLEST_TIMED: f64 = 2e6;
/// Large enough that any library is at its best.
const LARGE: Gemm = Gemm { batch: 1, m: 1024, n: 1024, k: 1024 };
/// Minimum repetitions of a GEMM, and minimum seconds.
const REPETITIONS: usize = 5;
const SECONDS: f64 = 0.03;

/// The minimum seconds of each GEMM, and the backend that reached them.
#[derive(Clone, Debug, Default)]
pub struct Rates {
    best: BTreeMap<Gemm, (f64, BackendKind)>,
    large: BTreeMap<String, f64>,
}

impl Rates {
    /// Times the GEMMs on `backends`. May be called again: a faster time replaces a slower one.
    pub fn measure(&mut self, products: &Products, backends: &[BackendKind]) {
        let mut gemms: Vec<Gemm> = products.iter().map(|(_, gemm, _)| gemm).collect();
        gemms.retain(|gemm| gemm.flops() >= SMALLEST_TIMED);
        gemms.push(LARGE);
        gemms.sort_unstable();
        gemms.dedup();
        for &backend in backends {
            for &gemm in &gemms {
                let seconds = with_backend!(backend, B => best_seconds::<B>(gemm));
                let best = self.best.entry(gemm).or_insert((seconds, backend));
                if seconds < best.0 {
                    *best = (seconds, backend);
                }
                if gemm == LARGE {
                    let large = self.large.entry(backend.to_string()).or_insert(seconds);
                    *large = large.min(seconds);
                }
            }
        }
    }

    /// Operations per second of the large square GEMM, by backend.
    pub fn large(&self) -> impl Iterator<Item = (&str, f64)> + '_ {
        self.large.iter().map(|(backend, &seconds)| (backend.as_str(), LARGE.flops() / seconds))
    }

    /// The highest rate of any GEMM, operations per second.
    ///
    /// # Panics
    /// If nothing was measured yet.
    pub fn peak(&self) -> f64 {
        let rates = self.best.iter().map(|(gemm, &(seconds, _))| gemm.flops() / seconds);
        rates.max_by(f64::total_cmp).expect("rates are measured before they are read")
    }

    /// Minimum seconds of a GEMM, and the backend that reached them; `None` for one that was too small to be timed.
    pub fn best(&self, gemm: Gemm) -> Option<(f64, BackendKind)> {
        self.best.get(&gemm).copied()
    }

    /// Seconds that a part's GEMMs need at the rate of each.
    pub fn roofline_of(&self, products: &Products, wanted: Part) -> f64 {
        let peak = self.peak();
        let of_part = products.iter().filter(|&(part, ..)| part == wanted);
        of_part
            .map(|(_, gemm, count)| count as f64 * self.best(gemm).map_or(gemm.flops() / peak, |(seconds, _)| seconds))
            .sum()
    }

    /// Seconds that all GEMMs need at the rate of each: the roofline of the step.
    pub fn roofline(&self, products: &Products) -> f64 {
        Part::ALL.into_iter().map(|part| self.roofline_of(products, part)).sum()
    }
}

/// Minimum seconds of a GEMM over its three layouts.
fn best_seconds<B: Backend>(gemm: Gemm) -> f64 {
    let Gemm { batch, m, n, k } = gemm;
    if batch == 1 {
        best_layout::<B, 2>([m, k], [k, n], [n, k], [k, m])
    } else {
        best_layout::<B, 3>([batch, m, k], [batch, k, n], [batch, n, k], [batch, k, m])
    }
}

fn best_layout<B: Backend, const D: usize>(
    left: [usize; D],
    right: [usize; D],
    right_transposed: [usize; D],
    left_transposed: [usize; D],
) -> f64 {
    let device = B::Device::default();
    let random =
        |shape: [usize; D]| Tensor::<B, D>::random(Shape::from(shape), Distribution::Uniform(-1.0, 1.0), &device);
    let (left, right) = (random(left), random(right));
    let layouts = [
        (left.clone(), right.clone()),
        (left, random(right_transposed).transpose()),
        (random(left_transposed).transpose(), right),
    ];
    layouts.into_iter().map(|(left, right)| least_seconds(left, right, &device)).fold(f64::INFINITY, f64::min)
}

fn least_seconds<B: Backend, const D: usize>(left: Tensor<B, D>, right: Tensor<B, D>, device: &B::Device) -> f64 {
    let multiply = || {
        // The result lives until the device is done, so that freeing it is not timed.
        let product = left.clone().matmul(right.clone());
        wait::<B>(device);
        product
    };
    drop(multiply());
    let began = Instant::now();
    let mut least = f64::INFINITY;
    let mut repetitions = 0;
    while repetitions < REPETITIONS || began.elapsed().as_secs_f64() < SECONDS {
        least = least.min(timed(multiply).0);
        repetitions += 1;
    }
    least
}

/// Returns once everything queued on the device is done.
pub(crate) fn wait<B: Backend>(device: &B::Device) {
    B::sync(device).expect("a device that took the work can be waited for");
}
