//! Products of matrices of any strides, the second one dense or quantized. Kernel: `gemm.wgsl`.

use std::ops::Range;

use burn_tensor::DType;
use firebrick_precision::Packing;

use super::super::engine::{Cost, Engine, Kernel, Matrix, Operand, Wgpu, in_a_row, int_primitive};
use crate::weights::{BlockScales, Weight};

/// A product that is added up: `scale * A Bᵀ`.
pub(in super::super) struct Segment<'a> {
    /// `[m, k]`.
    pub a: Turned<'a>,
    /// `[n, k]`.
    pub b: Values<'a>,
    pub scale: f64,
}

/// A matrix, or its transpose.
#[derive(Clone, Copy)]
pub(in super::super) enum Turned<'a> {
    Rows(&'a Matrix),
    Columns(&'a Matrix),
}

impl Turned<'_> {
    fn matrix(&self) -> &Matrix {
        let (Self::Rows(matrix) | Self::Columns(matrix)) = self;
        matrix
    }

    fn shape(&self) -> [usize; 2] {
        match self {
            Self::Rows(matrix) => [matrix.rows, matrix.width],
            Self::Columns(matrix) => [matrix.width, matrix.rows],
        }
    }

    /// Strides of rows and columns, and the offset.
    fn strides(&self) -> [usize; 3] {
        match self {
            Self::Rows(matrix) => [matrix.stride, 1, matrix.offset],
            Self::Columns(matrix) => [1, matrix.stride, matrix.offset],
        }
    }

    const fn is_by_rows(&self) -> bool {
        matches!(self, Self::Rows(_))
    }
}

/// The second matrix of a product.
pub(in super::super) enum Values<'a> {
    Matrix(Turned<'a>),
    /// A range of rows `[o, i]` of a weight, or the transpose of that.
    Weight {
        operand: &'a WeightOperand,
        rows: Range<usize>,
        is_turned: bool,
    },
}

/// A weight as launches read it.
pub(in super::super) enum WeightOperand {
    Dense(Box<Matrix>),
    Quantized(Box<Codes>),
}

impl WeightOperand {
    /// Returns `[out, in]`.
    pub(in super::super) fn shape(&self) -> [usize; 2] {
        match self {
            Self::Dense(values) => [values.rows, values.width],
            Self::Quantized(codes) => [codes.rows, codes.columns],
        }
    }
}

/// Codes, their scales, and the table in which they are looked up.
pub(in super::super) struct Codes {
    codes: Matrix,
    scales: Matrix,
    /// Values of scales that are codes.
    map: Option<Matrix>,
    table: Matrix,
    bits: u32,
    is_high_first: bool,
    block: usize,
    rows: usize,
    columns: usize,
}

impl Engine {
    /// Views a weight as an operand; `None` if it is in a format that no kernel reads.
    pub(in super::super) fn weight(&self, weight: &Weight<Wgpu>) -> Option<WeightOperand> {
        match weight {
            Weight::Dense(values) if matches!(values.dtype(), DType::F32 | DType::F16) => {
                Some(WeightOperand::Dense(Box::new(self.matrix(values.clone()))))
            }
            Weight::Dense(_) => None,
            Weight::Quantized(weight) => {
                let (scales, map) = match &weight.scales {
                    BlockScales::Float(scales) => (self.matrix(scales.clone()), None),
                    BlockScales::Narrow { codes, map } => {
                        let codes = self.matrix_of(int_primitive(codes.clone()));
                        // Four codes per word.
                        (Matrix { offset: 4 * codes.offset, ..codes }, Some(self.matrix(map.clone())))
                    }
                    BlockScales::Nested { .. } => return None,
                };
                let packing = weight.format.packing();
                let flat = |matrix: Matrix| Matrix { rows: 1, width: matrix.count(), ..matrix };
                Some(WeightOperand::Quantized(Box::new(Codes {
                    codes: self.matrix_of(int_primitive(weight.codes.clone())),
                    scales,
                    map,
                    table: flat(self.matrix(weight.table.clone())),
                    bits: (8 / packing.codes_per_byte()) as u32,
                    is_high_first: packing == Packing::HighNibbleFirst,
                    block: weight.format.block_size(weight.shape[1]),
                    rows: weight.shape[0],
                    columns: weight.shape[1],
                })))
            }
        }
    }

