//! Converts values to codes, to nearest with ties to even.
//!
//! - **Nearest**: the nearest number of the format; halfway between two, the one with the even code. In E8M0 every significand is 1, so there is
//!   no even code: halfway, it rounds up.
//! - **Beyond the largest number**: [`Overflow`] decides. Values that round to the largest number are not beyond it: up
//!   to 464 (included) E4M3 gives 448 in both modes.
//! - **Infinity** counts as a value beyond the largest number.
//! - **NaN** gets the one NaN code of the format, without a sign. E2M1 has none and gives its largest number, 6, as
//!   NVIDIA's instructions do; a group scale that is NaN carries the NaN instead.
//! - **Zero** keeps its sign, where the format has one. E8M0 has no zero: it gives the smallest number.
//! - **Negative numbers** in a format without a sign are NaN. -0 is zero.
//!
//! Not supported: stochastic rounding; rounding towards zero or infinity, except for E8M0 scales.

use crate::e8m0::{self, power_of_two};
use crate::float::{Fields, NarrowFloat, Top};

/// Result for a value beyond the largest number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Overflow {
    /// The largest number, with the value's sign (`satfinite` of NVIDIA's instructions), also for infinity.
    Saturate,
    /// Infinity if the format has one, otherwise NaN, as PyTorch and ml_dtypes convert. E2M1 has neither and saturates.
    Special,
}

const SIGN: u32 = 1 << 31;
const INFINITY: u32 = f32::INFINITY.to_bits();
const F32_MANTISSA_BITS: u32 = 23;

impl NarrowFloat {
    /// Returns the code of the nearest number.
    pub const fn encode(self, value: f32, overflow: Overflow) -> u8 {
        match self.fields() {
            Some(fields) => encode(fields, value, overflow),
            None => encode_e8m0(value, overflow),
        }
    }
}

#[inline(always)] // with constant fields in the loops over tensors
pub(crate) const fn encode(fields: Fields, value: f32, overflow: Overflow) -> u8 {
    let magnitude = value.to_bits() & !SIGN;
    if magnitude > INFINITY {
        return nan(fields);
    }
    // Infinity's bits are those of the next number after the largest f32, and round like it.
    finish(fields, value, nearest(fields, magnitude), overflow)
}

/// Handles values beyond the largest number, and the sign.
#[inline(always)]
const fn finish(fields: Fields, value: f32, rounded: u32, overflow: Overflow) -> u8 {
    let negative = value.to_bits() & SIGN != 0;
    if negative && !fields.signed {
        return if value == 0.0 { 0 } else { nan(fields) };
    }
    let largest = fields.largest_code();
    let code = if rounded <= largest {
        rounded
    } else {
        match (overflow, fields.top) {
            (Overflow::Saturate, _) | (_, Top::Numbers) => largest,
            (Overflow::Special, Top::InfinityAndNan) => largest + 1,
            (Overflow::Special, Top::OneNan) => return nan(fields),
        }
    };
    (if negative { code | fields.sign_mask() } else { code }) as u8
}

#[inline(always)]
const fn nan(fields: Fields) -> u8 {
    // E2M1 has no NaN: all bits but the sign are its largest number.
    fields.magnitude_mask() as u8
}

/// Returns the bits of the smallest normal number, as an f32.
const fn min_normal_bits(fields: Fields) -> u32 {
    (128 - fields.bias) << F32_MANTISSA_BITS
}

/// Returns the nearest code, continuing as if the format had no largest number.
#[inline(always)]
const fn nearest(fields: Fields, magnitude: u32) -> u32 {
    let shift = F32_MANTISSA_BITS - fields.mantissa_bits;
    if magnitude < min_normal_bits(fields) {
        // In a sum with a number whose last bit is worth the smallest number, the hardware rounds to nearest even.
        let rounder = power_of_two(1 - fields.bias as i32 - fields.mantissa_bits as i32 + F32_MANTISSA_BITS as i32);
        (f32::from_bits(magnitude) + rounder).to_bits() - rounder.to_bits()
    } else {
        let half = (1 << (shift - 1)) - 1 + (magnitude >> shift & 1);
        ((magnitude + half) >> shift) - ((127 - fields.bias) << fields.mantissa_bits)
    }
}

