//! Weights that an operation reads but does not train: dense, or quantized in a named format.
//!
//! A quantized weight keeps the codes and scales that `firebrick-precision` computes, byte for byte, in the layout that
//! each backend prefers. One function each quantizes, dequantizes and uploads every format.

#[cfg(feature = "flex")]
pub(crate) mod conformance;
pub mod reference;
mod storage;

use burn_tensor::{DType, Int, IntDType, Shape, Tensor, backend::Backend};
use firebrick_precision::{HostScales, QuantFormat, QuantizedTensor, blockwise};

use crate::memory::{HostBuffer, MemoryOps, slices};
use crate::payload::{Payload, PayloadLayout};
pub use storage::{BaseStorage, Storage};

/// A weight matrix `[out, in]`.
#[derive(Clone, Debug)]
pub enum Weight<B: Backend> {
    /// Unquantized values.
    Dense(Tensor<B, 2>),
    /// Codes and scales.
    Quantized(QuantizedWeight<B>),
}

/// A quantized weight on the device.
#[derive(Clone, Debug)]
pub struct QuantizedWeight<B: Backend> {
    /// The format of codes and scales.
    pub format: QuantFormat,
    /// The codes, padded to whole blocks with the code of zero: bytes (u8), or 32-bit words if the backend has no
    /// bytes. Only NF4, whose blocks run across rows, needs padding.
    pub codes: Tensor<B, 1, Int>,
    /// A scale per block.
    pub scales: BlockScales<B>,
    /// The table in which codes are looked up, in the layout that the backend's dequantization reads.
    pub table: Tensor<B, 2>,
    /// `[out, in]`.
    pub shape: [usize; 2],
}

/// Block scales: one f32 per block, or one 8-bit code per block.
#[derive(Clone, Debug)]
pub enum BlockScales<B: Backend> {
    /// `[blocks]` f32.
    Float(Tensor<B, 1>),
    /// Codes of a narrow float.
    Narrow {
        /// `[blocks]` codes.
        codes: Tensor<B, 1, Int>,
        /// The scale of each code, with the scale of the whole tensor multiplied in, `[256]` f32.
        map: Tensor<B, 1>,
    },
    /// Quantized to the 8-bit dynamic map in nested blocks of 256, around an offset (the mean).
    Nested {
        /// `[nested blocks * 256]` codes.
        codes: Tensor<B, 1, Int>,
        /// `[nested blocks]` f32.
        absmax: Tensor<B, 1>,
        /// The dynamic map, `[256]` f32.
        map: Tensor<B, 1>,
        /// Added to every decoded scale, `[1]` f32.
        offset: Tensor<B, 1>,
        /// Number of blocks (the codes are padded to whole nested blocks).
        blocks: usize,
    },
}

impl<B: Backend> Weight<B> {
    /// Returns the device that holds it.
    pub fn device(&self) -> B::Device {
        match self {
            Self::Dense(weight) => weight.device(),
            Self::Quantized(weight) => weight.codes.device(),
        }
    }

    /// Returns `[out, in]`.
    pub fn shape(&self) -> [usize; 2] {
        match self {
            Self::Dense(weight) => weight.dims(),
            Self::Quantized(weight) => weight.shape,
        }
    }
}

impl<B: WeightOps> Weight<B> {
    /// Divides a stack into `count` matrices of equal shape, which share its memory where the backend can.
    ///
    /// # Panics
    /// If it is not so many matrices, or the matrices of a quantized stack do not begin with a block, codes and nested scales included
    /// ([`matrix_scales`]).
    pub fn matrices(&self, count: usize) -> Vec<Self> {
        match self {
            Self::Dense(weight) => {
                slices(weight.clone(), &evenly(weight.dims()[0], count)).into_iter().map(Self::Dense).collect()
            }
            Self::Quantized(weight) => weight.matrices(count).into_iter().map(Self::Quantized).collect(),
        }
    }
}

/// Returns start and length of each of `count` equal parts.
///
/// # Panics
/// If they are not equal.
pub fn evenly(length: usize, count: usize) -> Vec<(usize, usize)> {
    assert!(length.is_multiple_of(count), "{length} does not divide into {count} parts");
    let each = length / count;
    (0..count).map(|index| (index * each, each)).collect()
}

