//! The own kernels of the wgpu backend against the host's codec. Without a Vulkan adapter there is nothing to test; CI has one.
#![cfg(feature = "wgpu")]

use firebrick_kernels::backend::Wgpu;
use firebrick_kernels::{Kernels, probe};
use firebrick_precision::{DoubleQuant, nf4::quantize};

#[test]
fn nf4_unpacked_on_the_device_equals_the_host_codec() {
    if let Err(reason) = probe::wgpu() {
        assert!(std::env::var_os("CI").is_none(), "CI must have a Vulkan adapter: {reason}");
        eprintln!("skipped: {reason}");
        return;
    }
    for shape in [[64, 64], [40, 24], [3, 7], [300, 1024]] {
        let values: Vec<f32> = (0..shape[0] * shape[1]).map(|index| (index as f32 * 0.173).sin()).collect();
        for double_quant in [DoubleQuant::On, DoubleQuant::Off] {
            let packed = quantize(&values, &shape, double_quant).unwrap();
            let weight = Wgpu::nf4_upload(&packed, &Default::default());
            let found: Vec<f32> = Wgpu::nf4_dequantize(&weight).into_data().to_vec().unwrap();
            for (index, (found, expected)) in found.iter().zip(packed.dequantize()).enumerate() {
                assert!(
                    (found - expected).abs() <= 1e-6,
                    "{shape:?} element {index}: got {found}, expected {expected}"
                );
            }
            let bits = weight.codes.shape().num_elements() * 32;
            assert!(bits <= (shape[0] * shape[1]).next_multiple_of(64) * 4, "four bits a code");
        }
    }
}
