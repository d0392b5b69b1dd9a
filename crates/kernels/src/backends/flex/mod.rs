//! CPU through burn-flex, with custom loops for everything except GEMMs and plain sums.
//!
//! burn-flex walks non-contiguous tensors element by element on one core and allocates for each arithmetic step; in the
//! reference bodies that took three quarters of a training step (docs/decisions.md). Here each operation is one pass
//! over contiguous rows, on all cores, compiled for the machine's vector extension.
//! Trade-off: only f32 has loops; tensors of other dtypes take the reference bodies.

mod attention;
mod gemm;
mod host;
mod lanes;
mod linear;
mod loss;
mod norm;
mod optimizer;

pub use burn_flex::Flex;

use burn_tensor::Tensor;
use rayon::prelude::*;

use crate::weights::{QuantizedWeight, WeightOps, reference};
use host::{Floats, TASK, bytes, tensor};

super::by_default!(Flex: Session, MemoryOps, MoeOps, ConvOps, DeltaOps, EmbeddingOps, Kernels);

impl WeightOps for Flex {
    fn dequantize_weight(weight: &QuantizedWeight<Self>) -> Tensor<Self, 2> {
        values(weight)
    }
}

/// Decodes the whole weight with the loops of the host codec, on all cores.
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
