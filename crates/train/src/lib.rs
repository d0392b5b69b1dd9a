#![doc = include_str!("../README.md")]

pub mod bench;
pub mod compress;
pub mod config;
pub mod console;
pub mod error;
pub mod export;
mod html;
pub mod hub;
pub mod inspect;
pub mod metrics;
pub mod plan;
pub mod push;
pub mod report;
pub mod run;
pub mod state;

pub use error::RunError;
