//! The attention sinks of a layer: one trained logit per query head, and whether they train.
//!
//! Trade-off: as with norms, the backward that skips the gradient of frozen ones is the kernels' business.

use firebrick_kernels::{Kernels, Parameter, Sinks};

/// Logits `[heads]` of one more column in the softmax of each query's scores.
#[derive(Clone, Debug)]
pub struct AttentionSinks<B: Kernels> {
    /// The logits, f32.
    pub logits: Parameter<B>,
    /// Full fine-tuning trains them, LoRA does not.
    pub trains: bool,
}

impl<B: Kernels> AttentionSinks<B> {
    /// Returns the sinks as an operand: a handle, not a copy.
    pub(crate) fn operand(&self) -> Sinks<B> {
        Sinks { logits_h: self.logits.value.clone(), trains: self.trains }
    }
}
