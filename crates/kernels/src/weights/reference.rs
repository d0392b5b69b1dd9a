//! Quantized weights in ordinary Burn operations, without bit operations: a byte selects its two values from a table of 256 pairs.
//!
//! Trade-off: some backends (candle) have no integer bit operations, so values are looked up, which reads a table for every byte.

use burn_tensor::{DType, Element, Int, IntDType, Tensor, TensorData, backend::Backend};
use firebrick_precision::{
    BlockScales as HostBlockScales, DynamicMap, HostScales, QuantFormat, QuantizedTensor, blockwise,
};

use super::{BlockScales, QuantizedWeight, Scales, Weight, WeightOps};
use crate::dtype::to_dtype;

/// The weight as a dense matrix `[out, in]` in `dtype`.
pub fn dense<B: WeightOps>(weight: &Weight<B>, dtype: DType) -> Tensor<B, 2> {
    match weight {
        Weight::Dense(values) => to_dtype(values.clone(), dtype),
        Weight::Quantized(quantized) => to_dtype(B::dequantize_weight(quantized), dtype),
    }
}

/// See [`WeightOps::upload_quantized`].
pub fn upload<B: WeightOps>(quantized: &QuantizedTensor, device: &B::Device) -> QuantizedWeight<B> {
    let table = Tensor::<B, 1>::from_floats(pairs(quantized.format).as_slice(), device).reshape([256, 2]);
    QuantizedWeight {
        format: quantized.format,
        codes: codes(padded_codes(quantized), device),
        scales: upload_scales(&quantized.scales, device),
        table,
        shape: matrix_shape(quantized),
    }
}

/// See [`WeightOps::quantize_weight`].
///
/// # Panics
/// If a value is not finite: the code that reads weights checks them.
pub fn quantize<B: WeightOps>(values_oi: Tensor<B, 2>, format: QuantFormat) -> QuantizedWeight<B> {
    let (shape, device) = (values_oi.dims(), values_oi.device());
    let host = values_oi.into_data().convert::<f32>().to_vec::<f32>().expect("values were just converted to f32");
    let quantized = format.quantize(&host, &shape).unwrap_or_else(|error| panic!("{error}"));
    B::upload_quantized(&quantized, &device)
}

/// See [`WeightOps::dequantize_weight`].
pub fn dequantize<B: Backend>(weight: &QuantizedWeight<B>) -> Tensor<B, 2> {
    let [rows, columns] = weight.shape;
    let (blocks, block_size) = (weight.blocks(), weight.format.block_size());
    let values = weight.table.clone().select(0, index(weight.codes.clone()));
    let scaled = values.reshape([blocks, block_size]).mul(block_scales(weight).reshape([blocks, 1]));
    scaled.reshape([blocks * block_size]).narrow(0, 0, rows * columns).reshape([rows, columns])
}

/// The scale of each block in f32, `[blocks]`.
pub fn block_scales<B: Backend>(weight: &QuantizedWeight<B>) -> Tensor<B, 1> {
    match &weight.scales.block {
        BlockScales::Float(scales) => scales.clone(),
        BlockScales::Nested { codes, absmax, map, offset, blocks } => {
            let nested = absmax.dims()[0];
            let values = map.clone().select(0, index(codes.clone())).reshape([nested, blockwise::BLOCK_SIZE]);
            let scaled = values.mul(absmax.clone().reshape([nested, 1])).add(offset.clone().reshape([1, 1]));
            scaled.reshape([nested * blockwise::BLOCK_SIZE]).narrow(0, 0, *blocks)
        }
    }
}

/// Rows and columns of a quantized matrix.
///
/// # Panics
/// If it is not a matrix: only linear modules are quantized.
pub(crate) fn matrix_shape(quantized: &QuantizedTensor) -> [usize; 2] {
    let shape: Result<[usize; 2], _> = quantized.shape.as_slice().try_into();
    shape.unwrap_or_else(|_| panic!("a quantized weight must be a matrix, got shape {:?}", quantized.shape))
}

