//! The host side of the CUDA backend on a machine without a card: training steps over a driver and libraries that compute nothing (`null_cuda.c`) and
//! count their calls. CI has no card, so these tests find failures that need none: a step that panics, that allocates in every step, that launches
//! something else than the step before it, or something else than was recorded (`launches.rs`).
//!
//! The libraries must exist when a process starts, so the test builds them and starts itself again.
//! Trade-off: numbers mean nothing here, except for the row counts of experts, which the libraries invent. Needs Linux and a C compiler.
#![cfg(all(feature = "cuda", target_os = "linux"))]

#[cfg(debug_assertions)]
mod launches;
mod memory;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};
use std::{env, fs};

use burn_tensor::{DType, Tensor, TensorData};
use firebrick_kernels::backends::cuda::{RowScaling, scale_rows, use_graphs, watch_burn_operations};
use firebrick_kernels::backends::{BackendKind, Cuda};
use firebrick_kernels::{GemmFormat, MemoryOps, Payload, Recompute, RunShape, Session};
use firebrick_model::{BatchLimits, GenerateOptions, PassOptions, Sampler};
use firebrick_tests::{FAMILIES, FROZEN, MIXTURES, NF4, TRAINED, load_in, packed, some_in_turn, trainer};
use firebrick_trainer::run::step::Trainer;

/// The file that the libraries count in.
const COUNTS: &str = "NULL_CUDA_COUNTS";
/// Variable with the file in which the libraries record their calls.
#[cfg(debug_assertions)]
const LAUNCHES: &str = "NULL_CUDA_LAUNCHES";
/// Variable with the compute capability of the card that they report.
const CAPABILITY: &str = "NULL_CUDA_CAPABILITY";
/// The starts of the names of models that have layers with kernels and without: with a window at these widths, or with a beta above 1.
const INTERRUPTED: [&str; 4] = ["tiny-gemma3", "tiny-gemma4", "tiny-olmo3", "tiny-olmo-hybrid"];
/// Time after which the process counts as hanging; it needs some seconds.
const LONGEST: Duration = Duration::from_secs(180);
/// File names of the libraries: NVIDIA's for CUDA 13.
const LIBRARIES: [&str; 6] =
    ["libcuda.so.1", "libcuda.so", "libcublasLt.so.13", "libcudnn.so.9", "libnvrtc.so.13", "libnvrtc.so"];

/// The recompute policy, whether saved tensors wait on the host, and the compute format.
const PASSES: [(Recompute, bool, DType); 7] = [
    (Recompute::Full, false, DType::BF16),
    (Recompute::Full, true, DType::BF16),
    (Recompute::Projections, false, DType::BF16),
    (Recompute::Projections, true, DType::BF16),
    (Recompute::Selective, false, DType::BF16),
    (Recompute::None, false, DType::BF16),
    (Recompute::Selective, false, DType::F32),
];

/// The counts so far, in the order of `enum count` in `null_cuda.c`.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Counts {
    launches: i64,
    /// The sum of hashes of the kernels' names and grids.
    launched: i64,
    gemms: i64,
    attentions: i64,
    bytes: i64,
    allocations: i64,
    submitted: i64,
}

impl Counts {
    fn now() -> Self {
        let bytes = fs::read(env::var_os(COUNTS).expect("the caller names the file")).unwrap();
        let mut values = bytes.chunks_exact(8).map(|value| i64::from_le_bytes(value.try_into().unwrap()));
        let mut next = || values.next().expect("seven counts");
        let [launches, launched, gemms, attentions] = [next(), next(), next(), next()];
        Self { launches, launched, gemms, attentions, bytes: next(), allocations: next(), submitted: next() }
    }

    /// Returns the counts since an earlier time.
    fn since(self, earlier: Self) -> Self {
        Self {
            launches: self.launches - earlier.launches,
            launched: self.launched.wrapping_sub(earlier.launched),
            gemms: self.gemms - earlier.gemms,
            attentions: self.attentions - earlier.attentions,
            bytes: self.bytes - earlier.bytes,
            allocations: self.allocations - earlier.allocations,
            submitted: self.submitted - earlier.submitted,
        }
    }

    /// Returns the device's work, independent of the number of host calls.
    fn done(self) -> Self {
        Self { submitted: 0, ..self }
    }
}

