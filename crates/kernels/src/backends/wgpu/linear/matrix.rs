//! Products by matrix units: operands in float16, sums in f32. Kernels: `matrix.wgsl`, `split.wgsl`.
//!
//! Trade-off: operands are rounded to 11 bits, as in float16 training, but their range is that of f32 (`half.rs`).

use burn_tensor::DType;

use super::super::engine::{Cost, DividedBy, Engine, Half, Kernel, Matrices, Matrix, Operand, in_a_row};
use super::gemm::{Codes, DEPTH, Parts, Segment, Values, WeightOperand};

/// Minimum number of large tiles; with fewer, small ones are faster even if the inner dimension is divided.
const MIN_LARGE: usize = 24;
/// Minimum rows for which tiles have more rows than columns.
const MIN_TALL: usize = 1024;

/// Sizes of a workgroup's tile, and matrices per subgroup.
#[derive(Clone, Copy, Debug)]
struct Tile {
    rows: usize,
    columns: usize,
    by_rows: usize,
    by_columns: usize,
}

impl Tile {
    const LARGE: Self = Self { rows: 128, columns: 256, by_rows: 4, by_columns: 4 };
    /// Reads each code half as often: faster than [`Tile::LARGE`] by 5 % on an H200.
    const TALL: Self = Self { rows: 256, columns: 128, by_rows: 4, by_columns: 4 };
    /// Two fit on a multiprocessor of Hopper: faster than [`Tile::LARGE`] by 10 % where both matrices are float16 and none is turned, slower elsewhere.
    const SQUARE: Self = Self { rows: 128, columns: 128, by_rows: 4, by_columns: 4 };
    const SMALL: Self = Self { rows: 64, columns: 64, by_rows: 2, by_columns: 2 };
    const NARROW: Self = Self { rows: 128, columns: 32, by_rows: 2, by_columns: 2 };
    const FLAT: Self = Self { rows: 32, columns: 128, by_rows: 2, by_columns: 2 };

    fn count(self, [m, n]: [usize; 2]) -> usize {
        m.div_ceil(self.rows) * n.div_ceil(self.columns)
    }

    fn of(shape: [usize; 2], has_codes: bool, is_turned: bool) -> Self {
        match shape {
            [_, n] if n <= 32 && !has_codes => Self::NARROW,
            [m, _] if m <= 32 && !has_codes => Self::FLAT,
            shape if Self::LARGE.count(shape) < MIN_LARGE => Self::SMALL,
            [m, _] if m >= MIN_TALL && has_codes => Self::TALL,
            _ if has_codes || is_turned => Self::LARGE,
            _ => Self::SQUARE,
        }
    }

    /// Returns the number of workgroups to aim for when the inner dimension is divided.
    const fn enough(self) -> usize {
        if self.rows * self.columns >= 128 * 128 { 128 } else { 512 }
    }

    const fn threads(self, lanes: usize) -> usize {
        self.rows / (16 * self.by_rows) * (self.columns / (16 * self.by_columns)) * lanes
    }
}

/// The second matrix of a product as launches read it.
enum Second<'a> {
    Half(Box<Half>),
    Codes { codes: &'a Codes, first_row: usize },
}

impl Second<'_> {
    fn is_wide(&self) -> bool {
        matches!(self, Self::Half(half) if is_wide(half))
    }
}

/// Returns whether an operand is an adapter's matrix in f32.
fn is_wide(half: &Half) -> bool {
    half.values.dtype() == DType::F32
}

/// What a second segment of this scale is divided by, in addition to the factors of the first: its B is 1,024 times as much.
fn relative_to(scale: f64) -> f64 {
    1024.0 / scale
}

/// What a program is made of.
#[derive(Clone, Copy)]
struct Form<'a> {
    tile: Tile,
    matrices: Matrices,
    codes: Option<&'a Codes>,
    a_is_turned: bool,
    b_is_turned: bool,
    /// Whether B has a factor, and there are a second product, a bias, and a matrix that is added; whether C is written in vectors of four; whether each
    /// row of A has a factor.
    has: [bool; 6],
    /// Whether B and that of the second product are f32.
    are_wide: [bool; 2],
}

