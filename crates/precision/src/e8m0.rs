//! E8M0: eight exponent bits alone. Code c is 2^(c - 127); code 255 is NaN. There is no zero and no sign.
//!
//! The scale of 32 values in MXFP8 and MXFP4 (OCP Microscaling Formats 1.0). Three ways to round exist: to nearest, down
//! (OCP's rule for scales) and up (TransformerEngine's, so that no value leaves the range of its element).
//!
//! Trade-off: 2^-127 is a subnormal f32. A device that flushes subnormals reads code 0 as zero; NVIDIA's tensor cores
//! apply the exponent itself and do not.

/// Number of codes.
pub(crate) const CODES: u32 = 256;
/// The NaN code.
pub(crate) const NAN: u8 = 0xFF;
/// The largest number, code 254.
pub(crate) const MAX: f32 = power_of_two(127);
/// The smallest number, code 0.
pub(crate) const MIN: f32 = power_of_two(-127);

const LARGEST_CODE: u32 = 254;
const MANTISSA: u32 = (1 << 23) - 1;
/// Bits of 2^-127.
const MIN_BITS: u32 = 1 << 22;

/// Returns 2^`exponent`, for exponents from -149 to 127, the smaller ones as subnormal numbers.
pub(crate) const fn power_of_two(exponent: i32) -> f32 {
    assert!(-149 <= exponent && exponent <= 127, "a power of two that f32 has");
    f32::from_bits(if exponent < -126 { 1 << (exponent + 149) } else { ((exponent + 127) as u32) << 23 })
}

pub(crate) const fn decode(code: u8) -> f32 {
    if code == NAN { f32::NAN } else { power_of_two(code as i32 - 127) }
}

/// Returns the nearest power of two by value, halfway up; `None` if that is above 2^127. Zero and everything below
/// 2^-127 get code 0. `magnitude` contains the bits of a finite nonnegative number.
pub(crate) const fn nearest(magnitude: u32) -> Option<u8> {
    // Between 2^-127 and 2^-126 the bits grow by 2^22, above by 2^23 per power.
    at_most_largest(if magnitude < 2 * MIN_BITS {
        (magnitude + MIN_BITS / 2) >> 23
    } else {
        (magnitude + MIN_BITS) >> 23
    })
}

/// Returns the largest power of two that is not above the value; code 0 below 2^-127.
pub(crate) const fn down(magnitude: u32) -> u8 {
    (magnitude >> 23) as u8
}

/// Returns the smallest power of two that is not below the value; `None` above 2^127.
pub(crate) const fn up(magnitude: u32) -> Option<u8> {
    at_most_largest(if magnitude <= MIN_BITS { 0 } else { (magnitude + MANTISSA) >> 23 })
}

const fn at_most_largest(code: u32) -> Option<u8> {
    if code <= LARGEST_CODE { Some(code as u8) } else { None }
}

/// Returns the reciprocal of a code's value, exact: 2^(127 - code).
pub(crate) const fn reciprocal(code: u8) -> f32 {
    if code == NAN { f32::NAN } else { power_of_two(127 - code as i32) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_ways_to_round_keep_every_code() {
        for code in 0..NAN {
            let bits = decode(code).to_bits();
            assert_eq!([nearest(bits), Some(down(bits)), up(bits)], [Some(code); 3], "{code}");
            assert_eq!(f64::from(decode(code)) * f64::from(reciprocal(code)), 1.0, "{code}");
        }
    }

    #[test]
    fn down_and_up_enclose_the_value_and_nearest_is_the_closer_one() {
        for code in 0..LARGEST_CODE as u8 {
            let [low, high] = [decode(code), decode(code + 1)];
            let middle = low + (high - low) / 2.0;
            for (value, expected) in [
                (low.next_up(), code),
                (middle.next_down(), code),
                (middle, code + 1),
                (middle.next_up(), code + 1),
                (high.next_down(), code + 1),
            ] {
                let bits = value.to_bits();
                assert_eq!((down(bits), up(bits), nearest(bits)), (code, Some(code + 1), Some(expected)), "{value:e}");
            }
        }
    }

    #[test]
    fn values_outside_the_range_have_a_defined_code() {
        for tiny in [0.0, f32::from_bits(1), MIN.next_down()] {
            let bits = tiny.to_bits();
            assert_eq!([nearest(bits), Some(down(bits)), up(bits)], [Some(0); 3]);
        }
        let [just_above, largest] = [MAX.next_up().to_bits(), f32::MAX.to_bits()];
        assert_eq!((up(just_above), down(just_above), nearest(just_above)), (None, 254, Some(254)));
        assert_eq!((up(largest), down(largest), nearest(largest)), (None, 254, None));
    }
}
