//! Quantized weights on the CPU: a lookup loop instead of a table of tensors.
//!
//! Trade-off: the whole weight is dequantized at a time, in f32.

use burn_flex::Flex;
use burn_tensor::Tensor;
use rayon::prelude::*;

use super::host::{Floats, TASK, bytes, tensor};
use crate::weights::{QuantizedWeight, WeightOps, reference};

impl WeightOps for Flex {
    fn dequantize_weight(weight: &QuantizedWeight<Self>) -> Tensor<Self, 2> {
        values(weight)
    }
}

/// The sixteen products of level and scale are made once per block.
fn values(weight: &QuantizedWeight<Flex>) -> Tensor<Flex, 2> {
    let [rows, columns] = weight.shape;
    let (codes, scales) = (bytes(&weight.codes), Floats::of(reference::block_scales(weight)));
    let codes: &[u8] = codes.as_slice().expect("codes of this backend are contiguous bytes");
    let (levels, block) = (weight.format.levels(), weight.format.block_size());
    let mut values = vec![0.0; scales.values().len() * block];
    let blocks_per_task = TASK / block;
    values
        .par_chunks_mut(blocks_per_task * block)
        .zip(codes.par_chunks(blocks_per_task * block / 2))
        .zip(scales.values().par_chunks(blocks_per_task))
        .for_each(|((values, codes), scales)| {
            let blocks = values.chunks_exact_mut(block).zip(codes.chunks_exact(block / 2)).zip(scales);
            for ((values, codes), scale) in blocks {
                let levels = levels.map(|level| level * scale);
                for (pair, code) in values.chunks_exact_mut(2).zip(codes) {
                    pair[0] = levels[usize::from(code >> 4)];
                    pair[1] = levels[usize::from(code & 15)];
                }
            }
        });
    values.truncate(rows * columns);
    tensor(values, [rows, columns])
}
