//! Ranks on two NVIDIA cards of one machine, each a process of its own: collectives by NCCL against sums on the host, training against
//! one card, and what happens when a rank is gone. Part of the GPU suite (`cargo xtask dist --tests`).
//!
//! Trade-off: with fewer than two cards, or without NCCL, each test prints that and passes.
#![cfg(feature = "cuda")]

use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::thread::{sleep, spawn};
use std::time::{Duration, Instant};

use burn_tensor::backend::Backend;
use burn_tensor::{DType, IntDType, Tensor, TensorData};
use firebrick_arch::Role;
use firebrick_cuda::Nccl;
use firebrick_cuda::fault::fail_device;
use firebrick_kernels::backends::{BackendKind, Cuda};
use firebrick_kernels::{Contributions, GradientSink, Loan, MemoryOps, Parameter, Payload, Session};
use firebrick_parallel::supervisor::free_port;
use firebrick_parallel::{JobToken, Placement, Ranks, ReducingSink, ShardingSink};
use firebrick_precision::difference::largest_difference;
use firebrick_tests::{NEW, finish, fixture, metrics, recipe, step_losses};
use firebrick_trainer::console::Console;
use firebrick_trainer::run::interrupt::Interrupt;
use firebrick_trainer::run::{RunOptions, run};
use tempfile::tempdir;

type Device = <Cuda as burn_tensor::backend::BackendTypes>::Device;

/// Names the folder that a test shares with the processes that it starts of itself.
const FOLDER: &str = "FIREBRICK_GPU_RANKS_TEST";
/// Longest wait for the end of a rank.
const PATIENCE: Duration = Duration::from_secs(300);

#[expect(clippy::print_stderr, reason = "a test that does not run, and a measurement, must be seen")]
fn show(text: &str) {
    eprintln!("{text}");
}

/// Runs the calling test as two ranks, in processes of their own; their exit statuses. `None` in such a process, and where there are no
/// two cards.
fn as_two_ranks(folder: &Path) -> Option<[i32; 2]> {
    if std::env::var_os(FOLDER).is_some() {
        return None;
    }
    let Some(mut children) = two_ranks(folder) else { return Some([0, 0]) };
    Some(children.each_mut().map(|child| end(child, PATIENCE)))
}

/// Starts the calling test as two ranks; `None` where there are no two cards.
fn two_ranks(folder: &Path) -> Option<[Child; 2]> {
    let cards = if BackendKind::Cuda.probe().is_ok() { BackendKind::Cuda.devices() } else { 0 };
    if cards < 2 {
        show(&format!("SKIPPED: two cards are needed, and there are {cards}"));
        return None;
    }
    if let Err(error) = Nccl::load() {
        show(&format!("SKIPPED: {error}"));
        return None;
    }
    let name = std::thread::current().name().expect("a test's thread has its name").to_owned();
    let port = free_port().unwrap().to_string();
    let token = JobToken::random();
    let start = |rank: usize| -> Child {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", &name, "--nocapture", "--test-threads", "1"]).env(FOLDER, folder);
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", "2").env("MASTER_PORT", &port);
        command.env("LOCAL_RANK", rank.to_string()).env("LOCAL_WORLD_SIZE", "2");
        command.env("MASTER_ADDR", "127.0.0.1").env("FIREBRICK_JOB_TOKEN", token.text());
        command.spawn().unwrap()
    };
    Some([start(0), start(1)])
}

/// Waits for the end of a rank, which is killed if it takes longer than `patience`; its exit status.
fn end(child: &mut Child, patience: Duration) -> i32 {
    let started = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code().unwrap_or(-1);
        }
        if started.elapsed() > patience {
            child.kill().unwrap();
        }
        sleep(Duration::from_millis(50));
    }
}

/// This process's rank, and its card, connected to the other.
fn joined() -> (Ranks, Device) {
    let placement = Placement::from_environment().unwrap().expect("this process was started as a rank");
    let ranks = Ranks::join(&placement).unwrap();
    let device = Cuda::device_of(ranks.local_rank());
    let carrier = ranks.connect(BackendKind::Cuda).unwrap().expect("there are two ranks");
    assert!(carrier.starts_with("NCCL"), "{carrier}");
    if ranks.is_main() {
        show(&carrier);
    }
    (ranks, device)
}

