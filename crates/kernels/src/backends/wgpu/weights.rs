//! Quantized weights on WebGPU: eight 4-bit codes per 32-bit word, unpacked by a `#[cube]` kernel.
//!
//! WebGPU has no 8-bit storage, and a byte in every word would cost as much as bf16.
//! Trade-off: nested codes of block scales take a word each, as in the reference body: they are one value in 64.

use burn_cubecl::CubeRuntime;
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use burn_tensor::{DType, Int, IntDType, Shape, Tensor, TensorData, TensorPrimitive};
use cubecl::prelude::*;
use cubecl::wgpu::WgpuRuntime;
use firebrick_precision::QuantizedTensor;

use super::Wgpu;
use crate::weights::{QuantizedWeight, WeightOps, reference};

/// Codes per word.
const CODES: usize = 8;
/// Units of a workgroup: every adapter allows at least 256.
const UNITS: u32 = 256;
/// Workgroups along one axis that every adapter allows.
const MAX_WORKGROUPS: usize = 65_535;

/// One unit unpacks one word: bytes from the lowest, in each byte the high nibble first.
#[cube(launch)]
fn unpack_codes(
    words: &Array<i32>,
    scales: &Array<f32>,
    levels: &Array<f32>,
    values: &mut Array<f32>,
    #[comptime] words_per_block: usize,
) {
    if ABSOLUTE_POS < words.len() {
        let word = words[ABSOLUTE_POS];
        let scale = scales[ABSOLUTE_POS / words_per_block];
        let first = ABSOLUTE_POS * 8;
        #[unroll]
        for byte in 0..4usize {
            let high = (word >> (comptime!(byte as i32 * 8 + 4))) & 15;
            let low = (word >> (comptime!(byte as i32 * 8))) & 15;
            values[first + byte * 2] = levels[high as usize] * scale;
            values[first + byte * 2 + 1] = levels[low as usize] * scale;
        }
    }
}

impl WeightOps for Wgpu {
    fn code_storage_dtype() -> IntDType {
        IntDType::I32
    }

    fn upload_quantized(quantized: &QuantizedTensor, device: &Self::Device) -> QuantizedWeight<Self> {
        let (codes, levels) = (words(reference::padded_codes(quantized)), quantized.format.levels());
        let length = codes.len();
        QuantizedWeight {
            format: quantized.format,
            codes: Tensor::from_data(TensorData::new(codes, [length]), device),
            scales: reference::upload_scales(&quantized.scales, device),
            table: Tensor::<Self, 1>::from_floats(*levels, device).reshape([levels.len(), 1]),
            shape: reference::matrix_shape(quantized),
        }
    }

    fn dequantize_weight(weight: &QuantizedWeight<Self>) -> Tensor<Self, 2> {
        let [rows, columns] = weight.shape;
        let scales = float(reference::block_scales(weight));
        let table = float(weight.table.clone());
        let codes: CubeTensor<WgpuRuntime> = Tensor::<Self, 1, Int>::into_primitive(weight.codes.clone());
        let values = unpack(codes, scales, table, weight.format.block_size() / CODES);
        let flat = Tensor::<Self, 1>::from_primitive(TensorPrimitive::Float(values));
        flat.narrow(0, 0, rows * columns).reshape([rows, columns])
    }
}

/// Four bytes per word, the first one lowest.
fn words(bytes: Vec<u8>) -> Vec<i32> {
    bytes.as_chunks::<4>().0.iter().map(|bytes| i32::from_le_bytes(*bytes)).collect()
}

fn float<const D: usize>(tensor: Tensor<Wgpu, D>) -> CubeTensor<WgpuRuntime> {
    tensor.into_primitive().tensor()
}

fn unpack<R: CubeRuntime>(
    words: CubeTensor<R>,
    scales: CubeTensor<R>,
    levels: CubeTensor<R>,
    words_per_block: usize,
) -> CubeTensor<R> {
    let count = words.meta.num_elements();
    let client = words.client.clone();
    let values =
        empty_device_contiguous_dtype(client.clone(), words.device.clone(), Shape::from([count * CODES]), DType::F32);
    let workgroups = count.div_ceil(UNITS as usize);
    let (x, y) = (workgroups.min(MAX_WORKGROUPS), workgroups.div_ceil(MAX_WORKGROUPS));
    unpack_codes::launch::<R>(
        &client,
        CubeCount::Static(x as u32, y as u32, 1),
        CubeDim::new_1d(UNITS),
        words.into_array_arg(),
        scales.into_array_arg(),
        levels.into_array_arg(),
        values.clone().into_array_arg(),
        words_per_block,
    );
    values
}
