//! Compares the narrow floating-point formats with ml_dtypes and PyTorch, code by code, and whole scaled matrices with numpy's f32
//! arithmetic around ml_dtypes' conversions. `golden/make_float_goldens.py` wrote the files.

// Each test file uses a part of it.
#[allow(dead_code)]
mod common;

use common::{Golden, bell};
use firebrick_precision::{BlockScales, NarrowFloat, Overflow, QuantFormat, Scaling};

use NarrowFloat::{E2m1, E4m3, E5m2, E8m0};

/// The files, and the formats that their libraries support; UE4M3 is E4M3 without its negative half.
const LIBRARIES: [(&str, &[NarrowFloat]); 2] =
    [("floats_ml_dtypes", &[E4m3, E5m2, E2m1, E8m0]), ("floats_torch", &[E4m3, E5m2, E8m0])];

#[test]
fn every_code_has_the_value_that_other_libraries_give_it() {
    for (library, formats) in LIBRARIES {
        let golden = Golden::read(library);
        for format in formats {
            let values = golden.floats(&format!("{format}.values"));
            assert_eq!(values.len(), format.codes() as usize);
            for (code, expected) in values.into_iter().enumerate() {
                let value = format.decode(code as u8);
                assert_eq!(value.is_nan(), expected.is_nan(), "{library} {format} {code:#x}");
                assert!(
                    value.is_nan() || value.to_bits() == expected.to_bits(),
                    "{library} {format} {code:#x}: {value}"
                );
            }
        }
    }
}

#[test]
fn every_value_gets_the_code_that_other_libraries_give_it() {
    for (library, formats) in LIBRARIES {
        let golden = Golden::read(library);
        for &format in formats {
            let inputs = golden.floats(&format!("{format}.inputs"));
            let codes = golden.codes(&format!("{format}.codes"));
            assert!(inputs.len() == codes.len() && inputs.len() > 2000, "{library} {format}");
            // PyTorch's E8M0 ignores the sign; here and in ml_dtypes a negative number has no power of two.
            let is_asked = |value: f32| value >= 0.0 || format != E8m0 || library != "floats_torch";
            for (value, expected) in inputs.into_iter().zip(codes).filter(|(value, _)| is_asked(*value)) {
                compare_code(library, format, value, expected as u8);
            }
        }
    }
}

#[test]
fn ue4m3_is_the_half_of_e4m3_without_sign() {
    for code in 0..NarrowFloat::Ue4m3.codes() as u8 {
        let [half, whole] = [NarrowFloat::Ue4m3, NarrowFloat::E4m3].map(|format| format.decode(code).to_bits());
        assert_eq!(half, whole, "{code:#x}");
    }
    let golden = Golden::read("floats_ml_dtypes");
    for value in golden.floats("e4m3.inputs").into_iter().filter(|value| value.is_sign_positive()) {
        let [half, whole] =
            [NarrowFloat::Ue4m3, NarrowFloat::E4m3].map(|format| format.encode(value, Overflow::Special));
        assert_eq!(half, whole, "{value:e}");
    }
}

/// Generates a matrix as `make_float_goldens.py` does.
fn matrix([rows, columns]: [usize; 2]) -> Vec<f32> {
    let mut values = bell((rows * columns) as u64, rows * columns);
    for (row, values) in values.chunks_mut(columns).enumerate() {
        values.iter_mut().for_each(|value| *value *= 2_f32.powi(row as i32 % 8 - 4));
        match row {
            3 => values.fill(0.0),
            4 => values.iter_mut().for_each(|value| *value *= 1e-37),
            5 => values[..32].fill(0.0),
            6 => values[32..64].iter_mut().for_each(|value| *value *= 1e-6),
            _ => {}
        }
    }
    values
}

#[test]
fn scaled_matrices_have_the_codes_and_scales_of_the_golden_ones() {
    let golden = Golden::read("scaled_ml_dtypes");
    let squares = Scaling::BLOCK_128X128.with_power_of_two_scales();
    let cases = [
        ("tensor_e4m3", Scaling::PER_TENSOR, E4m3),
        ("row_e4m3", Scaling::PER_ROW, E4m3),
        ("row_e5m2", Scaling::PER_ROW, E5m2),
        ("block_1x128_e4m3", Scaling::BLOCK_1X128, E4m3),
        ("block_128x128_e4m3", squares, E4m3),
        ("mxfp8", Scaling::MX, E4m3),
        ("mxfp4", Scaling::MX, E2m1),
        ("mxfp4_ocp", Scaling::MX_OCP, E2m1),
        ("nvfp4", Scaling::NVFP4, E2m1),
        ("nvfp4_16x16", Scaling::NVFP4_16X16, E2m1),
    ];
    for (name, scaling, element) in cases {
        let shape = if scaling == squares { [136, 144] } else { [24, 144] };
        let (codes, scales) = scaling.quantize(element, &matrix(shape), shape).unwrap();
        let codes: Vec<u8> = match element {
            E2m1 => codes.iter().flat_map(|byte| [byte & 0xF, byte >> 4]).collect(),
            _ => codes,
        };
        let expected = golden.bytes(&format!("{name}.codes"));
        assert_eq!(codes.len(), expected.len(), "{name}");
        for (index, (code, expected)) in codes.iter().zip(expected).enumerate() {
            assert_eq!(code, expected, "{name}: row {}, column {}", index / shape[1], index % shape[1]);
        }
        assert_scales(&golden, name, &scales);
    }
}

#[test]
fn weights_have_the_codes_scales_and_values_of_the_golden_ones() {
    let golden = Golden::read("weights_ml_dtypes");
    for format in [QuantFormat::Nvfp4, QuantFormat::Mxfp4, QuantFormat::Fp8] {
        let quantized = format.quantize(&matrix([24, 160]), &[24, 160]).unwrap();
        assert_eq!(quantized.codes, golden.bytes(&format!("{format}.codes")), "{format}");
        assert_scales(&golden, format.name(), &quantized.scales.block);
        let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
        assert_eq!(bits(quantized.dequantize()), bits(golden.floats(&format!("{format}.values"))), "{format}");
    }
}

fn assert_scales(golden: &Golden, name: &str, scales: &BlockScales) {
    let expected = format!("{name}.scales");
    match scales {
        BlockScales::Float(values) => assert_eq!(*values, golden.floats(&expected), "{name}"),
        BlockScales::Narrow { codes, tensor, .. } => {
            assert_eq!(codes, golden.bytes(&expected), "{name}");
            assert_eq!(tensor.is_some(), name.starts_with("nvfp4"), "{name}");
            assert!(tensor.is_none_or(|tensor| golden.floats(&format!("{name}.tensor")) == [tensor]), "{name}");
        }
        BlockScales::Nested { .. } => unreachable!("{name} has no nested scales"),
    }
}

fn compare_code(library: &str, format: NarrowFloat, value: f32, expected: u8) {
    let code = format.encode(value, Overflow::Special);
    // In E8M0, ml_dtypes gives NaN for zero, and 2^-126 for everything between 2^-127 and 2^-126; this crate gives the
    // smallest number for zero, and the nearest one there.
    let below_middle = value > 2_f32.powi(-127) && value < 1.5 * 2_f32.powi(-127);
    let expected = if format == NarrowFloat::E8m0 && (value == 0.0 || below_middle) { 0 } else { expected };
    let both_nan = format.decode(code).is_nan() && format.decode(expected).is_nan();
    assert!(code == expected || both_nan, "{library} {format} {value:e}: {code:#x} for {expected:#x}");
}