/// As [`joined`], where this process is one of the two ranks of the calling test; `None` where it started them, once both have passed.
fn one_of_two() -> Option<(Ranks, Device)> {
    let folder = tempdir().unwrap();
    if let Some(statuses) = as_two_ranks(folder.path()) {
        assert_eq!(statuses, [0, 0]);
        return None;
    }
    Some(joined())
}

/// Values that differ between ranks, and whose sum over two ranks is exact to one rounding.
fn values(rank: usize, seed: usize, length: usize) -> Vec<f32> {
    let value = |index: usize| ((index * 7 + seed * 13) % 1009) as f32 * 0.37 - 150.0 + 1000.0 * rank as f32 * 0.01;
    (0..length).map(value).collect()
}

fn sums(seed: usize, length: usize) -> Vec<f32> {
    values(0, seed, length).into_iter().zip(values(1, seed, length)).map(|(a, b)| a + b).collect()
}

fn on_device(rank: usize, seed: usize, length: usize, device: &Device) -> Tensor<Cuda, 1> {
    Tensor::from_floats(values(rank, seed, length).as_slice(), device)
}

/// 24 parameters, of which two fill a bucket, and how many values each has.
fn large_parameters(device: &Device) -> (usize, Vec<Parameter<Cuda>>) {
    let length = 3_000_001;
    let parameter =
        |index| Parameter::from_host(format!("p{index:02}"), &[length], Role::Embedding, vec![0.0; length], device);
    (length, (0..24).map(parameter).collect())
}

fn host(tensor: Tensor<Cuda, 1>) -> Vec<f32> {
    tensor.into_data().to_vec().unwrap()
}

#[test]
fn collectives_on_two_cards_equal_sums_on_the_host() {
    let Some((ranks, device)) = one_of_two() else { return };
    let (communicator, rank) = (ranks.communicator(), ranks.rank());
    let lengths = [1, 3, 1023, 4096, 1_000_003, 1 << 24];
    for round in 0..3 {
        let tensors = lengths.iter().map(|&length| on_device(rank, round + length, length, &device)).collect();
        let reduced = communicator.all_reduce_sum(tensors).unwrap();
        for (tensor, &length) in reduced.into_iter().zip(&lengths) {
            assert!(host(tensor) == sums(round + length, length), "{length} values, round {round}");
        }
        for length in [2, 5, 1000, 77_777] {
            let mut of_root = communicator.broadcast_each(vec![(on_device(rank, round, length, &device), 1)]).unwrap();
            assert!(host(of_root.remove(0)) == values(1, round, length), "{length} values");
        }
        assert_eq!(host(ranks.all_reduce_scalar(on_device(rank, 5, 1, &device)).unwrap()), sums(5, 1));
    }
    ranks.leave().unwrap();
}

/// Buckets are summed on the side stream while the section goes on; what the section computes meanwhile must not disturb them.
#[test]
fn buckets_that_are_summed_inside_a_section_are_right_after_it() {
    let Some((ranks, device)) = one_of_two() else { return };
    let (length, parameters) = large_parameters(&device);
    for round in 0..3 {
        let gradients: Vec<_> =
            (0..parameters.len()).map(|index| on_device(ranks.rank(), round + index, length, &device)).collect();
        let mut sink = ReducingSink::with_bucket_bytes(&ranks, Contributions::default(), 2 * 4 * length);
        sink.begin_micro_batch(true);
        Cuda::section(&device, || {
            for (parameter, gradient) in parameters.iter().zip(gradients) {
                // Work on memory that comes and goes between the buckets, as in a backward.
                let norm = <Cuda as firebrick_kernels::OptimizerOps>::squared_norm(std::slice::from_ref(&gradient));
                sink.add(parameter, gradient);
                drop(norm);
            }
        });
        let reduced = sink.finish().unwrap();
        for (index, parameter) in parameters.iter().enumerate() {
            let sum = host(reduced.get(&parameter.name).unwrap().clone());
            assert!(sum == sums(round + index, length), "round {round}, {}", parameter.name);
        }
    }
    ranks.leave().unwrap();
}