const fn encode_e8m0(value: f32, overflow: Overflow) -> u8 {
    let magnitude = value.to_bits() & !SIGN;
    if magnitude > INFINITY || (value.to_bits() & SIGN != 0 && magnitude != 0) {
        return e8m0::NAN;
    }
    match (e8m0::nearest(magnitude), overflow) {
        (Some(code), _) => code,
        (None, Overflow::Saturate) => e8m0::NAN - 1,
        (None, Overflow::Special) => e8m0::NAN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_values::Draws;

    /// Returns the codes of the nonnegative numbers, ascending.
    fn ascending(format: NarrowFloat) -> Vec<u8> {
        (0..=format.encode(format.max(), Overflow::Special)).collect()
    }

    fn signed(format: NarrowFloat, code: u8) -> Option<u8> {
        format.fields().filter(|fields| fields.signed).map(|fields| code | fields.sign_mask() as u8)
    }

    #[test]
    fn every_code_comes_back_from_its_value() {
        for format in NarrowFloat::ALL {
            for code in 0..=(format.codes() - 1) as u8 {
                let value = format.decode(code);
                if value.is_nan() {
                    assert_eq!(Some(format.encode(value, Overflow::Saturate)), format.nan(), "{format} {code:#x}");
                    continue;
                }
                assert_eq!(format.encode(value, Overflow::Special), code, "{format} {code:#x}");
                if value.is_finite() {
                    assert_eq!(format.encode(value, Overflow::Saturate), code, "{format} {code:#x}");
                }
            }
        }
    }

    #[test]
    fn between_two_codes_the_nearest_wins_and_ties_go_to_the_even_one() {
        for format in NarrowFloat::ALL {
            for pair in ascending(format).windows(2) {
                let (low, high) = (format.decode(pair[0]), format.decode(pair[1]));
                let middle = low + (high - low) / 2.0;
                let even = if format == NarrowFloat::E8m0 || pair[1].is_multiple_of(2) { pair[1] } else { pair[0] };
                let cases = [(middle.next_down(), pair[0]), (middle, even), (middle.next_up(), pair[1])];
                for (value, expected) in cases {
                    assert_eq!(format.encode(value, Overflow::Special), expected, "{format} {value:e}");
                    if let Some(negative) = signed(format, expected) {
                        assert_eq!(format.encode(-value, Overflow::Special), negative, "{format} -{value:e}");
                    }
                }
            }
        }
    }

    #[test]
    fn beyond_the_largest_number_overflow_decides() {
        for format in NarrowFloat::ALL {
            let largest = format.encode(format.max(), Overflow::Special);
            let infinite = match format {
                NarrowFloat::E5m2 => largest + 1,
                NarrowFloat::E2m1 => largest,
                _ => format.nan().unwrap(),
            };
            // E8M0 reaches almost as far as f32: only infinity is far enough beyond it to show both modes.
            for value in [f32::INFINITY, f32::MAX] {
                assert_eq!(format.encode(value, Overflow::Saturate), largest, "{format} {value:e}");
                assert_eq!(format.encode(value, Overflow::Special), infinite, "{format} {value:e}");
                if let Some(negative) = signed(format, largest) {
                    assert_eq!(format.encode(-value, Overflow::Saturate), negative, "{format} -{value:e}");
                }
            }
        }
        let e4m3 = |value| NarrowFloat::E4m3.encode(value, Overflow::Special);
        assert_eq!([464.0, 464.0_f32.next_up()].map(e4m3), [0x7E, 0x7F]);
        let e5m2 = |value| NarrowFloat::E5m2.encode(value, Overflow::Special);
        assert_eq!([61_440.0_f32.next_down(), 61_440.0].map(e5m2), [0x7B, 0x7C]);
    }

    #[test]
    fn nan_zero_and_negative_numbers_are_as_documented() {
        for format in NarrowFloat::ALL {
            let nan = format.nan().unwrap_or(7);
            for value in [f32::NAN, -f32::NAN] {
                assert_eq!(format.encode(value, Overflow::Saturate), nan, "{format}");
            }
            assert_eq!(format.encode(0.0, Overflow::Special), 0, "{format}");
            assert_eq!(format.encode(-0.0, Overflow::Special), signed(format, 0).unwrap_or(0), "{format}");
            if signed(format, 0).is_none() {
                for value in [-1.0, -f32::MIN_POSITIVE, f32::NEG_INFINITY] {
                    assert_eq!(format.encode(value, Overflow::Saturate), nan, "{format} {value}");
                }
            }
        }
    }

    #[test]
    fn rounding_never_reverses_the_order_of_two_values() {
        let mut draws = Draws(33);
        for format in NarrowFloat::ALL {
            for _ in 0..20_000 {
                let scale = 2_f32.powi(draws.below(40) as i32 - 20);
                let mut pair = [draws.bell().abs() * scale, draws.bell().abs() * scale];
                pair.sort_by(f32::total_cmp);
                let nearest = pair.map(|value| format.decode(format.encode(value, Overflow::Saturate)));
                assert!(nearest[0] <= nearest[1], "{format} {pair:?}");
            }
        }
    }
}
