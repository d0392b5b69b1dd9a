//! Values in float16 for matrix units, divided by a power of two, so that outliers neither overflow nor flush the others to zero. Kernel: `half.wgsl`.
//!
//! Rows have a power each where a product keeps its rows apart, so that one launch measures and converts them. Copies are kept until the operation ends,
//! since x is an operand of several products.

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
/// Values per workgroup below which fewer look; up to as many, each workgroup of the copy looks at all.
const PIECE: usize = 16_384;
/// What adapters' matrices are divided by: they are below 64.
const ADAPTER_SCALE: f64 = 1.0 / 1024.0;

/// Values in float16, padded with zeros.
#[derive(Clone, Debug)]
pub(crate) struct Half {
    /// `[rows, width]`, both padded.
    pub values: Matrix,
    /// What the values were divided by, f32: `[1, 1]`, or `[1, padded rows]`; `None`: 1.
    pub factor: Option<Matrix>,
}

/// Which power of two values are divided by.
#[derive(Clone, Copy)]
pub(crate) enum DividedBy<'a> {
    /// Each row by its own, from its largest value.
    Rows,
    /// All by one, from the largest value.
    Measured,
    /// Values times the factors of rows, then by one: the other matrix of a product over rows, whose own are by [`DividedBy::Rows`].
    Folded(&'a Matrix),
    /// A constant, for adapters.
    Adapter,
    /// None, for weights.
    Plain,
    /// Each row by that of other rows, times a constant.
    Relative(&'a Matrix, f64),
}

/// Copies of one operation, by what was converted and how.
pub(crate) type Halves = RefCell<Option<Vec<(Matrix, Kind, Half)>>>;

/// What a copy was divided by, as far as a matrix has several copies in one operation.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Own,
    Folded,
    Relative,
}

impl DividedBy<'_> {
    const fn kind(self) -> Kind {
        match self {
            Self::Rows | Self::Measured | Self::Adapter | Self::Plain => Kind::Own,
            Self::Folded(_) => Kind::Folded,
            Self::Relative(..) => Kind::Relative,
        }
    }
}

fn are_same(a: &Matrix, b: &Matrix) -> bool {
    let of = |matrix: &Matrix| (matrix.rows, matrix.width, matrix.stride, matrix.offset);
    let numbers = [a, b].map(|matrix| handle_number(&matrix.tensor.handle));
    of(a) == of(b) && numbers[0].is_some() && numbers[0] == numbers[1]
}

impl Half {
    /// Returns the results of a launch that writes it (`half_rows.wgsl`).
    pub(crate) fn operands(&self) -> [Operand<'_>; 2] {
        [&self.values, self.factor.as_ref().expect("each row has a factor")].map(Operand::Write)
    }

    /// Returns the constants of a launch that may write one.
    pub(crate) fn constants(half: Option<&Self>) -> [(&'static str, u32); 3] {
        let sizes = [usize::from(half.is_some()), PADDED_ROWS, PADDED_COLUMNS].map(|size| size as u32);
        [("HALF", sizes[0]), ("PADDED_ROWS", sizes[1]), ("PADDED_COLUMNS", sizes[2])]
    }
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
        let kind = by.kind();
        let is_it = |known: &&(Matrix, Kind, Half)| known.1 == kind && are_same(&known.0, x);
        let known =
            self.halves.borrow().as_ref().and_then(|halves| halves.iter().find(is_it).map(|known| known.2.clone()));
        known.unwrap_or_else(|| {
            let half = self.new_half(x, by);
            self.remember(x, kind, &half);
            half
        })
    }

    fn remember(&self, x: &Matrix, kind: Kind, half: &Half) {
        if let Some(halves) = self.halves.borrow_mut().as_mut() {
            halves.push((x.clone(), kind, half.clone()));
        }
    }

    /// Returns room for a copy of new rows that the launch that writes them writes as well (`half_rows.wgsl`); `None` if products are not by matrix
    /// units.
    pub(crate) fn half_rows(&self, y: &Matrix) -> Option<Half> {
        self.is_in_half().then(|| {
            let values = self.padded(y);
            let factor = Some(self.empty_matrix(1, values.rows));
            let half = Half { values, factor };
            self.remember(y, Kind::Own, &half);
            half
        })
    }

    /// Returns room for a copy of a result that is [`DividedBy::Relative`], which the launch that writes the result writes as well.
    pub(crate) fn relative_half(&self, y: &Matrix) -> Matrix {
        let values = self.padded(y);
        self.remember(y, Kind::Relative, &Half { values: values.clone(), factor: None });
        values
    }

