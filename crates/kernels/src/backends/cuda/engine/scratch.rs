//! Device memory that operations reuse: one buffer per slot, which grows to the largest size ever requested.
//!
//! All readers and writers are on the engine's one stream, so a buffer may be overwritten once the launches that read it are submitted. Contents
//! derived from weights (dequantized, merged with their adapter, cast) are remembered until the section ends, so the recomputation of a layer and its
//! backward share one conversion. Growing a buffer waits for the device and discards its contents; after the first step of a run, no buffer grows.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use burn_tensor::DType;
use firebrick_cuda::{Context, DeviceBuffer, Repeats};
use rustc_hash::FxHashMap;

use super::failure::{check, check_launch};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ScratchSlot {
    /// Converted weights `[o, i]` of a group or module. Groups of one layer have separate slots, so that they do not
    /// overwrite each other's contents.
    Weights([usize; 2]),
    /// Codes of a group's weight in 8-bit floats `[o, i and ranks, padded]`, with their scales and adapters.
    Fp8Weights([usize; 2]),
    /// The same codes, transposed.
    Fp8Transposed([usize; 2]),
    /// The other operand of a GEMM in 8-bit floats.
    Fp8Rows,
    /// Block scales of that operand, if a GEMM reads them.
    Fp8RowBlocks,
    /// Block scales of the weight.
    Fp8WeightBlocks,
    /// Biases of a group of this width, side by side.
    Bias(usize),
    LoraA,
    LoraB,
    /// Low-rank intermediates `x Aᵀ`.
    LowRank,
    /// The adapters' input under dropout, or its gradient.
    Masked,
    LowRankGradient,
    /// The low-rank gradients times `1 / rms` of a norm's input.
    ScaledLowRank,
    /// Partial sums of adapter passes.
    LowRankParts,
    /// The widest rows of one operation: logits of a chunk; joined QKV, or their gradients.
    WideRows,
    AttentionWorkspace,
    /// Lengths and offsets of packed documents: of a numbered part of them, or of all.
    AttentionIndex(Option<usize>),
    /// Scores of a tile of queries, and what is computed from them.
    AttentionScores,
    /// Where the document of each token begins.
    DocumentStarts,
    ExpertTiles,
    /// Partial results over parts of each query's keys.
    AttentionParts,
    Partial,
    /// Hidden states gathered for the loss, then their gradients.
    GatheredRows,
    /// Log-probabilities of a chunk's targets.
    LogProbs,
}

/// Contents of a buffer: the section since which its sources are unchanged, the format, and the sources it was computed from (`Engine::source`).
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

    /// Starts a section, which marks the buffers that it uses.
    pub(super) fn enter(&self, section: u64) {
        self.section.set(section);
    }

    /// Returns the address of a buffer of at least `bytes` whose contents are about to be overwritten.
    pub(crate) fn take(&self, slot: ScratchSlot, bytes: usize) -> u64 {
        self.buffer(slot, bytes, None).0
    }

    /// Returns the address of a buffer, and whether it already has these contents, which the caller must write now if not.
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
        (buffer.memory.address(), is_held)
    }

    /// Forgets the contents of all buffers, because after a failure a buffer may have been marked before it was filled.
    pub(crate) fn forget_contents(&self) {
        self.buffers.borrow_mut().values_mut().for_each(|buffer| buffer.contents = None);
    }

    pub(crate) fn bytes(&self) -> usize {
        self.buffers.borrow().values().map(|buffer| buffer.memory.len_bytes()).sum()
    }

    /// Returns buffers that the open section has not used to the driver. The caller has waited for the device.
    pub(crate) fn release_unused(&self) {
        let section = self.section.get();
        self.buffers.borrow_mut().retain(|_, buffer| buffer.section == section);
    }

    /// Returns all buffers to the driver. The caller has waited for the device.
    pub(crate) fn release(&self) {
        self.buffers.borrow_mut().clear();
    }
}
