//! E8M0: eight exponent bits alone. Code c is 2^(c - 127); code 255 is NaN. There is no zero and no sign.
//!
//! The scale of 32 values in MXFP4 (OCP Microscaling Formats 1.0), rounded up as in TransformerEngine, so that no value
//! leaves the range of its element. (OCP's own rule for scales rounds down.)
//!
//! Trade-off: 2^-127 is a subnormal f32. A device that flushes subnormals reads code 0 as zero; NVIDIA's tensor cores
//! apply the exponent itself and do not.

pub(crate) const CODES: u32 = 256;
pub(crate) const NAN: u8 = 0xFF;
/// The largest number, code 254.
pub(crate) const MAX: f32 = power_of_two(127);

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

/// Returns the smallest power of two that is not below the value; `None` above 2^127.
pub(crate) const fn up(magnitude: u32) -> Option<u8> {
    let code = if magnitude <= MIN_BITS { 0 } else { (magnitude + MANTISSA) >> 23 };
    if code < NAN as u32 { Some(code as u8) } else { None }
}

/// Returns the reciprocal of a code's value, exact: 2^(127 - code).
pub(crate) const fn reciprocal(code: u8) -> f32 {
    if code == NAN { f32::NAN } else { power_of_two(127 - code as i32) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_is_the_least_whose_value_is_not_below() {
        for code in 0..NAN {
            let value = decode(code);
            assert_eq!(f64::from(value) * f64::from(reciprocal(code)), 1.0, "{code}");
            let next = if code + 1 == NAN { None } else { Some(code + 1) };
            let codes = [value.next_down(), value, value.next_up()].map(|value| up(value.to_bits()));
            assert_eq!(codes, [Some(code), Some(code), next], "{code}");
        }
        assert_eq!([0.0, f32::MAX].map(|value| up(value.to_bits())), [Some(0), None]);
    }
}
