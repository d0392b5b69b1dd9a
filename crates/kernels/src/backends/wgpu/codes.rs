//! Quantized weights on wgpu: eight 4-bit codes or four bytes per 32-bit word, because WebGPU has no 8-bit storage, and nested scales decoded
//! when a weight is uploaded. A `#[cube]` kernel unpacks whole weights; products read the codes themselves (`linear/gemm.rs`).
//!
//! Trade-off: codes of nested scales would take a word each, so decoded ones cost nothing more.

use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_tensor::backend::BackendTypes;
use burn_tensor::{DType, Int, IntDType, Shape, Tensor};
use cubecl::prelude::*;
use cubecl::wgpu::WgpuRuntime;
use firebrick_precision::{BlockScales as HostBlockScales, HostScales, Packing, QuantFormat, narrow_map};

use super::engine::{Primitive, Wgpu, int_primitive, primitive, tensor};
use crate::memory::HostBuffer;
use crate::weights::{BlockScales, QuantizedWeight, WeightOps, reference};
use crate::{OptimizerOps, Session};

/// Units per workgroup: every adapter allows at least 256.
const UNITS: u32 = 256;
/// Number of workgroups along one axis that every adapter allows.
const MAX_WORKGROUPS: usize = 65_535;

/// A block size larger than any tensor, so that one kernel serves all of them.
const ONE_BLOCK: usize = 1 << 31;

/// Layout of a weight's codes in words, known when the kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Layout {
    /// Bits per code: 4 or 8.
    bits: usize,
    /// Whether the first code of a byte is in its high nibble.
    high_first: bool,
    /// Values that share a scale.
    block_size: usize,
}

impl Layout {
    const fn codes_per_word(self) -> usize {
        32 / self.bits
    }

    /// Returns the bit offset of the code for a word's value `index`.
    const fn shift(self, index: usize) -> i32 {
        let is_swapped = self.bits == 4 && self.high_first;
        let place = if is_swapped { index ^ 1 } else { index };
        (place * self.bits) as i32
    }

    const fn mask(self) -> i32 {
        (1 << self.bits) - 1
    }
}

/// Unpacks one word per unit, from the lowest byte.
#[cube(launch)]
fn unpack_codes(
    words: &Array<i32>,
    scales: &Array<f32>,
    levels: &Array<f32>,
    values: &mut Array<f32>,
    #[comptime] layout: Layout,
) {
    if ABSOLUTE_POS < words.len() {
        let word = words[ABSOLUTE_POS];
        let first = ABSOLUTE_POS * comptime!(layout.codes_per_word());
        #[unroll]
        for index in 0..comptime!(layout.codes_per_word()) {
            let code = (word >> comptime!(layout.shift(index))) & comptime!(layout.mask());
            let block = (first + index) / comptime!(layout.block_size);
            // The last word may be half used, beyond the last scale.
            if block < scales.len() {
                values[first + index] = levels[code as usize] * scales[block];
            }
        }
    }
}

impl WeightOps for Wgpu {
    const CODE_DTYPE: IntDType = IntDType::I32;

    fn upload_codes(
        codes: HostBuffer,
        scales: &HostScales,
        format: QuantFormat,
        shape: [usize; 2],
        device: &Self::Device,
    ) -> QuantizedWeight<Self> {
        let levels = format.levels();
        let scales = match &scales.block {
            HostBlockScales::Narrow { codes, format, tensor } => {
                let map = Tensor::from_floats(narrow_map(*format, *tensor), device);
                BlockScales::Narrow { codes: upload_words(codes.clone(), device), map }
            }
            _ => reference::upload_scales(scales, device),
        };
        let codes = upload_words(codes.into_memory().expect("the default buffer is a Vec"), device);
        let table = Tensor::<Self, 1>::from_floats(levels, device).reshape([levels.len(), 1]);
        let weight = QuantizedWeight { format, codes, scales, table, shape };
        match &weight.scales {
            BlockScales::Nested { .. } => {
                QuantizedWeight { scales: BlockScales::Float(block_scales(&weight)), ..weight }
            }
            BlockScales::Float(_) | BlockScales::Narrow { .. } => weight,
        }
    }

    fn dequantize_weight(weight: &QuantizedWeight<Self>) -> Tensor<Self, 2> {
        Self::pause(&weight.codes.device(), || unpacked(weight))
    }
}

fn unpacked(weight: &QuantizedWeight<Wgpu>) -> Tensor<Wgpu, 2> {
    let [rows, columns] = weight.shape;
    let packing = weight.format.packing();
    let layout = Layout {
        bits: 8 / packing.codes_per_byte(),
        high_first: packing == Packing::HighNibbleFirst,
        block_size: weight.format.block_size(columns),
    };
    let scales = primitive(block_scales(weight));
    let flat = unpack([int_primitive(weight.codes.clone()), scales, primitive(weight.table.clone())], layout);
    flat.narrow(0, 0, rows * columns).reshape([rows, columns])
}

/// Returns the scale of each block. Codes of narrow floats are unpacked like codes of weights, in one block of scale 1.
fn block_scales(weight: &QuantizedWeight<Wgpu>) -> Tensor<Wgpu, 1> {
    let BlockScales::Narrow { codes, map } = &weight.scales else { return reference::block_scales(weight) };
    let one = Tensor::<Wgpu, 1>::from_floats([1.0], &codes.device());
    let layout = Layout { bits: 8, high_first: false, block_size: ONE_BLOCK };
    let operands = [int_primitive(codes.clone()), primitive(one), primitive(map.clone())];
    unpack(operands, layout).narrow(0, 0, weight.blocks())
}

/// Packs four bytes per word, the first one lowest, with the last word zero-padded.
fn upload_words(mut bytes: Vec<u8>, device: &<Wgpu as BackendTypes>::Device) -> Tensor<Wgpu, 1, Int> {
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    Tensor::from_data(Wgpu::packed_codes(bytes), device)
}

fn unpack([words, scales, levels]: [Primitive; 3], layout: Layout) -> Tensor<Wgpu, 1> {
    let count = words.meta.num_elements();
    let client = words.client.clone();
    let values = empty_device_contiguous_dtype(
        client.clone(),
        words.device.clone(),
        Shape::from([count * layout.codes_per_word()]),
        DType::F32,
    );
    let workgroups = count.div_ceil(UNITS as usize);
    let (x, y) = (workgroups.min(MAX_WORKGROUPS), workgroups.div_ceil(MAX_WORKGROUPS));
    unpack_codes::launch::<WgpuRuntime>(
        &client,
        CubeCount::Static(x as u32, y as u32, 1),
        CubeDim::new_1d(UNITS),
        words.into_array_arg(),
        scales.into_array_arg(),
        levels.into_array_arg(),
        values.clone().into_array_arg(),
        layout,
    );
    tensor(values)
}