/// Codes and half floats arrive while the section computes, exchange by exchange, and memory that comes and goes does not disturb them.
#[test]
fn payloads_that_arrive_inside_a_section_are_those_of_their_root() {
    let Some((ranks, device)) = one_of_two() else { return };
    let (communicator, rank, length) = (ranks.communicator(), ranks.rank(), 1_000_003);
    let codes = |root: usize, block: usize| -> Vec<u8> { (0..length).map(|i| (i * 7 + root + block) as u8).collect() };
    let of = |root: usize, block: usize| -> [Payload<Cuda>; 2] {
        let data = TensorData::new(codes(root, block), [length]);
        let values = on_device(root, block, length, &device);
        [Payload::Codes(Tensor::from_data(data, (&device, DType::U8))), Payload::Values(values)]
    };
    // Block `n` has its codes on rank `n % 2` and its values on the other.
    let roots = |block: usize| [block % 2, 1 - block % 2];
    let blocks: Vec<Vec<Loan<Cuda>>> = (0..8)
        .map(|block| {
            let loan = |(payload, root): (Payload<Cuda>, usize)| {
                let layout = payload.layout();
                Loan { root, layout, own: (root == rank).then_some(payload) }
            };
            of(rank, block).into_iter().zip(roots(block)).map(loan).collect()
        })
        .collect();
    let work = on_device(rank, 3, 1 << 22, &device);
    for _ in 0..3 {
        let sums: Vec<(Tensor<Cuda, 1>, Payload<Cuda>)> = Cuda::section(&device, || {
            let mut next = Some(communicator.start_broadcast(blocks[0].clone(), &device).unwrap());
            (0..blocks.len())
                .map(|block| {
                    let mut arrived = next.take().unwrap().finish();
                    if let Some(loans) = blocks.get(block + 1) {
                        next = Some(communicator.start_broadcast(loans.clone(), &device).unwrap());
                    }
                    let values = arrived.pop().unwrap().into_values();
                    let norm = <Cuda as firebrick_kernels::OptimizerOps>::squared_norm(&[work.clone(), values]);
                    (norm, arrived.pop().unwrap())
                })
                .collect()
        });
        for (block, (norm, arrived)) in sums.into_iter().enumerate() {
            let found: Vec<i32> = arrived.into_codes().cast(IntDType::I32).into_data().to_vec().unwrap();
            let [of_codes, of_values] = roots(block);
            let expected = codes(of_codes, block).into_iter().map(i32::from);
            assert!(found.into_iter().eq(expected), "block {block}");
            let [_, values] = of(of_values, block);
            let expected =
                <Cuda as firebrick_kernels::OptimizerOps>::squared_norm(&[work.clone(), values.into_values()]);
            assert_eq!(host(norm), host(expected), "block {block}");
        }
    }
    ranks.leave().unwrap();
}

/// The shares of gradients that are summed while the section goes on, over several micro-batches.
#[test]
fn gradients_that_are_divided_inside_a_section_are_right_on_their_owners() {
    let Some((ranks, device)) = one_of_two() else { return };
    let (length, parameters) = large_parameters(&device);
    let listed: Vec<&Parameter<Cuda>> = parameters.iter().collect();
    let owners = ranks.owners(&listed);
    let bucket = 2 * 4 * length;
    let mut sink = ShardingSink::<Cuda>::new(&ranks, owners.clone(), Contributions::default(), bucket);
    for micro_batch in 0..2 {
        let gradients: Vec<_> =
            (0..parameters.len()).map(|index| on_device(ranks.rank(), micro_batch + index, length, &device)).collect();
        sink.begin_micro_batch(micro_batch == 1);
        Cuda::section(&device, || {
            for (parameter, gradient) in parameters.iter().zip(gradients) {
                let norm = <Cuda as firebrick_kernels::OptimizerOps>::squared_norm(std::slice::from_ref(&gradient));
                sink.add(parameter, gradient);
                drop(norm);
            }
        });
    }
    let share = sink.finish().unwrap();
    let is_own = |name: &str| owners[name] == ranks.rank();
    assert_eq!(share.len(), parameters.iter().filter(|parameter| is_own(&parameter.name)).count());
    for (index, _) in parameters.iter().enumerate().filter(|(_, parameter)| is_own(&parameter.name)) {
        let sum = host(share.get(&parameters[index].name).unwrap().clone());
        let expected = sums(index, length).into_iter().zip(sums(index + 1, length)).map(|(a, b)| a + b);
        assert!(sum.into_iter().eq(expected), "{}", parameters[index].name);
    }
    ranks.leave().unwrap();
}

