#![doc = include_str!("../README.md")]

mod backends;
#[cfg(feature = "flex")]
pub mod check;
mod documents;
mod host_buffer;
mod offload;
mod ops;
mod parameter;
mod portable;
pub mod probe;
mod weight;

pub use documents::Documents;
pub use host_buffer::HostBuffer;
pub use offload::Offloaded;
pub use ops::{
    AdamW, AttentionOutput, CrossEntropy, CrossEntropyOptions, EightBitMoments, EightBitUpdate, Heads, Kernels,
    Projection, ProjectionGradients, SwigluProjectGradients, TracedOperation, TrainedPositions,
};
pub use parameter::{GradientMap, Parameter};
pub use portable::rotary::RotaryTables;
pub use weight::{LoraPair, Nf4Absmax, Nf4Weight, Weight};

/// The portable bodies, callable on any Burn backend: the oracle that every override is tested against.
pub mod oracle {
    pub use crate::portable::{attention, cross_entropy, embedding, linear, nf4, norm, optimizer, rotary, swiglu};
}

/// The backends this build holds, under one name each.
pub mod backend {
    #[cfg(feature = "candle")]
    pub use crate::backends::candle::Candle;
    #[cfg(feature = "cuda")]
    pub use crate::backends::cuda::{Cuda, DeviceFailure, use_own_attention};
    #[cfg(feature = "flex")]
    pub use crate::backends::flex::Flex;
    #[cfg(feature = "wgpu")]
    pub use crate::backends::wgpu::Wgpu;
}
