//! The stages of a run and the commands that use them: prepare, train step by step, evaluate, generate.
//!
//! Trade-off: concrete backends are named in one macro, [`with_backend!`](crate::with_backend), so every command is compiled once
//! per backend.

pub mod assemble;
pub mod chat_settings;
pub mod data_sets;
pub mod device;
pub mod end_of_turn;
pub mod eval_prompts;
pub mod evaluate;
mod first_loss;
pub mod generate;
pub mod interrupt;
mod launch;
pub mod local_ranks;
pub mod peaks;
pub mod plan_for;
pub mod preference;
pub mod prepare;
mod reference;
pub mod sampling;
mod start;
pub mod step;
pub mod text_stream;
pub mod together;
pub mod trace;
mod train_loop;
pub mod verify;
mod weight_notes;

pub use launch::{RunOptions, reading_data, run};
pub use train_loop::ReportWriter;
