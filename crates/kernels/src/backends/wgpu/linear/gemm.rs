//! Products of matrices of any strides, the second one dense or quantized. Kernel: `gemm.wgsl`.

use std::ops::Range;

use burn_tensor::DType;
use firebrick_precision::Packing;

use super::super::engine::{Cost, Engine, Kernel, Matrix, Operand, Wgpu, in_a_row, int_primitive};
use crate::weights::{BlockScales, Weight};

/// Workgroups with which a device is busy.
const ENOUGH: usize = 96;
/// Number of workgroups to aim for when the inner dimension is divided, and the minimum size of a part.
const SPLIT_TO: usize = 512;
const MIN_PART: usize = 128;
/// Parts are multiples of this.
pub(super) const DEPTH: usize = 32;

/// A product that is added up: `scale * A Bᵀ`.
pub(in super::super) struct Segment<'a> {
    /// `[m, k]`.
    pub a: Turned<'a>,
    /// `[n, k]`.
    pub b: Values<'a>,
    pub scale: f64,
}

impl<'a> Segment<'a> {
    pub(in super::super) fn of(a: Turned<'a>, b: Turned<'a>, scale: f64) -> Self {
        Self { a, b: Values::Matrix(b), scale }
    }
}

/// A matrix, or its transpose.
#[derive(Clone, Copy)]
pub(in super::super) enum Turned<'a> {
    Rows(&'a Matrix),
    Columns(&'a Matrix),
}

impl<'a> Turned<'a> {
    pub(super) fn matrix(self) -> &'a Matrix {
        let (Self::Rows(matrix) | Self::Columns(matrix)) = self;
        matrix
    }

    pub(super) fn shape(&self) -> [usize; 2] {
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

    pub(super) const fn is_by_rows(&self) -> bool {
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
    pub(super) codes: Matrix,
    pub(super) scales: Matrix,
    /// Values of scales that are codes.
    pub(super) map: Option<Matrix>,
    pub(super) table: Matrix,
    pub(super) bits: u32,
    pub(super) is_high_first: bool,
    pub(super) block: usize,
    pub(super) rows: usize,
    pub(super) columns: usize,
}

/// How the inner dimension of a product is divided, so that small results keep the device busy as well.
pub(super) struct Parts {
    pub(super) count: usize,
    /// Size of all but the last.
    pub(super) size: usize,
}

impl Parts {
    /// Divides `k` for so many tiles if that is allowed, to get about `enough` workgroups.
    pub(super) fn of([tiles, enough]: [usize; 2], k: usize, may_split: bool) -> Self {
        let wanted = if may_split && tiles < ENOUGH { (enough / tiles).min(k / MIN_PART).max(1) } else { 1 };
        let size = k.div_ceil(wanted).next_multiple_of(DEPTH).max(DEPTH);
        Self { count: k.div_ceil(size).max(1), size }
    }
}

/// Returns rows and columns that a workgroup computes.
fn tile([m, n]: [usize; 2]) -> [usize; 2] {
    let is_large = m.div_ceil(128) * n.div_ceil(128) >= ENOUGH;
    [m, n].map(|size| match size {
        0..=16 => 16,
        _ if is_large && size > 64 => 128,
        _ => 64,
    })
}

/// Returns the constants of a tile: a thread has up to two vectors of four values in each direction.
fn constants_of([tm, tn]: [usize; 2]) -> Vec<(&'static str, u32)> {
    let [pm, pn] = [tm, tn].map(|size| size.div_ceil(64));
    let across = tn / (4 * pn);
    let threads = across * (tm / (4 * pm));
    let sizes = [("TM", tm), ("TN", tn), ("THREADS", threads), ("ACROSS", across), ("PM", pm), ("PN", pn)];
    let loads = [("LA", 4 * tm / threads), ("LB", 4 * tn / threads), ("FOUR", 4), ("FIRST_0", 1)];
    sizes.into_iter().chain(loads).map(|(name, size)| (name, size as u32)).collect()
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
        self.product(name, c, segments, [bias, add], None);
    }

    /// Writes a product to `c`, `[m, ranks]`, that will be A of a second segment of this scale; the first has the same A as this product.
    pub(super) fn low_rank_gemm(&self, name: &'static str, c: &Matrix, segment: Segment<'_>, scale: f64) {
        self.product(name, c, &[segment], [None; 2], Some(scale));
    }

    fn product(
        &self,
        name: &'static str,
        c: &Matrix,
        segments: &[Segment<'_>],
        [bias, add]: [Option<&Matrix>; 2],
        scale_of_second: Option<f64>,
    ) {
        if self.matrix_gemm(name, c, segments, [bias, add], scale_of_second) {
            return;
        }
        let [m, n] = [c.rows, c.width];
        let [first, ..] = segments else { unreachable!("a product has a segment") };
        let [tm, tn] = tile([m, n]);
        let [row_tiles, column_tiles] = [m.div_ceil(tm), n.div_ceil(tn)];
        let may_split = segments.len() == 1 && bias.is_none();
        let parts = Parts::of([row_tiles * column_tiles, SPLIT_TO], first.a.shape()[1], may_split);
        let pieces = self.pieces(&parts, c);
        let to = pieces.as_ref().unwrap_or(c);
        let added = add.filter(|_| pieces.is_none());
        let mut constants = constants_of([tm, tn]);
        constants.extend([
            ("SEGMENTS", segments.len() as u32),
            ("SECOND", u32::from(segments.len() > 1)),
            ("BIAS", u32::from(bias.is_some())),
            ("ADD", u32::from(added.is_some())),
        ]);
        let [add_row, add_at] = added.map_or([0; 2], |add| [add.stride, add.offset]);
        let bias_at = bias.map_or(0, |bias| bias.offset);
        let [codes_at, scales_at] = first.b.codes_at();
        let sizes = [m, n, row_tiles, column_tiles, parts.size];
        let head = sizes.into_iter().chain([to.stride, to.offset, add_row, add_at, bias_at, codes_at, scales_at]);
        let mut parameters: Vec<u32> = head.map(|size| size as u32).collect();
        let mut operands = Vec::new();
        let mut cost = Cost { flops: 0.0, bytes: to.bytes() };
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
        operands.extend(added.map(Operand::Read));
        operands.push(Operand::Write(to));
        let kernel = Kernel { name, template: include_str!("gemm.wgsl"), constants };
        self.launch(&kernel, &operands, &parameters, in_a_row(row_tiles * column_tiles * parts.count), cost);
        if let Some(pieces) = pieces {
            self.add_pieces(name, [&pieces, c], parts.count, add, None);
        }
    }

    /// Returns room for the pieces of a product whose inner dimension is divided.
    pub(super) fn pieces(&self, parts: &Parts, c: &Matrix) -> Option<Matrix> {
        let [rows, room] = [c.rows, self.room(c.rows)].map(|rows| parts.count * rows);
        (parts.count > 1).then(|| self.empty_matrix(room, c.width).rows(0, rows))
    }

    /// Writes the sum of the pieces of a product, and a copy in float16 if given, divided by the powers of rows times a constant.
    pub(super) fn add_pieces(
        &self,
        name: &'static str,
        [pieces, c]: [&Matrix; 2],
        count: usize,
        add: Option<&Matrix>,
        copy: Option<(&Matrix, &Matrix, f64)>,
    ) {
        let constants = vec![("ADD", u32::from(add.is_some())), ("HALF", u32::from(copy.is_some()))];
        let kernel = Kernel { name, template: include_str!("split.wgsl"), constants };
        let mut operands = vec![Operand::Read(pieces)];
        operands.extend(add.map(Operand::Read));
        operands.extend(copy.into_iter().flat_map(|(half, powers, _)| [Operand::Read(powers), Operand::Write(half)]));
        operands.push(Operand::Write(c));
        let [add_row, add_at] = add.map_or([0; 2], |add| [add.stride, add.offset]);
        let [rows, width] = copy.map_or([c.rows, c.width], |(half, ..)| [half.rows, half.width]);
        let sizes = [c.rows, c.width, count, c.stride, c.offset, add_row, add_at, rows, width];
        let mut parameters: Vec<u32> = sizes.map(|size| size as u32).into();
        parameters.push((copy.map_or(1.0, |(.., scale)| scale) as f32).to_bits());
        let cost = Cost { bytes: pieces.bytes(), flops: 0.0 };
        self.launch(&kernel, &operands, &parameters, in_a_row((rows * width).div_ceil(256)), cost);
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
                operands.push(Operand::Read(matrix.matrix()));
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
                            ("LEVELS", 1 << codes.bits),
                            (
                                "FOURS",
                                u32::from([codes.block, codes.columns].iter().all(|size| size.is_multiple_of(4))),
                            ),
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
