//! The stages of a run and the commands that use them, each above the one before: `text` (generate, sampling, chat settings), `step` (the trainer,
//! the loss of pairs, evaluation), `prepare` (data and plan, what ranks agree on), `train_loop` (launch, start, log, save).
//!
//! Trade-off: concrete backends are named in one macro, [`with_backend!`](crate::with_backend), so every command is compiled once
//! per backend.

pub mod device;
pub mod interrupt;
pub mod local_ranks;
pub mod peaks;
pub mod prepare;
pub mod step;
mod text;
mod train_loop;

pub use prepare::{data_sets, plan_for, together};
pub use step::{assemble, evaluate, preference};
pub use text::{chat_settings, end_of_turn, generate, sampling, text_stream, verify};
pub use train_loop::launch::{RunOptions, reading_data, run};
pub use train_loop::replay::replay;
pub use train_loop::{ReportWriter, trace};
