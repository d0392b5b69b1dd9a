#![doc = include_str!("../README.md")]

mod error;
mod non_finite;
mod ranks;
mod reducing;

pub use error::ParallelError;
pub use non_finite::NonFiniteSink;
pub use ranks::Ranks;
pub use reducing::{BUCKET_BYTES, ReducingSink};
