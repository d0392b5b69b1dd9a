//! The description of a GEMM in row-major terms, and the check that it is possible.
//!
//! Micro-scaled inputs (MXFP8, NVFP4) need Blackwell. No such card was available: their descriptors are tested against
//! the library, but no such GEMM has run.
//!
//! Not supported: batches, and input types other than f32, bf16, f16, the two 8-bit formats and the 4-bit one.

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
    /// 4 bits: 2 of exponent, 1 of mantissa; maximum 6 ("OCP Microscaling Formats (MX) Specification", 2023). Two per
    /// byte, the earlier one in the low bits.
    E2m1,
}

impl ElementType {
    /// Returns the bits of one element.
    pub const fn bits(self) -> usize {
        match self {
            Self::F32 => 32,
            Self::Bf16 | Self::F16 => 16,
            Self::E4m3 | Self::E5m2 => 8,
            Self::E2m1 => 4,
        }
    }

    /// Returns the required alignment of a matrix's address: one value, or 16 bytes if two values share a byte.
    pub(super) const fn address_multiple(self) -> usize {
        match self {
            Self::E2m1 => 16,
            _ => self.bits() / 8,
        }
    }

    /// Returns whether it is one of the 8-bit formats.
    pub const fn is_fp8(self) -> bool {
        matches!(self, Self::E4m3 | Self::E5m2)
    }

    /// Returns whether kernels support it only with A untransposed and B transposed.
    pub(super) const fn is_narrow(self) -> bool {
        self.is_fp8() || matches!(self, Self::E2m1)
    }

    /// Returns the `cudaDataType_t` (library_types.h).
    pub(super) const fn code(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 2,
            Self::Bf16 => 14,
            Self::E4m3 => 28,
            Self::E5m2 => 29,
            Self::E2m1 => 33,
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
            Self::E2m1 => "e2m1",
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
    /// Distance between stored rows in elements; larger than the width of a row for a view of a wider buffer.
    pub leading: usize,
}

/// An additional computation in the same pass as the GEMM.
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
    /// Returns the `cublasLtEpilogue_t`. Our A is cuBLASLt's B, as `descriptors.rs` explains.
    pub(super) const fn code(self) -> u32 {
        match self {
            Self::None => 1,
            Self::Bias => 4,
            Self::BiasGradient => 512,
        }
    }
}

/// Scales in device memory by which the stored numbers of 8-bit and 4-bit inputs are multiplied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Scaling {
    /// None: all scales are 1.
    #[default]
    None,
    /// One f32 for all of A, and one for all of B.
    Tensor,
    /// One f32 for each of the `m` rows of `op(A)` and each of the `n` columns of `op(B)`. Needs cuBLASLt of CUDA 12.9 and compute capability 9.0.
    OuterVector,
    /// MXFP8: one E8M0 per 32 values along `k` of 8-bit inputs, in tiles of 128 rows by 4 scales: the rows of a tile
    /// are 16 bytes apart, and rows 32 apart are side by side. Needs compute capability 10.0.
    Blocks32,
    /// NVFP4: one unsigned E4M3 per 16 values along `k` of 4-bit inputs, in the same tiles; the tensor's f32 scale is
    /// multiplied into alpha. Needs compute capability 10.0.
    Blocks16,
}

impl Scaling {
    /// Returns the number of values along `k` that share a scale, if scales are per block.
    pub const fn block(self) -> Option<usize> {
        match self {
            Self::Blocks32 => Some(32),
            Self::Blocks16 => Some(16),
            _ => None,
        }
    }

    /// Returns the bytes of the scales of an operand with this many rows of `op(A)`, or columns of `op(B)`, in whole tiles; 0 without scales.
    pub const fn bytes(self, rows: usize, k: usize) -> usize {
        match self {
            Self::None => 0,
            Self::Tensor => 4,
            Self::OuterVector => 4 * rows,
            Self::Blocks32 => rows.next_multiple_of(128) * k.div_ceil(32).next_multiple_of(4),
            Self::Blocks16 => rows.next_multiple_of(128) * k.div_ceil(16).next_multiple_of(4),
        }
    }

    /// Returns the required alignment of the scales' address.
    pub(super) const fn address_multiple(self) -> usize {
        if self.block().is_some() { 16 } else { 4 }
    }

