//! The CUDA backend on a real device: every operation against the CPU, over sizes that break kernels, and the engine's
//! guarantees about memory, order and failures.
//!
//! Part of the GPU suite (`cargo xtask dist --tests`). Without a device, as in CI, each test prints that and passes.
//! Trade-off: tests run concurrently, except for those that measure the memory or the time of the whole device. The CPU's side takes most of the time
//! and is compiled for tests, so cases have few tokens: those that leave parts of tiles and blocks, and windows and documents that cross them.
#![cfg(feature = "cuda")]

mod adamw_8bit;
mod alone;
mod card;

use std::process::Command;
use std::sync::{PoisonError, RwLock, RwLockReadGuard};

use burn_tensor::backend::Backend;
use burn_tensor::{DType, Distribution, Int, Tensor};
use cubecl::Runtime;
use cubecl::cuda::CudaRuntime;
use firebrick_arch::{Activation, AttentionSpec};
use firebrick_kernels::backends::cuda::{
    Cuda, CudnnLimits, limit_cudnn, limit_shared_memory, refuse_cudnn, scratch_bytes,
};
use firebrick_kernels::backends::{DeviceFailure, Flex};
use firebrick_kernels::conformance::{Case, Extent, Finding, attention, operations, tolerance};
use firebrick_kernels::{
    AttentionOps, BackendKind, CrossEntropyOptions, Documents, EmbeddingOps, Epilogue, GemmFormat, Group, Hint, Keep,
    Kernels, LinearOps, LossOps, LossTargets, MemoryOps, Module, NormOps, NormWeight, OptimizerOps, Payload, Prologue,
    Qkv, RunShape, SelfTest, Session, Weight, WeightGradient,
};
use firebrick_precision::difference::{is_within, relative_difference};

use card::{Device, half, halves, has_fp8};

/// Held shared by every test, and exclusively by those of [`alone`].
static USERS: RwLock<()> = RwLock::new(());

/// Returns the device, which other tests use at the same time.
fn device() -> Option<(Device, RwLockReadGuard<'static, ()>)> {
    Some((card::device()?, USERS.read().unwrap_or_else(PoisonError::into_inner)))
}

fn assert_case(case: &Case, device: &Device) {
    assert_right(case, operations::<Cuda>(case, device, Extent::All));
}

fn assert_attention(case: &Case, device: &Device) {
    assert_right(case, attention::<Cuda>(case, device, Extent::All));
}

fn assert_right(case: &Case, findings: Vec<Finding>) {
    let wrong: Vec<_> = findings
        .into_iter()
        .filter(|finding| !is_within(finding.relative_error, tolerance(case.dtype)))
        .map(|finding| format!("  {}: {:.2e}", finding.what, finding.relative_error))
        .collect();
    assert!(wrong.is_empty(), "{case:?}:\n{}", wrong.join("\n"));
}

/// Returns the lengths of more documents than a warp has threads, the last of which is a tile.
fn many_documents() -> Vec<usize> {
    (0..64).map(|index| 1 + index * 5 % 9).chain([64]).collect()
}

/// Returns cases whose attention differs, each with its changes to the small case.
fn attention_cases(dtype: DType) -> Vec<Case> {
    let small = |head_dim| Case::small(dtype, head_dim);
    let heads = |heads, kv_heads, head_dim| Case { heads, kv_heads, ..small(head_dim) };
    let documents = |documents: Vec<usize>| Case { documents, ..small(64) };
    let window = |window, documents: Vec<usize>| Case { window: Some(window), documents, ..small(64) };
    vec![
        small(64),
        small(96),
        small(128),
        small(256),
        small(512),
        heads(4, 4, 64),
        heads(8, 2, 128),
        heads(8, 1, 64),
        documents(vec![1]),
        documents(vec![1; 9]),
        // Rows of each few-row kernel.
        documents(vec![5]),
        documents(vec![9, 20]),
        documents(vec![130]),
        documents(vec![64, 64]),
        documents(many_documents()),
        documents(vec![3, 1, 257, 1, 90]),
        window(1, vec![70]),
        window(64, vec![200]),
        window(65, vec![129, 3, 193]),
        window(200, vec![190, 330]),
        Case { head_dim: 128, ..window(100, vec![260, 33]) },
        Case { head_dim: 256, ..window(40, vec![150]) },
        // A head width that neither cuDNN nor our kernels support.
        Case { heads: 4, kv_heads: 2, ..small(24) },
    ]
}