impl Form<'_> {
    fn constants(self) -> Vec<(&'static str, u32)> {
        let Self { tile, matrices, codes, .. } = self;
        let threads = tile.threads(matrices.lanes);
        let words = 4 * tile.columns / threads;
        let [has_factor, has_second, has_bias, adds, has_vectors, has_rows] = self.has.map(usize::from);
        let mut constants = vec![
            ("BM", tile.rows),
            ("BN", tile.columns),
            ("FM", tile.by_rows),
            ("FN", tile.by_columns),
            ("SN", tile.columns / (16 * tile.by_columns)),
            ("LANES", matrices.lanes),
            ("THREADS", threads),
            ("NA", 4 * tile.rows / threads),
            ("NB", words),
            ("HALVES", 2),
            ("A_TURNED", usize::from(self.a_is_turned)),
            ("TURNED", usize::from(self.b_is_turned)),
            ("FACTOR_B", has_factor),
            ("SECOND", has_second),
            ("BIAS", has_bias),
            ("ADD", adds),
            ("VECTORS", has_vectors),
            ("FACTORS", has_rows),
            ("WIDE_B", usize::from(self.are_wide[0])),
            ("WIDE_1", usize::from(self.are_wide[1])),
            ("EMULATED", usize::from(matrices.are_emulated)),
        ];
        if let Some(codes) = codes {
            constants.extend([
                ("QUANTIZED", 1),
                ("WORDS", words),
                ("WORDS_4", usize::from(words == 4)),
                ("BLOCK", codes.block),
                ("NARROW", usize::from(codes.map.is_some())),
                ("SWAPPED", usize::from(codes.is_high_first)),
            ]);
        }
        constants.into_iter().map(|(name, value)| (name, value as u32)).collect()
    }
}

impl WeightOperand {
    /// Returns whether products by matrix units read it.
    fn is_for_matrices(&self) -> bool {
        match self {
            Self::Dense(values) if values.dtype() == DType::F16 => {
                [values.stride, values.offset].iter().all(|size| size.is_multiple_of(8))
                    && values.width.is_multiple_of(DEPTH)
            }
            Self::Dense(_) => true,
            Self::Quantized(codes) => {
                let [rows, columns] = [codes.rows, codes.columns];
                codes.bits == 4 && [codes.block, rows, columns].iter().all(|size| size.is_multiple_of(DEPTH))
            }
        }
    }
}

