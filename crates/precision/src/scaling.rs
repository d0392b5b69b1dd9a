//! Groups of a matrix's values that share a scale, the storage format of the scale, and its computation from the group's largest magnitude (amax).
//!
//! A matrix is `[rows, columns]`, row-major, and the GEMM sums over its columns. A value is `code x scale`. With `max` the
//! element's largest number and f32 arithmetic that rounds to nearest even, each step as written:
//!
//! | scaling | group | scale | value times |
//! |---|---|---|---|
//! | [`Scaling::PER_TENSOR`] | all | `amax / max` | `max / amax` |
//! | [`Scaling::PER_ROW`] | a row (outer vector) | same | same |
//! | [`Scaling::BLOCK_1X128`], [`Scaling::BLOCK_128X128`] | that block | same | same |
//! | the same, [`Scaling::with_power_of_two_scales`] | | 2^-e | 2^e, e = floor(log2(`max / amax`)) |
//! | [`Scaling::MX`] | 1x32 | E8M0, `amax / max` rounded up | 1 / scale |
//! | [`Scaling::MX_OCP`] | 1x32 | E8M0, 2^(floor(log2 amax) - floor(log2 max)) | 1 / scale |
//! | [`Scaling::NVFP4`], [`Scaling::NVFP4_16X16`] | 1x16, 16x16 | UE4M3 s = `(amax · T) / max` times f32 t | `T / s` |
//!
//! where for NVFP4, with the amax of the whole matrix, `t = amax / (448 · max)` and `T = (448 · max) / amax`.
//! With MX_OCP values beyond `max` saturate: up to a quarter of the group's amax for E2M1.
//!
//! Every amax that is zero, tiny or not finite has a defined result:
//!
//! - **amax 0 or tiny**: f32 scales, and t of NVFP4, are computed as if amax were at least [`AMAX_FLOOR`], so no scale is 0 or subnormal and no
//!   factor infinite. E8M0 uses its smallest code, 2^-127. A group of zeros is decoded as zeros with their signs. In NVFP4 a group whose s rounds
//!   to 0 (amax below 2^-10 of the matrix's amax / 448) is decoded as zeros.
//! - **A NaN or an infinity** makes the scale NaN, and with it every value of the group: a gradient that overflowed stays
//!   visible. In NVFP4 t is NaN, which affects the whole matrix.
//!
//! TransformerEngine uses scale 1 if amax is 0 or not finite; the decoded values differ only in the latter case.
//!
//! Trade-off: a partial group at an edge has a scale like any other; cuBLASLt requires multiples of 16 and more, which its callers check.

use crate::e8m0::{self, power_of_two};
use crate::float::NarrowFloat;
use crate::rounding::Overflow;
use crate::scales::BlockScales;

/// f32 scales are computed as if amax were at least this: 2^-100.
pub const AMAX_FLOOR: f32 = power_of_two(-100);

/// The groups of values that share a scale, and the scale's storage format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Scaling {
    group_rows: usize,
    group_columns: usize,
    stored: Stored,
}

/// Storage format of a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Stored {
    F32,
    PowerOfTwo,
    E8m0Up,
    E8m0Down,
    Ue4m3,
}

/// All rows, or all columns.
const ALL: usize = usize::MAX;

impl Scaling {
    /// One f32 scale.
    pub const PER_TENSOR: Self = Self::new(ALL, ALL, Stored::F32);
    /// One f32 scale per row.
    pub const PER_ROW: Self = Self::new(1, ALL, Stored::F32);
    /// One f32 scale per 128 values of a row: activations and gradients of block scaling.
    pub const BLOCK_1X128: Self = Self::new(1, 128, Stored::F32);
    /// One f32 scale per square of 128: weights of block scaling.
    pub const BLOCK_128X128: Self = Self::new(128, 128, Stored::F32);
    /// One E8M0 scale per 32 values of a row, rounded up, as TransformerEngine quantizes: MXFP8, MXFP4.
    pub const MX: Self = Self::new(1, 32, Stored::E8m0Up);
    /// The same with the exponent of the OCP specification, rounded down, so that the largest values may saturate.
    pub const MX_OCP: Self = Self::new(1, 32, Stored::E8m0Down);
    /// One UE4M3 scale per 16 values of a row, and one f32 for the matrix.
    pub const NVFP4: Self = Self::new(1, 16, Stored::Ue4m3);
    /// One UE4M3 scale per square of 16, and one f32: weights, whose transpose then has the same codes.
    pub const NVFP4_16X16: Self = Self::new(16, 16, Stored::Ue4m3);

    const fn new(group_rows: usize, group_columns: usize, stored: Stored) -> Self {
        Self { group_rows, group_columns, stored }
    }

