//! Groups of a row's values that share a scale, the storage format of the scale, its computation from the group's largest
//! magnitude (amax), and the codes of the values: the reference of every kernel that quantizes for storage.
//!
//! A matrix is row-major, and the GEMM sums over its columns. A value is `code x scale`. With `max` the element's largest
//! number and f32 arithmetic that rounds to nearest even, each step as written:
//!
//! | scaling | element | group | scale | value times |
//! |---|---|---|---|---|
//! | `PerRow` | E4M3 | a row (outer vector) | f32, `amax / max` | `max / amax` |
//! | `Mx` | E2M1 | 32 of a row | E8M0, `amax / max` rounded up | 1 / scale |
//! | `Nvfp4` | E2M1 | 16 of a row | UE4M3 s = `(amax · T) / max` times f32 t | `T / s` |
//!
//! where for NVFP4, with the amax of the whole matrix, `t = amax / (448 · max)` and `T = (448 · max) / amax`. The code of
//! `value * factor` is the nearest, on a tie the even one, and saturates.
//!
//! Every amax that is zero, tiny or not finite has a defined result:
//!
//! - **amax 0 or tiny**: f32 scales, and t of NVFP4, are computed as if amax were at least [`AMAX_FLOOR`], so no scale is 0 or subnormal and no
//!   factor infinite. E8M0 uses its smallest code, 2^-127. A group of zeros is decoded as zeros with their signs. In NVFP4 a group whose s rounds
//!   to 0 (amax below 2^-10 of the matrix's amax / 448) is decoded as zeros.
//! - **A NaN or an infinity** makes the scale NaN. In NVFP4 t is NaN, which affects the whole matrix. A weight with one is refused.
//!
//! TransformerEngine uses scale 1 if amax is 0 or not finite; the decoded values differ only in the latter case.
//!
//! Trade-off: values of any type are widened when they are read, so each is widened twice: the first time for the amax.

use rayon::prelude::*;

use crate::e8m0::{self, power_of_two};
use crate::float::{Fields, NarrowFloat};
use crate::rounding;
use crate::scales::BlockScales;
use crate::workers::blocks_at_once;

/// f32 scales are computed as if amax were at least this: 2^-100.
pub const AMAX_FLOOR: f32 = power_of_two(-100);

/// The groups of values that share a scale, and the scale's storage format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scaling {
    PerRow,
    Mx,
    Nvfp4,
}

impl Scaling {
    pub(crate) const fn element(self) -> NarrowFloat {
        match self {
            Self::PerRow => NarrowFloat::E4m3,
            Self::Mx | Self::Nvfp4 => NarrowFloat::E2m1,
        }
    }

    /// Returns the values of a group in rows of `columns` values.
    pub(crate) const fn group(self, columns: usize) -> usize {
        match self {
            Self::PerRow => columns,
            Self::Mx => 32,
            Self::Nvfp4 => 16,
        }
    }

    /// Returns the bytes of a group's scale, and of the matrix's.
    pub(crate) const fn scale_bytes(self) -> [usize; 2] {
        match self {
            Self::PerRow => [size_of::<f32>(), 0],
            Self::Mx => [1, 0],
            Self::Nvfp4 => [1, size_of::<f32>()],
        }
    }

    /// Quantizes rows of whole groups, on all cores. Returns the codes (two of E2M1 per byte, the earlier one in the low nibble), and the
    /// scale of each group.
    pub(crate) fn quantize<T: Copy + Sync>(
        self,
        values: &[T],
        widen: impl Fn(T) -> f32 + Copy + Send + Sync,
        columns: usize,
    ) -> (Vec<u8>, BlockScales) {
        let group = self.group(columns);
        let (scales, factors) = self.scales(&group_amax(values, widen, group));
        // Constant fields let the compiler remove the branches of `rounding::encode`.
        let codes = match self {
            Self::PerRow => {
                let code = move |value, by| rounding::encode(Fields::E4M3, widen(value) * by);
                codes::<_, 1>(values, code, group, &factors)
            }
            Self::Mx | Self::Nvfp4 => {
                let code = move |value, by| rounding::encode(Fields::E2M1, widen(value) * by);
                codes::<_, 2>(values, code, group, &factors)
            }
        };
        (codes, scales)
    }

    /// Returns the scale of each group, and the factor of its values, from the amax of each.
    fn scales(self, amax: &[f32]) -> (BlockScales, Vec<f32>) {
        let max = self.element().max();
        match self {
            Self::PerRow => {
                let (scales, factors) = amax.iter().map(|&amax| f32_scale(amax, max)).unzip();
                (BlockScales::Float(scales), factors)
            }
            Self::Mx => mx_scales(amax, max),
            Self::Nvfp4 => nvfp4_scales(amax, max),
        }
    }
}

