//! The description of a GEMM in row-major terms, and the check that it is possible.
//!
//! Not supported: batches, and input types other than f32, bf16, f16 and the two 8-bit formats.

use std::fmt;

use crate::error::CudaError;

/// The element type of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ElementType {
    /// IEEE single.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE half.
    F16,
    /// 8 bits: 4 of exponent, 3 of mantissa; maximum 448, no infinity ("OCP 8-bit Floating Point Specification", 2023).
    E4m3,
    /// 8 bits: 5 of exponent, 2 of mantissa; maximum 57344 (same source).
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

/// An input matrix. `op(X)` is the matrix as stored, or its transpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Operand {
    /// Its element type.
    pub element: ElementType,
    /// Whether `op` transposes: an `op(A)` of `m` x `k` is then stored as `[k, m]`.
    pub transposed: bool,
    /// Distance of stored rows in elements; larger than the width of a row for a view of a wider buffer.
    pub leading: usize,
}

/// What is computed in addition to the GEMM itself, in the same pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Epilogue {
    /// Nothing.
    #[default]
    None,
    /// Adds a vector of `n` elements of the output's type to every row:
    /// `D[i, j] = alpha * (op(A) op(B))[i, j] + beta * C[i, j] + bias[j]`. The bias is scaled by neither alpha nor beta, so with
    /// beta = 1 the GEMM adds to C and adds the bias once. [`Pointers::bias`](crate::Pointers::bias) is read.
    Bias,
    /// Also writes the sums of `op(A)` over `k`, `m` elements of the output's type, to
    /// [`Pointers::bias`](crate::Pointers::bias): the gradient of a bias if the GEMM is `dY^T X`. Few kernels support it;
    /// [`CudaError::BlasLt`] if none does.
    BiasGradient,
}

impl Epilogue {
    /// `cublasLtEpilogue_t`. Our A is cuBLASLt's B (see `descriptors.rs`).
    pub(super) const fn code(self) -> u32 {
        match self {
            Self::None => 1,
            Self::Bias => 4,
            Self::BiasGradient => 512,
        }
    }
}

/// Scales in device memory by which the stored numbers of 8-bit inputs are multiplied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Scaling {
    /// None: all scales are 1.
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

/// `D[m, n] = alpha * op(A) op(B) + beta * C`, all matrices row-major, accumulated in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Matmul {
    /// Rows of `op(A)`, C and D.
    pub m: usize,
    /// Columns of `op(B)`, C and D.
    pub n: usize,
    /// Columns of `op(A)`, rows of `op(B)`.
    pub k: usize,
    /// The left operand.
    pub a: Operand,
    /// The right operand.
    pub b: Operand,
    /// Distance of rows in elements, in both C and D.
    pub c_leading: usize,
    /// Element type of C and D.
    pub output: ElementType,
    /// What is computed in addition.
    pub epilogue: Epilogue,
    /// Scales of 8-bit inputs.
    pub scaling: Scaling,
    /// Allows rounding f32 inputs to TF32 (10 bits of mantissa), which makes them fast.
    pub allow_tf32: bool,
    /// Allows accumulating 8-bit inputs with fewer bits than f32 has: faster on Hopper, meant for forward passes.
    pub fast_accumulation: bool,
}

impl Matmul {
    /// A plain GEMM of matrices without gaps: `op(A)` is `m` x `k`, `op(B)` is `k` x `n`. Change fields for anything else.
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

    /// Refuses what no version of cuBLASLt can do, or would silently do wrong.
    pub(super) fn check(&self) -> Result<(), CudaError> {
        self.fault().map_or(Ok(()), |reason| Err(CudaError::InvalidMatmul { requested: self.to_string(), reason }))
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
            return Some("k is 0, and cuBLASLt does not do empty sums: scale C by beta instead".to_string());
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
            return Some("scales are for 8-bit inputs".to_string());
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
    fn impossible_gemms_are_refused_with_a_reason() {
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
