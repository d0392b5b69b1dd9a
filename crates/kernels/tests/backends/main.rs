//! The backends that need no NVIDIA card against the reference on burn-flex, and 8-bit AdamW of each against bitsandbytes.
//!
//! Trade-off: one binary for all three, since each links Burn's backends.
#![cfg(feature = "flex")]

#[path = "../adamw_8bit/mod.rs"]
mod adamw_8bit;
#[cfg(feature = "candle")]
mod candle;
mod flex;
#[cfg(feature = "wgpu")]
mod wgpu;
