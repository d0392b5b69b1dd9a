#![doc = include_str!("../README.md")]

pub mod adamw_8bit;
mod amax;
pub mod blockwise;
pub mod delayed;
pub mod dynamic_map;
mod e8m0;
mod element;
mod error;
pub mod float;
mod format;
pub mod fp4;
pub mod frozen_fp8;
pub mod hadamard;
pub mod linear;
mod names;
pub mod nf4;
mod quantized;
pub mod random;
pub mod rounding;
pub mod scale_layout;
pub mod scaled;
mod scales;
pub mod scaling;
pub mod scaling_recipe;
#[cfg(test)]
mod test_values;
mod workers;

pub use adamw_8bit::{AdamW8bit, AdamW8bitState, adamw_8bit_reference};
pub use blockwise::BlockwiseQuantized;
pub use delayed::{AmaxComputeAlgo, DelayedScale, DelayedScaling};
pub use dynamic_map::DynamicMap;
pub use element::ElementFormat;
pub use error::{Error, Result};
pub use float::FloatFormat;
pub use format::{Format, QuantFormat};
pub use frozen_fp8::WeightOrder;
pub use hadamard::{HADAMARD_SIZE, RandomHadamard};
pub use linear::{LinearShape, fp4_linear, fp8_linear, nvfp4_linear, scaled_linear};
pub use quantized::QuantizedTensor;
pub use random::random_bits;
pub use rounding::Overflow;
pub use scale_layout::ScaleLayout;
pub use scaled::{Rounding, ScaledTensor};
pub use scales::{BlockScales, HostScales};
pub use scaling::{AMAX_FLOOR, Scales, Scaling};
pub use scaling_recipe::{Float8CurrentScaling, LinearGemm, Nvfp4BlockScaling, OperandRecipe, ScalingRecipe};
