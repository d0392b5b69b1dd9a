//! What measures the memory or the time of a whole device, while no other test of the program uses it.
//! Trade-off: the name of the module lets these begin among the first, since each waits for those that have begun.

use std::sync::RwLockWriteGuard;

use firebrick_kernels::{GemmAlgorithms, RangeGradient};
use firebrick_precision::difference::largest_difference;

use super::*;

fn device_alone() -> Option<(Device, RwLockWriteGuard<'static, ()>)> {
    Some((card::device()?, USERS.write().unwrap_or_else(PoisonError::into_inner)))
}

fn context() -> firebrick_cuda::Context {
    let context = firebrick_cuda::Driver::load().and_then(|driver| firebrick_cuda::Context::retain(&driver, 0));
    context.expect("the context of the device")
}

fn free_bytes(device: &Device) -> u64 {
    let _ = Cuda::sync(device);
    context().memory().expect("memory").free_bytes
}

fn choose_gemms(device: &Device, gemm_algorithms: GemmAlgorithms) {
    Cuda::open(device, &RunShape { gemm_algorithms, ..RunShape::default() });
}

#[test]
fn memory_comes_back_after_use() {
    let Some((device, _alone)) = device_alone() else { return };
    let work = || {
        let small = Case::small(half(&device), 128);
        assert_case(&Case { documents: vec![128; 4], hidden_size: 512, intermediate_size: 2048, ..small }, &device);
        Cuda::release_memory(&device);
        free_bytes(&device)
    };
    let after_first = work();
    work();
    let after_third = work();
    let lost = after_first.saturating_sub(after_third);
    assert!(lost < 16 << 20, "{lost} bytes were not returned");
}

/// The measured algorithm computes the same as the library's first, up to the order of sums, and another engine uses the same.
#[test]
fn measured_algorithms_compute_the_same_and_are_kept() {
    let Some((device, _alone)) = device_alone() else { return };
    let (x, weight) = (random_half([8192, 4096], &device), random_half([4096, 4096], &device));
    let (library, measured) = {
        let project = || host(projected(&x, std::slice::from_ref(&weight)).remove(0));
        let library = project();
        choose_gemms(&device, GemmAlgorithms::Measured);
        let measured: Vec<_> = (0..4).map(|_| project()).collect();
        choose_gemms(&device, GemmAlgorithms::Library);
        (library, measured)
    };
    let largest = library.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
    for run in &measured {
        let error = largest_difference(run, &library);
        assert!(error <= f64::from(largest) / 128.0, "off by {error} of {largest}");
    }
    let elsewhere = std::thread::scope(|scope| {
        let work = || {
            choose_gemms(&device, GemmAlgorithms::Kept);
            host(projected(&x, std::slice::from_ref(&weight)).remove(0))
        };
        scope.spawn(work).join().expect("the other thread")
    });
    assert!(elsewhere == measured[3], "an engine that starts later takes the kept choice");
}

/// Runs packed documents and many layers in one section: the backward of a layer must leave nothing behind.
#[test]
fn attention_over_packed_documents_keeps_nothing_until_the_section_ends() {
    let Some((device, _alone)) = device_alone() else { return };
    let documents = Documents::<Cuda>::new(&[0, 5000, 6001, 16_384], &device);
    let tokens = documents.tokens();
    let [q, k, v, d_o] = [256, 128, 128, 256].map(|width| random_half([tokens, width], &device));
    let (qkv, spec) = (Qkv { q, k, v }, AttentionSpec::new(4, 2, 64));
    let passes = |count: usize| {
        Cuda::release_memory(&device);
        let before = free_bytes(&device);
        Cuda::section(&device, || {
            for _ in 0..count {
                let output = Cuda::packed_attention(&qkv, None, &spec, &documents);
                let _ = Cuda::packed_attention_backward(qkv.clone(), None, &spec, output, d_o.clone(), &documents);
            }
        });
        before.saturating_sub(free_bytes(&device))
    };
    passes(1);
    let (two, eight) = (passes(2), passes(8));
    assert!(eight <= two + (2 << 20), "{two} bytes for two layers, {eight} for eight");
}

#[test]
fn running_out_of_memory_is_a_failure_that_says_so_and_leaves_a_working_device() {
    let Some((device, _alone)) = device_alone() else { return };
    let failure = DeviceFailure::catch(|| {
        let x = Tensor::<Cuda, 2>::random([16, 16], Distribution::Default, &device);
        // The rows of a table that fits on no device.
        Cuda::embed_backward(Tensor::from_ints([0], &device), x.narrow(0, 0, 1), 1.0, 1 << 36, false)
    });
    let failure = failure.expect_err("no device has terabytes");
    assert!(failure.out_of_memory, "{failure}");
    assert_case(&Case::small(half(&device), 64), &device);
}

