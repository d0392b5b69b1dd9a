//! MXFP4 with the scale of each block that gives the least error, for weights that are written once.
//!
//! [`QuantFormat::quantize`] takes the smallest scale s at which nothing saturates. A block whose largest value is just above 3 s then
//! loses half of its steps for that one value. Here s / 2 is tried as well, at which values beyond 3 s become 3 s, and what has the smaller sum
//! of squared errors is taken, s if both are equal. No other scale is better. The values of a coarser one are, up to the largest of the block,
//! among those of s. One of s / 4 cuts the largest value m > 3 s at 1.5 s, which costs at least 2.25 s² more than at s / 2, and the others, each at
//! most s / 8 off at s / 2 if s / 4 has finer steps for them, gain less than 0.49 s². So codes that use their range come back as they are, and keep
//! their scale if they change a little.
//!
//! Trade-off: twice the work, and only on the host. What is quantized while a model loads takes [`QuantFormat::quantize`].

use rayon::prelude::*;

use crate::e8m0;
use crate::error::Result;
use crate::float::{Fields, NarrowFloat};
use crate::format::QuantFormat;
use crate::quantized::QuantizedTensor;
use crate::rounding;
use crate::scales::{BlockScales, HostScales};
use crate::workers::blocks_at_once;

/// Values that share a scale.
const BLOCK: usize = 32;
/// Bytes of their codes.
const BYTES: usize = BLOCK / 2;

impl QuantizedTensor {
    /// Quantizes the f32 values of a row-major tensor of `shape` to [`QuantFormat::Mxfp4`] with the scales that give the least squared error.
    pub fn mxfp4_of_least_error(values: &[f32], shape: &[usize]) -> Result<Self> {
        let mut tensor = QuantFormat::Mxfp4.quantize(values, shape)?;
        let Self { codes, scales: HostScales { block: BlockScales::Narrow { codes: scales, .. } }, .. } = &mut tensor
        else {
            unreachable!("scales of MXFP4 are a narrow float's")
        };
        let (values, codes) = (values.as_chunks::<BLOCK>().0, codes.as_chunks_mut::<BYTES>().0);
        let blocks = values.par_iter().zip(codes).zip(scales).with_min_len(blocks_at_once(BLOCK));
        blocks.for_each(|((values, codes), scale)| refine(values, codes, scale));
        Ok(tensor)
    }
}

/// Replaces the codes and the scale of a block by those of half the scale, if their error is less.
fn refine(values: &[f32; BLOCK], codes: &mut [u8; BYTES], scale: &mut u8) {
    let Some(half) = scale.checked_sub(1) else { return };
    let others = encode(values, half);
    if squared_error(values, &others, half) < squared_error(values, codes, *scale) {
        (*codes, *scale) = (others, half);
    }
}

fn encode(values: &[f32; BLOCK], scale: u8) -> [u8; BYTES] {
    let factor = e8m0::reciprocal(scale);
    let code = |value: f32| rounding::encode(Fields::E2M1, value * factor);
    let pairs = values.as_chunks::<2>().0;
    std::array::from_fn(|byte| {
        let [low, high] = pairs[byte].map(code);
        high << 4 | low
    })
}

fn squared_error(values: &[f32; BLOCK], codes: &[u8; BYTES], scale: u8) -> f64 {
    let (levels, scale) = (NarrowFloat::E2m1.levels(), f64::from(e8m0::decode(scale)));
    let decoded = codes.iter().flat_map(|byte| [byte & 0xF, byte >> 4]);
    let error = |(value, code): (&f32, u8)| scale * f64::from(levels[usize::from(code)]) - f64::from(*value);
    values.iter().zip(decoded).map(error).map(|error| error * error).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_values::Draws;

    fn scales(tensor: &QuantizedTensor) -> &[u8] {
        let BlockScales::Narrow { codes, .. } = &tensor.scales.block else { panic!("{:?}", tensor.scales) };
        codes
    }

    /// Blocks whose largest values and tails differ: a few large values among small ones, and sizes from tiny to huge.
    fn blocks(count: usize) -> Vec<f32> {
        let mut draws = Draws(71);
        let block = |index: usize| {
            let size = 2_f32.powi((index % 40) as i32 * 6 - 120);
            let tail = [1.0, 0.3, 0.05][index % 3];
            let values = (0..BLOCK).map(|at| size * draws.bell() * if at < 1 + index % 5 { 1.0 } else { tail });
            values.collect::<Vec<_>>()
        };
        (0..count).flat_map(block).collect()
    }

    #[test]
    fn no_scale_of_all_gives_a_block_less_error() {
        let values = blocks(1200);
        let tensor = QuantizedTensor::mxfp4_of_least_error(&values, &[1200, BLOCK]).unwrap();
        let (codes, mut halved) = (tensor.codes.as_chunks::<BYTES>().0, [0; 2]);
        for ((values, codes), &scale) in values.as_chunks::<BLOCK>().0.iter().zip(codes).zip(scales(&tensor)) {
            let error = squared_error(values, codes, scale);
            for other in 0..=254 {
                let least = squared_error(values, &encode(values, other), other);
                assert!(error <= least, "{scale} has {error:e}, {other} {least:e}: {values:?}");
            }
            let up = QuantFormat::Mxfp4.quantize(values, &[BLOCK]).unwrap();
            halved[usize::from(scales(&up)[0] - scale)] += 1;
        }
        assert!(halved.iter().all(|count| *count > 100), "both scales are the best of some blocks: {halved:?}");
    }

    #[test]
    fn codes_that_use_their_range_come_back_as_they_are() {
        let mut draws = Draws(72);
        let codes: Vec<u8> =
            (0..BYTES * 500).map(|at| if at % BYTES == 0 { 0x76 } else { draws.bits() as u8 }).collect();
        let scale: Vec<u8> = (0..500).map(|_| 100 + draws.below(40) as u8).collect();
        let block = BlockScales::Narrow { codes: scale, format: NarrowFloat::E8m0, tensor: None };
        let scales_of = HostScales { block };
        let stored = QuantizedTensor { format: QuantFormat::Mxfp4, codes, scales: scales_of, shape: vec![500, BLOCK] };
        let values = stored.dequantize();
        assert_eq!(QuantizedTensor::mxfp4_of_least_error(&values, &[500, BLOCK]).unwrap(), stored);
        let larger: Vec<f32> = values.iter().map(|value| value * 1.01).collect();
        assert_eq!(QuantizedTensor::mxfp4_of_least_error(&larger, &[500, BLOCK]).unwrap(), stored);
        let rounded_up = QuantFormat::Mxfp4.quantize(&larger, &[500, BLOCK]).unwrap();
        assert!(scales(&rounded_up).iter().zip(scales(&stored)).all(|(up, kept)| *up == kept + 1));
    }

    #[test]
    fn what_the_other_quantizer_refuses_is_refused() {
        for (values, shape) in [(vec![f32::NAN; 32], vec![32]), (vec![1.0; 48], vec![48]), (vec![1.0; 3], vec![32])] {
            let [ours, others] = [
                QuantizedTensor::mxfp4_of_least_error(&values, &shape).unwrap_err(),
                QuantFormat::Mxfp4.quantize(&values, &shape).unwrap_err(),
            ];
            assert_eq!(format!("{ours}"), format!("{others}"));
        }
    }
}