    /// Returns the same groups with f32 scales that are powers of two, as in TransformerEngine's block scaling.
    ///
    /// # Panics
    /// If the scales are not f32.
    pub const fn with_power_of_two_scales(self) -> Self {
        assert!(matches!(self.stored, Stored::F32 | Stored::PowerOfTwo), "only f32 scales become powers of two");
        Self { stored: Stored::PowerOfTwo, ..self }
    }

    /// Returns rows and columns of a group in a matrix of this shape.
    pub const fn group(self, rows: usize, columns: usize) -> [usize; 2] {
        let [group_rows, group_columns] = [self.group_rows, self.group_columns];
        [
            if group_rows < rows { group_rows } else { rows },
            if group_columns < columns { group_columns } else { columns },
        ]
    }

    /// Returns the bytes of a group's scale, and of the matrix's.
    pub(crate) const fn scale_bytes(self) -> [usize; 2] {
        match self.stored {
            Stored::F32 | Stored::PowerOfTwo => [size_of::<f32>(), 0],
            Stored::E8m0Up | Stored::E8m0Down => [1, 0],
            Stored::Ue4m3 => [1, size_of::<f32>()],
        }
    }

    /// Returns the scale of each group, and the factor of its values, from the amax of each.
    pub(crate) fn scales(self, element: NarrowFloat, amax: &[f32]) -> (BlockScales, Vec<f32>) {
        let max = element.max();
        match self.stored {
            Stored::F32 => {
                let (scales, factors) = amax.iter().map(|&amax| f32_scale(amax, max)).unzip();
                (BlockScales::Float(scales), factors)
            }
            Stored::PowerOfTwo => {
                let (scales, factors) = amax.iter().map(|&amax| power_of_two_scale(amax, max)).unzip();
                (BlockScales::Float(scales), factors)
            }
            Stored::E8m0Up => e8m0_scales(amax, |amax| e8m0_up(amax, max)),
            Stored::E8m0Down => e8m0_scales(amax, |amax| e8m0_down(amax, max)),
            Stored::Ue4m3 => nvfp4_scales(amax, max),
        }
    }
}

/// Returns the largest of an amax and the magnitudes of `values`, where infinity and NaN are the largest.
#[inline(always)]
pub(crate) fn larger(amax: f32, values: &[f32]) -> f32 {
    larger_of(amax, values.iter().copied())
}

#[inline(always)]
pub(crate) fn larger_of(amax: f32, values: impl Iterator<Item = f32>) -> f32 {
    // Without their sign, the bits of floats are ordered as the floats are, with infinity and NaN on top.
    f32::from_bits(values.fold(amax.to_bits(), |largest, value| value.abs().to_bits().max(largest)))
}

/// Returns an f32 scale and the factor of the values, both NaN if amax is not finite.
pub(crate) fn f32_scale(amax: f32, max: f32) -> (f32, f32) {
    match floored(amax) {
        Some(amax) => (amax / max, max / amax),
        None => (f32::NAN, f32::NAN),
    }
}

fn power_of_two_scale(amax: f32, max: f32) -> (f32, f32) {
    let (_, factor) = f32_scale(amax, max);
    if factor.is_nan() {
        return (factor, factor);
    }
    // Without its mantissa, the factor is the power of two below it.
    let factor = f32::from_bits(factor.to_bits() & f32::INFINITY.to_bits());
    (1.0 / factor, factor)
}

/// Returns an amax as f32 scales use it; `None` if it is not finite.
fn floored(amax: f32) -> Option<f32> {
    amax.is_finite().then(|| amax.max(AMAX_FLOOR))
}

fn e8m0_scales(amax: &[f32], code: impl Fn(f32) -> u8) -> (BlockScales, Vec<f32>) {
    let codes: Vec<u8> = amax.iter().map(|&amax| if amax.is_finite() { code(amax) } else { e8m0::NAN }).collect();
    let factors = codes.iter().map(|&code| e8m0::reciprocal(code)).collect();
    (BlockScales::Narrow { codes, format: NarrowFloat::E8m0, tensor: None }, factors)
}

fn e8m0_up(amax: f32, max: f32) -> u8 {
    // A finite amax over at least 6 is far below 2^127.
    e8m0::up((amax / max).to_bits()).unwrap_or(e8m0::NAN - 1)
}

fn e8m0_down(amax: f32, max: f32) -> u8 {
    let largest_exponent = e8m0::down(max.to_bits()) - 127;
    e8m0::down(amax.to_bits()).saturating_sub(largest_exponent)
}

