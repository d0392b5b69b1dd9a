//! Ranks on this machine, as the commands that train and time take them.
//!
//! Trade-off: processes are the only kind of ranks, on the CPU too.

use std::process::ExitCode;

use clap::Args;
use firebrick_parallel::Placement;
use firebrick_trainer::RunError;
use firebrick_trainer::config::BackendChoice;
use firebrick_trainer::run::local_ranks::{self, GpuCount};

/// What this process is.
pub(crate) enum Place {
    /// It started ranks, which have ended with this status.
    Supervised(i32),
    /// A rank of a job, or the only one.
    Rank(Option<Box<Placement>>),
}

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
    /// Starts the ranks that are requested, unless this process is one of them, or was started as one by another launcher.
    pub(crate) fn place(&self, backend: BackendChoice, is_for_programs: bool) -> Result<Place, RunError> {
        let placement = local_ranks::placement(!self.words().is_empty())?;
        if placement.is_none() {
            let count = local_ranks::requested(backend, self.gpus, self.ranks.map(|ranks| ranks as usize))?;
            if count > 1 {
                return Ok(Place::Supervised(local_ranks::run_supervised(count, is_for_programs)?));
            }
        }
        Ok(Place::Rank(placement.map(Box::new)))
    }

    /// The option as it was typed.
    pub(crate) fn words(&self) -> Vec<String> {
        let gpus = self.gpus.map(|gpus| match gpus {
            GpuCount::All => ["--gpus".to_owned(), "all".to_owned()],
            GpuCount::Number(number) => ["--gpus".to_owned(), number.to_string()],
        });
        gpus.or(self.ranks.map(|ranks| ["--ranks".to_owned(), ranks.to_string()])).into_iter().flatten().collect()
    }
}

/// A status that fits into what a process can return; any other is a failure.
pub(crate) fn status(status: i32) -> ExitCode {
    u8::try_from(status).map_or(ExitCode::FAILURE, ExitCode::from)
}