fn cases(dtype: DType) -> Vec<Case> {
    let small = |head_dim| Case::small(dtype, head_dim);
    let widths = vec![
        Case { hidden_size: 129, intermediate_size: 67, vocab_size: 331, ..small(64) },
        Case { hidden_size: 72, intermediate_size: 1000, vocab_size: 1003, rank: 8, ..small(64) },
        // Ranks that are appended to the inner dimension: one to three adapters, whole and padded.
        Case { rank: 5, ..small(64) },
        Case { hidden_size: 640, rank: 16, ..small(64) },
        // Gated activations fused with adapter passes, over one block of columns and several.
        Case { hidden_size: 384, intermediate_size: 1384, rank: 16, documents: vec![130, 3], ..small(64) },
        // Ranks of which some or all GEMMs are separate.
        Case { rank: 24, ..small(64) },
        Case { rank: 136, ..small(64) },
    ];
    [attention_cases(dtype), widths].concat()
}

/// Number of threads that share the cases of a format.
const SHARES: usize = 4;

fn assert_cases(dtype: DType) {
    let Some((device, _shared)) = device() else { return };
    if dtype == DType::BF16 && !halves(&device).contains(&dtype) {
        return;
    }
    let (cases, device) = (&cases(dtype), &device);
    let share =
        |first: usize| move || cases.iter().skip(first).step_by(SHARES).for_each(|case| assert_case(case, device));
    std::thread::scope(|scope| (0..SHARES).for_each(|first| _ = scope.spawn(share(first))));
}

#[test]
fn every_operation_equals_the_cpu_in_bf16() {
    assert_cases(DType::BF16);
}

#[test]
fn every_operation_equals_the_cpu_in_f16() {
    assert_cases(DType::F16);
}

#[test]
fn every_operation_equals_the_cpu_in_f32() {
    assert_cases(DType::F32);
}

/// A card before compute capability 8.0, or one that imitates it, names what it has; others compute.
#[test]
fn bf16_is_a_failure_that_names_other_formats_on_cards_without_it() {
    let Some((device, _shared)) = device() else { return };
    let has_bf16 = halves(&device).contains(&DType::BF16);
    assert_eq!(BackendKind::Cuda.format_refusal(0, DType::BF16).is_none(), has_bf16);
    let norm = NormWeight { weight: Tensor::ones([64], &device), offset: 0.0, epsilon: 0.0, trains: false };
    let x = Tensor::<Cuda, 2>::ones([3, 64], (&device, DType::BF16));
    match DeviceFailure::catch(|| host(Cuda::rms_norm(x, &norm, None))) {
        Ok(values) => assert!(has_bf16 && values.iter().all(|&value| value == 1.0), "{values:?}"),
        Err(failure) => assert!(!has_bf16 && failure.message.contains("float16"), "{failure}"),
    }
}

/// Tests cards whose blocks have less shared memory, in the format that each usually computes in.
#[test]
fn blocks_fit_the_shared_memory_of_smaller_cards() {
    let Some((device, _shared)) = device() else { return };
    refuse_cudnn(&device, true, true);
    // A100; L4, L40S, RTX 30, 40 and 50; T4.
    for (bytes, dtype) in [(166_912, half(&device)), (101_376, half(&device)), (65_536, DType::F16)] {
        assert!(limit_shared_memory(&device, Some(bytes)) <= bytes);
        for head_dim in [64, 96, 128, 256] {
            let small = Case::small(dtype, head_dim);
            for case in [Case { hidden_size: 640, rank: 16, ..small.clone() }, Case { rank: 32, ..small }] {
                assert_case(&case, &device);
            }
        }
    }
    limit_shared_memory(&device, None);
    refuse_cudnn(&device, false, false);
}

#[test]
fn the_flash_kernels_equal_the_cpu_where_cudnn_refuses_both_passes() {
    let Some((device, _shared)) = device() else { return };
    refuse_cudnn(&device, true, true);
    for &dtype in halves(&device) {
        attention_cases(dtype).iter().for_each(|case| assert_attention(case, &device));
    }
    refuse_cudnn(&device, false, false);
}