    /// Writes the sum of one or two products to `c`, plus a bias `[n]` and a matrix of its shape, which may be `c`.
    pub(in super::super) fn gemm(
        &self,
        name: &'static str,
        c: &Matrix,
        segments: &[Segment<'_>],
        bias: Option<&Matrix>,
        add: Option<&Matrix>,
    ) {
        let [m, n] = [c.rows, c.width];
        let tile = |size: usize| if size <= 16 { 16 } else { 64 };
        let (tm, tn) = (tile(m), tile(n));
        let mut constants = vec![
            ("TM", tm as u32),
            ("TN", tn as u32),
            ("THREADS", (tm * tn / 16) as u32),
            ("SEGMENTS", segments.len() as u32),
            ("SECOND", u32::from(segments.len() > 1)),
            ("BIAS", u32::from(bias.is_some())),
            ("ADD", u32::from(add.is_some())),
        ];
        let [add_row, add_at] = add.map_or([0; 2], |add| [add.stride, add.offset]);
        let bias_at = bias.map_or(0, |bias| bias.offset);
        let [codes_at, scales_at] = segments.first().map_or([0; 2], |first| first.b.codes_at());
        let head = [m, n, n.div_ceil(tn), c.stride, c.offset, add_row, add_at, bias_at, codes_at, scales_at];
        let mut parameters: Vec<u32> = head.map(|size| size as u32).into();
        let mut operands = Vec::new();
        let mut cost = Cost { flops: 0.0, bytes: c.bytes() };
        let names = [["A_ROWS_0", "B_ROWS_0"], ["A_ROWS_1", "B_ROWS_1"]];
        for (Segment { a, b, scale }, [a_rows, b_rows]) in segments.iter().zip(names) {
            let [rows, k] = a.shape();
            assert_eq!(rows, m, "{name}: rows of a product");
            operands.push(Operand::Read(a.matrix()));
            let (strides, b_is_by_rows) = b.read(&mut operands, &mut constants, [n, k]);
            constants.extend([(a_rows, u32::from(a.is_by_rows())), (b_rows, u32::from(b_is_by_rows))]);
            let [a_row, a_column, a_at] = a.strides();
            let [b_row, b_column, b_at] = strides;
            parameters.extend([k, a_row, a_column, a_at, b_row, b_column, b_at].map(|size| size as u32));
            parameters.push((*scale as f32).to_bits());
            cost.flops += 2.0 * (m * n * k) as f64;
            cost.bytes += a.matrix().bytes();
        }
        operands.extend(bias.map(Operand::Read));
        operands.extend(add.map(Operand::Read));
        operands.push(Operand::Write(c));
        let kernel = Kernel { name, template: include_str!("gemm.wgsl"), constants };
        self.launch(&kernel, &operands, &parameters, in_a_row(m.div_ceil(tm) * n.div_ceil(tn)), cost);
    }
}

impl<'a> Values<'a> {
    /// Offsets of codes and of their scales, if that is what it is: stacks of experts share both.
    fn codes_at(&self) -> [usize; 2] {
        match self {
            Self::Weight { operand: WeightOperand::Quantized(codes), .. } => [codes.codes.offset, codes.scales.offset],
            Self::Matrix(_) | Self::Weight { .. } => [0; 2],
        }
    }

    /// Adds the operands and constants that describe them; returns strides of rows and columns, the offset, and whether adjacent values are in a row.
    fn read(
        &self,
        operands: &mut Vec<Operand<'a>>,
        constants: &mut Vec<(&'static str, u32)>,
        [n, k]: [usize; 2],
    ) -> ([usize; 3], bool) {
        match self {
            Self::Matrix(matrix) => {
                assert_eq!(matrix.shape(), [n, k], "the second matrix of a product");
                operands.push(Operand::Read(matrix_of(*matrix)));
                (matrix.strides(), matrix.is_by_rows())
            }
            Self::Weight { operand, rows, is_turned } => {
                let (stride, offset) = match operand {
                    WeightOperand::Dense(values) => {
                        operands.push(Operand::Read(values));
                        constants.push(("HALF", u32::from(values.dtype() == DType::F16)));
                        (values.stride, values.offset)
                    }
                    WeightOperand::Quantized(codes) => {
                        let Codes { codes: words, scales, map, table, .. } = &**codes;
                        operands.extend([words, scales].map(Operand::Read));
                        operands.extend(map.as_ref().map(Operand::Read));
                        operands.push(Operand::Read(table));
                        constants.extend([
                            ("NARROW", u32::from(map.is_some())),
                            ("QUANTIZED", 1),
                            ("BITS", codes.bits),
                            ("PER_WORD", 32 / codes.bits),
                            ("SWAPPED", u32::from(codes.bits == 4 && codes.is_high_first)),
                            ("BLOCK", codes.block as u32),
                        ]);
                        (codes.columns, 0)
                    }
                };
                let at = offset + rows.start * stride;
                if *is_turned { ([1, stride, at], false) } else { ([stride, 1, at], true) }
            }
        }
    }
}

fn matrix_of(turned: Turned<'_>) -> &Matrix {
    let (Turned::Rows(matrix) | Turned::Columns(matrix)) = turned;
    matrix
}
