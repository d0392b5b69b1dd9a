//! Quantized weights in ordinary Burn operations, without bit operations: a byte selects its one or two values from a table of 256 rows.

use burn_tensor::{DType, Element, Int, IntDType, Tensor, TensorData, backend::Backend};
use firebrick_precision::{BlockScales as HostBlockScales, DynamicMap, HostScales, QuantFormat, blockwise, narrow_map};

use super::{BlockScales, QuantizedWeight, Weight, WeightOps};
use crate::HostBuffer;
use crate::dtype::to_dtype;

/// Returns the weight as a dense matrix `[out, in]` in `dtype`.
pub fn dense<B: WeightOps>(weight: &Weight<B>, dtype: DType) -> Tensor<B, 2> {
    match weight {
        Weight::Dense(values) => to_dtype(values.clone(), dtype),
        Weight::Quantized(quantized) => to_dtype(B::dequantize_weight(quantized), dtype),
    }
}

/// Implements [`WeightOps::upload_codes`].
pub fn upload_codes<B: WeightOps>(
    buffer: HostBuffer,
    scales: &HostScales,
    format: QuantFormat,
    shape: [usize; 2],
    device: &B::Device,
) -> QuantizedWeight<B> {
    let codes = codes(buffer.into_memory().expect("the default buffer is a Vec"), device);
    QuantizedWeight { format, codes, scales: upload_scales(scales, device), table: byte_table(format, device), shape }
}

/// Implements [`WeightOps::quantize_weight`].
///
/// # Panics
/// If a value is not finite; the code that reads weights checks this.
pub fn quantize<B: WeightOps>(values_oi: Tensor<B, 2>, format: QuantFormat) -> QuantizedWeight<B> {
    let (shape, device) = (values_oi.dims(), values_oi.device());
    let host = values_oi.into_data().convert::<f32>().to_vec::<f32>().expect("values were just converted to f32");
    let quantized = format.quantize(&host, &shape).unwrap_or_else(|error| panic!("{error}"));
    QuantizedWeight::<B>::upload(&quantized, &device)
}

/// Implements [`WeightOps::dequantize_weight`].
pub fn dequantize<B: Backend>(weight: &QuantizedWeight<B>) -> Tensor<B, 2> {
    let [rows, columns] = weight.shape;
    let (blocks, block_size) = (weight.blocks(), weight.format.block_size(columns));
    let values = weight.table.clone().select(0, index(weight.codes.clone()));
    let scaled = values.reshape([blocks, block_size]).mul(block_scales(weight).reshape([blocks, 1]));
    scaled.reshape([blocks * block_size]).narrow(0, 0, rows * columns).reshape([rows, columns])
}

/// Returns the scale of each block, `[blocks]` f32.
pub fn block_scales<B: Backend>(weight: &QuantizedWeight<B>) -> Tensor<B, 1> {
    match &weight.scales {
        BlockScales::Float(scales) => scales.clone(),
        BlockScales::Narrow { codes, map } => map.clone().select(0, index(codes.clone())),
        BlockScales::Nested { codes, absmax, map, offset, blocks } => {
            let nested = absmax.dims()[0];
            let values = map.clone().select(0, index(codes.clone())).reshape([nested, blockwise::BLOCK_SIZE]);
            let scaled = values.mul(absmax.clone().reshape([nested, 1])).add(offset.clone().reshape([1, 1]));
            scaled.reshape([nested * blockwise::BLOCK_SIZE]).narrow(0, 0, *blocks)
        }
    }
}

/// Uploads scales, their codes padded to whole nested blocks.
pub(crate) fn upload_scales<B: WeightOps>(scales: &HostScales, device: &B::Device) -> BlockScales<B> {
    let padded = |given: &[u8], count| {
        let mut padded = given.to_vec();
        padded.resize(count, 0);
        codes(padded, device)
    };
    let values = |values: &[f32]| Tensor::from_floats(values, device);
    scales_by(scales, padded, values, || values(DynamicMap::signed().values()))
}

