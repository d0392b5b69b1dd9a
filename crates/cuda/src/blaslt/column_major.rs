//! From our row-major matrices to the column-major ones that cuBLASLt's kernels are made for.
//!
//! A row-major matrix is, byte for byte, its transpose in column-major order. So the library is asked for
//! `D^T = op(B)^T op(A)^T`: B goes first, A second, nothing is copied, and a matrix that we multiply as it is stored is also one
//! that the library multiplies as it is stored.

use super::matmul::{ElementType, Matmul, Operand};
use super::pointers::Alignment;

/// One matrix as `cublasLtMatrixLayoutCreate` wants it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) element: ElementType,
    pub(super) rows: u64,
    pub(super) columns: u64,
    pub(super) leading: i64,
}

/// The product in the library's terms: `first` is its A, `second` its B, `output` its C and D.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ColumnMajor {
    pub(super) first: Layout,
    pub(super) first_transposed: bool,
    pub(super) second: Layout,
    pub(super) second_transposed: bool,
    pub(super) output: Layout,
}

impl ColumnMajor {
    pub(super) fn of(matmul: &Matmul) -> Self {
        let (m, n, k) = (matmul.m, matmul.n, matmul.k);
        Self {
            first: stored(matmul.b, k, n),
            first_transposed: matmul.b.transposed,
            second: stored(matmul.a, m, k),
            second_transposed: matmul.a.transposed,
            output: layout(matmul.output, n, m, matmul.c_leading),
        }
    }
}

/// The layout of an operand whose `op` is `rows` x `columns`, row-major.
fn stored(operand: Operand, rows: usize, columns: usize) -> Layout {
    // Stored [rows, columns] in row-major order is [columns, rows] in column-major order, and the other way round for a
    // matrix that is stored transposed.
    let [rows, columns] = if operand.transposed { [rows, columns] } else { [columns, rows] };
    layout(operand.element, rows, columns, operand.leading)
}

fn layout(element: ElementType, rows: usize, columns: usize, leading: usize) -> Layout {
    // No buffer has 2^63 elements, so a leading dimension that is wrapped here is refused by the library.
    Layout { element, rows: rows as u64, columns: columns as u64, leading: leading as i64 }
}

/// What a plan is cached under: two calls with one key may use one algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) matmul: Matmul,
    pub(super) alignment: Alignment,
}

#[cfg(test)]
mod tests {
    use super::ElementType::{Bf16, F32};
    use super::*;
    use crate::blaslt::pointers::Pointers;

    /// A matrix of distinct numbers, and how each side addresses it.
    fn column_major_at(layout: Layout, transposed: bool, row: usize, column: usize) -> usize {
        let [row, column] = if transposed { [column, row] } else { [row, column] };
        assert!((row as u64) < layout.rows && (column as u64) < layout.columns, "{layout:?} has no [{row}, {column}]");
        column * layout.leading as usize + row
    }

    fn row_major_at(leading: usize, transposed: bool, row: usize, column: usize) -> usize {
        if transposed { column * leading + row } else { row * leading + column }
    }

    #[test]
    fn every_element_of_the_transposed_product_is_read_and_written_where_the_row_major_one_is() {
        let (m, n, k) = (3, 5, 7);
        for (transpose_a, transpose_b, wider) in
            [false, true].into_iter().flat_map(|a| [(a, false, 0), (a, true, 0), (a, false, 4), (a, true, 9)])
        {
            let mut matmul = Matmul::dense([m, n, k], Bf16, [transpose_a, transpose_b], F32);
            matmul.a.leading += wider;
            matmul.b.leading += wider;
            matmul.c_leading += wider;
            let mapped = ColumnMajor::of(&matmul);
            for (row, column, inner) in (0..m).flat_map(|i| (0..n).flat_map(move |j| (0..k).map(move |l| (i, j, l)))) {
                assert_eq!(
                    column_major_at(mapped.second, mapped.second_transposed, inner, row),
                    row_major_at(matmul.a.leading, transpose_a, row, inner),
                    "A of {matmul}"
                );
                assert_eq!(
                    column_major_at(mapped.first, mapped.first_transposed, column, inner),
                    row_major_at(matmul.b.leading, transpose_b, inner, column),
                    "B of {matmul}"
                );
                assert_eq!(
                    column_major_at(mapped.output, false, column, row),
                    row_major_at(matmul.c_leading, false, row, column),
                    "D of {matmul}"
                );
            }
            assert_eq!((mapped.first.element, mapped.output.element), (Bf16, F32));
        }
    }

    #[test]
    fn keys_tell_apart_what_may_need_another_algorithm_and_nothing_else() {
        let matmul = Matmul::dense([32, 16, 8], Bf16, [false, true], Bf16);
        let key = |matmul, address| Key { matmul, alignment: Alignment::of(&Pointers::new(address, 512, 512, 512)) };
        let base = key(matmul, 4096);
        assert_eq!(base, key(matmul, 8192), "two fresh allocations");
        assert_ne!(base, key(matmul, 4096 + 16));
        assert_ne!(base, key(Matmul { m: 33, ..matmul }, 4096));
        assert_ne!(base, key(Matmul { c_leading: 17, ..matmul }, 4096));
        assert_ne!(base, key(Matmul { allow_tf32: true, ..matmul }, 4096));
    }
}
