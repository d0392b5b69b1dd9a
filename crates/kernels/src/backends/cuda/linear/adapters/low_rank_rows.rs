//! `x Aᵀ` of all adapters of a group for the few rows of a decoding step, in the launch that makes `x`: a norm, a gated activation, or
//! none. It goes to the columns after `x`, where the group's GEMM reads it. Kernels: `low_rank_rows.cu`.
//!
//! A step of 64 rows waits for its launches: a norm, a GEMM with two tiles and the sums of its parts take longer than reading all of A.
//! Trade-off: forward only, since a pass over many rows reads A too often; A and `x` in 16 bits, on 16 bytes.

use firebrick_arch::Activation;
use firebrick_cuda::Arguments;

use crate::NormWeight;
use crate::backends::cuda::device::Device;
use crate::backends::cuda::engine::{
    BlockArguments, Cuda, DeviceBlock, MatrixView, ScratchSlot, Source, arguments, grid_of,
};
use crate::backends::cuda::linear::gated::gate_and_up;
use crate::backends::cuda::linear::modules::Routed;
use crate::backends::planning::passes::{BLOCKS_OF_ROWS, ROWS_TILE};

/// Maximum number of tiles whose columns are divided, as in `low_rank_rows.cu`.
const MAX_DIVIDED_TILES: usize = 1024;
/// Columns that a block multiplies in one round.
const ROUND_COLUMNS: usize = 256;
/// Minimum columns of a block, if they are divided.
const MIN_PART_COLUMNS: usize = 4 * ROUND_COLUMNS;

/// What a launch computes: `low` `[n, ranks]` from `a` `[ranks, width]`.
struct Product {
    low: DeviceBlock,
    a: DeviceBlock,
    /// Columns of a block, and into how many parts that divides them.
    part_columns: usize,
    parts: usize,
}

impl Product {
    fn tiles(&self) -> [usize; 2] {
        [self.a.rows.div_ceil(ROWS_TILE[0]), self.low.rows.div_ceil(ROWS_TILE[1])]
    }
}

impl Device {
    /// Computes the norm of `x` in rows with room for `x Aᵀ` of its group, and that. Returns `None` and writes nothing if this takes two launches.
    pub(crate) fn norm_low_rank_rows(
        &self,
        x: &MatrixView,
        norm: &NormWeight<Cuda>,
        group: &Routed<'_>,
    ) -> Option<MatrixView> {
        let a = self.few_row_a(x.block, group)?;
        let weight = Some(self.norm_weight(norm, x.width)).filter(|weight| weight.address.is_multiple_of(16))?;
        let y = self.empty_with_room([x.rows, x.width], a.rows, x.dtype);
        let product = self.divided(y.columns_after(a.rows), a);
        let arguments = arguments! {
            y: rows(&y), y_stride: long(y.stride), x: rows(x), w: rows(&weight), w_offset: float(norm.offset), eps: float(norm.epsilon),
        };
        // SAFETY: x is rows of this width without gaps, y at its stride, both on 16 bytes; so is the weight, [width] f32.
        unsafe { self.launch_low_rank_rows("norm_low_rank_rows", None, &product, 2 * x.bytes(), arguments) };
        Some(y)
    }

    /// Computes `activation(gate) * up` in rows with room for `x Aᵀ` of the group that reads it, and that. Returns `None` and writes nothing if
    /// this takes two launches.
    pub(crate) fn gated_low_rank_rows(
        &self,
        [gate, up]: [&MatrixView; 2],
        activation: Activation,
        group: &Routed<'_>,
    ) -> Option<MatrixView> {
        let a = self.few_row_a(gate.block, group).filter(|_| up.begins_on_vectors())?;
        let y = self.empty_with_room([gate.rows, gate.width], a.rows, gate.dtype);
        let product = self.divided(y.columns_after(a.rows), a);
        let arguments = arguments! { y: rows(&y), y_stride: long(y.stride) };
        let arguments = gate_and_up(arguments, [gate.block, up.block]);
        // SAFETY: y, gate and up are rows of this width at the strides given, on 16 bytes.
        unsafe {
            self.launch_low_rank_rows("gated_low_rank_rows", Some(activation), &product, 3 * gate.bytes(), arguments);
        }
        Some(y)
    }