    /// Returns the `cublasLtMatmulMatrixScale_t`.
    pub(super) const fn code(self) -> u32 {
        match self {
            Self::None | Self::Tensor => 0,
            Self::Blocks16 => 1,
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
    /// The left operand.
    pub a: Operand,
    /// The right operand.
    pub b: Operand,
    /// Distance between rows in elements, in both C and D.
    pub c_leading: usize,
    /// Element type of C and D.
    pub output: ElementType,
    /// Additional computation in the same pass.
    pub epilogue: Epilogue,
    /// Scales of 8-bit inputs.
    pub scaling: Scaling,
    /// Allows rounding f32 inputs to TF32 (10 bits of mantissa), which makes them fast.
    pub allow_tf32: bool,
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
        let fp8 = a.element.is_fp8() && b.element.is_fp8();
        if a.element != b.element && !fp8 {
            return Some("A and B differ in type; only the two 8-bit formats can be mixed".to_string());
        }
        if self.output.is_narrow()
            || !(a.element.is_narrow() || self.output == ElementType::F32 || self.output == a.element)
        {
            return Some(format!("{} inputs cannot give {} outputs", a.element, self.output));
        }
        self.scaling_fault().or_else(|| self.narrow_fault())
    }

    /// Returns the error in the scales for these inputs, if any.
    fn scaling_fault(&self) -> Option<String> {
        let fp4 = self.a.element == ElementType::E2m1;
        if self.scaling != Scaling::None && !self.a.element.is_narrow() {
            return Some("scales are for 8-bit and 4-bit inputs".to_string());
        }
        if fp4 != (self.scaling == Scaling::Blocks16) {
            return Some("4-bit inputs need a scale for each 16 values, and only they have them".to_string());
        }
        let block = self.scaling.block()?;
        (!self.k.is_multiple_of(block))
            .then(|| format!("k is {}, no multiple of the {block} values of a scale", self.k))
    }

    /// Returns the error in 8-bit and 4-bit inputs, if any.
    fn narrow_fault(&self) -> Option<String> {
        let (a, b) = (self.a, self.b);
        let fp8 = a.element.is_fp8() && b.element.is_fp8();
        let plain = !a.transposed && b.transposed;
        if self.scaling.block().is_some() && !plain {
            return Some("micro-scaled inputs have their scales along k: A untransposed, B transposed".to_string());
        }
        if fp8 && (a.element, b.element) == (ElementType::E5m2, ElementType::E5m2) {
            return Some("no hardware multiplies e5m2 by e5m2: make one of them e4m3".to_string());
        }
        None
    }

    /// Rejects formats for which the device has no instructions; the library would only report that the GEMM is not supported.
    pub(super) fn check_device(&self, capability: (u32, u32)) -> Result<(), CudaError> {
        let needed = match self.scaling {
            Scaling::Blocks32 | Scaling::Blocks16 => (10, 0),
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
        write!(out, ", epilogue {:?}, scaling {:?}", self.epilogue, self.scaling)
    }
}

#[cfg(test)]
mod tests {
    use super::ElementType::{Bf16, E2m1, E4m3, E5m2, F16, F32};
    use super::*;

    #[test]
    fn a_device_without_the_instructions_is_refused_by_its_capability() {
        let narrow = |element, scaling| Matmul { scaling, ..Matmul::dense([4, 6, 64], element, [false, true], Bf16) };
        let accepts = |matmul: Matmul, capability| matmul.check_device(capability).is_ok();
        for (matmul, least, too_old) in [
            (narrow(E4m3, Scaling::Blocks32), (10, 0), (9, 0)),
            (narrow(E2m1, Scaling::Blocks16), (12, 0), (9, 0)),
            (narrow(E4m3, Scaling::OuterVector), (9, 0), (8, 9)),
            (narrow(E4m3, Scaling::Tensor), (8, 9), (8, 6)),
        ] {
            assert!(accepts(matmul, least) && !accepts(matmul, too_old), "{matmul}");
        }
        let message = narrow(E2m1, Scaling::Blocks16).check_device((9, 0)).expect_err("Hopper").to_string();
        assert!(message.contains("needs compute capability 10.0, this device has 9.0"), "{message}");
        assert!(accepts(Matmul::dense([4, 6, 8], Bf16, [false, true], F32), (7, 0)));
    }

    #[test]
    fn scales_of_blocks_take_whole_tiles() {
        assert_eq!(Scaling::Blocks32.bytes(128, 128), 512);
        assert_eq!(Scaling::Blocks32.bytes(129, 160), 256 * 8);
        assert_eq!(Scaling::Blocks16.bytes(1, 16), 512);
        assert_eq!(
            [Scaling::None, Scaling::Tensor, Scaling::OuterVector].map(|scaling| scaling.bytes(7, 64)),
            [0, 4, 28]
        );
    }

    #[test]
    fn impossible_gemms_are_refused_with_a_reason() {
        let plain = Matmul::dense([4, 6, 8], Bf16, [false, true], F32);
        assert_eq!(plain.check(), Ok(()));
        assert_eq!(Matmul::dense([4, 6, 8], E4m3, [false, true], Bf16).check(), Ok(()));
        let mx = Matmul { scaling: Scaling::Blocks32, ..Matmul::dense([4, 6, 64], E4m3, [false, true], Bf16) };
        let nvfp4 = Matmul { scaling: Scaling::Blocks16, ..Matmul::dense([4, 6, 64], E2m1, [false, true], Bf16) };
        assert_eq!([mx.check(), nvfp4.check()], [Ok(()), Ok(())]);
        let refused = [
            (Matmul { k: 0, ..plain }, "k is 0"),
            (Matmul { c_leading: 5, ..plain }, "C and D are 6 elements wide and only 5 apart"),
            (Matmul { b: Operand { leading: 7, ..plain.b }, ..plain }, "B are 8 elements wide and only 7 apart"),
            (Matmul { b: Operand { element: F16, ..plain.b }, ..plain }, "differ in type"),
            (Matmul { output: F16, ..plain }, "bf16 inputs cannot give f16 outputs"),
            (Matmul { scaling: Scaling::Tensor, ..plain }, "for 8-bit and 4-bit inputs"),
            (Matmul::dense([4, 6, 32], E2m1, [false, true], Bf16), "a scale for each 16 values"),
            (Matmul { scaling: Scaling::Blocks16, ..mx }, "a scale for each 16 values"),
            (Matmul { scaling: Scaling::Blocks32, ..Matmul::dense([4, 6, 40], E4m3, [false, true], Bf16) }, "k is 40"),
            (Matmul { scaling: Scaling::Blocks32, ..Matmul::dense([4, 6, 64], E4m3, [false, false], Bf16) }, "along k"),
            (Matmul::dense([4, 6, 8], E5m2, [false, true], Bf16), "no hardware"),
            (Matmul::dense([4, 6, 8], E4m3, [false, true], E4m3), "cannot give e4m3 outputs"),
        ];
        for (matmul, part) in refused {
            let message = matmul.check().expect_err(part).to_string();
            assert!(message.contains(part), "{part} is missing in: {message}");
        }
    }
}