impl Engine {
    /// Computes what [`Engine::gemm`] does by matrix units; returns whether it did, which depends on the format of the weight alone. If C will be the
    /// first matrix of a second segment, of that scale, its copy in float16 is made here where that takes no launch.
    pub(super) fn matrix_gemm(
        &self,
        name: &'static str,
        c: &Matrix,
        segments: &[Segment<'_>],
        [bias, add]: [Option<&Matrix>; 2],
        scale_of_second: Option<f64>,
    ) -> bool {
        let Some(matrices) = self.matrices().filter(|_| self.is_in_half()) else { return false };
        let [first, rest @ ..] = segments else { unreachable!("a product has a segment") };
        if matches!(&first.b, Values::Weight { operand, .. } if !operand.is_for_matrices()) {
            return false;
        }
        let a_is_turned = !first.a.is_by_rows();
        let (a, b, b_is_turned) = if a_is_turned { self.over_rows(first) } else { self.row_by_row(first) };
        let factor = a.factor.clone().expect("it was measured");
        let second = rest.first().map(|segment| {
            let Values::Matrix(b) = &segment.b else { unreachable!("only the first segment has a weight") };
            let b = self.adapter_matrix(b.matrix(), false);
            let relative = DividedBy::Relative(&factor, relative_to(segment.scale));
            [self.half(segment.a.matrix(), relative), b]
        });
        let [m, n] = [c.rows, c.width];
        let k = first.a.shape()[1].next_multiple_of(DEPTH);
        let (codes, factor_b) = match &b {
            Second::Codes { codes, .. } => (Some(*codes), None),
            Second::Half(half) => (None, half.factor.clone()),
        };
        let has_rows = factor.width > 1;
        let tile = Tile::of([m, n], codes.is_some(), b_is_turned);
        let tiles = tile.count([m, n]);
        let parts = Parts::of([tiles, tile.enough()], k, bias.is_none());
        let pieces = self.pieces(&parts, c);
        let to = pieces.as_ref().unwrap_or(c);
        let added = add.filter(|_| pieces.is_none());

        let mut operands = vec![Operand::Read(&a.values), Operand::Read(&factor)];
        let (b_row, b_at, scales_at) = match &b {
            Second::Half(half) => {
                operands.push(Operand::Read(&half.values));
                (half.values.stride, half.values.offset, 0)
            }
            Second::Codes { codes, first_row } => {
                operands.extend([&codes.codes, &codes.scales].map(Operand::Read));
                operands.extend(codes.map.iter().chain([&codes.table]).map(Operand::Read));
                (codes.columns, 8 * codes.codes.offset + first_row * codes.columns, codes.scales.offset)
            }
        };
        operands.extend(factor_b.as_ref().map(Operand::Read));
        operands.extend(second.iter().flatten().map(|half| Operand::Read(&half.values)));
        operands.extend([bias, added].into_iter().flatten().map(Operand::Read));
        operands.push(Operand::Write(to));
        let [ranks, a_1_row, b_1_row] =
            second.as_ref().map_or([0; 3], |[a, b]| [a.values.width, a.values.stride, b.values.stride]);
        let [add_row, add_at] = added.map_or([0; 2], |add| [add.stride, add.offset]);
        let bias_at = bias.map_or(0, |bias| bias.offset);
        let [row_tiles, column_tiles] = [m.div_ceil(tile.rows), n.div_ceil(tile.columns)];
        let head = [m, n, k, parts.size, row_tiles, column_tiles, to.stride, to.offset, add_row, add_at, bias_at];
        let strides = [a.values.stride, b_row, b_at, scales_at, ranks, a_1_row, b_1_row];
        let mut parameters: Vec<u32> = head.into_iter().chain(strides).map(|size| size as u32).collect();
        let are_wide = [b.is_wide(), second.as_ref().is_some_and(|[_, b]| is_wide(b))];
        let scale = if are_wide[0] { first.scale / 1024.0 } else { first.scale };
        parameters.push((scale as f32).to_bits());
        let has_vectors = [n, to.stride, to.offset, add_row, add_at].iter().all(|size| size.is_multiple_of(4));
        let has = [factor_b.is_some(), second.is_some(), bias.is_some(), added.is_some(), has_vectors, has_rows];
        let constants = Form { tile, matrices, codes, a_is_turned, b_is_turned, has, are_wide }.constants();
        let kernel = Kernel { name, template: include_str!("matrix.wgsl"), constants };
        let cost = Cost { flops: 2.0 * (m * n * (k + ranks)) as f64, bytes: to.bytes() };
        self.launch(&kernel, &operands, &parameters, in_a_row(tiles * parts.count), cost);
        if let Some(pieces) = pieces {
            let scale = scale_of_second.map(relative_to);
            let half = scale.map(|_| self.relative_half(c));
            let copy = half.as_ref().zip(scale).map(|(half, scale)| (half, &factor, scale));
            self.add_pieces(name, [&pieces, c], parts.count, add, copy);
        }
        true
    }

    /// Returns an adapter's matrix as it is if launches can read it so, else a copy.
    fn adapter_matrix(&self, matrix: &Matrix, may_begin_later: bool) -> Half {
        let is_aligned = [matrix.stride, matrix.offset].iter().all(|size| size.is_multiple_of(8));
        if is_aligned && (may_begin_later || matrix.offset == 0) {
            return Half { values: matrix.clone(), factor: None };
        }
        self.half(matrix, DividedBy::Adapter)
    }

    /// Returns the matrices of a product that keeps the rows of A apart, and whether B is turned.
    fn row_by_row<'a>(&self, segment: &Segment<'a>) -> (Half, Second<'a>, bool) {
        let a = self.half(segment.a.matrix(), DividedBy::Rows);
        let (b, is_turned) = match &segment.b {
            Values::Matrix(b) => (Second::Half(Box::new(self.adapter_matrix(b.matrix(), true))), !b.is_by_rows()),
            Values::Weight { operand: WeightOperand::Quantized(codes), rows, is_turned } => {
                (Second::Codes { codes, first_row: rows.start }, *is_turned)
            }
            Values::Weight { operand: WeightOperand::Dense(values), rows, is_turned } => {
                let values = values.rows(rows.start, rows.len());
                let half = match values.dtype() {
                    DType::F16 => Half { values, factor: None },
                    _ => self.half(&values, DividedBy::Plain),
                };
                (Second::Half(Box::new(half)), *is_turned)
            }
        };
        (a, b, is_turned)
    }

    /// Returns the matrices of a product over the rows of both, as of a gradient of a weight. The wider one has a factor per row, by which the rows of
    /// the other are multiplied; A is the one that carries the factor of all.
    fn over_rows<'a>(&self, segment: &Segment<'a>) -> (Half, Second<'a>, bool) {
        let Values::Matrix(b) = &segment.b else { unreachable!("a product over rows has no weight") };
        let (a, b) = (segment.a.matrix(), b.matrix());
        let (wide, other) = if a.width > b.width { (a, b) } else { (b, a) };
        let wide_half = self.half(wide, DividedBy::Rows);
        let factors = wide_half.factor.as_ref().expect("rows are measured");
        let other = self.half(other, DividedBy::Folded(factors));
        let factor = other.factor.clone();
        let [a, b] = if a.width > b.width { [wide_half, other] } else { [other, wide_half] };
        (Half { factor, ..a }, Second::Half(Box::new(Half { factor: None, ..b })), true)
    }
}

#[cfg(test)]
mod tests {
    use burn_tensor::{Tensor, TensorData};
    use cubecl::wgpu::WgpuDevice;
    use firebrick_precision::QuantFormat;

