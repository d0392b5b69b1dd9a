//! GEMMs by cuBLASLt over row-major matrices with any row stride.

use burn_tensor::{DType, Tensor};
use firebrick_cuda::{ElementType, Matmul, Operand, Pointers, Scaling};

use super::Engine;
use super::experts::OfExperts;
use super::failure::check;
use super::matrix::{Cuda, DeviceBlock, MatrixView, tensor};
use super::trace::Cost;

/// `D = alpha op(A) op(B) + C + bias`, with `op(A)` `[m, k]` and `op(B)` `[k, n]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gemm {
    /// Name in the trace.
    pub name: &'static str,
    pub a: DeviceBlock,
    pub a_transposed: bool,
    pub b: DeviceBlock,
    pub b_transposed: bool,
    /// Matrix to add, with the format and row stride of the result; may be the result itself.
    pub c: Option<DeviceBlock>,
    /// Address of `n` bias values in the format of the result, added to every row.
    pub bias: Option<u64>,
    pub alpha: f64,
    /// Scales of 8-bit operands; without them, codes are multiplied unscaled.
    pub scales: Option<GemmScales>,
    /// Whether partial sums of 8-bit operands may be accumulated in fewer bits.
    pub is_fast: bool,
    /// The rows of experts: `b` is the first expert's matrix, or the result has the sums of each expert's rows below each other.
    pub experts: Option<OfExperts>,
}

/// Scales of 8-bit operands.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GemmScales {
    /// Address of the scales for the rows of `op(A)`, or for their blocks.
    pub a: u64,
    /// Address of the scales for the columns of `op(B)`, or for their blocks.
    pub b: u64,
    pub scaling: Scaling,
}

impl Gemm {
    /// Describes `x weightᵀ`, `[n, o]`.
    pub(crate) fn forward(name: &'static str, x: DeviceBlock, weight: DeviceBlock) -> Self {
        Self {
            name,
            a: x,
            a_transposed: false,
            b: weight,
            b_transposed: true,
            c: None,
            bias: None,
            alpha: 1.0,
            scales: None,
            is_fast: false,
            experts: None,
        }
    }

    /// Describes `dy weight`, `[n, i]`.
    pub(crate) fn input_gradient(name: &'static str, dy: DeviceBlock, weight: DeviceBlock) -> Self {
        Self { b_transposed: false, ..Self::forward(name, dy, weight) }
    }

    /// Describes `leftᵀ right` summed over tokens, `[left width, right width]`.
    pub(crate) fn token_sum(name: &'static str, left: DeviceBlock, right: DeviceBlock) -> Self {
        Self { a_transposed: true, b_transposed: false, ..Self::forward(name, left, right) }
    }

    fn sizes(&self) -> [usize; 3] {
        let (m, k) = if self.a_transposed { (self.a.width, self.a.rows) } else { (self.a.rows, self.a.width) };
        let n = if self.b_transposed { self.b.rows } else { self.b.width };
        [m, n, k]
    }
}

impl Engine {
    /// Runs one GEMM per matrix, `[g, m, n]` from `[g, m, k]` and `[g, k, n]`, after copying operands that are not contiguous.
    pub(crate) fn batched_gemm(&self, a: Tensor<Cuda, 3>, b: Tensor<Cuda, 3>) -> Tensor<Cuda, 3> {
        let ([groups, m, k], [b_groups, b_k, n]) = (a.dims(), b.dims());
        assert_eq!((groups, k), (b_groups, b_k), "shapes of a GEMM's operands");
        let [a, b] = [self.flat(a), self.flat(b)];
        let result = self.view_of(self.empty([groups, m, n], a.dtype));
        let of = |matrix: &MatrixView, rows, width, group| {
            DeviceBlock::dense(matrix.address, [groups * rows, width], matrix.dtype).rows(group * rows, rows)
        };
        for group in 0..groups {
            let gemm = Gemm::input_gradient("matmul", of(&a, m, k, group), of(&b, k, n, group));
            self.plain_gemm(gemm, of(&result, m, n, group));
        }
        tensor(result.tensor)
    }

    /// Computes a GEMM into `d` that is not over the rows of experts (`Device::gemm` is for both).
    pub(crate) fn plain_gemm(&self, gemm: Gemm, d: DeviceBlock) {
        let Gemm { name, a, b, .. } = gemm;
        let [m, n, k] = gemm.sizes();
        if m == 0 || n == 0 {
            return;
        }
        let inner = if gemm.b_transposed { b.width } else { b.rows };
        assert_eq!((inner, d.rows, d.width), (k, m, n), "{name}: shapes of the operands");
        let matmul = Matmul {
            m,
            n,
            k,
            a: Operand { element: element(a.dtype), transposed: gemm.a_transposed, leading: a.stride },
            b: Operand { element: element(b.dtype), transposed: gemm.b_transposed, leading: b.stride },
            c_leading: d.stride,
            output: element(d.dtype),
            bias: gemm.bias.is_some(),
            scaling: gemm.scales.map_or(Scaling::None, |scales| scales.scaling),
            fast_accumulation: gemm.is_fast,
        };
        let c = gemm.c.unwrap_or(d);
        assert!(c.stride == d.stride && c.dtype == d.dtype, "{name}: what is added is laid out as the result");
        [a, b, c, d].into_iter().for_each(|block| self.assert_block_is_live(name, block));
        let bytes = (a.bytes() + b.bytes() + d.bytes() + gemm.c.map_or(0, |c| c.bytes())) as f64;
        let cost = Cost { flops: 2.0 * m as f64 * n as f64 * k as f64, bytes, gemm: Some([m, n, k]) };
        let beta = if gemm.c.is_some() { 1.0 } else { 0.0 };
        let [a_scale, b_scale] = gemm.scales.map_or([0; 2], |scales| [scales.a, scales.b]);
        let pointers = Pointers {
            bias: gemm.bias.unwrap_or(0),
            a_scale,
            b_scale,
            ..Pointers::new(a.address, b.address, c.address, d.address)
        };
        // SAFETY: the blocks lie in tensors or scratch memory that the caller holds, with the strides that the descriptor
        // repeats; the bias has `n` values, and scales are those of all rows; the library reads and writes nothing else but its workspace.
        let prepared =
            unsafe { self.blas.borrow().prepare(|| self.stream(), &matmul, gemm.alpha as f32, beta, pointers) };
        let prepared = check(name, prepared).expect("m and n are not 0");
        // SAFETY: as above; the library lives as long as the engine, and a prepared GEMM is hashed with all that it depends on.
        unsafe { self.submit(name, cost, prepared, |prepared, stream| prepared.submit(stream)) };
    }
}

/// Returns cuBLASLt's name of a format.
fn element(dtype: DType) -> ElementType {
    match dtype {
        DType::BF16 => ElementType::Bf16,
        DType::F16 => ElementType::F16,
        DType::F32 => ElementType::F32,
        DType::U8 => ElementType::E4m3,
        other => unreachable!("GEMMs are of f32, f16, bf16 or 8-bit floats, not {other:?}"),
    }
}
