#![doc = include_str!("../README.md")]

pub mod adamw_8bit;
pub mod blockwise;
pub mod dynamic_map;
mod error;
mod format;
mod names;
pub mod nf4;
mod quantized;
mod scales;
#[cfg(test)]
mod test_values;
mod workers;

pub use adamw_8bit::{AdamW8bit, AdamW8bitState, adamw_8bit_reference};
pub use blockwise::BlockwiseQuantized;
pub use dynamic_map::DynamicMap;
pub use error::{Error, Result};
pub use format::{Format, QuantFormat};
pub use quantized::QuantizedTensor;
pub use scales::{BlockScales, HostScales};