/// Prints times of sums as large as the gradients of an adapter of an 8B, and as 1 GiB; nothing is asserted about them.
#[test]
fn times_of_sums_are_printed() {
    let Some((ranks, device)) = one_of_two() else { return };
    for (what, count, length) in
        [("168 MiB in one", 1, 42 << 20), ("168 MiB in 448", 448, 98_304), ("1 GiB in one", 1, 256 << 20)]
    {
        let mut tensors: Vec<Tensor<Cuda, 1>> = (0..count).map(|_| Tensor::zeros([length], &device)).collect();
        let mut best = f64::MAX;
        for _ in 0..12 {
            Cuda::sync(&device).unwrap();
            ranks.barrier().unwrap();
            let started = Instant::now();
            tensors = ranks.communicator().all_reduce_sum(tensors).unwrap();
            Cuda::sync(&device).unwrap();
            best = best.min(started.elapsed().as_secs_f64());
        }
        if ranks.is_main() {
            let bytes = (4 * count * length) as f64;
            show(&format!("all_reduce_sum, {what}: {:.3} ms, {:.0} GB/s bus", 1e3 * best, bytes / best / 1e9));
        }
    }
    let adapters: Vec<Parameter<Cuda>> = (0..448)
        .map(|index| Parameter::from_host(format!("p{index:03}"), &[98_304], Role::LoraA, vec![0.0; 98_304], &device))
        .collect();
    let parameters: Vec<_> = adapters.iter().collect();
    let (mut in_backward, mut at_the_end) = (f64::MAX, f64::MAX);
    for round in 0..12 {
        let gradients: Vec<_> = (0..448).map(|index| on_device(ranks.rank(), index, 98_304, &device)).collect();
        let mut sink = ReducingSink::for_parameters(&ranks, Contributions::default(), &parameters);
        sink.begin_micro_batch(true);
        Cuda::sync(&device).unwrap();
        ranks.barrier().unwrap();
        let started = Instant::now();
        Cuda::section(&device, || adapters.iter().zip(gradients).for_each(|(p, gradient)| sink.add(p, gradient)));
        Cuda::sync(&device).unwrap();
        in_backward = in_backward.min(started.elapsed().as_secs_f64());
        ranks.barrier().unwrap();
        let started = Instant::now();
        let reduced = sink.finish().unwrap();
        Cuda::sync(&device).unwrap();
        at_the_end = at_the_end.min(started.elapsed().as_secs_f64());
        if round == 0 {
            for (index, parameter) in adapters.iter().enumerate() {
                assert!(
                    host(reduced.get(&parameter.name).unwrap().clone()) == sums(index, 98_304),
                    "{}",
                    parameter.name
                );
            }
        }
    }
    if ranks.is_main() {
        let (in_backward, at_the_end) = (1e3 * in_backward, 1e3 * at_the_end);
        show(&format!(
            "168 MiB of 448 adapters: {in_backward:.3} ms within the backward, {at_the_end:.3} ms at its end"
        ));
    }
    ranks.leave().unwrap();
}

