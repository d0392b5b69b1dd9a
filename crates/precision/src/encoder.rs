//! Quantizes a matrix to codes of a narrow float with a scale per group: [`Scaling::quantize`], on all cores.
//!
//! The result depends only on values and shape, and a device can reproduce each step bit for bit: the largest magnitude ("amax") of
//! the group, scale and factor as defined in `scaling.rs`, `value * factor` in f32, and its code (nearest even, saturating).
//!
//! Trade-off: values of any type are widened when they are read, so each is widened twice: the first time for the amax.

use crate::error::{Error, Result};
use crate::float::{Fields, NarrowFloat};
use crate::rounding::{self, Overflow};
use crate::scales::BlockScales;
use crate::scaling::{Scaling, larger, larger_of};
use crate::workers;

impl Scaling {
    /// Quantizes a row-major matrix `[rows, columns]`. Returns the codes, one per byte (two for E2M1, the earlier one
    /// in the low nibble), and the scale of each group, row-major over the grid of groups.
    ///
    /// A group with a NaN or an infinity is decoded as NaN; `scaling.rs` lists the results for every special amax. Otherwise, a value
    /// x of a group with scale s is decoded with an error of at most half a unit in the last place, or `s · min_positive / 2` if that
    /// is more, and a few parts in 2^24. Errors are larger for values that saturate with [`Scaling::MX_OCP`], for the largest value of
    /// a group of NVFP4 (s is rounded: up to 1/16 of the value), and for groups of NVFP4 that flush to zero.
    ///
    /// # Errors
    /// [`Error::Empty`], [`Error::ShapeMismatch`]; [`Error::Indivisible`] for E2M1 and an odd number of columns.
    pub fn quantize(self, element: NarrowFloat, values: &[f32], shape: [usize; 2]) -> Result<(Vec<u8>, BlockScales)> {
        self.quantize_with(element, values, |value| value, shape)
    }

    /// Quantizes values of another type, each widened to f32 when it is needed.
    pub(crate) fn quantize_with<T: Copy + Sync>(
        self,
        element: NarrowFloat,
        values: &[T],
        widen: impl Fn(T) -> f32 + Copy + Send + Sync,
        [rows, columns]: [usize; 2],
    ) -> Result<(Vec<u8>, BlockScales)> {
        let expected = rows.saturating_mul(columns);
        if expected == 0 {
            return Err(Error::Empty { shape: vec![rows, columns] });
        }
        if values.len() != expected {
            return Err(Error::ShapeMismatch {
                shape: vec![rows, columns],
                expected,
                got: values.len(),
                unit: "values",
            });
        }
        if element == NarrowFloat::E2m1 && !columns.is_multiple_of(2) {
            return Err(Error::Indivisible { what: "columns", got: columns, by: 2 });
        }
        let group = self.group(rows, columns);
        let (scales, factors) = self.scales(element, &group_amax(values, widen, group, [rows, columns]));
        let grid = Grid { group, columns, factors: &factors };
        // Constant fields for the stored formats of weights let the compiler remove the branches of `rounding::encode`.
        let code = |fields: Fields, scaled: f32| rounding::encode(fields, scaled, Overflow::Saturate);
        let codes = match element {
            NarrowFloat::E4m3 => grid.codes::<_, 1>(values, |value, by| code(Fields::E4M3, widen(value) * by)),
            NarrowFloat::E2m1 => grid.codes::<_, 2>(values, |value, by| code(Fields::E2M1, widen(value) * by)),
            other => grid.codes::<_, 1>(values, |value, by| other.encode(widen(value) * by, Overflow::Saturate)),
        };
        Ok((codes, scales))
    }
}

/// The factors of a matrix's values, by groups of `group` rows and columns.
#[derive(Clone, Copy)]
struct Grid<'a> {
    group: [usize; 2],
    columns: usize,
    factors: &'a [f32],
}

impl Grid<'_> {
    /// Computes the codes of all values, `PER_BYTE` per byte, the earlier ones in the lower bits. `code` takes a value and its factor.
    fn codes<T: Copy + Sync, const PER_BYTE: usize>(
        self,
        values: &[T],
        code: impl Fn(T, f32) -> u8 + Copy + Send + Sync,
    ) -> Vec<u8> {
        let Self { group: [group_rows, group_columns], columns, factors } = self;
        let (rows, grid_columns) = (values.len() / columns, columns.div_ceil(group_columns));
        let mut codes = vec![0; values.len() / PER_BYTE];
        let span = workers::blocks_per_worker(rows, columns);
        let spans = values.chunks(span * columns).zip(codes.chunks_mut(span * columns / PER_BYTE)).enumerate();
        workers::run(spans.map(|(worker, (values, codes))| {
            move || {
                let rows = values.chunks(columns).zip(codes.chunks_mut(columns / PER_BYTE));
                for (row, (values, codes)) in (worker * span..).zip(rows) {
                    let factors = &factors[row / group_rows * grid_columns..][..grid_columns];
                    let groups = values.chunks(group_columns).zip(codes.chunks_mut(group_columns.div_ceil(PER_BYTE)));
                    for ((values, codes), &factor) in groups.zip(factors) {
                        for (values, byte) in values.as_chunks::<PER_BYTE>().0.iter().zip(codes) {
                            *byte = values.iter().rev().fold(0, |byte, &value| byte << 4 | code(value, factor));
                        }
                    }
                }
            }
        }));
        codes
    }
}

