//! The description of a GEMM in row-major terms, and the check that it is possible.
//!
//! Micro-scaled inputs (MXFP8) need Blackwell. No such card was available: their descriptors are tested against the library, but no such GEMM has
//! run.
//!
//! Not supported: batches, and input types other than f32, bf16, f16 and e4m3.

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
}

impl ElementType {
    /// Returns the bytes of one element, which are also the required alignment of a matrix's address.
    pub(super) const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
            Self::E4m3 => 1,
        }
    }

    /// Returns whether it is the 8-bit format, which kernels support only with A untransposed and B transposed.
    pub(super) const fn is_fp8(self) -> bool {
        matches!(self, Self::E4m3)
    }

    /// Returns the `cudaDataType_t` (library_types.h).
    pub(super) const fn code(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 2,
            Self::Bf16 => 14,
            Self::E4m3 => 28,
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
        })
    }
}

/// An input matrix. `op(X)` is the matrix as stored, or its transpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Operand {
    /// How its values are stored.
    pub element: ElementType,
    /// Whether `op` transposes: an `op(A)` of `m` x `k` is then stored as `[k, m]`.
    pub transposed: bool,
    /// Distance between stored rows in elements; larger than the width of a row for a view of a wider buffer.
    pub leading: usize,
}

/// Scales in device memory by which the stored numbers of 8-bit inputs are multiplied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Scaling {
    /// None: all scales are 1.
    #[default]
    None,
    /// One f32 for each of the `m` rows of `op(A)` and each of the `n` columns of `op(B)`. Needs cuBLASLt of CUDA 12.9 and compute capability 9.0.
    OuterVector,
    /// MXFP8: one E8M0 per 32 values along `k` of 8-bit inputs, in tiles of 128 rows by 4 scales: the rows of a tile
    /// are 16 bytes apart, and rows 32 apart are side by side. Needs compute capability 10.0.
    Blocks32,
}

impl Scaling {
    /// Returns the bytes of the scales of an operand with this many rows of `op(A)`, or columns of `op(B)`, in whole tiles; 0 without scales.
    pub const fn bytes(self, rows: usize, k: usize) -> usize {
        match self {
            Self::None => 0,
            Self::OuterVector => 4 * rows,
            Self::Blocks32 => rows.next_multiple_of(128) * k.div_ceil(32).next_multiple_of(4),
        }
    }

    pub(super) const fn address_multiple(self) -> usize {
        if matches!(self, Self::Blocks32) { 16 } else { 4 }
    }

    /// Returns the `cublasLtMatmulMatrixScale_t`.
    pub(super) const fn code(self) -> u32 {
        match self {
            Self::None => 0,
            Self::Blocks32 => 2,
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
    /// The left operand, `op(A)`: `m` x `k`.
    pub a: Operand,
    /// The right operand, `op(B)`: `k` x `n`.
    pub b: Operand,
    /// Distance between rows in elements, in both C and D.
    pub c_leading: usize,
    /// Element type of C and D.
    pub output: ElementType,
    /// Whether a vector of `n` elements of the output's type is added to every row:
    /// `D[i, j] = alpha * (op(A) op(B))[i, j] + beta * C[i, j] + bias[j]`. The bias is scaled by neither alpha nor beta, so with
    /// beta = 1 the GEMM adds to C and adds the bias once. [`Pointers::bias`](crate::Pointers::bias) is read.
    pub bias: bool,
    /// Scales of 8-bit inputs.
    pub scaling: Scaling,
    /// Allows accumulating 8-bit inputs in fewer bits than f32 has: faster on Hopper, intended for forward passes.
    pub fast_accumulation: bool,
}

impl Matmul {
    /// Describes a plain GEMM of matrices without gaps: `op(A)` is `m` x `k`, `op(B)` is `k` x `n`. Change fields for anything else.
    pub const fn dense(
        [m, n, k]: [usize; 3],
        inputs: ElementType,
        [transpose_a, transpose_b]: [bool; 2],
        output: ElementType,
    ) -> Self {
        let a = Operand { element: inputs, transposed: transpose_a, leading: if transpose_a { m } else { k } };
        let b = Operand { element: inputs, transposed: transpose_b, leading: if transpose_b { k } else { n } };
        Self { m, n, k, a, b, c_leading: n, output, bias: false, scaling: Scaling::None, fast_accumulation: false }
    }

    /// Rejects GEMMs that no version of cuBLASLt supports, or that it would silently compute wrongly.
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
        if a.element != b.element {
            return Some("A and B differ in type".to_string());
        }
        if self.output.is_fp8() || !(a.element.is_fp8() || self.output == ElementType::F32 || self.output == a.element)
        {
            return Some(format!("{} inputs cannot give {} outputs", a.element, self.output));
        }
        if self.scaling != Scaling::None && !a.element.is_fp8() {
            return Some("scales are for 8-bit inputs".to_string());
        }
        if self.scaling == Scaling::Blocks32 && !self.k.is_multiple_of(32) {
            return Some(format!("k is {}, no multiple of the 32 values of a scale", self.k));
        }
        if self.scaling == Scaling::Blocks32 && (a.transposed || !b.transposed) {
            return Some("micro-scaled inputs have their scales along k: A untransposed, B transposed".to_string());
        }
        None
    }

    /// Rejects formats for which the device has no instructions; the library would only report that the GEMM is not supported.
    pub(super) fn check_device(&self, capability: (u32, u32)) -> Result<(), CudaError> {
        let needed = match self.scaling {
            Scaling::Blocks32 => (10, 0),
            Scaling::OuterVector => (9, 0),
            _ if self.a.element.is_fp8() => (8, 9),
            _ => (0, 0),
        };
        if capability >= needed {
            return Ok(());
        }
        let dotted = |(major, minor): (u32, u32)| format!("{major}.{minor}");
        let reason = format!("it needs compute capability {}, this device has {}", dotted(needed), dotted(capability));
        Err(CudaError::InvalidMatmul { requested: self.to_string(), reason })
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
        let epilogue = if self.bias { "Bias" } else { "None" };
        write!(out, ", epilogue {epilogue}, scaling {:?}", self.scaling)
    }
}

#[cfg(test)]
mod tests {
    use super::ElementType::{Bf16, E4m3, F16, F32};
    use super::*;

