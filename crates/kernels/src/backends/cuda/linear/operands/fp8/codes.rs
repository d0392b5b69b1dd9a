//! Rows in 8-bit floats: their address and layout, prepared rows for the next GEMM, the scales of frozen weights, and
//! how each generation of cards applies the scales in a GEMM.
//!
//! | compute capability | |
//! |---|---|
//! | 8.9 (L4, L40S, RTX 40) | the GEMM multiplies bare codes, and a pass over its result multiplies by the scales |
//! | 9.0 (H100, H200) | cuBLASLt reads one f32 per row |
//! | 10.0 and later (B200, RTX 50) | MXFP8: cuBLASLt reads a power of two for each 32 codes of a row, and has them in hardware |
//!
//! The same kernels write codes on all cards. Under MXFP8 the scale of a row is a power of two, which all blocks of the
//! row share. A separate scale per block would be no more exact for values in the normal range of E4M3, which covers 15
//! powers of two, and the backward could not multiply by the transposed codes of the forward.
//!
//! Trade-off: addresses have no owners; the engine holds the memory. The handling of scales follows from the compute capability alone;
//! the self-test of a run in 8-bit floats checks whether a library implements it correctly. Scales of weights take 4 bytes per output
//! feature of every group; the first pass that needs a weight computes them, and they are kept until memory is released.

use std::cell::RefCell;
use std::collections::HashMap;

use firebrick_cuda::{Context, DeviceBuffer};

use crate::backends::cuda::engine::{DeviceBlock, check};
use crate::backends::on_cubecl::Owner;
use crate::backends::planning::rows::{fp8_lead, fp8_stride};

/// Rows of E4M3 codes with one f32 scale each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Codes {
    pub block: DeviceBlock,
    pub scales: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowLayout {
    /// Leading columns for low-rank values.
    pub lead: usize,
    /// Bytes from the start of one row to the next.
    pub stride: usize,
    /// Address of one factor per column, or of those of all experts.
    pub column_scales: Option<u64>,
    /// The experts, if these are their rows.
    pub experts: Option<RowsByExpert>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowsByExpert {
    /// Address of the first row of each expert.
    pub starts: u64,
    pub count: usize,
    /// Column scales of each expert.
    pub columns: usize,
}

/// Codes already written by the launch that computed `x`.
#[derive(Debug)]
pub(crate) struct PreparedRows {
    /// Identifies the rows.
    pub owner: Owner,
    pub x: DeviceBlock,
    pub layout: RowLayout,
    pub codes: Codes,
}

impl RowLayout {
    /// Returns the layout of rows of `width` values, with room for the ranks of the group's adapters.
    pub(crate) fn new(width: usize, ranks: usize, column_scales: Option<u64>, experts: Option<RowsByExpert>) -> Self {
        let stride = fp8_stride(width, ranks, experts.is_some());
        Self { lead: fp8_lead(ranks), stride, column_scales, experts }
    }

    /// Returns the kernel for such rows: the second if each expert has its own column scales.
    pub(crate) fn kernel(&self, [plain, of_experts]: [&'static str; 2]) -> &'static str {
        if self.column_scales.is_some() && self.experts.is_some() { of_experts } else { plain }
    }
}

/// Row scales of frozen weights: computed by the first pass that needs a weight, and reused by all later ones.
pub(crate) struct Fp8Scales {
    context: Context,
    by_weights: RefCell<HashMap<Vec<u64>, DeviceBuffer>>,
}

impl Fp8Scales {
    pub(crate) fn new(context: &Context) -> Self {
        Self { context: context.clone(), by_weights: RefCell::default() }
    }

    /// Returns the address of the row scales of the weights that `sources` identify, and whether they are computed.
    pub(crate) fn of(&self, mut sources: Vec<u64>, rows: usize) -> (u64, bool) {
        // A stack and its first matrix have the same sources.
        sources.push(rows as u64);
        let mut by_weights = self.by_weights.borrow_mut();
        let is_known = by_weights.contains_key(&sources);
        let buffer = by_weights
            .entry(sources)
            .or_insert_with(|| check("allocating scales", DeviceBuffer::new(&self.context, rows * 4)));
        (buffer.address(), is_known)
    }

    /// Drops all scales, before memory is released and after a failure, which may have happened before they were computed.
    pub(crate) fn clear(&self) {
        self.by_weights.borrow_mut().clear();
    }
}

/// The way in which a device multiplies rows of codes with one scale each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowScaling {
    /// The GEMM reads an f32 per row.
    InGemm {
        /// Whether they are powers of two nevertheless, as for [`RowScaling::InBlocks`], for tests on cards without blocks.
        powers_of_two: bool,
    },
    /// The GEMM reads a power of two per 32 codes.
    InBlocks,
    /// A pass over the result multiplies by the scales.
    Afterwards,
}

impl RowScaling {
    /// Returns the method of a device with this compute capability, if it has 8-bit floats.
    pub(crate) fn of((major, _): (u32, u32)) -> Self {
        match major {
            9 => Self::InGemm { powers_of_two: false },
            0..9 => Self::Afterwards,
            _ => Self::InBlocks,
        }
    }

    pub(super) fn has_powers_of_two(self) -> bool {
        matches!(self, Self::InGemm { powers_of_two: true } | Self::InBlocks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_go_where_each_generation_of_cards_takes_them() {
        let of = RowScaling::of;
        assert_eq!([of((8, 9)), of((9, 0))], [RowScaling::Afterwards, RowScaling::InGemm { powers_of_two: false }]);
        assert_eq!([of((10, 0)), of((10, 3)), of((12, 0))], [RowScaling::InBlocks; 3]);
        assert!(of((12, 0)).has_powers_of_two() && !of((9, 0)).has_powers_of_two());
    }
}
