#![doc = include_str!("../README.md")]

pub mod chosen;
pub mod config;
pub mod console;
pub mod doctor;
pub mod error;
pub mod extraction;
pub mod grpo;
#[cfg(test)]
mod hostile_json;
pub mod hub;
pub mod metrics;
pub mod new_recipe;
pub mod plan;
pub mod run;
pub mod shipped;
pub mod state;
pub mod storage;

pub use error::RunError;
