//! Timing steps, operations and the writing of text.
//!
//! Trade-off: reports go to standard output as text or as one JSON object, in no other format.

use std::process::ExitCode;

use clap::Args;
use firebrick_hwprofile::measure::ProcessClock;
use firebrick_parallel::Ranks;
use firebrick_trainer::console::Console;
use firebrick_trainer::run::interrupt::Interrupt;
use firebrick_trainer::run::local_ranks;

use super::ranks::{LocalRankCount, Place, status};
use super::warn;
#[cfg(feature = "flex")]
use crate::bench::matrix::{MatrixOptions, bench_matrix};
use crate::bench::{BenchOptions, GenerationOptions, bench, bench_generation};

#[derive(Args)]
pub(crate) struct Bench {
    #[command(flatten)]
    options: BenchOptions,
    /// Print one JSON object as the last line, and everything else to standard error.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    ranks: LocalRankCount,
}

#[cfg(feature = "flex")]
#[derive(Args)]
pub(crate) struct BenchMatrix {
    #[command(flatten)]
    options: MatrixOptions,
}

#[derive(Args)]
pub(crate) struct BenchGenerate {
    #[command(flatten)]
    options: GenerationOptions,
    /// Print one JSON object as the last line, and everything else to standard error.
    #[arg(long)]
    json: bool,
}

pub(crate) fn time_steps(arguments: &Bench, clock: ProcessClock) -> anyhow::Result<ExitCode> {
    let Bench { options, json, ranks } = arguments;
    let placement = match ranks.place(options.backend, *json)? {
        Place::Supervised(ended) => return Ok(status(ended)),
        Place::Rank(placement) => placement,
    };
    local_ranks::follow_supervisor(&Interrupt::detached());
    let ranks = placement.as_deref().map_or_else(|| Ok(Ranks::single()), Ranks::join)?;
    let quiet: &dyn Fn(&str) = &|_| ();
    let report = bench(options, &ranks, clock, if ranks.is_main() { &warn } else { quiet })?;
    if ranks.is_main() && *json {
        warn(&report.to_string());
        Console::VERBOSE.print(&serde_json::to_string(&report)?);
    } else if ranks.is_main() {
        Console::VERBOSE.print(&report.to_string());
    }
    Ok(ExitCode::SUCCESS)
}

/// Fails if a result was wrong or a device failed, after everything was printed and written.
#[cfg(feature = "flex")]
pub(crate) fn time_matrix(BenchMatrix { options }: &BenchMatrix) -> anyhow::Result<ExitCode> {
    if let Some(refusal) = options.refusal() {
        anyhow::bail!("--subjects: {refusal}");
    }
    let run = bench_matrix(options, &warn)?;
    Console::VERBOSE.print(&run.text);
    for path in &run.written {
        Console::VERBOSE.print(&format!("written: {}", path.display()));
    }
    let bad = run.results.wrong().count() + run.results.failed().count();
    Ok(if bad == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Prints how fast text is written.
pub(crate) fn time_generation(BenchGenerate { options, json }: &BenchGenerate) -> anyhow::Result<()> {
    let report = bench_generation(options)?;
    if *json {
        warn(report.to_string().trim_end());
        Console::VERBOSE.print(&serde_json::to_string(&report)?);
    } else {
        Console::VERBOSE.print(report.to_string().trim_end());
    }
    Ok(())
}