/// Returns the largest magnitude of each group, or its infinity or NaN if there is one, row-major over the grid.
fn group_amax<T: Copy + Sync>(
    values: &[T],
    widen: impl Fn(T) -> f32 + Copy + Send,
    [group_rows, group_columns]: [usize; 2],
    [rows, columns]: [usize; 2],
) -> Vec<f32> {
    // A group of all rows is split by rows for the workers and joined at the end.
    let band_rows = if group_rows == rows { 1 } else { group_rows };
    let (bands, grid_columns) = (rows.div_ceil(band_rows), columns.div_ceil(group_columns));
    let mut amax = vec![0.0; bands * grid_columns];
    let (band, span) = (band_rows * columns, workers::blocks_per_worker(bands, band_rows * columns));
    let spans = values.chunks(span * band).zip(amax.chunks_mut(span * grid_columns));
    workers::run(spans.map(|(values, amax)| {
        move || {
            for (band, amax) in values.chunks(band).zip(amax.chunks_mut(grid_columns)) {
                for row in band.chunks(columns) {
                    row.chunks(group_columns).zip(&mut *amax).for_each(|(group, amax)| {
                        *amax = larger_of(*amax, group.iter().map(|&value| widen(value)));
                    });
                }
            }
        }
    }));
    if group_rows == rows {
        for band in 1..bands {
            for column in 0..grid_columns {
                amax[column] = larger(amax[column], &[amax[band * grid_columns + column]]);
            }
        }
        amax.truncate(grid_columns);
    }
    amax
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_values::Draws;

    const ELEMENTS: [NarrowFloat; 3] = [NarrowFloat::E4m3, NarrowFloat::E5m2, NarrowFloat::E2m1];
    const ALL: [Scaling; 8] = [
        Scaling::PER_TENSOR,
        Scaling::PER_ROW,
        Scaling::BLOCK_1X128,
        Scaling::BLOCK_128X128,
        Scaling::BLOCK_128X128.with_power_of_two_scales(),
        Scaling::MX,
        Scaling::NVFP4,
        Scaling::NVFP4_16X16,
    ];

    fn matrix(draws: &mut Draws, [rows, columns]: [usize; 2]) -> Vec<f32> {
        // Rows have different sizes, as in activations.
        (0..rows)
            .flat_map(|_| {
                let scale = 2_f32.powi(draws.below(8) as i32 - 4);
                draws.vector(columns, scale)
            })
            .collect()
    }

    /// The code and the scale of each value, and whether all scales are finite.
    struct Quantized {
        codes: Vec<u8>,
        scales: Vec<f32>,
        is_finite: bool,
    }

    impl Quantized {
        fn new(scaling: Scaling, element: NarrowFloat, values: &[f32], [rows, columns]: [usize; 2]) -> Self {
            let (codes, scales) = scaling.quantize(element, values, [rows, columns]).unwrap();
            let [group_rows, group_columns] = scaling.group(rows, columns);
            let scales = scales.values();
            let group =
                |at: usize| at / columns / group_rows * columns.div_ceil(group_columns) + at % columns / group_columns;
            Self {
                codes: match element {
                    NarrowFloat::E2m1 => codes.iter().flat_map(|byte| [byte & 0xF, byte >> 4]).collect(),
                    _ => codes,
                },
                is_finite: scales.iter().all(|scale| scale.is_finite()),
                scales: (0..values.len()).map(|at| scales[group(at)]).collect(),
            }
        }

        fn values(&self, element: NarrowFloat) -> Vec<f32> {
            let pairs = self.codes.iter().zip(&self.scales);
            pairs.map(|(&code, scale)| element.decode(code) * scale).collect()
        }
    }

    #[test]
    fn every_value_comes_back_within_the_documented_error() {
        let mut draws = Draws(51);
        for element in ELEMENTS {
            let half_unit = 1.0 / (2 << element.mantissa_bits()) as f32;
            for (scaling, shape) in ALL
                .into_iter()
                .flat_map(|scaling| [[1, 2], [5, 130], [130, 36], [300, 514]].map(|shape| (scaling, shape)))
            {
                let values = matrix(&mut draws, shape);
                let quantized = Quantized::new(scaling, element, &values, shape);
                assert!(quantized.is_finite);
                for (index, back) in quantized.values(element).into_iter().enumerate() {
                    let (value, scale) = (values[index], quantized.scales[index]);
                    // In NVFP4 the largest value of a group may be a 16th of its scale beyond the range.
                    let rounded_scale = if value.abs() > element.max() * scale { value.abs() / 16.0 } else { 0.0 };
                    let bound = (value.abs() * half_unit).max(scale * element.min_positive() / 2.0).max(rounded_scale);
                    let error = (back - value).abs();
                    assert!(error <= bound * 1.000_01, "{element} {scaling:?} {value} became {back}");
                }
            }
        }
    }

    #[test]
    fn many_threads_and_partial_groups_give_what_one_group_at_a_time_gives() {
        let shape = [517, 776];
        let values = matrix(&mut Draws(53), shape);
        for element in ELEMENTS {
            for scaling in ALL.into_iter().filter(|scaling| !matches!(*scaling, Scaling::NVFP4 | Scaling::NVFP4_16X16))
            {
                let whole = Quantized::new(scaling, element, &values, shape).codes;
                let [rows, columns] = scaling.group(shape[0], shape[1]);
                for (top, left) in [(0, 0), (516 / rows * rows, 775 / columns * columns), (256 / rows * rows, 0)] {
                    let (bottom, right) = ((top + rows).min(517), (left + columns).min(776));
                    let group: Vec<f32> =
                        (top..bottom).flat_map(|row| &values[row * 776..][left..right]).copied().collect();
                    let shape = [bottom - top, right - left];
                    let alone = Quantized::new(scaling, element, &group, shape).codes;
                    for (row, alone) in (top..bottom).zip(alone.chunks(shape[1])) {
                        assert_eq!(&whole[row * 776..][left..right], alone, "{scaling:?} {element} row {row}");
                    }
                }
            }
        }
    }

    #[test]
    fn one_value_that_is_not_finite_makes_its_group_nan_and_no_other() {
        let shape = [40, 256];
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut values = matrix(&mut Draws(54), shape);
            values[33 * 256 + 200] = bad;
            for element in ELEMENTS {
                for scaling in ALL {
                    let quantized = Quantized::new(scaling, element, &values, shape);
                    assert!(!quantized.is_finite, "{scaling:?} {element} {bad}");
                    let whole = matches!(scaling, Scaling::NVFP4 | Scaling::NVFP4_16X16);
                    let [rows, columns] = if whole { shape } else { scaling.group(40, 256) };
                    for (index, back) in quantized.values(element).iter().enumerate() {
                        let same = index / 256 / rows == 33 / rows && index % 256 / columns == 200 / columns;
                        assert_eq!(back.is_nan(), same, "{scaling:?} {element} {bad}, value {index}");
                    }
                }
            }
        }
    }

    #[test]
    fn groups_of_zeros_come_back_as_zeros_with_their_signs() {
        let shape = [32, 128];
        let mut values = matrix(&mut Draws(55), shape);
        values[..16 * 128].iter_mut().enumerate().for_each(|(index, value)| *value = [0.0, -0.0][index % 2]);
        for element in ELEMENTS {
            for scaling in ALL {
                let back = Quantized::new(scaling, element, &values, shape).values(element);
                let bits = |values: &[f32]| values[..16 * 128].iter().map(|value| value.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&back), bits(&values), "{scaling:?} {element}");
            }
        }
    }

    #[test]
    fn squares_give_the_transpose_the_same_codes() {
        let (rows, columns) = (160, 272);
        let values = matrix(&mut Draws(56), [rows, columns]);
        let transposed: Vec<f32> =
            (0..columns * rows).map(|index| values[index % rows * columns + index / rows]).collect();
        for (scaling, element) in
            [(Scaling::NVFP4_16X16, NarrowFloat::E2m1), (Scaling::BLOCK_128X128, NarrowFloat::E4m3)]
        {
            let forward = Quantized::new(scaling, element, &values, [rows, columns]).codes;
            let backward = Quantized::new(scaling, element, &transposed, [columns, rows]).codes;
            for (index, code) in backward.into_iter().enumerate() {
                assert_eq!(code, forward[index % rows * columns + index / rows], "{scaling:?}");
            }
        }
    }

    #[test]
    fn each_group_has_the_largest_of_its_magnitudes() {
        let (rows, columns) = (700, 301);
        let values = Draws(45).vector(rows * columns, 1.0);
        for [height, width] in [[1, 301], [700, 301], [1, 32], [128, 128], [16, 16], [699, 300]] {
            let amax = group_amax(&values, |value| value, [height, width], [rows, columns]);
            let mut expected = vec![0.0_f32; rows.div_ceil(height) * columns.div_ceil(width)];
            for (index, value) in values.iter().enumerate() {
                let group = index / columns / height * columns.div_ceil(width) + index % columns / width;
                expected[group] = expected[group].max(value.abs());
            }
            assert_eq!(amax, expected, "{height} x {width}");
        }
    }

    #[test]
    fn shapes_that_do_not_fit_are_refused() {
        let quantize =
            |element, count, shape| Scaling::PER_ROW.quantize(element, &vec![1.0; count], shape).unwrap_err();
        let odd = Error::Indivisible { what: "columns", got: 3, by: 2 };
        assert_eq!(quantize(NarrowFloat::E2m1, 6, [2, 3]), odd);
        assert_eq!(quantize(NarrowFloat::E4m3, 0, [2, 0]), Error::Empty { shape: vec![2, 0] });
        let mismatch = Error::ShapeMismatch { shape: vec![2, 3], expected: 6, got: 5, unit: "values" };
        assert_eq!(quantize(NarrowFloat::E4m3, 5, [2, 3]), mismatch);
    }
}