/// Changes to the recipe of a run under each of its names.
fn kinds() -> Vec<(&'static str, Vec<String>)> {
    let full = ["bnb_4bit=", "lora=", "mode=full", "train.learning_rate=1e-4"];
    let experts = format!("model='{}'", fixture("tiny-qwen3-moe").display());
    let gpt_oss = format!("model='{}'", fixture("quant-mxfp4-gpt-oss").display());
    let parameters = "lora={r=4,alpha=8,target_parameters=['mlp.experts.gate_up_proj','mlp.experts.down_proj']}";
    let kinds: [(&str, &[&[&str]]); 11] = [
        ("lora", &[&["bnb_4bit="]]),
        ("qlora", &[]),
        ("full", &[&full]),
        ("zero-1", &[&full, &["train.zero_stage=1"]]),
        ("zero-2", &[&full, &["train.zero_stage=2"]]),
        ("zero-3", &[&full, &["train.zero_stage=3"]]),
        ("qlora-zero-3", &[&["train.zero_stage=3", "train.recompute=full"]]),
        ("experts-zero-2", &[&full, &[&experts, "train.zero_stage=2"]]),
        ("experts-zero-3", &[&full, &[&experts, "train.zero_stage=3"]]),
        ("experts-qlora-zero-3", &[&[&experts, parameters, "train.zero_stage=3"]]),
        ("mxfp4-experts", &[&[&gpt_oss, parameters, "bnb_4bit=", "train.zero_stage=1"]]),
    ];
    kinds.map(|(name, changes)| (name, changes.concat().into_iter().map(str::to_owned).collect())).into()
}

/// LoRA, QLoRA, and every weight, also of experts, with all on both cards and with what ZeRO divides, in f32: two cards with half the
/// accumulation follow one card.
#[test]
fn two_cards_train_as_one() {
    const STEPS: [&str; 5] =
        ["backend=cuda", "compute=float32", "train.steps=8", "eval.every_steps=4", "train.micro_batch_size=1"];
    fn all<'a>(changes: &'a [String], accumulation: &'a str) -> Vec<&'a str> {
        STEPS.into_iter().chain(changes.iter().map(String::as_str)).chain([accumulation]).collect()
    }
    let folder = tempdir().unwrap();
    if let Some(statuses) = as_two_ranks(folder.path()) {
        assert_eq!(statuses, [0, 0]);
        for (kind, changes) in kinds().iter().filter(|(kind, _)| folder.path().join(kind).is_dir()) {
            let alone = tempdir().unwrap();
            finish(recipe(alone.path(), &all(changes, "train.gradient_accumulation=4")), NEW);
            let one = step_losses(&alone.path().join("run"));
            let two = step_losses(&folder.path().join(kind).join("run"));
            assert_eq!((one.len(), two.len()), (8, 8));
            let lines = metrics(&folder.path().join(kind).join("run"));
            let waits: Vec<f64> = lines.iter().filter_map(|line| line["comm_wait_ms"].as_f64()).collect();
            show(&format!("{kind}: ms per step of waiting for the other card: {waits:?}"));
            assert_eq!(waits.len(), 8);
            let largest = largest_difference(&one, &two);
            show(&format!("{kind}: losses of one and two cards differ by up to {largest:e}"));
            assert!(largest < 2e-4, "{kind}: {one:?} on one card, {two:?} on two");
        }
        return;
    }
    let folder = PathBuf::from(std::env::var_os(FOLDER).expect("this process was started as a rank"));
    for (number, (kind, changes)) in kinds().iter().enumerate() {
        let mut placement = Placement::from_environment().unwrap().expect("this process was started as a rank");
        // A job of its own for each run.
        placement.master_port += number as u16;
        let ranks = Ranks::join(&placement).unwrap();
        let config = recipe(&folder.join(kind), &all(changes, "train.gradient_accumulation=2"));
        let (console, interrupt) = (Console::QUIET, Interrupt::detached());
        run(RunOptions { config, resume: NEW, console, interrupt, trace: None, force: false, ranks, report: None })
            .unwrap();
    }
}