/// The packed bytes, the last block filled up with the code of zero.
pub(crate) fn padded_codes(quantized: &QuantizedTensor) -> Vec<u8> {
    let zero = quantized.format.levels().iter().position(|&level| level == 0.0).expect("every format has a zero") as u8;
    let mut codes = quantized.codes.clone();
    codes.resize(quantized.count().next_multiple_of(quantized.format.block_size()) / 2, zero << 4 | zero);
    codes
}

/// Uploads scales, their codes padded to whole nested blocks.
pub(crate) fn upload_scales<B: WeightOps>(scales: &HostScales, device: &B::Device) -> Scales<B> {
    let block = match &scales.block {
        HostBlockScales::Float(values) => BlockScales::Float(Tensor::from_floats(values.as_slice(), device)),
        HostBlockScales::Nested { codes: nested_codes, absmax, offset } => {
            let blocks = nested_codes.len();
            let mut padded = nested_codes.clone();
            padded.resize(blocks.next_multiple_of(blockwise::BLOCK_SIZE), 0);
            BlockScales::Nested {
                codes: codes(padded, device),
                absmax: Tensor::from_floats(absmax.as_slice(), device),
                map: Tensor::from_floats(DynamicMap::signed().values().as_slice(), device),
                offset: Tensor::from_floats([*offset], device),
                blocks,
            }
        }
    };
    Scales { block }
}

/// Codes of at most 8 bits as the backend stores them.
pub(crate) fn codes<B: WeightOps>(values: Vec<u8>, device: &B::Device) -> Tensor<B, 1, Int> {
    let (length, dtype) = (values.len(), DType::from(B::code_storage_dtype()));
    Tensor::from_data(TensorData::new(values, [length]).convert_dtype(dtype), (device, dtype))
}

/// Codes as indices of a lookup, in the integer type that the lookups of the backend take.
pub(crate) fn index<B: Backend>(codes: Tensor<B, 1, Int>) -> Tensor<B, 1, Int> {
    let dtype = B::IntElem::dtype();
    if codes.dtype() == dtype { codes } else { codes.cast(IntDType::from(dtype)) }
}

/// The two values of each byte of codes, high nibble first.
pub(crate) fn pairs(format: QuantFormat) -> Vec<f32> {
    let levels = format.levels();
    (0..=255u8).flat_map(|byte| [levels[usize::from(byte >> 4)], levels[usize::from(byte & 15)]]).collect()
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::testing::{Plain, assert_close, random};

    #[test]
    fn uploaded_weights_have_the_values_of_the_host_codec() {
        let device = Default::default();
        for shape in [[40, 24], [64, 512], [3, 7]] {
            let values: Vec<f32> = random::<Plain, 1>(7, [shape[0] * shape[1]]).into_data().to_vec().unwrap();
            for format in QuantFormat::ALL {
                let host = format.quantize(&values, &shape).unwrap();
                let expected = Tensor::<Plain, 1>::from_floats(host.dequantize().as_slice(), &device).reshape(shape);
                let weight = Weight::Quantized(upload::<Plain>(&host, &device));
                assert_eq!(weight.shape(), shape);
                assert_close(dense(&weight, DType::F32), expected, 1e-6);
            }
        }
    }

    #[test]
    fn a_double_quantized_nf4_weight_holds_about_4_13_bits_per_value() {
        let values: Vec<f32> = random::<Plain, 1>(7, [256 * 512]).into_data().to_vec().unwrap();
        let host = QuantFormat::Nf4 { double_quant: true }.quantize(&values, &[256, 512]).unwrap();
        let weight = upload::<Plain>(&host, &Default::default());
        let bits = weight.bytes() as f64 * 8.0 / (256.0 * 512.0);
        assert!((4.12..4.14).contains(&bits), "{bits}");
    }
}