/// Computes the codes of all values, `PER_BYTE` per byte, the earlier ones in the lower bits. `code` takes a value and its factor.
fn codes<T: Copy + Sync, const PER_BYTE: usize>(
    values: &[T],
    code: impl Fn(T, f32) -> u8 + Send + Sync,
    group: usize,
    factors: &[f32],
) -> Vec<u8> {
    let (mut codes, bytes) = (vec![0; values.len() / PER_BYTE], group / PER_BYTE);
    let groups = values.par_chunks(group).zip(codes.par_chunks_mut(bytes)).zip(factors);
    groups.with_min_len(blocks_at_once(group)).for_each(|((values, codes), &factor)| {
        for (values, byte) in values.as_chunks::<PER_BYTE>().0.iter().zip(codes) {
            *byte = values.iter().rev().fold(0, |byte, &value| byte << 4 | code(value, factor));
        }
    });
    codes
}

/// Returns the largest magnitude of each group, or its infinity or NaN if there is one.
fn group_amax<T: Copy + Sync>(values: &[T], widen: impl Fn(T) -> f32 + Send + Sync, group: usize) -> Vec<f32> {
    let groups = values.par_chunks(group).with_min_len(blocks_at_once(group));
    groups.map(|group| larger_of(0.0, group.iter().map(|&value| widen(value)))).collect()
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
    if !amax.is_finite() {
        return (f32::NAN, f32::NAN);
    }
    let amax = amax.max(AMAX_FLOOR);
    (amax / max, max / amax)
}

fn mx_scales(amax: &[f32], max: f32) -> (BlockScales, Vec<f32>) {
    let code = |&amax: &f32| {
        // A finite amax over 6 is far below 2^127.
        let up = e8m0::up((amax / max).to_bits()).unwrap_or(e8m0::NAN - 1);
        if amax.is_finite() { up } else { e8m0::NAN }
    };
    let codes: Vec<u8> = amax.iter().map(code).collect();
    let factors = codes.iter().map(|&code| e8m0::reciprocal(code)).collect();
    (BlockScales::Narrow { codes, format: NarrowFloat::E8m0, tensor: None }, factors)
}

fn nvfp4_scales(amax: &[f32], max: f32) -> (BlockScales, Vec<f32>) {
    let (tensor, tensor_factor) = f32_scale(larger(0.0, amax), NarrowFloat::Ue4m3.max() * max);
    let group = |&amax: &f32| {
        let code = NarrowFloat::Ue4m3.encode(amax * tensor_factor / max);
        let scale = NarrowFloat::Ue4m3.decode(code);
        (code, if scale == 0.0 { 0.0 } else { tensor_factor / scale })
    };
    let (codes, factors) = amax.iter().map(group).unzip();
    (BlockScales::Narrow { codes, format: NarrowFloat::Ue4m3, tensor: Some(tensor) }, factors)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scale(scaling: Scaling, amax: f32) -> (f32, f32) {
        let (scales, factors) = scaling.scales(&[amax]);
        (scales.values()[0], factors[0])
    }

    #[test]
    fn scales_and_factors_of_rows_are_normal_numbers() {
        for amax in [0.0, f32::from_bits(1), f32::MIN_POSITIVE, AMAX_FLOOR, 1.0, 6.0, 448.0, 1e30, f32::MAX] {
            let (scale, factor) = scale(Scaling::PerRow, amax);
            assert!(scale.is_normal() && factor.is_normal() && scale > 0.0, "{amax:e}: {scale:e}");
            assert!(amax * factor <= 448.0 * 1.000_001, "{amax:e}");
        }
    }

    #[test]
    fn an_amax_that_is_not_finite_gives_nan() {
        for scaling in [Scaling::PerRow, Scaling::Mx, Scaling::Nvfp4] {
            assert!([f32::INFINITY, f32::NAN].iter().all(|amax| scale(scaling, *amax).0.is_nan()), "{scaling:?}");
        }
        assert_eq!(larger(0.0, &[1.0, -3.0, 2.0]), 3.0);
        assert_eq!(larger(5.0, &[f32::NEG_INFINITY, f32::MAX]), f32::INFINITY);
        assert!(larger(f32::INFINITY, &[-f32::NAN, 1.0]).is_nan() && larger(f32::NAN, &[f32::INFINITY]).is_nan());
    }

    #[test]
    fn e8m0_scales_cover_the_amax() {
        // 2^k covers amax up to 6 · 2^k.
        for (amax, expected) in [(6.0, 1.0), (6.1, 2.0), (4.0, 1.0), (8.0, 2.0), (0.0, power_of_two(-127))] {
            assert_eq!(scale(Scaling::Mx, amax), (expected, 1.0 / expected), "{amax}");
        }
    }

    #[test]
    fn nvfp4_uses_the_whole_range_and_flushes_tiny_groups() {
        let (scales, factors) = Scaling::Nvfp4.scales(&[2688.0, 6.0, 0.0, 6.0 * power_of_two(-11)]);
        let (codes, format) = (vec![0x7E, 0x38, 0, 0], NarrowFloat::Ue4m3);
        assert_eq!(scales, BlockScales::Narrow { codes, format, tensor: Some(1.0) });
        assert_eq!(factors, [1.0 / 448.0, 1.0, 0.0, 0.0]);
    }
}
