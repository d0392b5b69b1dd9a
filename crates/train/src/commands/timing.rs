//! Timing steps and the writing of text.
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
use crate::bench::{BenchOptions, bench};
use crate::bench_generate::{GenerationOptions, bench_generation};

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
