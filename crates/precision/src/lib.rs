#![doc = include_str!("../README.md")]

pub mod adamw_8bit;
pub mod bf16;
pub mod blockwise;
pub mod dynamic_map;
mod error;
pub mod format;
pub mod nf4;
#[cfg(test)]
mod test_values;
mod workers;

pub use adamw_8bit::{AdamW8bit, AdamW8bitState, adamw_8bit_reference};
pub use blockwise::BlockwiseQuantized;
pub use dynamic_map::DynamicMap;
pub use error::{Error, Result};
pub use format::{DoubleQuant, Format};
pub use nf4::{Absmax, Nf4Quantized};
