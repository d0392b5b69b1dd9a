//! Whole runs in this process: what they learn and leave on disk, how they resume, what they refuse, how they are timed.
//!
//! Trade-off: signals and a full disk are left out; `firebrick-train` tests those next to their code.

mod bench;
mod checkpoints;
mod data;
mod folder;
mod learning;
mod mlflow;
mod new_tokens;
mod preference;
mod refusals;
mod results;
mod resume;
