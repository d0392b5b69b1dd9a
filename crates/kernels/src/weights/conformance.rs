//! In every format, quantizing on the device gives the same codes as on the host, and dequantizing the same values as the host codec.

use burn_tensor::{DType, Int, Tensor};
use firebrick_precision::{BlockScales as HostBlockScales, QuantFormat};

use super::{BlockScales, QuantizedWeight};
use crate::Kernels;
use crate::conformance::check::Check;

pub(crate) fn check<B: Kernels>(check: &mut Check<'_, B>) {
    let case = check.case;
    for shape in check.variants([[case.intermediate_size, case.hidden_size], [3, 7], [33, 96]]) {
        for dtype in check.variants([case.dtype, DType::F32]) {
            let takes = |format: &QuantFormat| format.check_columns(shape[1]).is_ok();
            for format in check.variants(QuantFormat::ALL).into_iter().filter(takes) {
                one_format(check, shape, dtype, format);
            }
        }
    }
}

fn one_format<B: Kernels>(check: &mut Check<'_, B>, shape: [usize; 2], dtype: DType, format: QuantFormat) {
    let (values, expected) = check.random_in(dtype, shape, 0.2);
    let host: Vec<f32> = expected.into_data().to_vec().expect("the reference is f32");
    let quantized = format.quantize(&host, &shape).expect("finite values");
    let uploaded = QuantizedWeight::<B>::upload(&quantized, check.device);
    let computed = B::quantize_weight(values, format);
    check.same("quantize_weight: format and shape", computed.format == format && computed.shape == shape);
    check.same("quantize_weight: codes", bytes(computed.codes.clone()) == bytes(uploaded.codes.clone()));
    check.same("quantize_weight: scales", same_kind(&computed.scales, &quantized.scales.block));
    let values = quantized.dequantize();
    let expected = Tensor::<burn_flex::Flex, 1>::from_floats(values.as_slice(), &check.cpu).reshape(shape);
    let computed = [("quantize_weight: values", computed), ("dequantize_weight", uploaded)];
    for (what, weight) in computed {
        let got = B::dequantize_weight(&weight);
        if format.double_quant() {
            // The mean of the scales, and sums with it, may differ in the last bit.
            check.compare(what, got, expected.clone());
        } else {
            let got: Vec<f32> = got.into_data().to_vec().expect("dequantized values are f32");
            check.same(&format!("{what} of {format}"), got == values);
        }
    }
}

fn same_kind<B: Kernels>(device: &BlockScales<B>, host: &HostBlockScales) -> bool {
    matches!(
        (device, host),
        // A backend may keep decoded scales.
        (BlockScales::Float(_), _)
            | (BlockScales::Narrow { .. }, HostBlockScales::Narrow { .. })
            | (BlockScales::Nested { .. }, HostBlockScales::Nested { .. })
    )
}

fn bytes<B: Kernels>(codes: Tensor<B, 1, Int>) -> Vec<u8> {
    codes.into_data().as_bytes().to_vec()
}
