//! NF4 on WebGPU: eight codes a 32-bit word, unpacked by a `#[cube]` kernel.
//!
//! WebGPU has no 8-bit storage, and a byte in every word would cost as much as bf16. The block scales keep the portable
//! form: they are one value in 64.

use burn_cubecl::CubeRuntime;
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use burn_tensor::{DType, Int, Shape, Tensor, TensorData, TensorPrimitive};
use cubecl::prelude::*;
use cubecl::wgpu::WgpuRuntime;
use firebrick_precision::nf4::{LEVELS, Nf4Quantized};

use super::Wgpu;
use crate::Nf4Weight;
use crate::portable::nf4;

/// Codes in a word.
const CODES: usize = 8;
/// Units of a workgroup: the least that every adapter allows is 256.
const UNITS: u32 = 256;
/// Workgroups along one axis that every adapter allows.
const MOST_WORKGROUPS: usize = 65_535;

/// One unit unpacks one word: bytes from the lowest, in each byte the high nibble first.
#[cube(launch)]
fn unpack_nf4(
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

/// Uploads a packed weight, eight codes a word.
pub(super) fn upload(
    quantized: &Nf4Quantized,
    device: &<Wgpu as burn_tensor::backend::BackendTypes>::Device,
) -> Nf4Weight<Wgpu> {
    let bytes = nf4::padded_codes(quantized);
    let words: Vec<i32> =
        bytes.chunks_exact(4).map(|b| i32::from_le_bytes(b.try_into().expect("chunks of four bytes"))).collect();
    let length = words.len();
    Nf4Weight {
        codes: Tensor::from_data(TensorData::new(words, [length]), device),
        absmax: nf4::upload_absmax(&quantized.absmax, device),
        table: Tensor::<Wgpu, 1>::from_floats(LEVELS, device).reshape([16, 1]),
        shape: nf4::matrix_shape(quantized),
        block_size: quantized.block_size,
    }
}

/// The values, `[out, in]` f32.
pub(super) fn dequantize(weight: &Nf4Weight<Wgpu>) -> Tensor<Wgpu, 2> {
    let [rows, columns] = weight.shape;
    let scales = float(nf4::absmax(weight));
    let levels = float(weight.table.clone());
    let codes: CubeTensor<WgpuRuntime> = Tensor::<Wgpu, 1, Int>::into_primitive(weight.codes.clone());
    let values = unpack(codes, scales, levels, weight.block_size / CODES);
    let flat = Tensor::<Wgpu, 1>::from_primitive(TensorPrimitive::Float(values));
    flat.narrow(0, 0, rows * columns).reshape([rows, columns])
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
    let (x, y) = (workgroups.min(MOST_WORKGROUPS), workgroups.div_ceil(MOST_WORKGROUPS));
    unpack_nf4::launch::<R>(
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
