//! What a matrix product is asked to do, in row-major terms, and which products make no sense.

use std::fmt;

use crate::CudaError;

/// Type of a matrix' elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ElementType {
    /// IEEE single.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE half.
    F16,
    /// 8 bits: 4 of exponent, 3 of mantissa, largest 448, no infinity ("OCP 8-bit Floating Point Specification", 2023).
    E4m3,
    /// 8 bits: 5 of exponent, 2 of mantissa, largest 57344 (same source).
    E5m2,
}

impl ElementType {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
            Self::E4m3 | Self::E5m2 => 1,
        }
    }

    /// Whether it is one of the 8-bit formats.
    pub const fn is_fp8(self) -> bool {
        matches!(self, Self::E4m3 | Self::E5m2)
    }

    /// `cudaDataType_t` (library_types.h).
    pub(super) const fn code(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 2,
            Self::Bf16 => 14,
            Self::E4m3 => 28,
            Self::E5m2 => 29,
        }
    }
}

impl fmt::Display for ElementType {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::E4m3 => "e4m3",
            Self::E5m2 => "e5m2",
        })
    }
}

/// An input matrix. `op` of it is what is multiplied: the matrix as stored, or its transpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Operand {
    /// Type of its elements.
    pub element: ElementType,
    /// Whether the transpose of what is stored is multiplied: an `A` of `m` x `k` is then stored as `[k, m]`.
    pub transposed: bool,
    /// Elements from one stored row to the next; more than a row's width for a view of a wider buffer.
    pub leading: usize,
}

/// What is done beside the product itself, in the same pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Epilogue {
    /// Nothing.
    #[default]
    None,
    /// Adds a vector of `n` elements of the output's type to every row of D ([`Pointers::bias`](super::Pointers::bias) is read).
    Bias,
    /// Also writes the sums of `op(A)` over `k`, `m` elements of the output's type, to [`Pointers::bias`](super::Pointers::bias): the gradient of a
    /// bias, where the product is `dY^T X`. Few kernels can; [`CudaError::BlasLt`] when none fits.
    BiasGradient,
}

impl Epilogue {
    /// `cublasLtEpilogue_t`. Our A is cuBLASLt's B (see `column_major.rs`).
    pub(super) const fn code(self) -> u32 {
        match self {
            Self::None => 1,
            Self::Bias => 4,
            Self::BiasGradient => 512,
        }
    }
}

/// Factors in device memory that turn the stored numbers of 8-bit inputs back into what they stand for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Scaling {
    /// None: all factors are 1.
    #[default]
    None,
    /// One f32 for all of A and one for all of B.
    Tensor,
    /// An f32 for each of the `m` rows of `op(A)` and each of the `n` columns of `op(B)`. Needs cuBLASLt of CUDA 12.9 and
    /// compute capability 9.0.
    OuterVector,
}

impl Scaling {
    /// `cublasLtMatmulMatrixScale_t`.
    pub(super) const fn code(self) -> u32 {
        match self {
            Self::None | Self::Tensor => 0,
            Self::OuterVector => 3,
        }
    }
}

/// `D[m, n] = alpha * op(A) op(B) + beta * C`, every matrix row-major, products summed in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Matmul {
    /// Rows of `op(A)`, C and D.
    pub m: usize,
    /// Columns of `op(B)`, C and D.
    pub n: usize,
    /// Columns of `op(A)`, rows of `op(B)`.
    pub k: usize,
    /// The left matrix.
    pub a: Operand,
    /// The right matrix.
    pub b: Operand,
    /// Elements from one row to the next in both C and D.
    pub c_leading: usize,
    /// Type of C and D.
    pub output: ElementType,
    /// What else is done.
    pub epilogue: Epilogue,
    /// Factors of 8-bit inputs.
    pub scaling: Scaling,
    /// Lets f32 inputs be rounded to TF32 (10 bits of mantissa), which is what makes them fast.
    pub allow_tf32: bool,
    /// Lets 8-bit products be summed with fewer bits than f32 has: faster on Hopper, meant for forward passes.
    pub fast_accumulation: bool,
}

impl Matmul {
    /// A plain product of matrices without gaps: `op(A)` is `m` x `k`, `op(B)` is `k` x `n`. Change fields for the rest.
    pub const fn dense(
        [m, n, k]: [usize; 3],
        inputs: ElementType,
        [transpose_a, transpose_b]: [bool; 2],
        output: ElementType,
    ) -> Self {
        let a = Operand { element: inputs, transposed: transpose_a, leading: if transpose_a { m } else { k } };
        let b = Operand { element: inputs, transposed: transpose_b, leading: if transpose_b { k } else { n } };
        Self {
            m,
            n,
            k,
            a,
            b,
            c_leading: n,
            output,
            epilogue: Epilogue::None,
            scaling: Scaling::None,
            allow_tf32: false,
            fast_accumulation: false,
        }
    }