/// Builds scales with the given uploads: `codes` uploads codes, zero-padded to a count, and `values` f32 values; `signed` is the signed dynamic map.
pub(crate) fn scales_by<B: Backend>(
    scales: &HostScales,
    codes: impl Fn(&[u8], usize) -> Tensor<B, 1, Int>,
    values: impl Fn(&[f32]) -> Tensor<B, 1>,
    signed: impl FnOnce() -> Tensor<B, 1>,
) -> BlockScales<B> {
    match &scales.block {
        HostBlockScales::Float(of_blocks) => BlockScales::Float(values(of_blocks)),
        HostBlockScales::Narrow { codes: of_blocks, format, tensor } => {
            BlockScales::Narrow { codes: codes(of_blocks, of_blocks.len()), map: values(&narrow_map(*format, *tensor)) }
        }
        HostBlockScales::Nested { codes: of_blocks, absmax, offset } => BlockScales::Nested {
            codes: codes(of_blocks, of_blocks.len().next_multiple_of(blockwise::BLOCK_SIZE)),
            absmax: values(absmax),
            map: signed(),
            offset: values(&[*offset]),
            blocks: of_blocks.len(),
        },
    }
}

/// Uploads codes of at most 8 bits as the backend stores them.
pub(crate) fn codes<B: WeightOps>(values: Vec<u8>, device: &B::Device) -> Tensor<B, 1, Int> {
    let (length, dtype) = (values.len(), DType::from(B::CODE_DTYPE));
    Tensor::from_data(TensorData::new(values, [length]).convert_dtype(dtype), (device, dtype))
}

/// Converts codes to indices, in the integer type of the backend's lookups.
pub(crate) fn index<B: Backend>(codes: Tensor<B, 1, Int>) -> Tensor<B, 1, Int> {
    let dtype = B::IntElem::dtype();
    if codes.dtype() == dtype { codes } else { codes.cast(IntDType::from(dtype)) }
}

/// Returns the values of each byte of codes, `[256, codes per byte]` f32.
pub(crate) fn byte_table<B: Backend>(format: QuantFormat, device: &B::Device) -> Tensor<B, 2> {
    let (levels, packing) = (format.levels(), format.packing());
    let per_byte = packing.codes_per_byte();
    let codes = (0..=255).flat_map(|byte| packing.codes(byte).into_iter().take(per_byte));
    let values: Vec<f32> = codes.map(|code| levels[code]).collect();
    // Two codes of E4M3 are NaN. No weight contains them, but backends may compute with the whole table.
    let values: Vec<f32> = values.into_iter().map(|value| if value.is_nan() { 0.0 } else { value }).collect();
    Tensor::<B, 1>::from_floats(values.as_slice(), device).reshape([256, per_byte])
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::testing::{Plain, assert_close, random};

    #[test]
    fn uploaded_weights_have_the_values_of_the_host_codec() {
        let device = Default::default();
        for shape in [[40, 24], [64, 512], [3, 7], [5, 96]] {
            let values: Vec<f32> = random::<Plain, 1>(7, [shape[0] * shape[1]]).into_data().to_vec().unwrap();
            for format in QuantFormat::ALL.into_iter().filter(|format| format.check_columns(shape[1]).is_ok()) {
                let host = format.quantize(&values, &shape).unwrap();
                let expected = Tensor::<Plain, 1>::from_floats(host.dequantize().as_slice(), &device).reshape(shape);
                let weight = Weight::Quantized(QuantizedWeight::<Plain>::upload(&host, &device));
                assert_eq!(weight.shape(), shape);
                // Offsets of nested scales may be added in one operation or in two; everything else is one multiplication.
                let tolerance = if format.double_quant() { 1e-6 } else { 0.0 };
                assert_close(dense(&weight, DType::F32), expected, tolerance);
            }
        }
    }

    #[test]
    fn a_weight_holds_the_bytes_of_its_format() {
        let values: Vec<f32> = random::<Plain, 1>(7, [256 * 512]).into_data().to_vec().unwrap();
        for format in QuantFormat::ALL {
            let host = format.quantize(&values, &[256, 512]).unwrap();
            let weight = QuantizedWeight::<Plain>::upload(&host, &Default::default());
            // The scale of a whole tensor is in the table of 256 that codes of scales have.
            let table = if matches!(format, QuantFormat::Nvfp4 | QuantFormat::Mxfp4) { 1024 } else { 0 };
            let difference = format.bytes(&[256, 512]) + table - weight.bytes();
            assert!(difference <= 4, "{format}: {} bytes", weight.bytes());
        }
    }
}