/// cuDNN gets short documents here, if its version supports packed ones, all at once and a few at a time.
#[test]
fn packed_documents_equal_the_cpu_through_cudnn_in_one_call_and_in_parts() {
    let Some((device, _shared)) = device() else { return };
    for max_backward_tokens in [16_384, 64] {
        let default_limits = limit_cudnn(&device, CudnnLimits { min_mean_tokens: 0, max_backward_tokens });
        for documents in [vec![3, 1, 257, 1, 90], many_documents(), vec![64, 64], vec![40, 24, 64, 130, 10, 54]] {
            for head_dim in [64, 128] {
                let case = Case { documents: documents.clone(), ..Case::small(half(&device), head_dim) };
                assert_attention(&case, &device);
            }
        }
        limit_cudnn(&device, default_limits);
    }
}

/// Returns values that both backends represent exactly: multiples of 1/64.
fn values(count: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|index| (((index * 7919 + seed * 104_729) % 257) as f32 - 128.0) / 64.0).collect()
}

/// Computes the gradients of queries, keys and values, all rounded to what every format represents.
fn attention_gradients<B: Kernels>(
    inputs: &[Vec<f32>; 4],
    boundaries: &[u32],
    spec: &AttentionSpec,
    dtype: DType,
    device: &B::Device,
) -> [Vec<f32>; 3] {
    let documents = Documents::<B>::new(boundaries, device);
    let tokens = documents.tokens();
    let [q, k, v, d_o] = inputs.each_ref().map(|values| {
        // The upper half of the bits.
        let rounded: Vec<f32> = values.iter().map(|value| f32::from_bits(value.to_bits() & 0xffff_0000)).collect();
        let flat = Tensor::<B, 1>::from_floats(rounded.as_slice(), device);
        flat.reshape([tokens, values.len() / tokens]).cast(dtype)
    });
    let qkv = Qkv { q, k, v };
    let gradient = B::section(device, || {
        let output = B::packed_attention(&qkv, None, spec, &documents);
        B::packed_attention_backward(qkv, None, spec, output, d_o, &documents).0
    });
    [gradient.q, gradient.k, gradient.v].map(|x| x.cast(DType::F32).into_data().to_vec().expect("f32"))
}

/// cuDNN or the flash kernel may write the softmax statistics; the backward reads them in the writer's layout.
#[test]
fn attention_equals_the_cpu_where_cudnn_refuses_one_pass() {
    let Some((device, _shared)) = device() else { return };
    // Short documents of several lengths go to cuDNN, too.
    let limits = limit_cudnn(&device, CudnnLimits { min_mean_tokens: 0, ..CudnnLimits::default() });
    for documents in [vec![64; 3], vec![40, 1, 159, 30]] {
        for refuses_forward in [true, false] {
            refuse_cudnn(&device, refuses_forward, !refuses_forward);
            let case = Case { documents: documents.clone(), ..Case::small(half(&device), 64) };
            assert_attention(&case, &device);
        }
    }
    refuse_cudnn(&device, false, false);
    limit_cudnn(&device, limits);
}

#[test]
fn the_self_test_passes() {
    let Some((device, _shared)) = device() else { return };
    for dtype in [half(&device), DType::F32] {
        let multiplies = dtype == DType::BF16 && has_fp8(&device).is_ok();
        for gemms in [Some(GemmFormat::Compute), multiplies.then_some(GemmFormat::Fp8)].into_iter().flatten() {
            let test = SelfTest { dtype, gemms, head_dim: 128, has_experts: true };
            BackendKind::Cuda.self_test(0, test).expect("CUDA has a self-test").expect("a working device");
        }
    }
}

/// Alternates between the engine's stream and CubeCL's hundreds of times, with inputs that change every time: an
/// operation that runs too early sees another round's values.
#[test]
fn operations_of_the_engine_and_of_burn_follow_each_other_in_order() {
    let Some((device, _shared)) = device() else { return };
    let (rows, width) = (257, 1024);
    let norm =
        NormWeight { weight: Tensor::<Cuda, 1>::ones([width], &device), offset: 0.0, epsilon: 0.0, trains: false };
    let mut sums = Vec::new();
    for round in 0..400 {
        let value = 1.0 + round as f32;
        // Burn fills, the engine normalizes (to ones), Burn scales, the engine adds, Burn scales in a pause, the engine adds.
        let x = Tensor::<Cuda, 2>::full([rows, width], value, &device);
        let scaled = Cuda::rms_norm(x, &norm, None).mul_scalar(value).reshape([rows * width]);
        let twice = Cuda::accumulate(scaled.clone(), scaled);
        let inside = Cuda::section(&device, || {
            let four = Cuda::accumulate(twice.clone(), twice.clone());
            let eight = Cuda::pause(&device, || four.mul_scalar(2.0));
            Cuda::accumulate(eight, twice)
        });
        sums.push((value, inside));
    }
    for (value, found) in sums {
        let found: Vec<f32> = found.into_data().to_vec().expect("f32");
        assert_eq!(found.len(), rows * width);
        for (index, got) in found.iter().enumerate() {
            assert!((got - 10.0 * value).abs() <= 1e-3 * value, "round {value}, element {index}: {got}");
        }
    }
}

