//! CPU through burn-candle: the portable bodies as they are.
//!
//! burn-candle is deprecated upstream and leaves Burn after 0.21; it stays here as long as we pin 0.21.
#![expect(
    deprecated,
    reason = "burn-candle 0.21 is marked deprecated as a whole; docs/decisions.md says why it is kept"
)]

use crate::Kernels;

/// f32 values, i64 indices: what candle's CPU kernels are fastest with.
pub type Candle = burn_candle::Candle<f32, i64>;

impl Kernels for Candle {}
