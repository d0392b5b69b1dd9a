//! Sums over rows in a fixed order: gradients of biases and of norm weights. Kernels: `columns.cu`.
//! Trade-off: two launches per sum instead of atomic additions, whose order would change from run to run.

use burn_tensor::DType;
use firebrick_cuda::{Arguments, LaunchShape};

use super::Engine;
use super::launch::{BlockArguments, Launch, at, grid};
use super::matrix::{DeviceBlock, Primitive};
use super::program::Source;
use super::scratch::ScratchSlot;

/// Columns of one block of `column_sums`.
const BLOCK_COLUMNS: usize = 256;
/// Rows that one block sums at least.
const BLOCK_ROWS: usize = 64;

impl Engine {
    /// Sums of the columns of `x`, `[width]` f32.
    pub(crate) fn column_sums(&self, x: DeviceBlock) -> Primitive {
        let across = x.width.div_ceil(BLOCK_COLUMNS);
        let parts = x.rows.div_ceil(BLOCK_ROWS).clamp(1, (4 * self.multiprocessors()).div_ceil(across));
        let partial = self.scratch.take(ScratchSlot::Partial, parts * x.width * 4);
        let launch = Launch {
            source: Source::Columns,
            dtype: x.dtype,
            name: "column_sums",
            shape: LaunchShape { grid: [across as u32, parts as u32, 1], block: [256, 1, 1], shared_bytes: 0 },
            bytes: x.bytes(),
        };
        let arguments =
            Arguments::new().pointer(at(partial)).rows(&x).i64(x.stride as i64).i64(x.rows as i64).i32(x.width as i32);
        // SAFETY: x has the rows, width and stride given; the partial sums are [parts, width] f32.
        unsafe { self.launch(launch, &arguments) };
        self.sum_partial_rows(partial, parts, x.width)
    }

    /// Sums of the columns of `[rows, width]` f32 partial sums.
    pub(crate) fn sum_partial_rows(&self, partial: u64, rows: usize, width: usize) -> Primitive {
        let out = self.empty([width], DType::F32);
        let launch = Launch {
            source: Source::Columns,
            dtype: DType::F32,
            name: "sum_partial_rows",
            shape: grid(width.div_ceil(32), 256),
            bytes: rows * width * 4,
        };
        let arguments =
            Arguments::new().pointer(at(self.address(&out))).pointer(at(partial)).i32(rows as i32).i32(width as i32);
        // SAFETY: out is [width] and the partial sums are [rows, width], both f32.
        unsafe { self.launch(launch, &arguments) };
        out
    }
}
