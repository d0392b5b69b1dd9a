//! CPU through burn-candle, with the reference bodies.
//!
//! Trade-off: burn-candle is deprecated upstream and leaves Burn after 0.21; it stays here as long as we pin 0.21.
#![expect(
    deprecated,
    reason = "burn-candle 0.21 is marked deprecated as a whole; docs/decisions.md says why it is kept"
)]

/// f32 values and i64 indices, the fastest types of candle's CPU kernels.
pub type Candle = burn_candle::Candle<f32, i64>;

super::by_default! {
    Candle: Session, MemoryOps, WeightOps, NormOps, LinearOps, AttentionOps, MoeOps, ConvOps, DeltaOps, EmbeddingOps, LossOps,
    OptimizerOps, Kernels,
}
