//! Errors between ranks.

use std::time::Duration;

use firebrick_kernels::CommError;

/// Ranks could not be started, do not find each other, do not belong to one job, or an exchange failed. No step may be taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "messages say what variants and their fields are")]
pub enum ParallelError {
    /// A rank is gone, or ranks disagree about what they exchange.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The variables that a launcher sets are incomplete or wrong.
    #[error("this process was started as one of several ranks (by {launcher}), but {problem}")]
    Environment { launcher: &'static str, problem: String },
    #[error(
        "rank 0 cannot listen on {address}: {problem}. MASTER_ADDR must be an address of the machine of rank 0, and the port must be \
         free there: choose another with MASTER_PORT, or FIREBRICK_PORT where the launcher uses MASTER_PORT itself"
    )]
    Listen { address: String, problem: String },
    #[error(
        "{missing} of {world_size} did not come to {address} within {}: {refused}look at their logs, check that MASTER_ADDR and \
         MASTER_PORT are the same on all ranks and that no firewall is between them; FIREBRICK_RENDEZVOUS_TIMEOUT (seconds) is how long \
         rank 0 waits", seconds(*.waited)
    )]
    Missing {
        /// The ranks, in words.
        missing: String,
        world_size: usize,
        address: String,
        waited: Duration,
        /// Connections that were refused, in words; may be empty.
        refused: String,
    },
    #[error(
        "rank {rank} did not reach rank 0 at {address} within {}: {problem}. Look at the log of rank 0, check that MASTER_ADDR and \
         MASTER_PORT are the same on all ranks and that no firewall is between them", seconds(*.waited)
    )]
    Unreachable { rank: usize, address: String, waited: Duration, problem: String },
    /// Rank 0 did not accept this rank, or is not the expected rank 0.
    #[error("rank {rank} was not accepted into the job at {address}: {reason}")]
    Refused { rank: usize, address: String, reason: String },
    /// A rank would not compute the same run.
    #[error(
        "rank {rank} has {key} = {found}, rank 0 has {expected}: all ranks must run the same program with the same recipe, model and \
         data. Nothing was trained"
    )]
    Differs { rank: usize, key: String, found: String, expected: String },
    #[error("rank {rank} could not be started as {program}: {problem}")]
    Start { rank: usize, program: String, problem: String },
}

fn seconds(duration: Duration) -> String {
    format!("{:.0} s", duration.as_secs_f64())
}