/// Returns the bytes that the pools of this process hold, whatever other programs do.
fn reserved_bytes(device: &Device) -> u64 {
    let _ = Cuda::sync(device);
    CudaRuntime::client(device).memory_usage().expect("the device works").bytes_reserved
}

/// Set in a process that runs a single test.
const SINGLE: &str = "FIREBRICK_SINGLE_TEST";

/// Runs a test again in a process of its own, where no other test has left anything; returns whether this is that process.
fn is_single(test: &str) -> bool {
    if std::env::var_os(SINGLE).is_some() {
        return true;
    }
    let mut again = Command::new(std::env::current_exe().expect("this program has a file"));
    again.args([test, "--exact", "--nocapture", "--test-threads=1"]).env(SINGLE, "1");
    let output = again.output().expect("this program starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    false
}

/// Pools keep a buffer for each exact size. If a pass would not fit next to the buffers of passes with other sizes, those are freed. All threads of a
/// process share the pools, and those of earlier tests return buffers when they end: this needs a process of its own.
#[test]
fn passes_over_many_lengths_take_the_memory_of_the_longest_where_the_device_is_full() {
    let Some((device, _shared)) = device() else { return };
    if !is_single("passes_over_many_lengths_take_the_memory_of_the_longest_where_the_device_is_full") {
        return;
    }
    let passes = |bytes_per_token: u64| {
        Cuda::release_memory(&device);
        Cuda::open(&device, &RunShape { pass_bytes: [bytes_per_token, 0], pass_tokens: 1, ..RunShape::default() });
        let before = reserved_bytes(&device);
        for tokens in (1..=16).rev().map(|part| 256 * part) {
            Cuda::hint(&device, Hint::Pass { tokens });
            let values = Tensor::<Cuda, 1>::zeros([tokens * 4096], &device);
            assert_eq!(Cuda::squared_norm(&[values]).into_scalar(), 0.0);
        }
        reserved_bytes(&device).saturating_sub(before)
    };
    // Buffers of 16 lengths, 4 to 64 MiB each.
    let (in_an_empty_device, in_a_full_one) = (passes(0), passes(1 << 40));
    Cuda::open(&device, &RunShape::default());
    assert!(in_an_empty_device > 512 << 20, "{in_an_empty_device} bytes: buffers are reused while there is room");
    assert!(in_a_full_one < 128 << 20, "{in_a_full_one} bytes");
}

/// Returns outputs `[n, o]` of dense weights over one input: column ranges of one buffer.
fn projected(x: &Tensor<Cuda, 2>, weights: &[Tensor<Cuda, 2>]) -> Vec<Tensor<Cuda, 2>> {
    let out = weights[0].dims()[0];
    let module = |(index, weight): (usize, &Tensor<Cuda, 2>)| Module {
        columns: index * out..(index + 1) * out,
        weight: Weight::Dense(weight.clone()),
        weight_gradient: WeightGradient::Frozen,
        bias: None,
        adapter: None,
    };
    let modules = weights.iter().enumerate().map(module).collect();
    let group =
        Group { modules, parts: vec![out; weights.len()], gemms: GemmFormat::Compute, dropout: None, rows: None };
    Cuda::project(Prologue::None { x: x.clone() }, &group, Epilogue::None, Keep::Nothing).0
}

fn random_half(shape: [usize; 2], device: &Device) -> Tensor<Cuda, 2> {
    Tensor::<Cuda, 2>::random(shape, Distribution::Normal(0.0, 0.1), (device, DType::F32)).cast(half(device))
}

fn host(tensor: Tensor<Cuda, 2>) -> Vec<f32> {
    tensor.into_data().convert::<f32>().to_vec().expect("floats")
}

/// The backward of a gated activation overwrites gate and up if no other tensor has their memory; sections reuse memory again and again.
#[test]
fn gradients_never_overwrite_a_gate_that_something_still_reads() {
    let Some((device, _shared)) = device() else { return };
    let (x, dy) = (random_half([64, 128], &device), random_half([64, 256], &device));
    let weights = [random_half([256, 128], &device), random_half([256, 128], &device)];
    let [gate, up] = <[_; 2]>::try_from(projected(&x, &weights)).expect("two parts");
    let expected = host(gate.clone());
    let reference = Cuda::gated_backward(gate, up, Activation::Silu, dy.clone());
    let reference = [host(reference.0), host(reference.1)];
    let rounds = |keeps: bool| {
        Cuda::section(&device, || {
            let round = |_| {
                let [gate, up] = <[_; 2]>::try_from(projected(&x, &weights)).expect("two parts");
                let kept = keeps.then(|| gate.clone());
                (kept, Cuda::gated_backward(gate, up, Activation::Silu, dy.clone()))
            };
            (0..4).map(round).collect::<Vec<_>>()
        })
    };
    for (kept, (d_gate, d_up)) in rounds(true).into_iter().chain(rounds(false)).chain(rounds(true)) {
        assert!(kept.is_none_or(|kept| host(kept) == expected));
        assert_eq!([host(d_gate), host(d_up)], reference);
    }
}

/// Runs micro-batches with different numbers of loss tokens: scratch memory must be that of the largest chunk.
#[test]
fn scratch_memory_is_bounded_over_different_counts_of_loss_tokens() {
    let Some((device, _shared)) = device() else { return };
    let (tokens, width, vocab_size, chunk_tokens) = (2048, 256, 4096, 128);
    let matrix = |rows: usize, seed: usize| {
        let flat = Tensor::<Cuda, 1>::from_floats(values(rows * width, seed).as_slice(), &device);
        flat.reshape([rows, width]).cast(half(&device))
    };
    let (hidden, head) = (matrix(tokens, 1), Weight::Dense(matrix(vocab_size, 2)));
    let loss = |count: usize| {
        let positions: Vec<i32> = (0..count as i32).collect();
        let targets = LossTargets {
            positions_m: Tensor::from_ints(positions.as_slice(), &device),
            targets_m: Tensor::from_ints(positions.as_slice(), &device),
            weights_m: None,
            count,
        };
        let options = CrossEntropyOptions { gradient_scale: Some(1.0), ..CrossEntropyOptions::new(chunk_tokens) };
        let result = Cuda::linear_cross_entropy(hidden.clone(), &head, &targets, options);
        assert!(result.loss_sum.into_scalar().is_finite());
        scratch_bytes(&device)
    };
    let first = loss(200);
    for count in [300, 500, 700, 900, 1300, 1700, 2000] {
        assert_eq!(loss(count), first, "{count} loss tokens");
    }
}

/// A kernel that reads invalid memory leaves a context in which nothing works any more, so it runs in a separate
/// process. Allocations fail then, but not for lack of memory.
#[test]
fn a_kernel_that_broke_the_device_is_the_reported_cause_and_not_a_lack_of_memory() {
    let Some((device, _shared)) = device() else { return };
    if !is_single("a_kernel_that_broke_the_device_is_the_reported_cause_and_not_a_lack_of_memory") {
        return;
    }
    DeviceFailure::quiet_hook();
    let failure = DeviceFailure::catch(|| {
        let table = Tensor::<Cuda, 2>::zeros([1, 1024], &device);
        let outside = Tensor::<Cuda, 1, Int>::from_ints([i32::MAX], &device);
        let _ = Cuda::embed(table, outside, 1.0, DType::F32);
        // Sizes that the pool does not have.
        for mebibytes in 1..64 {
            let values = Tensor::<Cuda, 1>::zeros([mebibytes << 18], &device);
            let _ = Cuda::squared_norm(&[values]);
        }
    });
    let failure = failure.expect_err("no allocation is terabytes after the table");
    assert!(!failure.out_of_memory, "{failure}");
    assert!(failure.message.to_lowercase().contains("illegal"), "{failure}");
    // Destructors would use the broken context.
    std::process::exit(0);
}

/// Two threads on one device take turns: sections of one never run while the other is inside one.
#[test]
fn two_threads_with_sections_on_one_device_do_not_disturb_each_other() {
    let Some((device, _shared)) = device() else { return };
    let count = 1 << 20;
    let inputs: Vec<_> = (1..=2).map(|value| Tensor::<Cuda, 1>::full([count], value as f32, &device)).collect();
    let sums: Vec<_> = std::thread::scope(|scope| {
        let work = |input: Tensor<Cuda, 1>| {
            let device = device.clone();
            move || {
                let add = |sum: Tensor<Cuda, 1>, _: usize| {
                    Cuda::section(&device, || Cuda::accumulate(Cuda::accumulate(input.clone(), sum), input.clone()))
                };
                (0..50).fold(input.clone(), add)
            }
        };
        let workers: Vec<_> = inputs.into_iter().map(|input| scope.spawn(work(input))).collect();
        workers.into_iter().map(|worker| worker.join().expect("no failure")).collect()
    });
    for (index, sum) in sums.into_iter().enumerate() {
        let expected = (index + 1) as f32 * 101.0;
        let found: Vec<f32> = sum.into_data().to_vec().expect("f32");
        assert!(found.iter().all(|&value| value == expected), "thread {index}: expected {expected}");
    }
}

/// Runs Burn alone in a thread: allocates, changes and reads values, while others are inside sections.
fn burn_alone(device: &Device, count: usize, rounds: usize, value: f32) {
    for round in 0..rounds {
        let start = value + round as f32;
        let x = Tensor::<Cuda, 1>::full([count], start, device);
        // Each operation frees what it read, while its kernel still waits.
        let x = (0..6).fold(x, |x, _| x.add_scalar(1.0));
        let found: Vec<f32> = x.into_data().to_vec().expect("f32");
        let wrong = found.iter().find(|&&found| found != start + 6.0);
        assert_eq!(wrong, None, "round {round}: expected {}", start + 6.0);
        if round % 16 == 7 {
            Cuda::release_memory(device);
        }
    }
}

/// Burn operations that other threads request on the same device must not disturb a section that reads memory of earlier sections, drops
/// tensors from outside, or allocates memory that other threads free.
#[test]
fn sections_and_burn_operations_of_other_threads_keep_their_values() {
    let Some((device, _shared)) = device() else { return };
    let count = 1 << 20;
    let (sender, receiver) = std::sync::mpsc::channel::<(Tensor<Cuda, 1>, f32)>();
    std::thread::scope(|scope| {
        for thread in 0..2 {
            let device = device.clone();
            scope.spawn(move || burn_alone(&device, count, 200, 1000.0 * (thread + 1) as f32));
        }
        // Reads the results of sections after the thread that computed them has released them.
        let reader = scope.spawn(move || {
            for (x, expected) in receiver {
                let found = x.mul_scalar(2.0).max().into_scalar();
                assert_eq!(found, 2.0 * expected);
            }
        });
        for round in 0..200 {
            let value = round as f32;
            let [x, y] = [value, 2.0].map(|value| Tensor::<Cuda, 1>::full([count], value, &device));
            let sum = Cuda::section(&device, || {
                // The launches below wait for this work, so their inputs are dropped long before they run.
                let slow = (0..8).fold(y.clone(), |sum, _| Cuda::accumulate(sum, y.clone()));
                drop(slow);
                Cuda::accumulate(x, y)
            });
            sender.send((sum.clone(), value + 2.0)).expect("the reader runs");
            // The next section may get the memory of this one's sum.
            let found: Vec<f32> = Cuda::accumulate(sum.clone(), sum).into_data().to_vec().expect("f32");
            assert!(found.iter().all(|&found| found == 2.0 * (value + 2.0)), "round {round}");
        }
        drop(sender);
        reader.join().expect("the reader's values are right");
    });
}

/// Scores are far below zero, so that a row's log-sum-exp would underflow as a plain sum, at lengths that leave half a tile.
#[test]
fn gradients_are_finite_and_right_where_all_scores_are_very_low() {
    let Some((device, _shared)) = device() else { return };
    let (score, head_dim) = (-100.0_f32, 128);
    let spec = AttentionSpec::new(4, 2, head_dim);
    // The first values of a query and a key determine the score, the others add a little noise.
    let side = (-score * (head_dim as f32).sqrt()).sqrt();
    for boundaries in [vec![0, 64], vec![0, 192], vec![0, 64, 256], vec![0, 192, 256, 448, 900]] {
        let tokens = *boundaries.last().expect("boundaries") as usize;
        let towards = |heads: usize, side: f32, seed: usize| -> Vec<f32> {
            let noise = values(tokens * heads * head_dim, seed).into_iter().map(|noise| noise / 4.0);
            noise.enumerate().map(|(index, noise)| if index % head_dim == 0 { side } else { noise }).collect()
        };
        let inputs = [towards(4, side, 1), towards(2, -side, 2), values(tokens * 256, 3), values(tokens * 512, 4)];
        let expected = attention_gradients::<Flex>(&inputs, &boundaries, &spec, DType::F32, &Default::default());
        let found = attention_gradients::<Cuda>(&inputs, &boundaries, &spec, half(&device), &device);
        for (part, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert!(found.iter().all(|value| value.is_finite()), "{boundaries:?}, gradient {part} is not finite");
            // In the first values, large terms cancel.
            let others = |values: &[f32]| -> Vec<f32> {
                values.chunks(head_dim).flat_map(|head| head[1..].iter().copied()).collect()
            };
            let error = relative_difference(&others(found), &others(expected), 0.0);
            assert!(error < 5e-2, "{boundaries:?}, gradient {part}: relative error {error:.2e}");
        }
    }
}

/// Exact resuming requires the same bits every time.
#[test]
fn operations_of_the_engine_repeat_bit_for_bit() {
    let Some((device, _shared)) = device() else { return };
    refuse_cudnn(&device, true, true);
    let case = Case::small(half(&device), 64);
    let errors = || {
        operations::<Cuda>(&case, &device, Extent::All).iter().map(|f| f.relative_error.to_bits()).collect::<Vec<_>>()
    };
    assert_eq!(errors(), errors());
    refuse_cudnn(&device, false, false);
}

#[test]
fn steps_of_8_bit_adamw_equal_bitsandbytes_up_to_rounding() {
    let Some((_device, _shared)) = device() else { return };
    adamw_8bit::assert_golden_steps::<Cuda>();
}

/// Imitates paged optimizer state: tensors of different sizes are restored two ahead of their use, changed in place and offloaded
/// again, many times in one section. A copy that runs too early or too late, or a buffer that is reused too early, shows in a sum.
#[test]
fn tensors_that_leave_and_come_back_all_the_time_keep_every_change() {
    let Some((device, _shared)) = device() else { return };
    let (sizes, rounds) = ([1 << 20, 300_001, 1 << 22, 1 << 20, 77, 1 << 21, 1 << 22, 300_001], 20);
    let full = |size: usize, value: f32| Tensor::<Cuda, 1>::full([size], value, &device);
    let ones: Vec<_> = sizes.iter().map(|&size| full(size, 1.0)).collect();
    let offload = |values: Tensor<Cuda, 1>, size: usize| Cuda::offload(Payload::Values(values.reshape([1, size])));
    let start = |(index, &size): (usize, &usize)| offload(full(size, index as f32), size);
    let mut away: Vec<_> = sizes.iter().enumerate().map(start).map(Some).collect();
    for _ in 0..rounds {
        Cuda::section(&device, || {
            for index in 0..sizes.len() {
                for ahead in away.iter_mut().skip(index).take(3).flatten() {
                    ahead.prefetch(&device);
                }
                let here = away[index].take().expect("it was put back");
                let x = here.restore(&device).into_values().reshape([sizes[index]]);
                let x = Cuda::accumulate(x, ones[index].clone());
                away[index] = Some(offload(x, sizes[index]));
            }
        });
    }
    for (index, offloaded) in away.into_iter().flatten().enumerate() {
        let values: Vec<f32> = offloaded.to_data().to_vec().expect("f32");
        let expected = (index + rounds) as f32;
        assert_eq!(values.len(), sizes[index]);
        assert!(values.iter().all(|&value| value == expected), "tensor {index}: expected {expected}");
    }
}

/// Numbers have the values of the time of the request, even if the tensor is changed in place while they are copied.
#[test]
fn numbers_that_are_read_later_are_those_of_their_request() {
    let Some((device, _shared)) = device() else { return };
    let one = || Tensor::<Cuda, 1>::ones([1], &device);
    let mut sum = one();
    let mut requested = Vec::new();
    for _ in 0..200 {
        requested.push(Cuda::read_later(vec![sum.clone(), one()]));
        sum = Cuda::accumulate(sum, one());
    }
    for (index, readback) in requested.into_iter().enumerate() {
        assert_eq!(readback.wait(), [1.0 + index as f32, 1.0]);
    }
    drop(Cuda::read_later(vec![sum.clone()]));
    assert_eq!(Cuda::read_later(vec![sum]).wait(), [201.0]);
}
