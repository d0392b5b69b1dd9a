//! NF4 on the device without bit operations: a byte selects its two values from a table of 256 pairs.
//!
//! Some backends (candle) have no integer bit operations, so the portable body looks values up instead of unpacking nibbles.

use burn_tensor::{Element, Int, IntDType, Tensor, TensorData, backend::Backend};
use firebrick_precision::DynamicMap;
use firebrick_precision::nf4::{self, Absmax, LEVELS, Nf4Quantized};

use crate::{Kernels, Nf4Absmax, Nf4Weight};

/// Blocks of scales that share one nested scale.
const NESTED_BLOCK: usize = 256;

/// See [`Kernels::nf4_upload`].
pub fn upload<B: Kernels>(quantized: &Nf4Quantized, device: &B::Device) -> Nf4Weight<B> {
    Nf4Weight {
        codes: codes(padded_codes(quantized), device),
        absmax: upload_absmax(&quantized.absmax, device),
        table: Tensor::<B, 1>::from_floats(pair_table().as_slice(), device).reshape([256, 2]),
        shape: matrix_shape(quantized),
        block_size: quantized.block_size,
    }
}

/// See [`Kernels::nf4_dequantize`].
pub fn dequantize<B: Backend>(weight: &Nf4Weight<B>) -> Tensor<B, 2> {
    let [rows, columns] = weight.shape;
    let (blocks, elements) = (weight.blocks(), rows * columns);
    let values = weight.table.clone().select(0, index(weight.codes.clone()));
    let scaled = values.reshape([blocks, weight.block_size]).mul(absmax(weight).reshape([blocks, 1]));
    let flat = scaled.reshape([blocks * weight.block_size]);
    flat.narrow(0, 0, elements).reshape([rows, columns])
}

/// Block scales in f32, `[blocks]`.
pub fn absmax<B: Backend>(weight: &Nf4Weight<B>) -> Tensor<B, 1> {
    match &weight.absmax {
        Nf4Absmax::Float(absmax) => absmax.clone(),
        Nf4Absmax::Nested { codes, absmax, map, offset, blocks } => {
            let nested = absmax.dims()[0];
            let values = map.clone().select(0, index(codes.clone())).reshape([nested, NESTED_BLOCK]);
            let scaled = values.mul(absmax.clone().reshape([nested, 1])).add(offset.clone().reshape([1, 1]));
            scaled.reshape([nested * NESTED_BLOCK]).narrow(0, 0, *blocks)
        }
    }
}

/// The rows and columns of a quantised matrix.
///
/// # Panics
/// If it is not a matrix: only linear layers are quantised.
pub(crate) fn matrix_shape(quantized: &Nf4Quantized) -> [usize; 2] {
    let shape: Result<[usize; 2], _> = quantized.shape.as_slice().try_into();
    shape.unwrap_or_else(|_| panic!("an NF4 weight must be a matrix, got shape {:?}", quantized.shape))
}

/// The packed bytes, the last block filled up with the code of zero.
pub(crate) fn padded_codes(quantized: &Nf4Quantized) -> Vec<u8> {
    /// Two codes for the value 0.
    const ZERO_PAIR: u8 = 0x77;
    let elements: usize = quantized.shape.iter().product();
    let mut packed = quantized.packed.clone();
    packed.resize(elements.next_multiple_of(quantized.block_size) / 2, ZERO_PAIR);
    packed
}

/// Uploads the block scales with their codes padded to whole nested blocks.
pub(crate) fn upload_absmax<B: Kernels>(absmax: &Absmax, device: &B::Device) -> Nf4Absmax<B> {
    match absmax {
        Absmax::Float(values) => Nf4Absmax::Float(Tensor::from_floats(values.as_slice(), device)),
        Absmax::Nested { codes: nested_codes, absmax, offset } => {
            let blocks = nested_codes.len();
            let mut padded_codes = nested_codes.clone();
            padded_codes.resize(blocks.next_multiple_of(NESTED_BLOCK), 0);
            Nf4Absmax::Nested {
                codes: codes(padded_codes, device),
                absmax: Tensor::from_floats(absmax.as_slice(), device),
                map: Tensor::from_floats(DynamicMap::signed().values().as_slice(), device),
                offset: Tensor::from_floats([*offset], device),
                blocks,
            }
        }
    }
}

/// See [`Kernels::nf4_quantize`].
///
/// # Panics
/// If a value is not finite: whoever read the weight has looked at it.
pub fn quantize<B: Kernels>(values: Tensor<B, 2>, double_quant: bool) -> Nf4Weight<B> {
    let (shape, device) = (values.dims(), values.device());
    let host = values.into_data().convert::<f32>().to_vec::<f32>().expect("values were just converted to f32");
    let packed = nf4::quantize(&host, &shape, double_quant.into()).unwrap_or_else(|error| panic!("{error}"));
    B::nf4_upload(&packed, &device)
}

/// Codes of at most 8 bits as the backend stores them.
pub(crate) fn codes<B: Kernels>(values: Vec<u8>, device: &B::Device) -> Tensor<B, 1, Int> {
    let length = values.len();
    let data = TensorData::new(values, [length]);
    Tensor::from_data(data.convert_dtype(B::code_dtype().into()), (device, B::code_dtype().into()))
}

/// Codes as indices of a look-up, in the integer type that the backend's own look-ups take.
pub(crate) fn index<B: Backend>(codes: Tensor<B, 1, Int>) -> Tensor<B, 1, Int> {
    let dtype = B::IntElem::dtype();
    if codes.dtype() == dtype { codes } else { codes.cast(IntDType::from(dtype)) }
}

fn pair_table() -> Vec<f32> {
    (0..=255u8).flat_map(|byte| [LEVELS[(byte >> 4) as usize], LEVELS[(byte & 15) as usize]]).collect()
}
