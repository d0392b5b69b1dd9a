//! Where the scales of a matrix lie in the buffer that a GEMM reads, as cuBLASLt wants them.
//!
//! | scaling | order | cuBLASLt |
//! |---|---|---|
//! | per tensor, per row | one f32; one per row | `SCALAR_32F`, `OUTER_VEC_32F` |
//! | 1x128 | all rows of the first 128 columns, then of the next; the row count padded to 4 | `VEC128_32F` |
//! | 128x128 | row by row; the column count padded to 4 | `BLK128x128_32F` |
//! | MX, NVFP4 | tiles of 128 rows by 4 columns, each row of a tile 16 bytes from the next | `VEC32_UE8M0`, `VEC16_UE4M3` |
//!
//! Every buffer takes a multiple of [`ScaleLayout::ALIGNMENT`] bytes and must begin at one: on sm90 cuBLASLt refuses
//! matrices whose scales do not, and libraries that then take another path silently lose the speed of fp8. The padding to
//! 4 gives each run of f32 scales the same alignment.
//!
//! Trade-off: written from NVIDIA's description of the layouts and PyTorch's checks of the strides. The 128x128 and tiled
//! ones have not met their hardware yet.

/// The order and size of a buffer of scales. Made by [`Scaling::layout`](crate::Scaling::layout).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScaleLayout {
    rows: usize,
    columns: usize,
    order: Order,
}

/// How an entry's place follows from its row and column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// f32, row by row without padding inside: one scale, or one per row.
    Vector,
    /// f32, column by column, the rows padded to 4.
    ColumnMajor,
    /// f32, row by row, the columns padded to 4.
    RowMajor,
    /// 8 bits, in tiles of 128 rows by 4 columns.
    Tiled,
}

const TILE_ROWS: usize = 128;
const TILE_COLUMNS: usize = 4;
/// Within a tile, rows 32 apart lie next to each other.
const TILE_STRIPE: usize = 32;

impl ScaleLayout {
    /// What the address of a scale buffer and its size in bytes are multiples of.
    pub const ALIGNMENT: usize = 16;

    pub(crate) const fn new(rows: usize, columns: usize, order: Order) -> Self {
        Self { rows, columns, order }
    }

    /// Rows of scales, without padding.
    pub const fn rows(self) -> usize {
        self.rows
    }

    /// Columns of scales, without padding.
    pub const fn columns(self) -> usize {
        self.columns
    }

    /// Bytes of one scale: 4 for f32, 1 for E8M0 and UE4M3.
    pub const fn entry_bytes(self) -> usize {
        match self.order {
            Order::Tiled => 1,
            _ => size_of::<f32>(),
        }
    }

    /// Entries that the order takes, padding inside it included.
    const fn entries(self) -> usize {
        match self.order {
            Order::Vector => self.rows * self.columns,
            Order::ColumnMajor => self.rows.next_multiple_of(4) * self.columns,
            Order::RowMajor => self.rows * self.columns.next_multiple_of(4),
            Order::Tiled => self.rows.next_multiple_of(TILE_ROWS) * self.columns.next_multiple_of(TILE_COLUMNS),
        }
    }

    /// Bytes of the buffer, a multiple of [`Self::ALIGNMENT`].
    pub const fn bytes(self) -> usize {
        (self.entries() * self.entry_bytes()).next_multiple_of(Self::ALIGNMENT)
    }

    /// Byte offset of the scale of a row and column of scales.
    ///
    /// # Panics
    /// If there is no such row or column.
    pub const fn offset(self, row: usize, column: usize) -> usize {
        assert!(row < self.rows && column < self.columns, "a scale of this matrix");
        let index = match self.order {
            Order::Vector => row * self.columns + column,
            Order::ColumnMajor => column * self.rows.next_multiple_of(4) + row,
            Order::RowMajor => row * self.columns.next_multiple_of(4) + column,
            Order::Tiled => {
                let tile = row / TILE_ROWS * self.columns.div_ceil(TILE_COLUMNS) + column / TILE_COLUMNS;
                let (row, column) = (row % TILE_ROWS, column % TILE_COLUMNS);
                tile * TILE_ROWS * TILE_COLUMNS
                    + row % TILE_STRIPE * (TILE_ROWS / TILE_STRIPE * TILE_COLUMNS)
                    + row / TILE_STRIPE * TILE_COLUMNS
                    + column
            }
        };
        index * self.entry_bytes()
    }

    /// Whether a buffer of scales may begin at this address, or at this offset of an aligned buffer.
    pub const fn is_aligned(address: usize) -> bool {
        address.is_multiple_of(Self::ALIGNMENT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ORDERS: [Order; 4] = [Order::Vector, Order::ColumnMajor, Order::RowMajor, Order::Tiled];

    #[test]
    fn every_scale_has_a_place_of_its_own_inside_the_buffer() {
        for order in ORDERS {
            for (rows, columns) in [(1, 1), (3, 5), (4, 4), (128, 4), (129, 5), (200, 33)] {
                let layout = ScaleLayout::new(rows, columns, order);
                let mut taken = vec![false; layout.bytes()];
                for row in 0..rows {
                    for column in 0..columns {
                        let offset = layout.offset(row, column);
                        assert_eq!(offset % layout.entry_bytes(), 0);
                        for byte in &mut taken[offset..offset + layout.entry_bytes()] {
                            assert!(!std::mem::replace(byte, true), "{order:?} {row} {column}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn buffers_and_runs_of_f32_scales_are_aligned() {
        for order in ORDERS {
            for rows in 1..40 {
                for columns in 1..40 {
                    assert!(ScaleLayout::is_aligned(ScaleLayout::new(rows, columns, order).bytes()));
                }
            }
        }
        assert!(ScaleLayout::is_aligned(ScaleLayout::new(7, 3, Order::ColumnMajor).offset(0, 2)));
        assert!(ScaleLayout::is_aligned(ScaleLayout::new(7, 3, Order::RowMajor).offset(5, 0)));
        assert!([4, 8, 12, 15, 17].into_iter().all(|address| !ScaleLayout::is_aligned(address)));
    }

    #[test]
    fn a_tile_holds_rows_32_apart_side_by_side() {
        let layout = ScaleLayout::new(256, 8, Order::Tiled);
        let places = [(0, 0), (0, 3), (1, 0), (32, 0), (64, 1), (96, 3), (31, 0), (127, 3), (0, 4), (128, 0)];
        let offsets = [0, 3, 16, 4, 9, 15, 496, 511, 512, 1024];
        assert_eq!(places.map(|(row, column)| layout.offset(row, column)), offsets);
        assert_eq!(layout.bytes(), 2048);
    }
}