    /// Floating point operations of the product, a multiplication and an addition counted as two.
    pub fn floating_point_operations(&self) -> f64 {
        2.0 * self.m as f64 * self.n as f64 * self.k as f64
    }

    /// Refuses what no cuBLASLt can do, or would do wrongly without a word.
    pub(super) fn check(&self) -> Result<(), CudaError> {
        self.fault().map_or(Ok(()), |reason| Err(CudaError::InvalidMatmul { asked: self.to_string(), reason }))
    }

    fn fault(&self) -> Option<String> {
        let (a, b) = (self.a, self.b);
        let width = |operand: Operand, plain, transposed| if operand.transposed { transposed } else { plain };
        let rows = [
            ("A", a.leading, width(a, self.k, self.m)),
            ("B", b.leading, width(b, self.n, self.k)),
            ("C and D", self.c_leading, self.n),
        ];
        if self.k == 0 {
            return Some("k is 0, and cuBLASLt has no empty sum: scale C by beta instead".to_string());
        }
        if let Some((name, leading, width)) = rows.into_iter().find(|(_, leading, width)| leading < width) {
            return Some(format!("rows of {name} are {width} elements wide and only {leading} apart"));
        }
        let fp8 = a.element.is_fp8() && b.element.is_fp8();
        if a.element != b.element && !fp8 {
            return Some("A and B differ in type; only the two 8-bit formats can be mixed".to_string());
        }
        if self.output.is_fp8() || !(fp8 || self.output == ElementType::F32 || self.output == a.element) {
            return Some(format!("{} inputs cannot give {} outputs", a.element, self.output));
        }
        if self.scaling != Scaling::None && !fp8 {
            return Some("scale factors are for 8-bit inputs".to_string());
        }
        if fp8 && (a.element, b.element) == (ElementType::E5m2, ElementType::E5m2) {
            return Some("no hardware multiplies e5m2 by e5m2: make one of them e4m3".to_string());
        }
        None
    }
}

impl fmt::Display for Matmul {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let operand = |operand: Operand, rows, columns| {
            let (mark, [rows, columns]) =
                if operand.transposed { ("^T", [columns, rows]) } else { ("", [rows, columns]) };
            format!("{} [{rows}, {columns}]{mark} with rows {} apart", operand.element, operand.leading)
        };
        let (m, n, k) = (self.m, self.n, self.k);
        write!(out, "{} times {}", operand(self.a, m, k), operand(self.b, k, n))?;
        write!(out, " to {} [{m}, {n}] with rows {} apart", self.output, self.c_leading)?;
        write!(out, ", epilogue {:?}, scaling {:?}", self.epilogue, self.scaling)
    }
}

#[cfg(test)]
mod tests {
    use super::ElementType::{Bf16, E4m3, E5m2, F16, F32};
    use super::*;

    #[test]
    fn what_no_library_can_do_is_refused_with_a_reason() {
        let plain = Matmul::dense([4, 6, 8], Bf16, [false, true], F32);
        assert_eq!(plain.check(), Ok(()));
        assert_eq!(Matmul::dense([4, 6, 8], E4m3, [false, true], Bf16).check(), Ok(()));
        let refused = [
            (Matmul { k: 0, ..plain }, "k is 0"),
            (Matmul { c_leading: 5, ..plain }, "C and D are 6 elements wide and only 5 apart"),
            (Matmul { b: Operand { leading: 7, ..plain.b }, ..plain }, "B are 8 elements wide and only 7 apart"),
            (Matmul { b: Operand { element: F16, ..plain.b }, ..plain }, "differ in type"),
            (Matmul { output: F16, ..plain }, "bf16 inputs cannot give f16 outputs"),
            (Matmul { scaling: Scaling::Tensor, ..plain }, "for 8-bit inputs"),
            (Matmul::dense([4, 6, 8], E5m2, [false, true], Bf16), "no hardware"),
            (Matmul::dense([4, 6, 8], E4m3, [false, true], E4m3), "cannot give e4m3 outputs"),
        ];
        for (matmul, part) in refused {
            let message = matmul.check().expect_err(part).to_string();
            assert!(message.contains(part), "{part} is missing in: {message}");
        }
    }
}