    /// Computes `x Aᵀ` `[n, ranks]` of few rows; returns whether it did, which needs rows on 16 bytes.
    pub(crate) fn low_rank_rows(&self, x: DeviceBlock, a: DeviceBlock, low: DeviceBlock) -> bool {
        if !x.begins_on_vectors() {
            return false;
        }
        let product = self.divided(low, a);
        let arguments = arguments! { x: rows(&x), x_stride: long(x.stride) };
        // SAFETY: x is rows of this width at its stride, on 16 bytes.
        unsafe { self.launch_low_rank_rows("low_rank_rows", None, &product, x.bytes(), arguments) };
        true
    }

    /// Returns all A of a group over few rows that these kernels take. The group's weight, which contains them, is materialized first.
    fn few_row_a(&self, x: DeviceBlock, group: &Routed<'_>) -> Option<DeviceBlock> {
        if !group.route.takes_low_rank_rows {
            return None;
        }
        Some(self.input_adapters(x, group)?.a)
    }

    fn divided(&self, low: DeviceBlock, a: DeviceBlock) -> Product {
        let whole = Product { low, a, part_columns: a.width, parts: 1 };
        let tiles: usize = whole.tiles().iter().product();
        let part_columns = part_columns(tiles, a.width, self.multiprocessors);
        let parts = a.width.div_ceil(part_columns);
        assert!(parts == 1 || tiles <= MAX_DIVIDED_TILES, "{tiles} tiles of {parts} parts");
        Product { part_columns, parts, ..whole }
    }

    /// Launches a kernel whose arguments begin with those of its input, `bytes` with its result.
    ///
    /// # Safety
    /// The arguments must be the kernel's own, with the rows of `low` and the width of `a`.
    unsafe fn launch_low_rank_rows(
        &self,
        name: &'static str,
        activation: Option<Activation>,
        product: &Product,
        bytes: usize,
        arguments: Arguments,
    ) {
        let &Product { low, a, part_columns, parts } = product;
        let [of_ranks, of_rows] = product.tiles();
        let bytes_of_parts = of_ranks * of_rows * parts * ROWS_TILE[0] * ROWS_TILE[1] * 4;
        let sums = if parts > 1 { self.scratch.take(ScratchSlot::LowRankParts, bytes_of_parts) } else { 0 };
        let shape = grid_of([of_ranks, of_rows, parts], 256);
        let bytes = bytes + a.bytes() + low.bytes();
        let launch = Source::LowRankRows(activation).launch(low.dtype, name, shape, bytes).early();
        let arguments = arguments! {
            arguments =>
            low: rows(&low), low_stride: long(low.stride), a: rows(&a), a_stride: long(a.stride), parts: address(sums),
            ranks: int(a.rows), n: int(low.rows), width: int(a.width), part_columns: int(part_columns),
        };
        // SAFETY: low has these rows at its stride and a column for each rank; A has a row of the width for each rank, on 16 bytes; the parts
        // have room for the sums of every block. The caller promises the rest.
        unsafe { self.launch(launch, &arguments) };
    }
}

/// Returns the columns of a block: as many blocks as keep the device busy, if there are `tiles` of all columns.
fn part_columns(tiles: usize, width: usize, multiprocessors: usize) -> usize {
    let parts = (BLOCKS_OF_ROWS * multiprocessors / tiles).max(1);
    width.div_ceil(parts).max(MIN_PART_COLUMNS).next_multiple_of(ROUND_COLUMNS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backends::planning::passes::part_bytes;

    #[test]
    fn columns_of_few_rows_are_divided_while_that_leaves_each_block_work() {
        let parts = |tiles: usize, width: usize| width.div_ceil(part_columns(tiles, width, 132));
        // 64 rows: one tile of ranks of down and of o, three of q, k and v.
        assert_eq!([parts(8, 14_336), parts(8, 4096), parts(24, 4096)], [14, 4, 4]);
        // 256 rows, and more tiles than a device has blocks at a time.
        assert_eq!([parts(32, 14_336), parts(96, 4096), parts(300, 14_336)], [8, 2, 1]);
        for (tiles, width) in [(1, 8), (1, 14_336), (133, 1 << 17), (132, 1 << 17), (264, 4096)] {
            let parts = parts(tiles, width);
            assert!(
                parts == 1 || tiles * parts * ROWS_TILE[0] * ROWS_TILE[1] * 4 <= part_bytes(132),
                "{tiles} {width}"
            );
        }
    }
}
