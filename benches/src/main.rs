//! `bench-matrix`: the operations of training and whole steps on every available backend, each checked against its reference in the run that times
//! it, next to peaks that are measured in the same run.
//!
//! The order is: peaks, then cases, backend by backend; then other programs on the same work, if requested; then the files. Every backend has a share
//! of the time, and cases that do not fit into it are named.
//! Trade-off: one process for all backends, so a driver that aborts ends the whole run; results are written after each backend.

mod case;
mod compare;
mod models;
mod numbers;
mod options;
mod peers;
mod results;
mod run_backend;
mod show;
mod subjects;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use std::{fs, io};

use anyhow::Context;
use chrono::DateTime;
use clap::Parser;
use firebrick_hwprofile::HardwareProfile;
use firebrick_hwprofile::memory::human_bytes;
use firebrick_kernels::BackendKind;
use firebrick_trainer::config::BackendChoice;
use firebrick_trainer::console::Console;
use firebrick_trainer::plan::choose_backend;
use firebrick_trainer::{RunError, with_backend};

use compare::compare;
use options::MatrixOptions;
use results::{MatrixResults, SCHEMA, VERSION};
use run_backend::{Request, run_backend};
use subjects::StepReference;

/// The allocator of the `train` binary, so that timings match it.
#[global_allocator]
static ALLOCATOR: firebrick_data::BoundedAllocator<mimalloc::MiMalloc> =
    firebrick_data::BoundedAllocator(mimalloc::MiMalloc);

/// Seconds of the short run and of the whole one without other programs: with the last case and the files they stay below 2 and 10 minutes.
const QUICK_S: u64 = 95;
const WHOLE_S: u64 = 540;

/// Minimum time of a backend: with less it would measure only its peaks.
const LEAST_OF_A_BACKEND: Duration = Duration::from_secs(10);

fn main() -> ExitCode {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "warn".into());
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).init();
    execute(&MatrixOptions::parse()).unwrap_or_else(|error| {
        warn(&format!("error: {error:#}"));
        ExitCode::FAILURE
    })
}

