#![doc = include_str!("../README.md")]

#[cfg(feature = "flex")]
pub mod block;
pub mod rate;
pub mod report;
pub mod shapes;
pub mod step;