/// The scales that a quantized stack of matrices may have, so that each matrix has its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatrixScales {
    /// As the format has them.
    OfFormat,
    /// As f32: a matrix would begin inside of a nested block, or of a word of codes.
    Float,
    /// None: a matrix would begin inside of a block.
    None,
}

/// Returns the scales of a stack of matrices of this shape in a format.
pub fn matrix_scales(format: QuantFormat, [rows, columns]: [usize; 2]) -> MatrixScales {
    /// Codes in the largest word that a backend stores them in.
    const WORD: usize = 4;
    let (values, block) = (rows * columns, format.block_size(columns));
    let blocks = values / block;
    let bytes = values / format.packing().codes_per_byte();
    if !values.is_multiple_of(block) || !bytes.is_multiple_of(WORD) {
        return MatrixScales::None;
    }
    let unit = if format.double_quant() { blockwise::BLOCK_SIZE } else { WORD };
    if blocks.is_multiple_of(unit) { MatrixScales::OfFormat } else { MatrixScales::Float }
}

impl<B: WeightOps> QuantizedWeight<B> {
    fn matrices(&self, count: usize) -> Vec<Self> {
        let shape = [self.shape[0] / count, self.shape[1]];
        let blocks = self.format.blocks(shape[0] * shape[1], shape[1]);
        assert!(
            self.shape[0].is_multiple_of(count) && self.blocks() == count * blocks,
            "a stack {:?} of {count} matrices in {} has matrices of whole blocks",
            self.shape,
            self.format
        );
        // The last part of these scales, a map or an offset, is that of every matrix.
        let shared = match &self.scales {
            BlockScales::Float(_) => 0,
            BlockScales::Narrow { .. } => 1,
            BlockScales::Nested { .. } => {
                assert!(blocks.is_multiple_of(blockwise::BLOCK_SIZE), "{blocks} blocks are whole nested blocks");
                1
            }
        };
        let parts = self.parts();
        let own = parts.len() - shared;
        let of_matrices = |(index, part): (usize, Payload<B>)| {
            let elements = part.layout().elements;
            if index < own { B::slices(part, &evenly(elements, count)) } else { vec![part; count] }
        };
        let parts: Vec<_> = parts.into_iter().enumerate().map(of_matrices).collect();
        let of_matrix = |index: usize| parts.iter().map(|part| part[index].clone()).collect();
        (0..count).map(|index| self.with_parts(shape, of_matrix(index))).collect()
    }
}

impl<B: Backend> QuantizedWeight<B> {
    /// Returns the number of blocks that share a scale.
    pub fn blocks(&self) -> usize {
        self.format.blocks(self.shape[0] * self.shape[1], self.shape[1])
    }

    /// Returns the bytes held on the device, without the tables in which all weights of a format are looked up.
    pub fn bytes(&self) -> usize {
        let stored = |shape: Shape, dtype: DType| shape.num_elements() * dtype.size();
        let codes = |codes: &Tensor<B, 1, Int>| stored(codes.shape(), codes.dtype());
        let floats = |values: &Tensor<B, 1>| stored(values.shape(), values.dtype());
        codes(&self.codes)
            + match &self.scales {
                BlockScales::Float(scales) => floats(scales),
                BlockScales::Narrow { codes: scales, map } => codes(scales) + floats(map),
                BlockScales::Nested { codes: scales, absmax, offset, .. } => {
                    codes(scales) + floats(absmax) + floats(offset)
                }
            }
    }
}

impl<B: WeightOps> QuantizedWeight<B> {
    /// Uploads a weight that was quantized on the host.
    ///
    /// # Panics
    /// If it is not a matrix; only linear modules are quantized.
    pub fn upload(quantized: &QuantizedTensor, device: &B::Device) -> Self {
        let shape: Result<[usize; 2], _> = quantized.shape.as_slice().try_into();
        let shape = shape.unwrap_or_else(|_| panic!("a quantized weight must be a matrix, not {:?}", quantized.shape));
        let (bytes, fill) = padded_codes(quantized.format, &quantized.shape);
        let mut buffer = B::host_buffer(device, bytes);
        let (codes, padding) = buffer.split_at_mut(quantized.codes.len());
        codes.copy_from_slice(&quantized.codes);
        padding.fill(fill);
        B::upload_codes(buffer, &quantized.scales, quantized.format, shape, device)
    }
}