/// Runs the matrix. Fails if a result was wrong or a device failed, after everything was printed and written.
fn execute(options: &MatrixOptions) -> anyhow::Result<ExitCode> {
    if let Some(refusal) = options.refusal() {
        anyhow::bail!("--subjects: {refusal}");
    }
    let earlier = options.compare.as_deref().map(MatrixResults::read).transpose()?;
    let (results, written) = run(options)?;
    let mut text = show::terminal(&results);
    if let Some(earlier) = &earlier {
        text.push_str(&format!("\n{}", compare(earlier, &results)));
    }
    Console::VERBOSE.print(&text);
    written.iter().for_each(|path| Console::VERBOSE.print(&format!("written: {}", path.display())));
    let [_, wrong, failed, _] = results.counts();
    Ok(if wrong + failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Prints a progress line to standard error. If that is closed, the error is ignored.
fn warn(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// Runs the matrix and writes its files. A wrong or failed case is a row of the results, not an error.
fn run(options: &MatrixOptions) -> anyhow::Result<(MatrixResults, Vec<PathBuf>)> {
    let (started, profile) = (Instant::now(), HardwareProfile::detect_with_adapters());
    let mut results = begin(options, &profile);
    let backends = backends(options, &profile, &mut results.notes)?;
    results.notes.extend(load_note("at the start", &profile));
    let needs_reference = backends.iter().any(|&kind| kind != BackendKind::Flex);
    let reference = needs_reference.then(StepReference::compute).transpose()?;
    let budget = Duration::from_secs(if options.quick { QUICK_S } else { WHOLE_S });
    for (index, &kind) in backends.iter().enumerate() {
        let left = budget.saturating_sub(started.elapsed());
        if left < LEAST_OF_A_BACKEND {
            results.notes.push(format!("{kind} was left out: the time of the run was spent by those before it"));
            continue;
        }
        let request = Request {
            kind,
            options,
            profile: &profile,
            reference: reference.filter(|_| kind != BackendKind::Flex),
            // The next backend gets the time that one does not need.
            deadline: Instant::now() + left.mul_f64(share(&backends[index..])),
            print: &warn,
        };
        with_backend!(kind, B => run_backend::<B>(&request, &mut results));
        results.seconds = started.elapsed().as_secs_f64();
        write(options.out.as_deref(), &results)?;
    }
    results.notes.extend(load_note("at the end", &profile));
    if options.peers {
        results.peers = Some(peers::run(options, &results, &warn));
    }
    results.seconds = started.elapsed().as_secs_f64();
    let written = write(options.out.as_deref(), &results)?;
    Ok((results, written))
}

/// Creates the results without rows: date, program and machine.
fn begin(options: &MatrixOptions, profile: &HardwareProfile) -> MatrixResults {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let date = DateTime::from_timestamp(since.as_secs() as i64, 0);
    let optimized = !cfg!(debug_assertions);
    let note = "This build is not optimized: its times say nothing about the project.";
    MatrixResults {
        schema: SCHEMA.to_owned(),
        version: VERSION,
        program: env!("CARGO_PKG_VERSION").to_owned(),
        date: date.map(|date| date.format("%Y-%m-%d %H:%M UTC").to_string()).unwrap_or_default(),
        quick: options.quick,
        optimized,
        seconds: 0.0,
        machine: machine(profile),
        backends: Vec::new(),
        rows: Vec::new(),
        peers: None,
        notes: (!optimized).then(|| note.to_owned()).into_iter().collect(),
    }
}

fn machine(profile: &HardwareProfile) -> Vec<String> {
    let (cpu, memory) = (&profile.cpu, human_bytes(profile.memory.total_bytes));
    let (name, threads, cores, simd) = (&cpu.name, cpu.logical_cores, cpu.physical_cores, cpu.simd);
    let mut lines = vec![format!("{name}, {threads} threads on {cores} cores, {simd}; {memory} of memory")];
    for gpu in &profile.gpus {
        let limit = gpu.power_limit_w.map_or_else(String::new, |watts| format!(", limited to {watts:.0} W"));
        let memory = human_bytes(gpu.memory_total_bytes);
        lines.push(format!("{}, {memory}, driver {}{limit}", gpu.name, gpu.driver_version));
    }
    lines
}

/// Reports other load on the processor, which makes times longer.
fn load_note(when: &str, profile: &HardwareProfile) -> Option<String> {
    let text = fs::read_to_string("/proc/loadavg").ok()?;
    let load: f64 = text.split_whitespace().next()?.parse().ok()?;
    Some(format!("Load average {when}: {load:.2} on {} hardware threads.", profile.cpu.logical_cores))
}

/// Returns the requested backends, or all that are compiled in and find a device.
fn backends(
    options: &MatrixOptions,
    profile: &HardwareProfile,
    notes: &mut Vec<String>,
) -> Result<Vec<BackendKind>, RunError> {
    // CUDA first: it has the most cases.
    let order = [BackendKind::Cuda, BackendKind::Flex, BackendKind::Candle, BackendKind::Wgpu];
    let mut usable = Vec::new();
    for kind in order {
        let is_named = options.backends.contains(&kind);
        if !is_named && (!options.backends.is_empty() || !kind.is_compiled()) {
            continue;
        }
        match choose_backend(BackendChoice::Given(kind), profile) {
            Ok(_) => usable.push(kind),
            Err(error) if is_named => return Err(error),
            Err(error) => notes.push(format!("{kind} was left out: {error}")),
        }
    }
    Ok(usable)
}

/// Returns the first backend's share of the time, weighted by the number and importance of cases.
fn share(backends: &[BackendKind]) -> f64 {
    let weight = |kind: &BackendKind| match kind {
        BackendKind::Cuda => 4.0,
        BackendKind::Flex => 2.0,
        BackendKind::Candle | BackendKind::Wgpu => 1.0,
    };
    weight(&backends[0]) / backends.iter().map(weight).sum::<f64>()
}

/// Writes all files of the results, if a folder was given.
fn write(folder: Option<&Path>, results: &MatrixResults) -> anyhow::Result<Vec<PathBuf>> {
    let Some(folder) = folder else { return Ok(Vec::new()) };
    let failed = || format!("the results cannot be written to {}", folder.display());
    fs::create_dir_all(folder).with_context(failed)?;
    let json = serde_json::to_string_pretty(results).expect("plain data");
    let mut files = vec![
        ("matrix.json".to_owned(), json + "\n"),
        ("matrix.md".to_owned(), show::markdown(results)),
        ("matrix.html".to_owned(), show::page(results)),
    ];
    for backend in &results.backends {
        files.push((format!("roofline-{}.svg", backend.backend), show::roofline_file(results, backend)));
    }
    let mut written = Vec::new();
    for (name, text) in files {
        let path = folder.join(name);
        fs::write(&path, text).with_context(failed)?;
        written.push(path);
    }
    Ok(written)
}
