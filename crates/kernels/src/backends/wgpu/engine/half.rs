//! Values in float16 for matrix units, divided by a power of two, so that outliers neither overflow nor flush the others to zero. Kernel: `half.wgsl`.
//!
//! Copies are kept until the operation ends, since x is an operand of several products.

use std::cell::RefCell;

use burn_tensor::DType;

use super::Engine;
use super::launch::{Operand, in_a_row};
use super::program::Kernel;
use super::tensor::Matrix;
use super::trace::Cost;
use crate::backends::on_cubecl::handle_number;

/// Columns to which matrices are padded, and rows.
const PADDED_COLUMNS: usize = 32;
const PADDED_ROWS: usize = 64;
/// Workgroups that look for the largest value.
const MAX_PIECES: usize = 256;
/// Values per workgroup below which fewer look.
const PIECE: usize = 16_384;
/// What adapters' matrices are divided by: they are below 64.
const ADAPTER_SCALE: f64 = 1.0 / 1024.0;

/// Values in float16, padded with zeros.
#[derive(Clone, Debug)]
pub(crate) struct Half {
    /// `[rows, width]`, both padded.
    pub values: Matrix,
    /// What the values were divided by, `[1, 1]` f32; `None`: 1.
    pub factor: Option<Matrix>,
}

/// Which power of two values are divided by.
#[derive(Clone, Copy)]
pub(crate) enum DividedBy<'a> {
    /// By their own largest value.
    Measured,
    /// A constant, for adapters.
    Adapter,
    /// None, for weights.
    Plain,
    /// That of others, times a constant.
    Relative(&'a Matrix, f64),
}

/// Copies of one operation, by what was converted.
pub(crate) type Halves = RefCell<Option<Vec<(Matrix, Half)>>>;

fn are_same(a: &Matrix, b: &Matrix) -> bool {
    let of = |matrix: &Matrix| (matrix.rows, matrix.width, matrix.stride, matrix.offset);
    let numbers = [a, b].map(|matrix| handle_number(&matrix.tensor.handle));
    of(a) == of(b) && numbers[0].is_some() && numbers[0] == numbers[1]
}

impl Engine {
    /// Runs an operation whose products are by matrix units, if they are to be.
    pub(crate) fn in_half<R>(&self, is_half: bool, work: impl FnOnce() -> R) -> R {
        let before = self.halves.replace(is_half.then(Vec::new));
        let result = work();
        self.halves.replace(before);
        result
    }

    /// Returns whether products are to be by matrix units.
    pub(crate) fn is_in_half(&self) -> bool {
        self.halves.borrow().is_some()
    }

    /// Returns a copy in float16, made at its first use.
    pub(crate) fn half(&self, x: &Matrix, by: DividedBy<'_>) -> Half {
        let known =
            |halves: &Vec<(Matrix, Half)>| halves.iter().find(|(of, _)| are_same(of, x)).map(|(_, half)| half.clone());
        if let Some(known) = self.halves.borrow().as_ref().and_then(known) {
            return known;
        }
        let half = self.new_half(x, by);
        if let Some(halves) = self.halves.borrow_mut().as_mut() {
            halves.push((x.clone(), half.clone()));
        }
        half
    }

    fn new_half(&self, x: &Matrix, by: DividedBy<'_>) -> Half {
        let [rows, width] = [x.rows.next_multiple_of(PADDED_ROWS), x.width.next_multiple_of(PADDED_COLUMNS)];
        let values = self.matrix_of(self.empty([rows, width], DType::F16));
        let largest = matches!(by, DividedBy::Measured).then(|| self.largest(x));
        let factor = (!matches!(by, DividedBy::Plain)).then(|| self.empty_matrix(1, 1));
        let (given, scale) = match by {
            DividedBy::Measured | DividedBy::Plain => (None, 1.0),
            DividedBy::Adapter => (None, ADAPTER_SCALE),
            DividedBy::Relative(given, scale) => (Some(given), scale),
        };
        let has_vectors = self.reads_in_vectors(x);
        let constants = vec![
            ("VECTORS", u32::from(has_vectors)),
            ("MEASURED", u32::from(largest.is_some())),
            ("SHARES", u32::from(largest.is_some())),
            ("RELATIVE", u32::from(given.is_some())),
            ("FACTOR", u32::from(factor.is_some())),
        ];
        let kernel = Kernel { name: "to_half", template: include_str!("half.wgsl"), constants };
        let mut operands = vec![Operand::Read(x)];
        operands.extend(largest.iter().chain(given).map(Operand::Read));
        operands.extend(factor.iter().chain([&values]).map(Operand::Write));
        let pieces = largest.as_ref().map_or(0, |largest| largest.width);
        let mut parameters: Vec<u32> =
            [x.rows, x.width, x.stride, x.offset, rows, width, pieces].map(|size| size as u32).into();
        parameters.push((scale as f32).to_bits());
        let cost = Cost { bytes: 1.5 * x.bytes(), flops: 0.0 };
        self.launch(&kernel, &operands, &parameters, in_a_row((rows * width / 4).div_ceil(256)), cost);
        Half { values, factor }
    }

    /// Returns the largest values of parts of a matrix, `[1, parts]`.
    fn largest(&self, x: &Matrix) -> Matrix {
        let pieces = x.count().div_ceil(PIECE).clamp(1, MAX_PIECES);
        let largest = self.empty_matrix(1, pieces);
        let constants = vec![("LARGEST", 1), ("SHARES", 1), ("VECTORS", u32::from(self.reads_in_vectors(x)))];
        let kernel = Kernel { name: "largest_value", template: include_str!("half.wgsl"), constants };
        let parameters = [x.rows, x.width, x.stride, x.offset, 0, 0, 0, 0].map(|size| size as u32);
        let operands = [Operand::Read(x), Operand::Write(&largest)];
        self.launch(&kernel, &operands, &parameters, in_a_row(pieces), Cost { bytes: x.bytes(), flops: 0.0 });
        largest
    }

    fn reads_in_vectors(&self, x: &Matrix) -> bool {
        [x.width, x.stride, x.offset].iter().all(|size| size.is_multiple_of(4))
    }
}