/// The parts in which two weights of one format differ, and which ranks exchange. They do not include the tables that weights share.
impl<B: Backend> QuantizedWeight<B> {
    /// Returns codes and scales, flat.
    pub fn parts(&self) -> Vec<Payload<B>> {
        let scales = match &self.scales {
            BlockScales::Float(scales) => vec![Payload::Values(scales.clone())],
            BlockScales::Narrow { codes, map } => vec![Payload::Codes(codes.clone()), Payload::Values(map.clone())],
            BlockScales::Nested { codes, absmax, offset, .. } => {
                vec![Payload::Codes(codes.clone()), Payload::Values(absmax.clone()), Payload::Values(offset.clone())]
            }
        };
        [Payload::Codes(self.codes.clone())].into_iter().chain(scales).collect()
    }

    /// Returns the layout of the parts of a weight with another shape `[out, in]`, in the same format and with the same kinds of tensors.
    pub fn layouts(&self, shape: [usize; 2]) -> Vec<PayloadLayout> {
        let sizes = part_sizes(self.format, shape, matches!(self.scales, BlockScales::Float(_)));
        let is_nested = matches!(self.scales, BlockScales::Nested { .. });
        let of = |(index, (part, [count, _])): (usize, (Payload<B>, [usize; 2]))| {
            let layout = part.layout();
            // Without a byte type, a backend stores four bytes per word, except for nested codes.
            let in_words = layout.is_codes && (index == 0 || !is_nested);
            PayloadLayout { elements: if in_words { count.div_ceil(layout.dtype.size()) } else { count }, ..layout }
        };
        self.parts().into_iter().zip(sizes).enumerate().map(of).collect()
    }

    /// Builds a weight of shape `[out, in]` from its parts, in the order of [`QuantizedWeight::parts`].
    ///
    /// # Panics
    /// If the parts do not match such a weight.
    #[must_use]
    pub fn with_parts(&self, shape: [usize; 2], parts: Vec<Payload<B>>) -> Self {
        let mut parts = parts.into_iter();
        let mut next = || parts.next().expect("a weight has all its parts");
        let codes = next().into_codes();
        let scales = match &self.scales {
            BlockScales::Float(_) => BlockScales::Float(next().into_values()),
            BlockScales::Narrow { .. } => BlockScales::Narrow { codes: next().into_codes(), map: next().into_values() },
            BlockScales::Nested { map, .. } => BlockScales::Nested {
                codes: next().into_codes(),
                absmax: next().into_values(),
                map: map.clone(),
                offset: next().into_values(),
                blocks: self.format.blocks(shape[0] * shape[1], shape[1]),
            },
        };
        Self { format: self.format, codes, scales, table: self.table.clone(), shape }
    }
}

/// Returns count and bytes of the codes and f32 values in each part of a weight `[out, in]`, in the order of [`QuantizedWeight::parts`]. The scales are
/// those of the format, or f32.
fn part_sizes(format: QuantFormat, [rows, columns]: [usize; 2], has_float_scales: bool) -> Vec<[usize; 2]> {
    let blocks = format.blocks(rows * columns, columns);
    let nested = blocks.div_ceil(blockwise::BLOCK_SIZE);
    let codes = [padded_codes(format, &[rows, columns]).0, 1];
    match format {
        _ if has_float_scales => vec![codes, [blocks, 4]],
        QuantFormat::Nf4 { double_quant: true } => {
            vec![codes, [nested * blockwise::BLOCK_SIZE, 1], [nested, 4], [1, 4]]
        }
        // Every code of a scale has its value in a table of the weight.
        QuantFormat::Nvfp4 | QuantFormat::Mxfp4 => vec![codes, [blocks, 1], [256, 4]],
        QuantFormat::Nf4 { double_quant: false } | QuantFormat::Fp8 => vec![codes, [blocks, 4]],
    }
}

