//! Quantized weights on the CPU: the loops of the host codec, on all cores.
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

fn values(weight: &QuantizedWeight<Flex>) -> Tensor<Flex, 2> {
    let [rows, columns] = weight.shape;
    let (codes, scales) = (bytes(&weight.codes), Floats::of(reference::block_scales(weight)));
    let codes: &[u8] = codes.as_slice().expect("codes of this backend are contiguous bytes");
    let block = weight.format.block_size(columns);
    let mut values = vec![0.0; scales.values().len() * block];
    let blocks = (TASK / block).max(1);
    let bytes = blocks * block / weight.format.packing().codes_per_byte();
    let tasks = values.par_chunks_mut(blocks * block).zip(codes.par_chunks(bytes));
    tasks
        .zip(scales.values().par_chunks(blocks))
        .for_each(|((values, codes), scales)| weight.format.decode_blocks(columns, values, codes, scales));
    values.truncate(rows * columns);
    tensor(values, [rows, columns])
}
