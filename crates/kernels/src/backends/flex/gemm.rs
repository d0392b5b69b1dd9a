//! Strided GEMMs on slices, through the `gemm` crate: the only file of this backend that needs `unsafe`.
//!
//! Every index that is read or written is checked against its slice first.
//! Trade-off: one core per call; callers run one task per core.
#![expect(unsafe_code, reason = "gemm's interface is raw pointers")]

/// A matrix inside a slice, with element `(row, column)` at `row * row_stride + column * column_stride`.
#[derive(Clone, Copy)]
pub(super) struct Matrix<'a> {
    pub(super) values: &'a [f32],
    pub(super) row_stride: usize,
    pub(super) column_stride: usize,
}

impl<'a> Matrix<'a> {
    pub(super) fn rows(values: &'a [f32], stride: usize) -> Self {
        Self { values, row_stride: stride, column_stride: 1 }
    }

    pub(super) fn after_row(self, first: usize) -> Self {
        Self { values: &self.values[first * self.row_stride..], ..self }
    }

    pub(super) fn transposed(self) -> Self {
        Self { row_stride: self.column_stride, column_stride: self.row_stride, ..self }
    }

    fn holds(&self, rows: usize, columns: usize) -> bool {
        (rows - 1) * self.row_stride + (columns - 1) * self.column_stride < self.values.len()
    }
}

/// Computes `out = a b` or `out += a b`, where `out` is `[m, n]` with rows `out_stride` apart and `k` is the inner width.
///
/// # Panics
/// If a matrix does not lie inside its slice, or rows of `out` overlap.
pub(super) fn product(
    [m, n, k]: [usize; 3],
    out: &mut [f32],
    out_stride: usize,
    is_added: bool,
    a: Matrix<'_>,
    b: Matrix<'_>,
) {
    assert!(m > 0 && n > 0 && k > 0, "an empty product [{m}, {n}, {k}]");
    assert!(out_stride >= n && (m - 1) * out_stride + n <= out.len(), "the result [{m}, {n}] leaves its slice");
    assert!(a.holds(m, k) && b.holds(k, n), "a factor of the product [{m}, {n}, {k}] leaves its slice");
    let stride = |stride: usize| isize::try_from(stride).expect("slices are shorter than isize::MAX");
    // SAFETY: the asserts above bound every element of the three matrices; `out` is borrowed mutably, so it overlaps neither
    // factor, and its rows do not overlap each other.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.as_mut_ptr(),
            1,
            stride(out_stride),
            is_added,
            a.values.as_ptr(),
            stride(a.column_stride),
            stride(a.row_stride),
            b.values.as_ptr(),
            stride(b.column_stride),
            stride(b.row_stride),
            1.0,
            1.0,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strided_product_equals_the_triple_loop() {
        let a: Vec<f32> = (0..60).map(|index| (index % 7) as f32).collect();
        let b: Vec<f32> = (0..60).map(|index| (index % 5) as f32 - 2.0).collect();
        let (m, n, k) = (3, 4, 5);
        let (left, right) = (Matrix::rows(&a, 11), Matrix::rows(&b, 9).transposed());
        let mut out = vec![1.0; 30];
        product([m, n, k], &mut out, 10, true, left, right);
        for row in 0..m {
            for column in 0..n {
                let expected: f32 = (0..k).map(|inner| a[row * 11 + inner] * b[column * 9 + inner]).sum();
                assert_eq!(out[row * 10 + column], 1.0 + expected);
            }
        }
        assert_eq!(out[4..10], [1.0; 6], "values between rows stay");
    }

    #[test]
    #[should_panic(expected = "leaves its slice")]
    fn a_product_beyond_its_slice_is_refused() {
        let values = vec![0.0; 10];
        product([3, 4, 5], &mut [0.0; 12], 4, false, Matrix::rows(&values, 5), Matrix::rows(&values, 4));
    }
}
