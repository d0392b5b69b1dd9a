//! The wgpu backend on a real or software adapter: every operation against the reference on the CPU, and the size of its codes.
//!
//! Not supported: machines without a Vulkan, Metal or DirectX adapter; the tests print that and pass, except in CI.

use burn_tensor::DType;
use firebrick_kernels::backends::{BackendKind, Wgpu};
use firebrick_kernels::conformance::{Case, Extent, operations, products, verdict};
use firebrick_kernels::{QuantizedWeight, WeightOps};
use firebrick_precision::QuantFormat;

use crate::adamw_8bit;

#[expect(clippy::print_stderr, reason = "a test that is not run must be seen")]
fn adapter() -> Option<()> {
    let found = BackendKind::Wgpu.probe().inspect_err(|reason| {
        assert!(std::env::var_os("CI").is_none(), "CI must have a Vulkan adapter: {reason}");
        eprintln!("skipped: {reason}");
    });
    found.ok()
}

#[test]
fn every_operation_equals_the_reference_on_the_cpu() {
    let Some(()) = adapter() else { return };
    let small = || Case::small(DType::F32, 32);
    let odd = Case { documents: vec![1, 9, 30], hidden_size: 33, intermediate_size: 67, rank: 3, ..small() };
    for case in [Case { window: Some(7), ..small() }, odd] {
        let mut findings = operations::<Wgpu>(&case, &Default::default(), Extent::All);
        findings.extend(products::<Wgpu>(&case, &Default::default()));
        verdict(case.dtype, findings).unwrap_or_else(|problem| panic!("{case:?}: {problem}"));
    }
}

#[test]
fn weights_dequantized_on_the_device_equal_the_host_codec_in_the_bits_of_their_codes() {
    let Some(()) = adapter() else { return };
    for shape in [[64, 64], [40, 24], [3, 7], [5, 96], [300, 1024]] {
        let values: Vec<f32> = (0..shape[0] * shape[1]).map(|index| (index as f32 * 0.173).sin()).collect();
        for format in QuantFormat::ALL.into_iter().filter(|format| format.check_columns(shape[1]).is_ok()) {
            let quantized = format.quantize(&values, &shape).unwrap();
            let weight = QuantizedWeight::<Wgpu>::upload(&quantized, &Default::default());
            let on_device: Vec<f32> = Wgpu::dequantize_weight(&weight).into_data().to_vec().unwrap();
            for (index, (value, expected)) in on_device.iter().zip(quantized.dequantize()).enumerate() {
                // Only a sum with the offset of nested scales may be rounded differently.
                let tolerance = if format.double_quant() { 1e-6 } else { 0.0 };
                let difference = (value - expected).abs();
                assert!(difference <= tolerance, "{format} {shape:?} element {index}: {value}, expected {expected}");
            }
            let bits = weight.codes.shape().num_elements() * 32;
            // Codes of scales have their values in a table of 256.
            let table = if matches!(format, QuantFormat::Nvfp4 | QuantFormat::Mxfp4) { 1024 } else { 0 };
            let most = format.bytes(&shape).next_multiple_of(256) + 8 + table;
            assert!(format.double_quant() || weight.bytes() <= most, "{format}");
            let per_code = 8 / format.packing().codes_per_byte();
            assert!(
                bits <= (shape[0] * shape[1]).next_multiple_of(64) * per_code,
                "{format}: {per_code} bits per code"
            );
        }
    }
}

#[test]
fn steps_of_8_bit_adamw_equal_bitsandbytes_up_to_rounding() {
    let Some(()) = adapter() else { return };
    adamw_8bit::assert_golden_steps::<Wgpu>();
}
