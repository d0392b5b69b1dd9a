//! The command that trains a recipe.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::Args;
use firebrick_trainer::config::RunConfig;
use firebrick_trainer::console::{Console, Outcome, program};
use firebrick_trainer::run::interrupt::Interrupt;
use firebrick_trainer::run::trace::TraceSteps;
use firebrick_trainer::run::{RunOptions, replay, run};
use firebrick_trainer::state::resume_point::ResumeFrom;

use super::ranks::LocalRankCount;
use super::recipes::Recipe;
use crate::report::write_at_end;

#[derive(Args)]
pub(crate) struct Train {
    #[command(flatten)]
    recipe: Recipe,
    /// Continue a run from its newest checkpoint. RUN is a run folder, a run's name or a checkpoint folder; without it, the newest
    /// run of the recipe's name. Without a recipe, the one that RUN saved.
    #[arg(long, value_name = "RUN", num_args = 0..=1)]
    resume: Option<Option<PathBuf>>,
    /// Run the step that ended a run again, in this process, without an update, and print the sizes of its outputs and gradients, layer by layer.
    /// RUN is a run folder. Without a recipe, the one that RUN saved.
    #[arg(long, value_name = "RUN", conflicts_with_all = ["resume", "trace"])]
    replay: Option<PathBuf>,
    /// Trace these steps, e.g. 5-8: when the host queued and waited and when the device ran what, written to trace.json in the run
    /// folder, for <https://ui.perfetto.dev>. Only CUDA shows its device.
    #[arg(long, value_name = "STEPS")]
    trace: Option<TraceSteps>,
    /// Train although the plan says that the run does not fit into memory.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    ranks: LocalRankCount,
}

impl Train {
    /// Returns the recipe file: the given one, or the config.toml of the run folder that RUN is or is inside.
    fn config(&self) -> anyhow::Result<PathBuf> {
        if let Some(recipe) = self.recipe.given()? {
            return Ok(recipe.clone());
        }
        let named = self.resume.as_ref().and_then(Option::as_ref).or(self.replay.as_ref());
        let folders = named.into_iter().flat_map(|run| run.ancestors().take(3));
        let found = folders.map(|folder| folder.join("config.toml")).find(|path| path.is_file());
        found.with_context(|| {
            let program = program();
            format!("give the recipe first, as in `{program} train my.toml`, or the run as in --resume runs/my-run")
        })
    }
}

/// Trains. If a signal ended the run, the exit status is that of a process killed by the signal; if its time was up, that of `timeout`.
pub(crate) fn train(arguments: Train) -> anyhow::Result<ExitCode> {
    let path = arguments.config()?;
    let config = RunConfig::load(&path, &arguments.recipe.overrides)?;
    if let Some(run) = &arguments.replay {
        replay(config, run, Console::VERBOSE)?;
        return Ok(ExitCode::SUCCESS);
    }
    let interrupt = || Interrupt::install().context("cannot listen for Ctrl-C");
    let (ranks, interrupt) = match arguments.ranks.join(config.backend, false, interrupt)? {
        ControlFlow::Break(ended) => return Ok(ended),
        ControlFlow::Continue(joined) => joined,
    };
    let resume = arguments.resume.map(|named| named.map_or(ResumeFrom::Newest, ResumeFrom::Named));
    let console = if ranks.is_main() { Console::VERBOSE } else { Console::QUIET };
    let mut words = vec![path.display().to_string()];
    words.extend(arguments.recipe.overrides.into_iter().flat_map(|set| ["--set".to_owned(), set]));
    words.extend(arguments.ranks.words());
    let Train { trace, force, .. } = arguments;
    let outcome =
        run(RunOptions { config, resume, console, interrupt, trace, force, ranks, report: Some(write_at_end) })?;
    let Outcome::Interrupted { step, status, folder, .. } = outcome else { return Ok(ExitCode::SUCCESS) };
    console.stopped(step, &words, &folder);
    Ok(ExitCode::from(status))
}