    #[test]
    fn cards_without_the_instructions_are_refused() {
        let narrow = |element, scaling| Matmul { scaling, ..Matmul::dense([4, 6, 64], element, [false, true], Bf16) };
        let accepts = |matmul: Matmul, capability| matmul.check_device(capability).is_ok();
        for (matmul, least, too_old) in [
            (narrow(E4m3, Scaling::Blocks32), (10, 0), (9, 0)),
            (narrow(E4m3, Scaling::OuterVector), (9, 0), (8, 9)),
            (narrow(E4m3, Scaling::None), (8, 9), (8, 6)),
        ] {
            assert!(accepts(matmul, least) && !accepts(matmul, too_old), "{matmul}");
        }
        let message = narrow(E4m3, Scaling::Blocks32).check_device((9, 0)).expect_err("Hopper").to_string();
        assert!(message.contains("needs compute capability 10.0, this device has 9.0"), "{message}");
        assert!(accepts(Matmul::dense([4, 6, 8], Bf16, [false, true], F32), (7, 0)));
    }

    #[test]
    fn scales_of_blocks_take_whole_tiles() {
        assert_eq!(Scaling::Blocks32.bytes(128, 128), 512);
        assert_eq!(Scaling::Blocks32.bytes(129, 160), 256 * 8);
        assert_eq!([Scaling::None, Scaling::OuterVector].map(|scaling| scaling.bytes(7, 64)), [0, 28]);
    }

    #[test]
    fn impossible_gemms_are_refused_with_a_reason() {
        let plain = Matmul::dense([4, 6, 8], Bf16, [false, true], F32);
        assert_eq!(plain.check(), Ok(()));
        assert_eq!(Matmul::dense([4, 6, 8], E4m3, [false, true], Bf16).check(), Ok(()));
        let mx = Matmul { scaling: Scaling::Blocks32, ..Matmul::dense([4, 6, 64], E4m3, [false, true], Bf16) };
        assert_eq!(mx.check(), Ok(()));
        let refused = [
            (Matmul { k: 0, ..plain }, "k is 0"),
            (Matmul { c_leading: 5, ..plain }, "C and D are 6 elements wide and only 5 apart"),
            (Matmul { b: Operand { leading: 7, ..plain.b }, ..plain }, "B are 8 elements wide and only 7 apart"),
            (Matmul { b: Operand { element: F16, ..plain.b }, ..plain }, "differ in type"),
            (Matmul { output: F16, ..plain }, "bf16 inputs cannot give f16 outputs"),
            (Matmul { scaling: Scaling::OuterVector, ..plain }, "for 8-bit inputs"),
            (Matmul { scaling: Scaling::Blocks32, ..Matmul::dense([4, 6, 40], E4m3, [false, true], Bf16) }, "k is 40"),
            (Matmul { scaling: Scaling::Blocks32, ..Matmul::dense([4, 6, 64], E4m3, [false, false], Bf16) }, "along k"),
            (Matmul::dense([4, 6, 8], E4m3, [false, true], E4m3), "cannot give e4m3 outputs"),
        ];
        for (matmul, part) in refused {
            let message = matmul.check().expect_err(part).to_string();
            assert!(message.contains(part), "{part} is missing in: {message}");
        }
    }
}
