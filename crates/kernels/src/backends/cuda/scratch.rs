//! Device memory that operations reuse: one buffer for each size in use, and what is in it.
//!
//! All readers and writers are on our one stream, so a buffer may be overwritten as soon as the launches that read it have
//! been submitted. Contents derived from weights (dequantised, merged with their adapter, cast) are remembered until the
//! section ends: a block's recomputation and its backward then share one conversion. Outside CubeCL's pool, because a tensor
//! handle for memory that outlives its operation would buy nothing.

use std::cell::RefCell;
use std::collections::HashMap;

use firebrick_cuda::{Context, DeviceBuffer};

use super::failure::check;

/// What a buffer is for; buffers of one kind and size are one buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Purpose {
    /// Converted weights of a group of projections.
    Weights,
    /// LoRA's A in compute precision.
    LoraA,
    /// LoRA's B in compute precision.
    LoraB,
    /// Low-rank intermediates `x Aᵀ`.
    LowRank,
    /// Gradients of the low-rank intermediates.
    LowRankGradient,
    /// Logits of a chunk.
    Logits,
    /// What cuDNN asks for beside its tensors.
    AttentionWorkspace,
    /// Lengths and offsets of packed documents.
    AttentionIndex,
    /// Partial sums.
    Partial,
    /// Rows gathered for the loss.
    Rows,
    /// Gradients of gathered rows.
    RowGradients,
    /// Losses of a chunk's rows.
    Losses,
}

/// What a buffer holds: the section it was filled in, and the addresses it was made from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Contents {
    pub section: u64,
    pub sources: Vec<u64>,
}

struct Slot {
    buffer: DeviceBuffer,
    contents: Option<Contents>,
}

/// See the head of this file.
pub(super) struct Scratch {
    context: Context,
    slots: RefCell<HashMap<(Purpose, usize), Slot>>,
}

impl Scratch {
    pub(super) fn new(context: &Context) -> Self {
        Self { context: context.clone(), slots: RefCell::new(HashMap::new()) }
    }

    /// Address of a buffer of at least `bytes` whose contents are about to be overwritten.
    pub(super) fn take(&self, purpose: Purpose, bytes: usize) -> u64 {
        self.slot(purpose, bytes, None).0
    }

    /// Address of a buffer, and whether it already holds these contents; if not, the caller fills it now.
    pub(super) fn holding(&self, purpose: Purpose, bytes: usize, contents: Contents) -> (u64, bool) {
        self.slot(purpose, bytes, Some(contents))
    }

    fn slot(&self, purpose: Purpose, bytes: usize, contents: Option<Contents>) -> (u64, bool) {
        let mut slots = self.slots.borrow_mut();
        let slot = slots.entry((purpose, bytes)).or_insert_with(|| {
            let buffer = check("allocating scratch memory", DeviceBuffer::new(&self.context, bytes.max(1)));
            Slot { buffer, contents: None }
        });
        let held = contents.is_some() && slot.contents == contents;
        slot.contents = contents;
        (slot.buffer.pointer::<u8>().address(), held)
    }

    /// Gives all of it back to the driver. Waits for the device, since launches may still read it.
    pub(super) fn release(&self) {
        if !self.slots.borrow().is_empty() {
            check("waiting for the device", self.context.synchronize());
            self.slots.borrow_mut().clear();
        }
    }
}
