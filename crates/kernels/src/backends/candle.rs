//! CPU through burn-candle, with the reference bodies.
//!
//! Trade-off: burn-candle is deprecated upstream and leaves Burn after 0.21; it stays here as long as we pin 0.21.
#![expect(
    deprecated,
    reason = "burn-candle 0.21 is marked deprecated as a whole; docs/decisions.md says why it is kept"
)]

use crate::{
    AttentionOps, ConvOps, EmbeddingOps, Kernels, LinearOps, LossOps, MemoryOps, MoeOps, NormOps, OptimizerOps,
    Session, WeightOps,
};

/// f32 values and i64 indices, the fastest types of candle's CPU kernels.
pub type Candle = burn_candle::Candle<f32, i64>;

impl Session for Candle {}
impl MemoryOps for Candle {}
impl WeightOps for Candle {}
impl NormOps for Candle {}
impl LinearOps for Candle {}
impl AttentionOps for Candle {}
impl MoeOps for Candle {}
impl ConvOps for Candle {}
impl EmbeddingOps for Candle {}
impl LossOps for Candle {}
impl OptimizerOps for Candle {}
impl Kernels for Candle {}
