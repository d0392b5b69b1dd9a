#![doc = include_str!("../README.md")]

pub mod blockwise;
pub mod difference;
pub mod dynamic_map;
mod e8m0;
mod error;
pub mod float;
mod format;
pub mod fp4;
pub mod linear;
mod mxfp4;
mod names;
pub mod nf4;
mod packing;
mod quantized;
mod rounding;
mod scales;
mod scaling;
#[cfg(test)]
mod test_values;
mod workers;

pub use blockwise::BlockwiseQuantized;
pub use dynamic_map::DynamicMap;
pub use error::{Error, Result};
pub use float::NarrowFloat;
pub use format::{FloatType, Format, QuantFormat};
pub use linear::fp8_linear;
pub use packing::Packing;
pub use quantized::QuantizedTensor;
pub use scales::{BlockScales, HostScales, narrow_map};
pub use scaling::AMAX_FLOOR;
