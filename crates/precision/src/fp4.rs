//! FP4 of bitsandbytes: a sign and eight magnitudes, in blocks of 64 values with one f32 scale each. Not E2M1
//! ([`crate::NarrowFloat::E2m1`]): its magnitudes are 0, 1/192, 1/6, 1/4, 1/3, 1/2, 2/3 and 1.
//!
//! Two codes per byte, row-major, the earlier one in the HIGH nibble, as in NF4. The upper bit of a code is the sign;
//! the lower three are not in the order of the magnitudes. A block's scale is its largest magnitude.
//!
//! Levels and decision points are those of the CUDA path of bitsandbytes (`fp4_dequantization_lut` and `dQuantizeFP4` of
//! csrc/kernels.cu), to the digits printed there. A value on a decision point gets the smaller magnitude. The CPU path rounds the
//! levels to four digits (0.0052 for 1/192), so its values differ. It also gives values that round to zero the code of the other zero,
//! and its decision points differ in their last digits: 193 codes of the 36,864 projection weights of a tiny model differ.
//!
//! Not supported: other block sizes than 64.

use crate::error::Result;
use crate::nf4;
use crate::packing::Decoder;

/// The values of the sixteen codes. Code 8 is -0.
pub const LEVELS: [f32; 16] = {
    let mut levels = [0.0; 16];
    let mut rank = 0;
    while rank < 8 {
        levels[CODES[rank] as usize] = MAGNITUDES[rank];
        levels[CODES[rank] as usize + SIGN as usize] = -MAGNITUDES[rank];
        rank += 1;
    }
    levels
};

const SIGN: u8 = 8;
const MAGNITUDES: [f32; 8] = [0.0, 0.005_208_333_3, 0.166_666_67, 0.25, 0.333_333_33, 0.5, 0.666_666_7, 1.0];
/// The code of each magnitude, ascending.
const CODES: [u8; 8] = [0, 1, 6, 7, 4, 5, 2, 3];
/// Decision points between the magnitudes, as bitsandbytes prints them.
const DECISIONS: [f32; 7] =
    [0.002_604_17, 0.085_937_5, 0.208_333_33, 0.291_666_67, 0.416_666_7, 0.583_333, 0.833_333_3];

/// Returns the code of the level nearest to a value in [-1, 1]. Zero, negative zero and NaN get code 0.
fn nearest(scaled: f32) -> u8 {
    let magnitude = scaled.abs();
    let rank = DECISIONS.iter().filter(|&&decision| magnitude > decision).count();
    CODES[rank] + if scaled < 0.0 { SIGN } else { 0 }
}

/// Quantizes values to packed codes and the scale of each block.
pub fn quantize(values: &[f32]) -> Result<(Vec<u8>, Vec<f32>)> {
    nf4::encode_with(values, |value| value, nearest)
}

/// Decodes `count` values of packed codes.
///
/// # Panics
/// If codes, scales and count belong to different tensors.
pub fn dequantize(codes: &[u8], scales: &[f32], count: usize) -> Vec<f32> {
    Decoder { levels: &LEVELS, ..nf4::DECODER }.all(codes, scales, count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_but_negative_zero_comes_back_from_its_level() {
        for (code, &level) in LEVELS.iter().enumerate() {
            let expected = if level == 0.0 { 0 } else { code as u8 };
            assert_eq!(nearest(level), expected);
        }
    }

    #[test]
    fn decision_points_are_midpoints_to_printed_digits() {
        for (pair, decision) in MAGNITUDES.windows(2).zip(DECISIONS) {
            let middle = (f64::from(pair[0]) + f64::from(pair[1])) / 2.0;
            assert!((middle - f64::from(decision)).abs() < 5e-7, "{middle} against {decision}");
            let [below, above] = pair else { panic!("windows of two") };
            assert_eq!(LEVELS[usize::from(nearest(decision))], *below);
            assert_eq!(LEVELS[usize::from(nearest(decision.next_up()))], *above);
            assert_eq!(LEVELS[usize::from(nearest(-decision.next_up()))], -*above);
        }
    }
}
