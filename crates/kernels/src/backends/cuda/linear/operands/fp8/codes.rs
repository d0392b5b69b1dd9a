//! Rows in 8-bit floats: where they are, how they are laid out, and those that wait for the GEMM that reads them.
//! Trade-off: addresses without owners; the engine holds the memory.

use crate::backends::cuda::engine::{DeviceBlock, Owner};
use crate::backends::planning::rows::{fp8_lead, fp8_stride};

/// Rows of E4M3 codes with one f32 scale each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Codes {
    pub block: DeviceBlock,
    pub scales: u64,
}

/// What the rows of one operand of a GEMM are to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowLayout {
    /// Columns in front of the others, for low-rank values.
    pub lead: usize,
    /// Bytes from one row to the next.
    pub stride: usize,
    /// Address of a factor for each column.
    pub column_scales: Option<u64>,
}

/// Codes that the launch that made `x` has written.
#[derive(Debug)]
pub(crate) struct PreparedRows {
    /// Of the rows.
    pub owner: Owner,
    pub x: DeviceBlock,
    pub layout: RowLayout,
    pub codes: Codes,
}

impl RowLayout {
    /// Rows of `width` values, and the ranks of the adapters of the group.
    pub(crate) fn new(width: usize, ranks: &[usize], column_scales: Option<u64>) -> Self {
        let ranks = ranks.iter().sum();
        Self { lead: fp8_lead(ranks), stride: fp8_stride(width, ranks), column_scales }
    }
}
