//! The device buffers of an attention call, filled with a problem.

use firebrick_cuda::cudnn::{AttentionShape, BackwardPointers, ForwardPointers};
use firebrick_cuda::{CudaError, DeviceBuffer};

use crate::device::Gpu;
use crate::reference::Problem;

/// The device buffers of one case. Joined columns share a buffer.
pub(crate) struct Buffers {
    pub(crate) pointers: BackwardPointers,
    _shared: Vec<DeviceBuffer>,
    _gradients: Vec<DeviceBuffer>,
    pub(crate) workspace: DeviceBuffer,
    pub(crate) output: DeviceBuffer,
    pub(crate) statistics: DeviceBuffer,
}

impl Buffers {
    pub(crate) fn new(
        gpu: &Gpu,
        shape: &AttentionShape,
        problem: &Problem,
        workspace: usize,
    ) -> Result<Self, CudaError> {
        let tokens = shape.tokens();
        let (query, key) = (shape.query_heads * shape.head_dim, shape.key_value_heads * shape.head_dim);
        let widths = [query, key, key];
        let strides = [shape.strides.query, shape.strides.key, shape.strides.value];
        let (inputs, input_at) = columns(gpu, tokens, widths, strides);
        for (part, (rows, width)) in [&problem.query, &problem.key, &problem.value].iter().zip(widths).enumerate() {
            let bits: Vec<u16> = rows.iter().map(|&value| problem.half.to_bits(value)).collect();
            gpu.upload_rows(input_at[part], strides[part], width, &bits);
        }
        let strides = [shape.strides.query_gradient, shape.strides.key_gradient, shape.strides.value_gradient];
        let (gradients, gradient_at) = columns(gpu, tokens, widths, strides);
        let output = gpu.buffer(tokens * shape.strides.output * 2);
        let output_gradient = gpu.buffer(tokens * shape.strides.output_gradient * 2);
        let bits: Vec<u16> = problem.output_gradient.iter().map(|&value| problem.half.to_bits(value)).collect();
        gpu.upload_rows(address(&output_gradient), shape.strides.output_gradient, query, &bits);
        let statistics = gpu.buffer(tokens * shape.query_heads * 4);
        let contents = if shape.is_packed() { packed_index(shape, &problem.lengths) } else { vec![0] };
        let index = gpu.device.upload(&contents);
        let workspace = gpu.buffer(workspace.max(256));
        let forward = ForwardPointers {
            query: input_at[0],
            key: input_at[1],
            value: input_at[2],
            output: address(&output),
            statistics: address(&statistics),
            index: address(&index),
            workspace: address(&workspace),
            scale: problem.scale,
        };
        let pointers = BackwardPointers {
            forward,
            output_gradient: address(&output_gradient),
            query_gradient: gradient_at[0],
            key_gradient: gradient_at[1],
            value_gradient: gradient_at[2],
        };
        let mut shared = inputs;
        shared.extend([output_gradient, index]);
        Ok(Self { pointers, _shared: shared, _gradients: gradients, workspace, output, statistics })
    }
}

/// Builds the index of documents of these lengths; those that are missing are empty and at the end.
fn packed_index(shape: &AttentionShape, lengths: &[usize]) -> Vec<i32> {
    const ALIGNMENT: usize = 4;
    let mut index: Vec<i32> = lengths.iter().map(|&length| length as i32).collect();
    index.resize(shape.documents().next_multiple_of(ALIGNMENT), 0);
    for stride in shape.index_strides() {
        let starts = (0..=shape.documents()).map(|document| lengths.iter().take(document).sum::<usize>());
        index.extend(starts.map(|start| (start * stride) as i32));
        index.resize(index.len().next_multiple_of(ALIGNMENT), 0);
    }
    assert_eq!(index.len(), shape.packed_index_len());
    index
}

/// Returns one buffer for three column ranges if their row stride has room for all of them, else three buffers.
fn columns(gpu: &Gpu, tokens: usize, widths: [usize; 3], strides: [usize; 3]) -> (Vec<DeviceBuffer>, [u64; 3]) {
    if strides.iter().all(|&stride| stride == widths.iter().sum::<usize>()) {
        let buffer = gpu.buffer(tokens * strides[0] * 2);
        let at = |width: usize| address(&buffer) + 2 * width as u64;
        let addresses = [at(0), at(widths[0]), at(widths[0] + widths[1])];
        return (vec![buffer], addresses);
    }
    let buffers = strides.map(|stride| gpu.buffer(tokens * stride * 2));
    let addresses = buffers.each_ref().map(address);
    (buffers.into(), addresses)
}

pub(crate) fn address(buffer: &DeviceBuffer) -> u64 {
    buffer.pointer::<u8>().address()
}