    use super::super::super::engine::{Wgpu, compile_elsewhere, in_section, probe, tensor};
    use super::super::gemm::Turned;
    use super::*;
    use crate::QuantizedWeight;
    use crate::conformance::{Case, Extent, attention, operations, verdict};
    use crate::linear::GemmFormat;
    use crate::session::{RunShape, Session};
    use crate::weights::Weight;

    /// Compiles every variant for Vulkan and Metal, as wgpu does on a machine that has them.
    #[test]
    fn products_by_matrices_compile_for_vulkan_and_metal() {
        let tiles = [Tile::LARGE, Tile::TALL, Tile::SQUARE, Tile::SMALL, Tile::NARROW, Tile::FLAT];
        let turned = [[false, false], [false, true], [true, true]];
        for ([a_is_turned, b_is_turned], tile) in turned.into_iter().flat_map(|turned| tiles.map(|tile| (turned, tile)))
        {
            for has in [[true; 6], [false; 6]] {
                let matrices = Matrices { lanes: 32, are_emulated: false };
                let are_wide = [!has[0], has[0]];
                let form = Form { tile, matrices, codes: None, a_is_turned, b_is_turned, has, are_wide };
                let constants = form.constants();
                let with_codes =
                    [("QUANTIZED", 1), ("WORDS", 2), ("WORDS_4", 0), ("BLOCK", 64), ("NARROW", 1), ("SWAPPED", 1)];
                let with_codes = [&constants[..], &with_codes].concat();
                let of_codes = (tile.columns == 64 && !has[0]).then_some(with_codes);
                for constants in std::iter::once(constants).chain(of_codes) {
                    compile_elsewhere(&Kernel { name: "a product", template: include_str!("matrix.wgsl"), constants });
                }
            }
        }
    }

    #[test]
    fn operations_by_emulated_matrices_equal_the_reference() {
        let Ok(()) = probe() else { return };
        Engine::get().emulate_matrices();
        Wgpu::open(&WgpuDevice::DefaultDevice, &RunShape { gemms: GemmFormat::F16, ..RunShape::default() });
        let case = Case { gemms: GemmFormat::F16, has_experts: false, ..Case::small(DType::F32, 64) };
        let mut findings = operations::<Wgpu>(&case, &WgpuDevice::DefaultDevice, Extent::First);
        for case in [Case { head_dim: 128, ..case.clone() }, Case { window: Some(7), ..case }] {
            findings.extend(attention::<Wgpu>(&case, &WgpuDevice::DefaultDevice, Extent::First));
        }
        verdict(DType::F16, findings).expect("rounding to float16 alone");
    }

    /// A row of activations or of gradients with a value of 1e6 among values below 1: the other rows keep their digits.
    #[test]
    fn an_outlier_leaves_the_other_rows_their_digits() {
        let Ok(()) = probe() else { return };
        let (m, n, k) = (70, 128, 192);
        let value = |i: usize| ((i * 7919 % 1009) as f32 / 504.5) - 1.0;
        let device = WgpuDevice::DefaultDevice;
        for is_turned in [false, true] {
            let shape = if is_turned { [k, n] } else { [n, k] };
            let weight: Vec<f32> = (0..n * k).map(|i| 0.1 * value(i)).collect();
            let quantized = QuantFormat::Nf4 { double_quant: true }.quantize(&weight, &shape).expect("finite");
            let weight = quantized.dequantize();
            let mut x: Vec<f32> = (0..m * k).map(|i| value(i + 3)).collect();
            x[5] = 1e6;
            let found = in_section(|engine| {
                engine.emulate_matrices();
                let uploaded = QuantizedWeight::<Wgpu>::upload(&quantized, &device);
                let operand = engine.weight(&Weight::Quantized(uploaded)).expect("NF4 has codes");
                let data = TensorData::new(x.clone(), [m, k]);
                let x = engine.matrix(Tensor::<Wgpu, 2>::from_data(data, &device));
                let (c, rows) = (engine.empty_matrix(m, n), 0..shape[0]);
                let b = Values::Weight { operand: &operand, rows, is_turned };
                let product = [Segment { a: Turned::Rows(&x), b, scale: 1.0 }];
                engine.in_half(true, || engine.gemm("a product", &c, &product, None, None));
                tensor::<2>(c.tensor)
            });
            let found: Vec<f32> = found.into_data().to_vec().expect("f32");
            for row in 0..m {
                let (mut error, mut size) = (0.0, 0.0);
                for column in 0..n {
                    let of_weight = |i: usize| weight[if is_turned { i * n + column } else { column * k + i }];
                    let expected: f64 = (0..k).map(|i| f64::from(x[row * k + i]) * f64::from(of_weight(i))).sum();
                    error += (f64::from(found[row * n + column]) - expected).powi(2);
                    size += expected.powi(2);
                }
                assert!((error / size).sqrt() < 2e-3, "row {row}: {:e}", (error / size).sqrt());
            }
        }
    }
}