/// Returns the bytes of a weight's codes in whole blocks, and the byte that pads the last block: codes of zero.
pub fn padded_codes(format: QuantFormat, shape: &[usize]) -> (usize, u8) {
    let columns = *shape.last().expect("a weight has rows");
    let zero = format.levels().iter().position(|&level| level == 0.0).expect("every format has a zero") as u8;
    let values = format.blocks(shape.iter().product(), columns) * format.block_size(columns);
    (values / format.packing().codes_per_byte(), format.packing().repeated(zero))
}

/// Quantized weights on a device.
pub trait WeightOps: MemoryOps {
    /// The integer dtype of stored codes of at most 8 bits: a byte where the backend has one.
    const CODE_DTYPE: IntDType = IntDType::U8;
    /// Whether [`WeightOps::quantize_weight`] runs on the device, so that weights are best uploaded unquantized.
    const QUANTIZES_ON_DEVICE: bool = false;

    /// Uploads codes and scales from the host. The buffer has the size of [`padded_codes`], and its padding is codes of zero.
    fn upload_codes(
        codes: HostBuffer,
        scales: &HostScales,
        format: QuantFormat,
        shape: [usize; 2],
        device: &Self::Device,
    ) -> QuantizedWeight<Self> {
        reference::upload_codes(codes, scales, format, shape, device)
    }

    /// Quantizes a matrix `[out, in]` of finite values that the format supports ([`QuantFormat::check_columns`]), to the same bytes as on the host.
    fn quantize_weight(values_oi: Tensor<Self, 2>, format: QuantFormat) -> QuantizedWeight<Self> {
        Self::pause(&values_oi.device(), || reference::quantize(values_oi, format))
    }

    /// Dequantizes a weight to `[out, in]` f32.
    fn dequantize_weight(weight: &QuantizedWeight<Self>) -> Tensor<Self, 2> {
        Self::pause(&weight.codes.device(), || reference::dequantize(weight))
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::testing::{Plain, random};

    #[test]
    fn the_matrices_of_a_stack_have_its_values() {
        let device = Default::default();
        for (format, shape) in QuantFormat::ALL.into_iter().flat_map(|f| [(f, [128, 128]), (f, [16, 32])]) {
            let stack = random::<Plain, 2>(3, [3 * shape[0], shape[1]]);
            let values = stack.into_data().to_vec::<f32>().unwrap();
            if format.check_columns(shape[1]).is_err() {
                continue;
            }
            let mut host = format.quantize(&values, &[3 * shape[0], shape[1]]).unwrap();
            if matrix_scales(format, shape) == MatrixScales::Float {
                host.scales.block = firebrick_precision::BlockScales::Float(host.scales.block.values());
            }
            let weight = QuantizedWeight::<Plain>::upload(&host, &device);
            let whole = Plain::dequantize_weight(&weight);
            let parts = Weight::Quantized(weight).matrices(3);
            for (index, part) in parts.into_iter().enumerate() {
                let Weight::Quantized(part) = part else { panic!("it is quantized") };
                let expected = whole.clone().narrow(0, index * shape[0], shape[0]).into_data();
                assert_eq!(Plain::dequantize_weight(&part).into_data(), expected, "{format} {shape:?}");
            }
        }
        let nf4 = QuantFormat::Nf4 { double_quant: true };
        let scales = [[128, 128], [16, 32], [3, 5]].map(|shape| matrix_scales(nf4, shape));
        assert_eq!(scales, [MatrixScales::OfFormat, MatrixScales::Float, MatrixScales::None]);
    }

    #[test]
    fn a_weight_put_together_from_its_parts_is_the_weight() {
        for format in QuantFormat::ALL {
            // The layout of one row determines that of any number of rows.
            let row = Plain::quantize_weight(Tensor::ones([1, 320], &Default::default()), format);
            for shape in [[7, 320], [300, 320], [1, 320]] {
                let weight = Plain::quantize_weight(random::<Plain, 2>(3, shape), format);
                let layouts: Vec<_> = weight.parts().iter().map(Payload::layout).collect();
                assert_eq!(row.layouts(shape), layouts, "{format} {shape:?}");
                let again = row.with_parts(shape, weight.parts());
                assert_eq!((again.blocks(), again.bytes()), (weight.blocks(), weight.bytes()));
                let [found, expected] = [&again, &weight].map(|weight| Plain::dequantize_weight(weight).into_data());
                assert_eq!(found, expected, "{format} {shape:?}");
            }
        }
    }
}
