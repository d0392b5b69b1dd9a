#![doc = include_str!("../README.md")]

pub mod assemble;
pub mod backend;
pub mod checkpoint;
pub mod checkpoint_files;
pub mod config;
pub mod error;
pub mod evaluate;
pub mod generate;
pub mod interrupt;
pub mod metrics;
pub mod plan;
pub mod prepare;
pub mod progress;
pub mod report;
pub mod run;
pub mod run_folder;
pub mod step;
pub mod storage;
pub mod tensorboard;
pub mod verify;

pub use error::RunError;
