//! Whole runs in this process: learning, files, resuming, refusals, and timing.
//!
//! Trade-off: signals and a full disk need separate processes: `tests/program` tests them.

mod batch_size;
mod bench;
mod best;
mod checkpoints;
mod data;
mod folder;
mod guards;
mod learning;
mod mlflow;
mod new_recipe;
mod new_tokens;
mod preference;
mod refusals;
mod results;
mod resume;
#[cfg(unix)]
mod rewards;
mod small_data;
mod special_tokens;
mod wandb;
