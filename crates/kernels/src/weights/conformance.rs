//! Quantizing on the device gives the codes of quantizing on the host, and dequantizing the host codec's values, in every format.
//!
//! Trade-off: codes are compared as each backend stores them, scales by the values they give.

use burn_tensor::{DType, Int, Tensor};
use firebrick_precision::{BlockScales as HostBlockScales, QuantFormat};

use super::BlockScales;
use crate::Kernels;
use crate::conformance::check::Check;

pub(crate) fn check<B: Kernels>(check: &mut Check<'_, B>) {
    let case = check.case;
    for shape in check.variants([[case.intermediate_size, case.hidden_size], [3, 7]]) {
        for dtype in check.variants([case.dtype, DType::F32]) {
            for format in check.variants(QuantFormat::ALL) {
                one_format(check, shape, dtype, format);
            }
        }
    }
}

fn one_format<B: Kernels>(check: &mut Check<'_, B>, shape: [usize; 2], dtype: DType, format: QuantFormat) {
    let (values, expected) = check.random_in(dtype, shape, 0.2);
    let host: Vec<f32> = expected.into_data().to_vec().expect("the reference is f32");
    let quantized = format.quantize(&host, &shape).expect("finite values");
    let uploaded = B::upload_quantized(&quantized, check.device);
    let computed = B::quantize_weight(values, format);
    check.same("quantize_weight: format and shape", computed.format == format && computed.shape == shape);
    check.same("quantize_weight: codes", bytes(computed.codes.clone()) == bytes(uploaded.codes.clone()));
    let is_nested = matches!(computed.scales.block, BlockScales::Nested { .. });
    let should_be = matches!(quantized.scales.block, HostBlockScales::Nested { .. });
    check.same("quantize_weight: scales", is_nested == should_be);
    let expected =
        Tensor::<burn_flex::Flex, 1>::from_floats(quantized.dequantize().as_slice(), &check.cpu).reshape(shape);
    check.compare("quantize_weight: values", B::dequantize_weight(&computed), expected.clone());
    check.compare("dequantize_weight", B::dequantize_weight(&uploaded), expected);
}

fn bytes<B: Kernels>(codes: Tensor<B, 1, Int>) -> Vec<u8> {
    codes.into_data().as_bytes().to_vec()
}
