//! Tokens per second of the shipped recipes' training step on each backend, with the roofline of the same machine in the same run.
//!
//! `cargo bench -p firebrick-benches --features candle -- --help` lists the arguments; README.md describes what is measured.
//! Trade-off: an unoptimized build is timed with a note, and never saved.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "this is the edge of the program")]

use std::path::Path;
use std::process::ExitCode;
use std::{fs, io};

use clap::Parser;
use firebrick_benches::rate::Rates;
use firebrick_benches::report::{BlockReport, RecipeReport, Report, machine};
use firebrick_benches::step::{StepTimes, Workload};
use firebrick_hwprofile::HardwareProfile;
use firebrick_kernels::backends::BackendKind;
use firebrick_trainer::config::BackendChoice;
use firebrick_trainer::plan::choose_backend;
use firebrick_trainer::{RunError, with_backend};

/// The allocator of the `firebrick` binary: what is timed is what runs.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// The recipes whose step is timed: QLoRA, and every weight trained.
const RECIPES: [&str; 2] = ["quickstart", "quickstart-pretrain"];
/// The backends that can be requested.
const BACKENDS: [BackendKind; 3] = [BackendKind::Flex, BackendKind::Candle, BackendKind::Wgpu];

/// Times training steps, and the GEMMs that they consist of.
#[derive(Parser)]
#[command(name = "train_step")]
struct Args {
    /// Steps to time on each backend, after the warm-up.
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u16).range(1..))]
    steps: u16,
    /// Only these backends, separated by commas; otherwise all that are compiled in: flex, candle, wgpu.
    #[arg(long, value_delimiter = ',')]
    backends: Vec<String>,
    /// Write benches/results/train-step-<backends>.md and .json.
    #[arg(long)]
    save: bool,
    /// `cargo bench` adds this; `cargo test --benches` does not, and then nothing is timed.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    if !args.bench {
        println!("nothing is timed: run this with `cargo bench -p firebrick-benches`");
        return ExitCode::SUCCESS;
    }
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("error: {message}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<(), String> {
    let optimized = !cfg!(debug_assertions);
    if args.save && !optimized {
        return Err(
            "an unoptimized build's times are not worth saving: leave --save out, or use `cargo bench`".to_owned()
        );
    }
    let mut notes = Vec::new();
    if !optimized {
        notes.push("This build is not optimized: the times mean nothing.".to_owned());
    }
    let backends = backends(&args.backends, &mut notes)?;
    let report = measure(args, &backends, notes).map_err(|error| error.to_string())?;
    println!("\n{report}");
    if args.save {
        save(&report, &backends)
            .map_err(|error| format!("the results cannot be written to benches/results: {error}"))?;
    }
    Ok(())
}

/// The backends to time: those requested, or all, as far as they are compiled in and find a device.
fn backends(requested: &[String], notes: &mut Vec<String>) -> Result<Vec<BackendKind>, String> {
    let profile = HardwareProfile::detect();
    let known = BACKENDS.map(|kind| kind.to_string());
    if let Some(unknown) = requested.iter().find(|name| !known.contains(name)) {
        return Err(format!("there is no backend {unknown:?} here: name some of {}", known.join(",")));
    }
    let mut usable = Vec::new();
    for kind in BACKENDS {
        let is_requested = requested.contains(&kind.to_string());
        if !is_requested && (!requested.is_empty() || !kind.is_compiled()) {
            continue;
        }
        match choose_backend(BackendChoice::Named(kind), &profile) {
            Ok(_) => usable.push(kind),
            Err(error) if is_requested => return Err(error.to_string()),
            Err(error) => notes.push(format!("{kind} was left out: {error}")),
        }
    }
    let cpu_backends = [BackendKind::Flex, BackendKind::Candle];
    if usable.is_empty() || !cpu_backends.into_iter().any(BackendKind::is_compiled) {
        return Err(
            "no backend to time, or no CPU backend to measure the roofline with: add --features flex,candle".to_owned()
        );
    }
    Ok(usable)
}

fn measure(args: &Args, backends: &[BackendKind], mut notes: Vec<String>) -> Result<Report, RunError> {
    let steps = usize::from(args.steps);
    let (mut recipes, mut block) = (Vec::new(), None);
    for name in RECIPES {
        let Some(workload) = Workload::read(name)? else {
            notes.push(format!("{name} was left out: its data is not there. `cargo xtask quickstart-data` makes it."));
            continue;
        };
        recipes.push(time_recipe(&workload, backends, steps)?);
        if block.is_none() {
            block = time_block(&workload, steps)?;
        }
    }
    Ok(Report { machine: machine(), steps, recipes, block, notes })
}

fn time_recipe(workload: &Workload, backends: &[BackendKind], steps: usize) -> Result<RecipeReport, RunError> {
    // The roofline is the machine's: both CPU backends may raise it, even if only one of them is timed.
    let roofline_backends: Vec<_> =
        [BackendKind::Flex, BackendKind::Candle].into_iter().filter(|kind| kind.is_compiled()).collect();
    let (products, mut rates, mut times) = (workload.products(), Rates::default(), Vec::new());
    eprintln!("{}: rates of its GEMMs", workload.name);
    rates.measure(&products, &roofline_backends);
    for &kind in backends {
        eprintln!("{}: steps on {kind}", workload.name);
        let found: StepTimes = with_backend!(kind, B => workload.time::<B>(steps))?;
        times.push((kind, found));
    }
    // Once more: if the machine was slow for a while, that must not lower the roofline.
    rates.measure(&products, &roofline_backends);
    Ok(RecipeReport::new(workload, &rates, &times))
}

#[cfg(feature = "flex")]
fn time_block(workload: &Workload, steps: usize) -> Result<Option<BlockReport>, RunError> {
    eprintln!("{}: one layer", workload.name);
    let times = firebrick_benches::block::time_block(workload, steps)?;
    Ok(Some(BlockReport {
        recipe: workload.name.clone(),
        hand_written_ms: times.hand_written.times(1e3),
        autodiff_ms: times.autodiff.times(1e3),
    }))
}

#[cfg(not(feature = "flex"))]
fn time_block(_: &Workload, _: usize) -> Result<Option<BlockReport>, RunError> {
    Ok(None)
}

fn save(report: &Report, backends: &[BackendKind]) -> io::Result<()> {
    let names: Vec<String> = backends.iter().map(ToString::to_string).collect();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("results");
    fs::create_dir_all(&folder)?;
    let stem = format!("train-step-{}", names.join("-"));
    fs::write(folder.join(format!("{stem}.md")), report.to_string())?;
    let json = serde_json::to_string_pretty(report)?;
    fs::write(folder.join(format!("{stem}.json")), json + "\n")?;
    println!("written: benches/results/{stem}.md and .json");
    Ok(())
}
