//! Converts values to codes, to nearest with ties to even.
//!
//! - **Nearest**: the nearest number of the format; halfway between two, the one with the even code.
//! - **Beyond the largest number**, infinity included: the largest number with the value's sign (`satfinite` of NVIDIA's
//!   instructions).
//! - **NaN** gets the one NaN code of the format, without a sign. E2M1 has none and gives its largest number, 6, as
//!   NVIDIA's instructions do; a group scale that is NaN carries the NaN instead.
//! - **Zero** keeps its sign, where the format has one.
//! - **Negative numbers** in a format without a sign are NaN. -0 is zero.
//!
//! Not supported: stochastic rounding; rounding towards zero or infinity; E8M0, whose scales are rounded up (`e8m0.rs`).

use crate::e8m0::power_of_two;
use crate::float::{Fields, NarrowFloat};

const SIGN: u32 = 1 << 31;
const INFINITY: u32 = f32::INFINITY.to_bits();
const F32_MANTISSA_BITS: u32 = 23;

impl NarrowFloat {
    /// Returns the code of the nearest number.
    ///
    /// # Panics
    /// For E8M0, which has no rounding to nearest.
    pub const fn encode(self, value: f32) -> u8 {
        match self.fields() {
            Some(fields) => encode(fields, value),
            None => panic!("scales of E8M0 are rounded up"),
        }
    }
}

#[inline(always)] // with constant fields in the loops over tensors
pub(crate) const fn encode(fields: Fields, value: f32) -> u8 {
    let magnitude = value.to_bits() & !SIGN;
    if magnitude > INFINITY {
        return nan(fields);
    }
    // Infinity's bits are those of the next number after the largest f32, and round like it.
    let rounded = nearest(fields, magnitude);
    let negative = value.to_bits() & SIGN != 0;
    if negative && !fields.signed {
        return if value == 0.0 { 0 } else { nan(fields) };
    }
    let largest = fields.largest_code();
    let code = if rounded <= largest { rounded } else { largest };
    (if negative { code | fields.sign_mask() } else { code }) as u8
}

#[inline(always)]
const fn nan(fields: Fields) -> u8 {
    // E2M1 has no NaN: all bits but the sign are its largest number.
    fields.magnitude_mask() as u8
}

/// Returns the nearest code, continuing as if the format had no largest number.
#[inline(always)]
const fn nearest(fields: Fields, magnitude: u32) -> u32 {
    let shift = F32_MANTISSA_BITS - fields.mantissa_bits;
    let smallest_normal = (128 - fields.bias) << F32_MANTISSA_BITS;
    if magnitude < smallest_normal {
        // In a sum with a number whose last bit is worth the smallest number, the hardware rounds to nearest even.
        let rounder = power_of_two(1 - fields.bias as i32 - fields.mantissa_bits as i32 + F32_MANTISSA_BITS as i32);
        (f32::from_bits(magnitude) + rounder).to_bits() - rounder.to_bits()
    } else {
        let half = (1 << (shift - 1)) - 1 + (magnitude >> shift & 1);
        ((magnitude + half) >> shift) - ((127 - fields.bias) << fields.mantissa_bits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `tests/float_goldens.rs` has all other values.
    #[test]
    fn nan_has_one_code_and_e2m1_gives_its_largest() {
        for (format, code) in [(NarrowFloat::E4m3, 0x7F), (NarrowFloat::E2m1, 7), (NarrowFloat::Ue4m3, 0x7F)] {
            assert_eq!([f32::NAN, -f32::NAN].map(|value| format.encode(value)), [code; 2], "{format}");
        }
        let negative = [-0.0, -f32::from_bits(1), -1.0, f32::NEG_INFINITY];
        assert_eq!(negative.map(|value| NarrowFloat::Ue4m3.encode(value)), [0, 0x7F, 0x7F, 0x7F]);
    }
}
