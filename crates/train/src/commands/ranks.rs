//! Local ranks, for the commands that train and time.

use std::ops::ControlFlow;
use std::process::ExitCode;

use clap::Args;
use firebrick_parallel::Ranks;
use firebrick_trainer::config::BackendChoice;
use firebrick_trainer::run::interrupt::Interrupt;
use firebrick_trainer::run::local_ranks::{self, GpuCount};

/// Ranks on this machine. Other launchers (torchrun, srun, mpirun) start ranks themselves: docs/scaling.md.
#[derive(Args)]
pub(crate) struct LocalRankCount {
    /// Train on this many GPUs of this machine, or on all: one process per GPU, each with its own rows of every step.
    #[arg(long, value_name = "N|all", conflicts_with = "ranks")]
    gpus: Option<GpuCount>,
    /// The same with this many processes, for backends that compute on the CPU.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    ranks: Option<u32>,
}

impl LocalRankCount {
    /// Starts the requested ranks and returns the status with which they ended. A process that is one of them, or that another launcher started as a
    /// rank, joins the others instead.
    pub(crate) fn join(
        &self,
        backend: BackendChoice,
        is_for_programs: bool,
        interrupt: impl FnOnce() -> anyhow::Result<Interrupt>,
    ) -> anyhow::Result<ControlFlow<ExitCode, (Ranks, Interrupt)>> {
        let placement = local_ranks::placement(!self.words().is_empty())?;
        if placement.is_none() {
            let count = local_ranks::requested(backend, self.gpus, self.ranks.map(|ranks| ranks as usize))?;
            if count > 1 {
                return Ok(ControlFlow::Break(status(local_ranks::run_supervised(count, is_for_programs)?)));
            }
        }
        let interrupt = interrupt()?;
        local_ranks::follow_supervisor(&interrupt);
        let ranks = placement.as_ref().map_or_else(|| Ok(Ranks::single()), Ranks::join)?;
        Ok(ControlFlow::Continue((ranks, interrupt)))
    }

    /// Returns the option as it was typed.
    pub(crate) fn words(&self) -> Vec<String> {
        let gpus = self.gpus.map(|gpus| match gpus {
            GpuCount::All => ["--gpus".to_owned(), "all".to_owned()],
            GpuCount::Number(number) => ["--gpus".to_owned(), number.to_string()],
        });
        gpus.or(self.ranks.map(|ranks| ["--ranks".to_owned(), ranks.to_string()])).into_iter().flatten().collect()
    }
}

/// Converts a status that fits into an exit code; any other is a failure.
pub(crate) fn status(status: i32) -> ExitCode {
    u8::try_from(status).map_or(ExitCode::FAILURE, ExitCode::from)
}