#[test]
fn steps_launch_what_the_one_before_launched_and_allocate_nothing_from_the_third_on() {
    let this = "steps_launch_what_the_one_before_launched_and_allocate_nothing_from_the_third_on";
    over_null_cuda(this, &["9.0"], &[COUNTS], steps_of_every_family);
}

#[test]
fn plans_grow_with_tokens_as_allocations_do() {
    over_null_cuda(
        "plans_grow_with_tokens_as_allocations_do",
        &["9.0"],
        &[COUNTS],
        memory::plans_grow_with_tokens_as_allocations_do,
    );
}

#[test]
fn tensors_that_are_read_alongside_a_run_are_whole_and_in_order() {
    over_null_cuda("tensors_that_are_read_alongside_a_run_are_whole_and_in_order", &["9.0"], &[COUNTS], read_alongside);
}

/// Release builds leave bytes of arguments undefined.
#[cfg(debug_assertions)]
#[test]
fn the_launches_of_every_group_are_as_recorded() {
    let this = "the_launches_of_every_group_are_as_recorded";
    over_null_cuda(this, &launches::CAPABILITIES, &[COUNTS, LAUNCHES], launches::record);
    if env::var_os(COUNTS).is_none() {
        launches::compare();
    }
}

#[test]
fn steps_in_a_fixed_order_repeat_and_only_documents_of_one_length_go_to_cudnn() {
    let this = "steps_in_a_fixed_order_repeat_and_only_documents_of_one_length_go_to_cudnn";
    over_null_cuda(this, &["9.0", "10.0"], &[COUNTS], steps_in_a_fixed_order);
}

/// Ada has another number of launches for the scales, and so has Blackwell, whose GEMMs are refused if descriptors do not fit.
#[test]
fn steps_in_8_bit_floats_are_alike_on_every_generation_that_has_them() {
    let this = "steps_in_8_bit_floats_are_alike_on_every_generation_that_has_them";
    over_null_cuda(this, &["8.9", "9.0", "10.0", "12.0"], &[COUNTS], steps_in_8_bit_floats);
}

/// Runs `work` in processes that find the driver of `null_cuda.c` on the loader's path and its libraries by `FIREBRICK_CUDA`, each with a card of
/// another of these compute capabilities, which write to these files; `test` calls this again there.
fn over_null_cuda(test: &str, capabilities: &[&str], files: &[&str], work: fn()) {
    if env::var_os(COUNTS).is_some() {
        watch_burn_operations();
        return work();
    }
    let libraries = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    build(libraries.path());
    capabilities.iter().for_each(|capability| over_libraries(libraries.path(), test, capability, files));
}

