//! Compares the narrow floating-point formats with ml_dtypes and PyTorch, code by code, and quantized weights with numpy's f32
//! arithmetic around ml_dtypes' conversions. `golden/make_float_goldens.py` wrote the files.

// Each test file uses a part of it.
#[allow(dead_code)]
mod common;

use common::{Golden, bell};
use firebrick_precision::{BlockScales, NarrowFloat, QuantFormat};

use NarrowFloat::{E2m1, E4m3, E8m0};

/// The files, and the formats that their libraries support; UE4M3 is E4M3 without its negative half.
const LIBRARIES: [(&str, &[NarrowFloat]); 2] =
    [("floats_ml_dtypes", &[E4m3, E2m1, E8m0]), ("floats_torch", &[E4m3, E8m0])];

#[test]
fn codes_have_the_values_of_other_libraries() {
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
fn values_get_the_codes_of_other_libraries() {
    for (library, formats) in LIBRARIES {
        let golden = Golden::read(library);
        for &format in formats.iter().filter(|format| **format != E8m0) {
            let inputs = golden.floats(&format!("{format}.inputs"));
            let codes = golden.codes(&format!("{format}.codes"));
            assert!(inputs.len() == codes.len() && inputs.len() > 2000, "{library} {format}");
            for (value, expected) in inputs.into_iter().zip(codes) {
                // Beyond the largest number the libraries give NaN.
                let expected = match format.decode(expected as u8) {
                    decoded if decoded.is_nan() => format.encode(format.max().copysign(value)),
                    _ => expected as u8,
                };
                assert_eq!(format.encode(value), expected, "{library} {format} {value:e}");
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
        let [half, whole] = [NarrowFloat::Ue4m3, NarrowFloat::E4m3].map(|format| format.encode(value));
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
fn weights_have_the_golden_codes_scales_and_values() {
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
