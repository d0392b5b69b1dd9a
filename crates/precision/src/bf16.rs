//! bf16: the upper 16 bits of an f32, rounded to nearest with ties to even; NaN stays NaN, too large becomes infinite.
//!
//! Gives up stochastic rounding: that belongs to the optimizer, which owns a random stream.

use half::bf16;
use half::slice::HalfFloatSliceExt;

/// Rounds each value to the nearest bf16, ties to the even one.
pub fn from_f32(values: &[f32]) -> Vec<bf16> {
    let mut rounded = vec![bf16::ZERO; values.len()];
    rounded.convert_from_f32_slice(values);
    rounded
}

/// Widens each value; exact, since every bf16 is an f32.
pub fn to_f32(values: &[bf16]) -> Vec<f32> {
    values.iter().copied().map(widen).collect()
}

/// Rounds each value to a number that bf16 holds, and keeps it as f32.
pub fn round_in_place(values: &mut [f32]) {
    for value in values {
        *value = widen(bf16::from_f32(*value));
    }
}

/// The f32 with the same value, bit for bit a shift: simpler than `half`'s, which quiets NaNs, and quicker in loops.
pub(crate) fn widen(value: bf16) -> f32 {
    f32::from_bits(u32::from(value.to_bits()) << 16)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_values::Draws;

    /// Round to nearest even written with integers: add half of the lost part, less one where the kept part is even.
    fn rounded_bits(value: f32) -> u16 {
        let bits = value.to_bits();
        assert!(!value.is_nan(), "the carry could turn a NaN into an infinity");
        let kept_is_odd = (bits >> 16) & 1;
        ((bits + 0x7FFF + kept_is_odd) >> 16) as u16
    }

    #[test]
    fn rounding_equals_the_integer_formula_on_every_kind_of_bits() {
        let mut draws = Draws(1);
        let random: Vec<f32> =
            (0..200_000).map(|_| f32::from_bits(draws.bits() as u32)).filter(|v| !v.is_nan()).collect();
        let rounded = from_f32(&random);
        for (value, rounded) in random.iter().zip(rounded) {
            assert_eq!(rounded.to_bits(), rounded_bits(*value), "{value:e} ({:08x})", value.to_bits());
        }
    }

    #[test]
    fn ties_go_to_the_even_neighbour() {
        for upper in [0x3F80_u32, 0x3F81, 0x0000, 0x0001, 0x007F, 0x8003, 0xC2FF] {
            let tie = f32::from_bits((upper << 16) | 0x8000);
            let even = upper + (upper & 1);
            assert_eq!(u32::from(from_f32(&[tie])[0].to_bits()), even, "upper half {upper:04x}");
            let below_tie = f32::from_bits((upper << 16) | 0x7FFF);
            assert_eq!(u32::from(from_f32(&[below_tie])[0].to_bits()), upper);
            let above_tie = f32::from_bits((upper << 16) | 0x8001);
            assert_eq!(u32::from(from_f32(&[above_tie])[0].to_bits()), upper + 1);
        }
    }

    #[test]
    fn infinities_stay_and_too_large_values_become_infinite() {
        let rounded = from_f32(&[f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN, f32::from_bits(0x7F7F_7FFF)]);
        assert_eq!(rounded[..2], [bf16::INFINITY, bf16::NEG_INFINITY]);
        assert_eq!(rounded[2..4], [bf16::INFINITY, bf16::NEG_INFINITY]);
        assert_eq!(rounded[4], bf16::MAX);
    }

    #[test]
    fn nan_stays_nan_with_any_payload() {
        for bits in [0x7FC0_0000_u32, 0x7F80_0001, 0xFF80_0001, 0xFFFF_FFFF, 0x7F80_8000] {
            let rounded = from_f32(&[f32::from_bits(bits)])[0];
            assert!(rounded.is_nan(), "{bits:08x}");
            assert!(widen(rounded).is_nan(), "{bits:08x}");
        }
    }

    #[test]
    fn subnormals_round_like_the_rest_and_zero_keeps_its_sign() {
        let smallest = f32::from_bits(0x0001_0000);
        assert_eq!(from_f32(&[smallest])[0].to_bits(), 1);
        assert_eq!(from_f32(&[f32::from_bits(1)])[0].to_bits(), 0);
        assert_eq!(from_f32(&[-0.0])[0].to_bits(), 0x8000);
    }

    #[test]
    fn every_bf16_survives_the_round_trip() {
        let all: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).filter(|value| !value.is_nan()).collect();
        assert_eq!(from_f32(&to_f32(&all)), all);
    }

    #[test]
    fn rounding_in_place_is_rounding_there_and_back() {
        let mut values = Draws(2).vector(1000, 3.0);
        let expected = to_f32(&from_f32(&values));
        round_in_place(&mut values);
        assert_eq!(values, expected);
        let once = values.clone();
        round_in_place(&mut values);
        assert_eq!(values, once);
    }
}