/// Sections keep memory of every size that they used. If the device has no more, that memory is freed instead of a failure.
#[test]
fn a_section_that_needs_the_memory_of_others_gets_it() {
    let Some((device, _alone)) = device_alone() else { return };
    Cuda::release_memory(&device);
    let eighth = (free_bytes(&device) / 8) as usize;
    let one = Tensor::<Cuda, 1>::ones([1], &device);
    for round in 0..3 {
        Cuda::section(&device, || {
            for part in 0..10 {
                // Each size differs: an eighth of the device, less a little.
                let count = (eighth - (part << 20)) / 4;
                let gradient = RangeGradient { start: 0, gradient: one.clone(), is_first: true };
                let sum = Cuda::accumulate_ranges(None, count, vec![gradient]);
                assert_eq!(sum.dims(), [count], "round {round}, part {part}");
            }
        });
    }
    Cuda::release_memory(&device);
}

/// cuDNN's backward overflows from 2^31 query elements on, without an error; other kernels must compute it then.
#[test]
fn the_last_queries_of_a_very_long_document_have_their_gradients() {
    let Some((device, _alone)) = device_alone() else { return };
    let (tokens, groups, per_group, head_dim) = (131_072 + 256, 8, 16, 128);
    let random = |width: usize| {
        Tensor::<Cuda, 2>::random([tokens, width], Distribution::Normal(0.0, 1.0), (&device, DType::F32))
            .cast(half(&device))
    };
    let [q, d_o] = [0; 2].map(|_| random(groups * per_group * head_dim));
    let [k, v] = [0; 2].map(|_| random(groups * head_dim));
    let documents = Documents::<Cuda>::new(&[0, tokens as u32], &device);
    let backward = |qkv: Qkv<Cuda>, spec: &AttentionSpec, d_o: Tensor<Cuda, 2>| {
        let output = Cuda::packed_attention(&qkv, None, spec, &documents);
        Cuda::packed_attention_backward(qkv, None, spec, output, d_o, &documents).0.q
    };
    let end = |x: Tensor<Cuda, 2>, last: std::ops::Range<usize>| {
        host(x.narrow(0, tokens - 512, 512).narrow(1, last.start, last.len()))
    };
    let (of_queries, of_keys) = (per_group * head_dim, head_dim);
    let last = (groups - 1) * of_queries..groups * of_queries;
    let whole = backward(
        Qkv { q: q.clone(), k: k.clone(), v: v.clone() },
        &AttentionSpec::new(groups * per_group, groups, head_dim),
        d_o.clone(),
    );
    let found = end(whole, last.clone());
    // The last key head with only its own queries: an eighth of the elements.
    let keys = (groups - 1) * of_keys;
    let alone = backward(
        Qkv { q: q.narrow(1, last.start, of_queries), k: k.narrow(1, keys, of_keys), v: v.narrow(1, keys, of_keys) },
        &AttentionSpec::new(per_group, 1, head_dim),
        d_o.narrow(1, last.start, of_queries),
    );
    let expected = end(alone, 0..of_queries);
    let error = relative_difference(&found, &expected, 0.0);
    assert!(error < 2e-2, "relative error {error:.2e}");
}

/// The host gets a number while later queued work still runs.
#[test]
fn reading_a_number_does_not_wait_for_later_work() {
    let Some((device, _alone)) = device_alone() else { return };
    let big = Tensor::<Cuda, 1>::ones([1 << 28], &device);
    let number = Tensor::<Cuda, 1>::ones([1], &device);
    // The first sum compiles its program.
    drop(Cuda::section(&device, || Cuda::accumulate(big.clone(), big.clone())));
    Cuda::sync(&device).expect("the device works");
    let readback = Cuda::read_later(vec![number]);
    let started = std::time::Instant::now();
    let sum = Cuda::section(&device, || (0..100).fold(big.clone(), |sum, _| Cuda::accumulate(sum, big.clone())));
    assert_eq!(readback.wait(), [1.0]);
    let read = started.elapsed();
    Cuda::sync(&device).expect("the device works");
    let all = started.elapsed();
    drop(sum);
    assert!(read < all / 2, "the number came after {read:?}, the work took {all:?}");
}
