//! Device memory that operations reuse: one buffer per slot, which grows to the largest size ever requested.
//!
//! All readers and writers are on the engine's one stream, so a buffer may be overwritten as soon as the launches that read it have
//! been submitted. Contents derived from weights (dequantized, merged with their adapter, cast) are remembered until the section
//! ends: the recomputation of a layer and its backward share one conversion. Growing a buffer waits for the device and forgets its
//! contents; after the first step of a run nothing grows.
//! Trade-off: a slot keeps its largest size until memory is released.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use burn_tensor::DType;
use firebrick_cuda::{Context, DeviceBuffer, Repeats};
use rustc_hash::FxHashMap;

use super::failure::{check, check_launch};

/// What a buffer is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ScratchSlot {
    /// Converted weights of a group or module of this shape. Groups of one layer have slots of their own, so that what one of them
    /// holds survives the others.
    Weights {
        /// Output features.
        rows: usize,
        /// Input features.
        columns: usize,
    },
    /// Codes of a group's weight in 8-bit floats, with what belongs to them.
    Fp8Weights {
        /// Output features.
        rows: usize,
        /// Input features and ranks, filled up.
        columns: usize,
    },
    /// The same, transposed.
    Fp8Transposed {
        /// Input features.
        rows: usize,
        /// Output features and ranks, filled up.
        columns: usize,
    },
    /// The other operand of a GEMM in 8-bit floats.
    Fp8Rows,
    /// Scales of the blocks of that operand, where a GEMM reads such.
    Fp8RowBlocks,
    /// The same of the weight.
    Fp8WeightBlocks,
    /// Biases of a group of this width, side by side.
    Bias {
        /// Output features.
        width: usize,
    },
    /// LoRA's A in compute precision.
    LoraA,
    /// LoRA's B in compute precision.
    LoraB,
    /// Low-rank intermediates `x Aᵀ`.
    LowRank,
    /// The input of a group on one side of a mask: what adapters read under dropout, or the gradient of that.
    Masked,
    /// Gradients of the low-rank intermediates.
    LowRankGradient,
    /// The same times `1 / rms` of what a norm read.
    ScaledLowRank,
    /// Parts of the sums in passes over what adapters read.
    LowRankParts,
    /// The widest rows of one operation: logits of a chunk; queries, keys and values side by side, or their gradients.
    WideRows,
    /// What cuDNN needs in addition to its tensors.
    AttentionWorkspace,
    /// Lengths and offsets of packed documents.
    AttentionIndex {
        /// Which part of them; all of them if none.
        part: Option<usize>,
    },
    /// Sums of the parts of each query's keys.
    AttentionParts,
    /// Partial sums.
    Partial,
    /// Hidden states gathered for the loss, then their gradients.
    GatheredRows,
    /// Log probabilities of a chunk's targets.
    LogProbs,
}

/// What a buffer holds: the section it was filled in, the format, and what it was computed from (`Engine::source`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Contents {
    pub section: u64,
    pub dtype: DType,
    pub sources: Vec<u64>,
}

struct Buffer {
    memory: DeviceBuffer,
    contents: Option<Contents>,
    /// The last section that used it.
    section: u64,
}

/// See the head of this file.
pub(crate) struct Scratch {
    context: Context,
    repeats: Rc<Repeats>,
    buffers: RefCell<FxHashMap<ScratchSlot, Buffer>>,
    section: Cell<u64>,
}

impl Scratch {
    pub(crate) fn new(context: &Context, repeats: Rc<Repeats>) -> Self {
        Self { context: context.clone(), repeats, buffers: RefCell::default(), section: Cell::new(0) }
    }

    /// Buffers are used by this section from now on.
    pub(super) fn enter(&self, section: u64) {
        self.section.set(section);
    }

    /// Address of a buffer of at least `bytes` whose contents are about to be overwritten.
    pub(crate) fn take(&self, slot: ScratchSlot, bytes: usize) -> u64 {
        self.buffer(slot, bytes, None).0
    }

    /// Address of a buffer, and whether it already holds these contents; if not, the caller fills it now.
    pub(crate) fn holding(&self, slot: ScratchSlot, bytes: usize, contents: Contents) -> (u64, bool) {
        self.buffer(slot, bytes, Some(contents))
    }

    fn buffer(&self, slot: ScratchSlot, bytes: usize, contents: Option<Contents>) -> (u64, bool) {
        let mut buffers = self.buffers.borrow_mut();
        if buffers.get(&slot).is_none_or(|buffer| buffer.memory.len_bytes() < bytes.max(1)) {
            if let Some(smaller) = buffers.remove(&slot) {
                // Queued launches may still read it.
                check_launch(self.repeats.flush());
                check("waiting for the device", self.context.synchronize());
                drop(smaller);
            }
            let memory = check("allocating scratch memory", DeviceBuffer::new(&self.context, bytes.max(1)));
            buffers.insert(slot, Buffer { memory, contents: None, section: self.section.get() });
        }
        let buffer = buffers.get_mut(&slot).expect("the slot was filled above");
        let is_held = contents.is_some() && buffer.contents == contents;
        buffer.contents = contents;
        buffer.section = self.section.get();
        (buffer.memory.pointer::<u8>().address(), is_held)
    }

    /// Forgets what buffers hold: after a failure, a buffer may have been marked before it was filled.
    pub(crate) fn forget_contents(&self) {
        self.buffers.borrow_mut().values_mut().for_each(|buffer| buffer.contents = None);
    }

    /// Bytes of all buffers.
    pub(crate) fn bytes(&self) -> usize {
        self.buffers.borrow().values().map(|buffer| buffer.memory.len_bytes()).sum()
    }

    /// Returns what the open section has not used to the driver. The caller has waited for the device.
    pub(crate) fn release_unused(&self) {
        let section = self.section.get();
        self.buffers.borrow_mut().retain(|_, buffer| buffer.section == section);
    }

    /// Returns all of it to the driver. The caller has waited for the device.
    pub(crate) fn release(&self) {
        self.buffers.borrow_mut().clear();
    }
}