fn nvfp4_scales(amax: &[f32], max: f32) -> (BlockScales, Vec<f32>) {
    let (tensor, tensor_factor) = f32_scale(larger(0.0, amax), NarrowFloat::Ue4m3.max() * max);
    let group = |&amax: &f32| {
        let code = NarrowFloat::Ue4m3.encode(amax * tensor_factor / max, Overflow::Saturate);
        let scale = NarrowFloat::Ue4m3.decode(code);
        (code, if scale == 0.0 { 0.0 } else { tensor_factor / scale })
    };
    let (codes, factors) = amax.iter().map(group).unzip();
    (BlockScales::Narrow { codes, format: NarrowFloat::Ue4m3, tensor: Some(tensor) }, factors)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ELEMENTS: [NarrowFloat; 3] = [NarrowFloat::E4m3, NarrowFloat::E5m2, NarrowFloat::E2m1];
    const F32: [Scaling; 4] = [Scaling::PER_TENSOR, Scaling::PER_ROW, Scaling::BLOCK_1X128, Scaling::BLOCK_128X128];

    fn scales(scaling: Scaling, element: NarrowFloat, amax: f32) -> (f32, f32) {
        let (scales, factors) = scaling.scales(element, &[amax]);
        (scales.values()[0], factors[0])
    }

    #[test]
    fn no_finite_amax_gives_a_scale_or_factor_that_is_not_a_normal_number() {
        let amaxes = [0.0, f32::from_bits(1), f32::MIN_POSITIVE, AMAX_FLOOR, 1.0, 6.0, 448.0, 1e30, f32::MAX];
        for element in ELEMENTS {
            for scaling in F32.iter().flat_map(|scaling| [*scaling, scaling.with_power_of_two_scales()]) {
                for amax in amaxes {
                    let (scale, factor) = scales(scaling, element, amax);
                    assert!(scale.is_normal() && factor.is_normal() && scale > 0.0, "{element:?} {amax:e}: {scale:e}");
                    assert!(amax * factor <= element.max() * 1.000_001, "{element:?} {amax:e}");
                }
            }
        }
    }

    #[test]
    fn an_amax_that_is_not_finite_gives_nan() {
        let all = F32.into_iter().chain([Scaling::MX, Scaling::MX_OCP, Scaling::NVFP4, Scaling::NVFP4_16X16]);
        for scaling in all {
            for amax in [f32::INFINITY, f32::NAN] {
                for element in ELEMENTS {
                    let (scale, _) = scales(scaling, element, amax);
                    assert!(scale.is_nan(), "{scaling:?} {element:?} {amax}: {scale}");
                }
            }
        }
    }

    #[test]
    fn e8m0_scales_have_the_published_exponents() {
        // 2^k covers amax up to 448 · 2^k (rounded up), or has the exponent of amax less that of 448 (OCP).
        let cases =
            [(448.0, 1.0, 1.0), (448.1, 2.0, 1.0), (256.0, 1.0, 1.0), (512.0, 2.0, 2.0), (3.5, 0.0078125, 0.0078125)];
        for (amax, up, down) in cases {
            assert_eq!(scales(Scaling::MX, NarrowFloat::E4m3, amax), (up, 1.0 / up), "{amax}");
            assert_eq!(scales(Scaling::MX_OCP, NarrowFloat::E4m3, amax), (down, 1.0 / down), "{amax}");
        }
        for scaling in [Scaling::MX, Scaling::MX_OCP] {
            assert_eq!(scales(scaling, NarrowFloat::E2m1, 0.0), (power_of_two(-127), power_of_two(127)));
        }
        assert_eq!(scales(Scaling::MX_OCP, NarrowFloat::E2m1, 7.9).0, 1.0);
        assert_eq!(scales(Scaling::MX, NarrowFloat::E2m1, 7.9).0, 2.0);
    }

    #[test]
    fn nvfp4_uses_the_whole_range_of_its_scales_and_flushes_tiny_groups() {
        let (scales, factors) = Scaling::NVFP4.scales(NarrowFloat::E2m1, &[2688.0, 6.0, 0.0, 6.0 * power_of_two(-11)]);
        let (codes, format) = (vec![0x7E, 0x38, 0, 0], NarrowFloat::Ue4m3);
        assert_eq!(scales, BlockScales::Narrow { codes, format, tensor: Some(1.0) });
        assert_eq!(factors, [1.0 / 448.0, 1.0, 0.0, 0.0]);
    }

    #[test]
    fn infinity_is_larger_than_any_number_and_nan_larger_than_infinity() {
        assert_eq!(larger(0.0, &[1.0, -3.0, 2.0]), 3.0);
        assert_eq!(larger(5.0, &[f32::NEG_INFINITY, f32::MAX]), f32::INFINITY);
        assert!(larger(f32::INFINITY, &[-f32::NAN, 1.0]).is_nan() && larger(f32::NAN, &[f32::INFINITY]).is_nan());
    }
}
