//! One file a backend: which Burn type it is, and what it overrides.

#[cfg(feature = "candle")]
pub(crate) mod candle;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
#[cfg(feature = "flex")]
pub(crate) mod flex;
#[cfg(feature = "wgpu")]
pub(crate) mod wgpu;
