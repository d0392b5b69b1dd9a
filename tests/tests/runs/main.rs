//! Whole runs in this process: learning, files, resuming, refusals, and timing.
//!
//! Trade-off: signals and a full disk need separate processes: `terminal.rs` and `full_disk.rs` test them.

mod batch_size;
mod bench;
mod best;
mod checkpoints;
mod data;
mod folder;
mod learning;
mod mlflow;
mod new_recipe;
mod new_tokens;
mod preference;
mod refusals;
mod results;
mod resume;
mod special_tokens;
mod wandb;