/// The other rank waits in a kernel of NCCL for one that is gone, and ends.
#[test]
fn a_rank_that_is_gone_ends_the_other_within_seconds() {
    let folder = tempdir().unwrap();
    if let Some(statuses) = as_two_ranks(folder.path()) {
        assert!([[0, 0], [0, 9]].contains(&statuses), "{statuses:?}");
        return;
    }
    let (ranks, device) = joined();
    for step in 0.. {
        if ranks.rank() == 1 && step == 20 {
            // As if it was killed: nothing is closed or said.
            std::process::exit(9);
        }
        let started = Instant::now();
        let sum = ranks.all_reduce_scalar(on_device(ranks.rank(), step, 1, &device));
        let result = sum.map(host).and_then(|sum| ranks.check("a step").map(|()| sum));
        match result {
            Ok(sum) => assert_eq!(sum, sums(step, 1)),
            Err(error) => {
                show(&format!("after {:.1} s: {error}", started.elapsed().as_secs_f64()));
                assert!(step >= 20 && error.to_string().contains("rank 1"), "step {step}: {error}");
                assert!(started.elapsed() < Duration::from_secs(30));
                return;
            }
        }
    }
}

/// Lets the card fail that this process trains on, once the run has come to step 15.
fn fail_at_step_15(lines: PathBuf, ordinal: usize) {
    spawn(move || {
        wait_for_step_15(&lines);
        fail_device(ordinal).unwrap();
    });
}

fn wait_for_step_15(lines: &Path) {
    let started = Instant::now();
    while !std::fs::read_to_string(lines).is_ok_and(|text| text.contains("\"step\":15,")) {
        assert!(started.elapsed() < PATIENCE, "the run does not reach step 15");
        sleep(Duration::from_millis(20));
    }
}

/// A rank of a run is killed, or stopped so that its connections stay open, or its card fails. The other waits for it in a kernel of NCCL,
/// and ends with the reason and the name of the checkpoint that stands.
#[test]
fn a_rank_of_a_run_that_is_killed_or_stopped_or_whose_card_fails_ends_the_other_within_30_seconds() {
    let reports = |folder: &Path, rank: usize| folder.join(format!("error-{rank}"));
    if let Some(folder) = std::env::var_os(FOLDER).map(PathBuf::from) {
        let placement = Placement::from_environment().unwrap().expect("this process was started as a rank");
        let ranks = Ranks::join(&placement).unwrap();
        let rank = ranks.rank();
        if rank == 1 && folder.join("trap").exists() {
            fail_at_step_15(folder.join("run/metrics.jsonl"), ranks.local_rank());
        }
        let changes = [
            "backend=cuda",
            "compute=float32",
            "train.steps=100000",
            "eval.every_steps=0",
            "checkpoint.every_steps=10",
            "bnb_4bit=",
        ];
        let (console, interrupt) = (Console::QUIET, Interrupt::detached());
        let config = recipe(&folder, &changes);
        let error =
            run(RunOptions { config, resume: NEW, console, interrupt, trace: None, force: false, ranks, report: None });
        std::fs::write(reports(&folder, rank), error.expect_err("a rank is lost").to_string()).unwrap();
        return;
    }
    for fault in ["-KILL", "-STOP", "trap"] {
        let folder = tempdir().unwrap();
        if fault == "trap" {
            std::fs::write(folder.path().join(fault), "").unwrap();
        }
        let Some([mut first, mut second]) = two_ranks(folder.path()) else { return };
        wait_for_step_15(&folder.path().join("run/metrics.jsonl"));
        let lost = Instant::now();
        if fault != "trap" {
            assert!(Command::new("kill").args([fault, &second.id().to_string()]).status().unwrap().success());
        }
        let status = end(&mut first, Duration::from_secs(60));
        let seconds = lost.elapsed().as_secs_f64();
        if fault != "trap" {
            second.kill().unwrap();
        }
        end(&mut second, Duration::from_secs(60));
        let error = |rank| std::fs::read_to_string(reports(folder.path(), rank)).unwrap_or_default();
        show(&format!("{fault}: status {status} after {seconds:.1} s: {}\n  the other: {}", error(0), error(1)));
        assert!(seconds < 30.0, "{fault}: {seconds} s");
        // A rank that ends itself says so on standard error; one that is ended by its own watch cannot write the file.
        assert!([0, 1].contains(&status), "{fault}: {status}");
        if status == 0 {
            assert!(error(0).contains("rank 1") && error(0).contains("Everything up to step"), "{fault}: {}", error(0));
        }
    }
}