/// Runs a test again in a process that finds these libraries, as a card of this compute capability.
fn over_libraries(libraries: &Path, test: &str, capability: &str, files: &[&str]) {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    files.iter().for_each(|name| fs::write(folder.path().join(name), [0; size_of::<Counts>()]).unwrap());
    let text = folder.path().join("text");
    let mut paths = vec![libraries.to_owned()];
    paths.extend(env::var_os("LD_LIBRARY_PATH").iter().flat_map(env::split_paths));
    let output = fs::File::create(&text).unwrap();
    let mut running = Command::new(env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture"])
        .env("LD_LIBRARY_PATH", env::join_paths(paths).unwrap())
        .env("FIREBRICK_CUDA", libraries)
        .env("FIREBRICK_CACHE", folder.path().join("cache"))
        // CubeCL searches this path for headers, which nothing reads here.
        .env("CUDA_PATH", libraries)
        .envs(files.iter().map(|name| (name, folder.path().join(name))))
        .env(CAPABILITY, capability)
        .stdout(output.try_clone().unwrap())
        .stderr(output)
        .spawn()
        .unwrap();
    let started = Instant::now();
    let status = loop {
        match running.try_wait().unwrap() {
            None if started.elapsed() > LONGEST => running.kill().unwrap(),
            None => sleep(Duration::from_millis(50)),
            Some(status) => break status,
        }
    };
    let text = fs::read_to_string(&text).unwrap();
    let took = started.elapsed();
    assert!(status.success() && text.contains("1 passed"), "{capability}: {status} after {took:?}\n{text}");
}

/// Compiles the libraries: one file, which gets every name.
fn build(folder: &Path) {
    let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/null_cuda/null_cuda.c");
    let first = folder.join(LIBRARIES[0]);
    let built = Command::new("cc").args(["-O1", "-shared", "-fPIC", "-pthread", "-o"]).args([&first, &source]).output();
    let built = built.expect("a C compiler, which building this project needs as well");
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    LIBRARIES[1..].iter().for_each(|name| fs::hard_link(&first, folder.join(name)).unwrap());
    fs::create_dir(folder.join("include")).unwrap();
}

/// Takes two of the passes for each kind of weights of a family, in turn.
fn steps_of_every_family() {
    BackendKind::Cuda.probe().expect("the libraries are found");
    let mut turn = 0;
    for family in FAMILIES.into_iter().filter(|family| !MIXTURES.contains(family)) {
        let adapter = format!("{family}-lora");
        for (storage, adapter) in [(NF4, Some(adapter.as_str())), (FROZEN, Some(&adapter)), (TRAINED, None)] {
            turn += 1;
            for (recompute, offload, dtype) in some_in_turn(&PASSES, 2, turn) {
                let pass = PassOptions { recompute, offload, ..PassOptions::default() };
                let case = format!("{family} {storage:?} {dtype:?} {pass:?}");
                let lengths = if recompute == Recompute::None { [48, 48, 48] } else { [39, 29, 61] };
                steps_are_alike(
                    trainer::<Cuda>(family, adapter, storage, dtype, GemmFormat::Compute, pass),
                    lengths,
                    &case,
                );
            }
        }
    }
    texts_are_written_by_graphs();
    assert!(Counts::now().attentions > 0, "cuDNN takes some of these cases");
}

/// Tokens are launched like the ones before them.
fn texts_are_written_by_graphs() {
    let model = load_in::<Cuda>("tiny-llama", Some("tiny-llama-lora"), NF4, DType::BF16);
    let write = |new_tokens| {
        let options = GenerateOptions {
            max_new_tokens: new_tokens,
            stop_tokens: Vec::new(),
            sampler: Sampler::greedy(),
            limits: BatchLimits::NONE,
        };
        let before = Counts::now();
        let written = model.generate(&[vec![1, 2, 3], vec![4]], &options).expect("zeros are finite");
        assert_eq!(written[0].len(), new_tokens);
        Counts::now().since(before)
    };
    let (fewer, more) = (write(20), write(40));
    let of_tokens = more.since(fewer);
    assert!(of_tokens.launches > 0 && 4 * of_tokens.submitted <= of_tokens.launches, "20 tokens more: {of_tokens:?}");
}

/// The card of capability 10.0 has no gradients of attention in a fixed order by cuDNN.
fn steps_in_a_fixed_order() {
    BackendKind::Cuda.probe().expect("the libraries are found");
    let device = Default::default();
    let step = |deterministic, lengths: [u32; 3]| {
        Cuda::open(&device, &RunShape { deterministic, ..RunShape::default() });
        let (adapter, pass) = (Some("tiny-llama-lora"), PassOptions::default());
        let mut trainer = trainer::<Cuda>("tiny-llama", adapter, NF4, DType::BF16, GemmFormat::Compute, pass);
        let documents: [Vec<u32>; 3] = lengths.map(|length| (1..=length).collect());
        let batch = [packed(&documents.each_ref().map(Vec::as_slice))];
        let mut counts = || {
            trainer.step(&batch).expect("one rank reaches itself").read();
            Counts::now()
        };
        let [_, second, third] = [counts(), counts(), counts()];
        let Counts { launches, launched, gemms, attentions, .. } = third.since(second);
        (launches, launched, gemms, attentions)
    };
    let (of_one_length, of_several) = ([48; 3], [39, 29, 61]);
    let (first, second) = (step(true, of_one_length), step(true, of_one_length));
    assert_eq!(first, second, "two trainers");
    let (fixed, free) = (first.3, step(false, of_one_length).3);
    let is_hopper = env::var(CAPABILITY).is_ok_and(|capability| capability == "9.0");
    assert!(fixed > 0 && (fixed == free) == is_hopper, "{fixed} calls of cuDNN in a fixed order, {free} in any");
    assert_eq!(step(true, of_several).3, 0);
    Cuda::open(&device, &RunShape::default());
}

/// Reads tensors of several pieces and of parts of one, in several formats.
fn read_alongside() {
    BackendKind::Cuda.probe().expect("the libraries are found");
    let device = Cuda::device_of(0);
    let values = |count: usize| TensorData::new((0..count).map(|index| index as f32).collect::<Vec<_>>(), [count]);
    let (narrow, codes) = (values(1001).convert_dtype(DType::BF16), TensorData::new(vec![7_u8; 515], [515]));
    let expected = [values(5), values(20 << 20), narrow, values(8 << 20), codes, values(3)];
    let of = |data: &TensorData| match data.dtype {
        DType::U8 => Payload::Codes(Tensor::from_data(data.clone(), (&device, DType::U8))),
        dtype => Payload::Values(Tensor::<Cuda, 1>::from_data(data.clone(), (&device, dtype))),
    };
    let tensors = expected.iter().map(of).collect();
    let mut got = Vec::new();
    scope(|scope| {
        scope.spawn(|| Cuda::read_alongside(tensors, |data| got.push(data)));
    });
    assert!(got == expected);
}

fn steps_in_8_bit_floats() {
    BackendKind::Cuda.probe().expect("the libraries are found");
    let device = Default::default();
    let default_scaling = scale_rows(&device, RowScaling::Afterwards);
    for (storage, adapter) in [(NF4, Some("tiny-llama-lora")), (TRAINED, None)] {
        let launches = |scaling| {
            scale_rows(&device, scaling);
            let pass = PassOptions { recompute: Recompute::Selective, ..PassOptions::default() };
            let trainer = trainer::<Cuda>("tiny-llama", adapter, storage, DType::BF16, GemmFormat::Fp8, pass);
            steps_are_alike(trainer, [39, 29, 61], &format!("{storage:?} {scaling:?}"))
        };
        let (own, passes) = (launches(default_scaling), launches(RowScaling::Afterwards));
        match default_scaling {
            RowScaling::Afterwards => assert_eq!(own, passes),
            // There is a pass over the result of each of these GEMMs.
            RowScaling::InGemm { .. } => assert!(own < passes, "{own} launches, {passes} with passes"),
            // One for the blocks of each operand.
            RowScaling::InBlocks => {
                let in_gemm = launches(RowScaling::InGemm { powers_of_two: true });
                assert!(in_gemm < passes && own - in_gemm == 2 * (passes - in_gemm), "{in_gemm}, {passes}, {own}");
            }
        }
    }
}

/// Checks that the first two steps allocate, compile and choose, that after them nothing is new, and that in the fifth most launches are in graphs.
/// Returns the launches of a step.
fn steps_are_alike(mut trainer: Trainer<Cuda>, lengths: [u32; 3], case: &str) -> i64 {
    let documents: [Vec<u32>; 3] = lengths.map(|length| (1..=length).collect());
    let batch = [packed(&documents.each_ref().map(Vec::as_slice))];
    let mut step = || {
        let outcome = trainer.step(&batch).expect("one rank reaches itself");
        outcome.read();
        Counts::now()
    };
    let [_, second, third, fourth, fifth] = [step(), step(), step(), step(), step()];
    // A whole delta rule in Burn operations gets memory as CubeCL's thread comes to hand it out, which differs by a few kilobytes.
    let in_burn = case.starts_with("tiny-olmo-hybrid");
    let of_step = |later: Counts, earlier: Counts| {
        let counts = later.since(earlier);
        if in_burn { Counts { bytes: 0, allocations: 0, ..counts } } else { counts }
    };
    let in_a_step = of_step(third, second);
    for (later, earlier) in [(fourth, third), (fifth, fourth)] {
        assert_eq!(of_step(later, earlier).done(), in_a_step.done(), "{case}: two steps");
    }
    let Counts { launches, gemms, attentions, bytes, allocations, .. } = in_a_step;
    assert_eq!((allocations, bytes), (0, 0), "{case}: memory");
    assert!(launches > 0 && gemms > 0, "{case}: {launches} launches and {gemms} GEMMs");
    // Layers without cuDNN attention are too narrow for our kernels: Burn operations interrupt the section.
    let is_whole = attentions > 0 && !INTERRUPTED.iter().any(|name| case.starts_with(name));
    let (all, submitted) = (launches + gemms + attentions, fifth.since(fourth).submitted);
    let most = if is_whole { all / 5 } else { all - 1 };
    assert!(submitted <= most, "{case}: {submitted} submissions of {all} launches");
    // All cases together need more graphs than are kept.
    let device = trainer.model.device().clone();
    use_graphs(&device, false);
    use_graphs(&device, true);
    drop(trainer);
    // CubeCL frees unused memory at intervals. Freed here, it is not freed during a step of a later case.
    Cuda::release_memory(&device);
    launches
}