    fn padded(&self, x: &Matrix) -> Matrix {
        let [rows, room] = [x.rows, self.room(x.rows)].map(|rows| rows.next_multiple_of(PADDED_ROWS));
        let width = x.width.next_multiple_of(PADDED_COLUMNS);
        self.matrix_of(self.empty([room, width], DType::F16)).rows(0, rows)
    }

    fn new_half(&self, x: &Matrix, by: DividedBy<'_>) -> Half {
        let values = self.padded(x);
        let [rows, width] = [values.rows, values.width];
        let (given, scale) = match by {
            DividedBy::Adapter => (None, ADAPTER_SCALE),
            DividedBy::Folded(given) => (Some(given), 1.0),
            DividedBy::Relative(given, scale) => (Some(given), scale),
            DividedBy::Rows | DividedBy::Measured | DividedBy::Plain => (None, 1.0),
        };
        let factors = match by {
            DividedBy::Rows => rows,
            DividedBy::Plain | DividedBy::Relative(..) => 0,
            DividedBy::Measured | DividedBy::Folded(_) | DividedBy::Adapter => 1,
        };
        let factor = (factors > 0).then(|| self.empty_matrix(1, factors));
        let is_by_row = matches!(by, DividedBy::Rows);
        let is_measured = matches!(by, DividedBy::Measured | DividedBy::Folded(_));
        let is_folded = matches!(by, DividedBy::Folded(_));
        let largest = (is_measured && x.count() > PIECE).then(|| self.largest(x, given));
        let constants = vec![
            ("VECTORS", u32::from(self.reads_in_vectors(x))),
            ("BY_ROW", u32::from(is_by_row)),
            ("MEASURED", u32::from(is_measured)),
            ("PIECES", u32::from(largest.is_some())),
            ("SHARES", u32::from(is_by_row || is_measured)),
            ("GIVEN", u32::from(given.is_some())),
            ("FOLDED", u32::from(is_folded)),
            ("RELATIVE", u32::from(given.is_some() && !is_folded)),
            ("FACTOR", u32::from(factor.is_some())),
        ];
        let kernel = Kernel { name: "to_half", template: include_str!("half.wgsl"), constants };
        let mut operands = vec![Operand::Read(x)];
        operands.extend(given.into_iter().chain(&largest).map(Operand::Read));
        operands.extend(factor.iter().chain([&values]).map(Operand::Write));
        let pieces = largest.as_ref().map_or(0, |largest| largest.width);
        let mut parameters: Vec<u32> =
            [x.rows, x.width, x.stride, x.offset, rows, width, pieces].map(|size| size as u32).into();
        parameters.push((scale as f32).to_bits());
        let cost = Cost { bytes: 1.5 * x.bytes(), flops: 0.0 };
        let groups = if is_by_row { rows } else { (rows * width / 4).div_ceil(256) };
        self.launch(&kernel, &operands, &parameters, in_a_row(groups), cost);
        Half { values, factor }
    }

    /// Returns the largest values of parts of a matrix, times the factors of rows if given, `[1, parts]`.
    fn largest(&self, x: &Matrix, given: Option<&Matrix>) -> Matrix {
        let pieces = x.count().div_ceil(PIECE).min(MAX_PIECES);
        let largest = self.empty_matrix(1, pieces);
        let is_folded = u32::from(given.is_some());
        let vectors = u32::from(self.reads_in_vectors(x));
        let constants =
            vec![("LARGEST", 1), ("SHARES", 1), ("VECTORS", vectors), ("GIVEN", is_folded), ("FOLDED", is_folded)];
        let kernel = Kernel { name: "largest_value", template: include_str!("half.wgsl"), constants };
        let parameters = [x.rows, x.width, x.stride, x.offset, 0, 0, 0, 0].map(|size| size as u32);
        let mut operands = vec![Operand::Read(x)];
        operands.extend(given.map(Operand::Read));
        operands.push(Operand::Write(&largest));
        self.launch(&kernel, &operands, &parameters, in_a_row(pieces), Cost { bytes: x.bytes(), flops: 0.0 });
        largest
    }

    fn reads_in_vectors(&self, x: &Matrix) -> bool {
        [x.width, x.stride, x.offset].iter().all(|size| size.is_multiple_of(4))
    }
}
