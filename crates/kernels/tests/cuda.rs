//! The CUDA backend on a real device: every operation against the CPU, over the sizes that break kernels.
//!
//! Part of the GPU suite (`cargo xtask dist --tests`). Without a device each test says so and passes: CI has none.
#![cfg(feature = "cuda")]

use burn_tensor::{DType, Distribution, Tensor};
use firebrick_kernels::backend::{Cuda, DeviceFailure, use_own_attention};
use firebrick_kernels::check::{Case, every_operation, tolerance};
use firebrick_kernels::{Kernels, probe};

type Device = <Cuda as burn_tensor::backend::BackendTypes>::Device;

/// The device, or a line that says why there is none.
#[expect(clippy::print_stderr, reason = "a test that is not run must be seen")]
fn device() -> Option<Device> {
    match probe::cuda() {
        Ok(()) => Some(Device::default()),
        Err(reason) => {
            eprintln!("skipped: {reason}");
            None
        }
    }
}

fn assert_case(case: &Case, device: &Device) {
    let wrong: Vec<_> = every_operation::<Cuda>(case, device)
        .into_iter()
        .filter(|finding| finding.relative_error > tolerance(case.dtype))
        .map(|finding| format!("  {}: {:.2e}", finding.what, finding.relative_error))
        .collect();
    assert!(wrong.is_empty(), "{case:?}:\n{}", wrong.join("\n"));
}

/// Sizes by name: what is changed from the small case.
fn cases(dtype: DType) -> Vec<Case> {
    let small = |head_dim| Case::small(dtype, head_dim);
    let heads = |query_heads, key_value_heads, head_dim| Case { query_heads, key_value_heads, ..small(head_dim) };
    let documents = |documents: Vec<usize>| Case { documents, ..small(64) };
    vec![
        small(64),
        small(96),
        small(128),
        small(256),
        heads(4, 4, 64),
        heads(8, 2, 128),
        heads(8, 1, 64),
        documents(vec![1]),
        documents(vec![1; 9]),
        documents(vec![130]),
        documents(vec![64, 64]),
        documents((1..=64).collect()),
        documents(vec![3, 1, 257, 1, 90]),
        Case { width: 129, feed_forward: 67, vocabulary: 331, ..small(64) },
        Case { width: 72, feed_forward: 1000, vocabulary: 1003, rank: 8, ..small(64) },
        Case { rank: 5, ..small(64) },
        Case { rank: 64, ..small(64) },
        Case { rank: 136, ..small(64) },
        // A head width that neither library nor kernels take.
        Case { query_heads: 4, key_value_heads: 2, ..small(24) },
    ]
}

#[test]
fn every_operation_equals_the_cpu_in_bf16() {
    let Some(device) = device() else { return };
    cases(DType::BF16).iter().for_each(|case| assert_case(case, &device));
}

#[test]
fn every_operation_equals_the_cpu_in_f16() {
    let Some(device) = device() else { return };
    cases(DType::F16).iter().for_each(|case| assert_case(case, &device));
}

#[test]
fn every_operation_equals_the_cpu_in_f32() {
    let Some(device) = device() else { return };
    cases(DType::F32).iter().for_each(|case| assert_case(case, &device));
}

#[test]
fn own_attention_equals_the_cpu_where_the_library_is_left_out() {
    let Some(device) = device() else { return };
    use_own_attention(&device, true);
    for dtype in [DType::BF16, DType::F16] {
        cases(dtype).iter().for_each(|case| assert_case(case, &device));
    }
    use_own_attention(&device, false);
}

#[test]
fn the_self_test_passes_and_is_fast() {
    let Some(device) = device() else { return };
    for dtype in [DType::BF16, DType::F32] {
        Cuda::self_test(&device, dtype, 128).expect("a working device");
    }
}

/// Our stream and CubeCL's, thousands of times by turns, with inputs that change every time: an operation that runs too
/// early sees another round's values.
#[test]
fn operations_and_burn_s_own_follow_each_other_in_order() {
    let Some(device) = device() else { return };
    let (rows, width) = (257, 1024);
    let weight = Tensor::<Cuda, 1>::ones([width], &device);
    let mut sums = Vec::new();
    for round in 0..400 {
        let value = 1.0 + round as f32;
        // Burn fills, ours norms (to ones), Burn scales, ours adds, Burn sums.
        let x = Tensor::<Cuda, 2>::full([rows, width], value, &device);
        let normed = Cuda::rms_norm(x, weight.clone(), 0.0);
        let scaled = normed.mul_scalar(value).reshape([rows * width]);
        let twice = Cuda::accumulate(scaled.clone(), scaled);
        let inside = Cuda::section(&device, || {
            let again = Cuda::accumulate(twice.clone(), twice.clone());
            Cuda::accumulate(again, twice)
        });
        sums.push((value, inside));
    }
    for (value, found) in sums {
        let found: Vec<f32> = found.into_data().to_vec().expect("f32");
        assert_eq!(found.len(), rows * width);
        for (index, got) in found.iter().enumerate() {
            assert!((got - 6.0 * value).abs() <= 1e-3 * value, "round {value}, element {index}: {got}");
        }
    }
}

#[test]
fn memory_comes_back_after_use() {
    let Some(device) = device() else { return };
    let context = firebrick_cuda::Driver::load().and_then(|driver| firebrick_cuda::Context::retain(&driver, 0));
    let context = context.expect("the context of the device");
    let work = || {
        let case = Case { documents: vec![512; 4], width: 1024, feed_forward: 4096, ..Case::small(DType::BF16, 128) };
        assert_case(&case, &device);
        Cuda::release_memory(&device);
        let _ = <Cuda as burn_tensor::backend::Backend>::sync(&device);
        context.memory().expect("memory").free_bytes
    };
    let after_first = work();
    work();
    let after_third = work();
    let lost = after_first.saturating_sub(after_third);
    assert!(lost < 64 << 20, "{lost} bytes were not given back");
}

#[test]
fn running_out_of_memory_is_a_failure_that_says_so_and_leaves_a_working_device() {
    let Some(device) = device() else { return };
    let failure = DeviceFailure::catch(|| {
        let x = Tensor::<Cuda, 2>::random([16, 16], Distribution::Default, &device);
        // Rows of a table that no device holds.
        Cuda::embed_backward(Tensor::from_ints([0], &device), x.narrow(0, 0, 1), 1 << 36)
    });
    let failure = failure.expect_err("no device has terabytes");
    assert!(failure.out_of_memory, "{failure}");
    assert_case(&Case::small(DType::BF16, 64), &device);
}

/// The same bits every time: what resuming exactly rests on.
#[test]
fn operations_of_ours_repeat_bit_for_bit() {
    let Some(device) = device() else { return };
    use_own_attention(&device, true);
    let case = Case::small(DType::BF16, 64);
    let errors =
        || every_operation::<Cuda>(&case, &device).iter().map(|f| f.relative_error.to_bits()).collect::<Vec<_>>();
    assert_eq!(errors(), errors());
    use_own_attention(&device, false);
}
