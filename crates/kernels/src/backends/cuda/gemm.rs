//! Matrix products, all by cuBLASLt: rows as Rust sees them, any row stride.

use burn_tensor::DType;
use firebrick_cuda::{ElementType, Epilogue, Matmul, Operand, Scaling};

use super::engine::Engine;
use super::tensor::Matrix;
use super::trace::Cost;

/// A matrix by its address alone: what scratch memory holds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    pub address: u64,
    pub stride: usize,
    pub dtype: DType,
}

impl From<&Matrix> for Block {
    fn from(matrix: &Matrix) -> Self {
        Self { address: matrix.address, stride: matrix.stride, dtype: matrix.dtype }
    }
}

impl Block {
    /// The block that begins `columns` values to the right.
    pub(super) fn at_column(self, columns: usize) -> Self {
        Self { address: self.address + (columns * self.dtype.size()) as u64, ..self }
    }

    /// The block that begins `rows` rows further down.
    pub(super) fn at_row(self, rows: usize) -> Self {
        Self { address: self.address + (rows * self.stride * self.dtype.size()) as u64, ..self }
    }
}

/// `D = alpha op(A) op(B) + C`, with `op(A)` `[m, k]` and `op(B)` `[k, n]`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Product {
    /// For the trace.
    pub name: &'static str,
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub a: Block,
    pub a_transposed: bool,
    pub b: Block,
    pub b_transposed: bool,
    /// Added; same format and row stride as the result, and may be the result.
    pub c: Option<Block>,
    pub alpha: f64,
}

impl Engine {
    /// Computes a product into `d`.
    pub(super) fn gemm(&self, product: Product, d: Block) {
        let Product { name, m, n, k, a, b, .. } = product;
        if m == 0 || n == 0 {
            return;
        }
        let matmul = Matmul {
            m,
            n,
            k,
            a: Operand { element: element(a.dtype), transposed: product.a_transposed, leading: a.stride },
            b: Operand { element: element(b.dtype), transposed: product.b_transposed, leading: b.stride },
            c_leading: d.stride,
            output: element(d.dtype),
            epilogue: Epilogue::None,
            scaling: Scaling::None,
            allow_tf32: false,
            fast_accumulation: false,
        };
        let c = product.c.unwrap_or(d);
        assert!(c.stride == d.stride && c.dtype == d.dtype, "{name}: what is added is laid out as the result");
        let bytes = (m * k * a.dtype.size() + k * n * b.dtype.size() + m * n * d.dtype.size()) as f64
            + product.c.map_or(0.0, |c| (m * n * c.dtype.size()) as f64);
        let cost = Cost { flops: 2.0 * m as f64 * n as f64 * k as f64, bytes, product: Some([m, n, k]) };
        let beta = if product.c.is_some() { 1.0 } else { 0.0 };
        self.traced(name, cost, || self.launch_matmul(&matmul, product.alpha as f32, beta, [a, b, c, d]));
    }
}

/// cuBLASLt's name of a format.
fn element(dtype: DType) -> ElementType {
    match dtype {
        DType::BF16 => ElementType::Bf16,
        DType::F16 => ElementType::F16,
        DType::F32 => ElementType::F32,
        other => unreachable!("products are of f32, f16 or bf16, not {other:?}"),
    }
}
