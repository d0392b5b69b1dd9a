//! Describes this machine or a named one, measures its peaks, and checks what a run needs.

use std::process::ExitCode;

use anyhow::Context;
use clap::Args;
use firebrick_hwprofile::peaks::cache_folder;
use firebrick_hwprofile::{AcceleratorSpec, HardwareProfile};
use firebrick_trainer::config::BackendChoice;
use firebrick_trainer::console::Console;
use firebrick_trainer::doctor::examine;
use firebrick_trainer::plan::choose_backend;

use super::warn;
use crate::offered::Offered;
use firebrick_trainer::run::peaks::measure_peaks;

#[derive(Args)]
pub(crate) struct Profile {
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    /// Describe this machine of the table instead of the one at hand.
    #[arg(long = "for", value_name = "MACHINE", hide_possible_values = true, value_parser = one_machine())]
    machine: Option<&'static AcceleratorSpec>,
    /// Time large matrix multiplications of each format and copies, and keep the rates for the plans of this machine.
    #[arg(long, conflicts_with = "machine")]
    measure: bool,
    /// The backend to measure: auto, cuda, wgpu, candle or flex.
    #[arg(long, default_value_t, requires = "measure")]
    backend: BackendChoice,
}

pub(super) fn machine_ids() -> impl Iterator<Item = &'static str> {
    AcceleratorSpec::all().map(|machine| machine.id)
}

fn one_machine() -> Offered<&'static AcceleratorSpec> {
    Offered {
        values: machine_ids().collect(),
        parse: |name| AcceleratorSpec::named(name).map_err(|error| error.to_string()),
    }
}

pub(crate) fn profile(arguments: &Profile) -> anyhow::Result<()> {
    let mut profile = arguments.machine.map_or_else(HardwareProfile::detect_with_adapters, HardwareProfile::of_machine);
    if arguments.measure {
        let backend = choose_backend(arguments.backend, &profile)?.value;
        let peaks = measure_peaks(backend, &profile, &warn)?;
        let folder =
            cache_folder().context("there is no cache folder to keep the peaks in: set FIREBRICK_CACHE or HOME")?;
        let path = peaks.save(&folder).with_context(|| format!("cannot write to {}", folder.display()))?;
        warn(&format!("kept in {}", path.display()));
        profile.measured.retain(|kept| (&kept.backend, &kept.device) != (&peaks.backend, &peaks.device));
        profile.measured.push(peaks);
    }
    let text = if arguments.json { serde_json::to_string_pretty(&profile)? } else { profile.to_string() };
    Console::VERBOSE.print(text.trim_end_matches('\n'));
    Ok(())
}

/// Prints what a run needs from this machine, line by line. The status is 1 if a run would fail.
pub(crate) fn doctor() -> ExitCode {
    let starts = examine(&mut |check| Console::VERBOSE.print(&check.to_string()));
    if starts { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
