//! Commands that time training steps and text generation.

use std::fmt::Display;
use std::ops::ControlFlow;
use std::process::ExitCode;

use clap::Args;
use firebrick_hwprofile::measure::ProcessClock;
use firebrick_trainer::console::Console;
use firebrick_trainer::run::interrupt::Interrupt;
use serde::Serialize;

use super::ranks::LocalRankCount;
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
    let (ranks, _interrupt) = match ranks.join(options.backend, *json, || Ok(Interrupt::detached()))? {
        ControlFlow::Break(ended) => return Ok(ended),
        ControlFlow::Continue(joined) => joined,
    };
    let quiet: &dyn Fn(&str) = &|_| ();
    let report = bench(options, &ranks, clock, if ranks.is_main() { &warn } else { quiet })?;
    if ranks.is_main() {
        print(&report, *json)?;
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn time_generation(BenchGenerate { options, json }: &BenchGenerate) -> anyhow::Result<()> {
    print(&bench_generation(options)?, *json)
}

/// Prints a report as text; or prints the text on standard error and the report as one JSON object.
fn print(report: &(impl Display + Serialize), json: bool) -> anyhow::Result<()> {
    let text = report.to_string();
    if json {
        warn(text.trim_end());
        Console::VERBOSE.print(&serde_json::to_string(report)?);
    } else {
        Console::VERBOSE.print(text.trim_end());
    }
    Ok(())
}
