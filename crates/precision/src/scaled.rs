//! A matrix as narrow floating-point codes with a scale per group: quantized, and back.
//!
//! The result is a function of values, shape and seed alone, and each step is one that a device does bit for bit: amax over
//! the group, scale and factor as `scaling.rs` says, `value * factor` in f32, and the code of that (saturating).
//!
//! Trade-off: values are f32. Widening bf16 and f16 is exact, so a device that reads those gets the same codes.

use crate::amax::group_amax;
use crate::element::ElementFormat;
use crate::encoder::{Encoder, Rounding};
use crate::error::{Error, Result};
use crate::scaling::{Scales, Scaling, check_matrix};

/// A row-major matrix of codes with scales.
#[derive(Debug, Clone, PartialEq)]
pub struct ScaledTensor {
    /// What the codes stand for.
    pub element: ElementFormat,
    /// Which values share a scale.
    pub scaling: Scaling,
    /// Rows; with activations, tokens; with weights, outputs.
    pub rows: usize,
    /// Columns, over which a GEMM sums.
    pub columns: usize,
    /// The codes: one byte each, or two to a byte for E2M1, the earlier one in the low nibble.
    pub codes: Vec<u8>,
    /// The scale of each group.
    pub scales: Scales,
}

impl Scaling {
    /// Quantizes a row-major matrix `[rows, columns]`.
    ///
    /// A group with a NaN or an infinity comes back as NaN; `scaling.rs` lists what becomes of every special amax. Without
    /// those, and without stochastic rounding, a value x of a group with scale s comes back with an error of at most
    /// `max(|x| · element.relative_error(), s · min_positive / 2)` and a few parts in 2^24. Larger errors have what saturates
    /// with [`Scaling::MX_OCP`], the largest value of a group of NVFP4 (s is rounded: up to 1/16 of the value), and groups
    /// of NVFP4 that flush to zero.
    ///
    /// # Errors
    /// [`Error::Empty`], [`Error::ShapeMismatch`]; [`Error::Indivisible`] for E2M1 and an odd number of columns.
    pub fn quantize(
        self,
        element: ElementFormat,
        values: &[f32],
        [rows, columns]: [usize; 2],
        rounding: Rounding,
    ) -> Result<ScaledTensor> {
        self.quantize_with(element, values, |value| value, [rows, columns], rounding)
    }

    /// The same from values of another type, each widened to f32 where it is needed.
    pub(crate) fn quantize_with<T: Copy + Sync>(
        self,
        element: ElementFormat,
        values: &[T],
        widen: impl Fn(T) -> f32 + Copy + Send + Sync,
        [rows, columns]: [usize; 2],
        rounding: Rounding,
    ) -> Result<ScaledTensor> {
        check_matrix(values.len(), rows, columns)?;
        check_pairs(element, columns)?;
        let amax = group_amax(values, widen, self.group(rows, columns), [rows, columns]);
        let (scales, factors) = self.scales(element, &amax);
        let encoder = Encoder { group: self.group(rows, columns), columns, factors: &factors, rounding };
        let codes = encoder.encode(element, values, widen);
        Ok(ScaledTensor { element, scaling: self, rows, columns, codes, scales })
    }
}

/// Quantizes with one scale that was chosen before: codes of `value * factor`, and `scale` to be read with.
///
/// # Errors
/// As [`Scaling::quantize`].
pub(crate) fn quantize_with_scale(
    element: ElementFormat,
    values: &[f32],
    [rows, columns]: [usize; 2],
    scale: f32,
    factor: f32,
) -> Result<ScaledTensor> {
    check_matrix(values.len(), rows, columns)?;
    check_pairs(element, columns)?;
    let encoder = Encoder { group: [rows, columns], columns, factors: &[factor], rounding: Rounding::Nearest };
    let (codes, scales) = (encoder.encode(element, values, |value| value), Scales::F32(vec![scale]));
    Ok(ScaledTensor { element, scaling: Scaling::PER_TENSOR, rows, columns, codes, scales })
}

/// E2M1 packs two values of a row in a byte.
pub(crate) fn check_pairs(element: ElementFormat, columns: usize) -> Result<()> {
    match element {
        ElementFormat::E2m1 if !columns.is_multiple_of(2) => {
            Err(Error::Indivisible { what: "columns", got: columns, by: 2 })
        }
        _ => Ok(()),
    }
}

impl ScaledTensor {
    /// The code of a value.
    pub fn code(&self, row: usize, column: usize) -> u8 {
        let index = row * self.columns + column;
        match self.element {
            ElementFormat::E2m1 => self.codes[index / 2] >> (index % 2 * 4) & 0xF,
            _ => self.codes[index],
        }
    }

    /// The values that codes and scales stand for, row-major: `code x scale` in f32. For NVFP4 the scale is `s x t`,
    /// rounded to f32 first.
    ///
    /// # Panics
    /// If the fields do not belong together, that is, were taken from different tensors.
    pub fn dequantize(&self) -> Vec<f32> {
        let scales = self.scales.values();
        let [group_rows, group_columns] = self.scaling.group(self.rows, self.columns);
        let [grid_rows, grid_columns] = self.scaling.grid(self.rows, self.columns);
        assert_eq!(scales.len(), grid_rows * grid_columns, "one scale per group");
        assert_eq!(self.codes.len(), self.rows * self.columns * self.element.bits() / 8, "the codes of all values");
        let table = self.element.format().table();
        let mut values = vec![0.0; self.rows * self.columns];
        for (row, values) in values.chunks_mut(self.columns).enumerate() {
            let scales = &scales[row / group_rows * grid_columns..][..grid_columns];
            for (group, (values, scale)) in values.chunks_mut(group_columns).zip(scales).enumerate() {
                for (index, value) in values.iter_mut().enumerate() {
                    *value = table[usize::from(self.code(row, group * group_columns + index))] * scale;
                }
            }
        }
        values
    }

    /// Whether all values were finite. The scales alone show it, so this is cheap; a stored weight must be refused if not.
    pub fn is_finite(&self) -> bool {
        self.scales.values().iter().all(|scale| scale.is_finite())
    }

    /// The buffer of scales that a GEMM reads, in the order and with the padding of [`Scaling::layout`]. The f32 of NVFP4
    /// is not in it: GEMMs take it as a factor of their result.
    pub fn scale_buffer(&self) -> Vec<u8> {
        let layout = self.scaling.layout(self.rows, self.columns);
        let [grid_rows, grid_columns] = self.scaling.grid(self.rows, self.columns);
        let repeat = if layout.rows() == grid_rows { 1 } else { self.scaling.group(self.rows, self.columns)[0] };
        self.scales.buffer(layout, grid_columns, repeat)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rounding::Overflow;
    use crate::test_values::Draws;

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
    const SHAPES: [[usize; 2]; 4] = [[1, 2], [5, 130], [130, 36], [300, 514]];

    fn matrix(draws: &mut Draws, [rows, columns]: [usize; 2]) -> Vec<f32> {
        // Rows of different sizes, as activations have them.
        (0..rows)
            .flat_map(|_| {
                let scale = 2_f32.powi(draws.below(8) as i32 - 4);
                draws.vector(columns, scale)
            })
            .collect()
    }

    /// The scale of each value.
    fn scale_of(tensor: &ScaledTensor) -> Vec<f32> {
        let ones = ScaledTensor { codes: vec![unit(tensor.element); tensor.codes.len()], ..tensor.clone() };
        ones.dequantize()
    }

    /// A byte whose codes are 1.
    fn unit(element: ElementFormat) -> u8 {
        let one = element.format().encode(1.0, Overflow::Saturate) as u8;
        if element == ElementFormat::E2m1 { one << 4 | one } else { one }
    }

    #[test]
    fn every_value_comes_back_within_the_documented_error() {
        let mut draws = Draws(51);
        for element in ElementFormat::ALL {
            for (scaling, shape) in ALL.into_iter().flat_map(|scaling| SHAPES.map(|shape| (scaling, shape))) {
                let values = matrix(&mut draws, shape);
                let tensor = scaling.quantize(element, &values, shape, Rounding::Nearest).unwrap();
                let scales = scale_of(&tensor);
                assert!(tensor.is_finite());
                for (index, back) in tensor.dequantize().into_iter().enumerate() {
                    let (value, scale) = (values[index], scales[index]);
                    // In NVFP4 the largest value of a group may be a 16th of its scale beyond the range.
                    let rounded_scale =
                        if value.abs() > element.format().max() * scale { value.abs() / 16.0 } else { 0.0 };
                    let bound =
                        (value.abs() * element.relative_error()).max(scale * element.format().min_positive() / 2.0);
                    let error = (back - value).abs();
                    assert!(
                        error <= bound.max(rounded_scale) * 1.000_01,
                        "{element} {scaling:?} {value} became {back}"
                    );
                }
            }
        }
    }

    #[test]
    fn stochastic_codes_are_a_neighbor_of_the_value_and_repeat_with_their_seed() {
        let mut draws = Draws(52);
        let (shape, seed) = ([70, 96], Rounding::Stochastic { seed: 11 });
        let values = matrix(&mut draws, shape);
        for element in ElementFormat::ALL {
            for scaling in ALL {
                let drawn = scaling.quantize(element, &values, shape, seed).unwrap();
                assert_eq!(drawn, scaling.quantize(element, &values, shape, seed).unwrap());
                let nearest = scaling.quantize(element, &values, shape, Rounding::Nearest).unwrap();
                assert_eq!(drawn.scales, nearest.scales);
                assert_ne!(drawn.codes, nearest.codes);
                for row in 0..shape[0] {
                    for column in 0..shape[1] {
                        let [drawn, nearest] = [&drawn, &nearest].map(|tensor| tensor.code(row, column));
                        assert!(
                            drawn.abs_diff(nearest) <= 1 || (drawn ^ nearest).count_ones() == 1,
                            "{drawn} {nearest}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn many_threads_and_partial_groups_give_what_one_group_at_a_time_gives() {
        let shape = [517, 776];
        let values = matrix(&mut Draws(53), shape);
        for element in ElementFormat::ALL {
            for scaling in ALL.into_iter().filter(|scaling| !matches!(*scaling, Scaling::NVFP4 | Scaling::NVFP4_16X16))
            {
                let whole = scaling.quantize(element, &values, shape, Rounding::Nearest).unwrap();
                let [rows, columns] = scaling.group(shape[0], shape[1]);
                for (top, left) in [(0, 0), (516 / rows * rows, 775 / columns * columns), (256 / rows * rows, 0)] {
                    let (bottom, right) = ((top + rows).min(517), (left + columns).min(776));
                    let group: Vec<f32> =
                        (top..bottom).flat_map(|row| &values[row * 776..][left..right]).copied().collect();
                    let shape = [bottom - top, right - left];
                    let alone = scaling.quantize(element, &group, shape, Rounding::Nearest).unwrap();
                    for row in top..bottom {
                        for column in left..right {
                            assert_eq!(whole.code(row, column), alone.code(row - top, column - left));
                        }
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
            for element in ElementFormat::ALL {
                for scaling in ALL {
                    let tensor = scaling.quantize(element, &values, shape, Rounding::Nearest).unwrap();
                    assert!(!tensor.is_finite(), "{scaling:?} {element} {bad}");
                    let back = tensor.dequantize();
                    let whole = matches!(scaling, Scaling::NVFP4 | Scaling::NVFP4_16X16);
                    let [rows, columns] = if whole { shape } else { scaling.group(40, 256) };
                    for (index, back) in back.iter().enumerate() {
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
        for element in ElementFormat::ALL {
            for scaling in ALL {
                let back = scaling.quantize(element, &values, shape, Rounding::Nearest).unwrap().dequantize();
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
            [(Scaling::NVFP4_16X16, ElementFormat::E2m1), (Scaling::BLOCK_128X128, ElementFormat::E4m3)]
        {
            let forward = scaling.quantize(element, &values, [rows, columns], Rounding::Nearest).unwrap();
            let backward = scaling.quantize(element, &transposed, [columns, rows], Rounding::Nearest).unwrap();
            for row in 0..rows {
                assert!(
                    (0..columns).all(|column| forward.code(row, column) == backward.code(column, row)),
                    "{scaling:?}"
                );
            }
        }
    }

    #[test]
    fn buffers_hold_each_scale_where_the_layout_says() {
        let shape = [40, 288];
        let values = matrix(&mut Draws(57), shape);
        for scaling in ALL {
            let tensor = scaling.quantize(ElementFormat::E2m1, &values, shape, Rounding::Nearest).unwrap();
            let (layout, buffer) = (scaling.layout(40, 288), tensor.scale_buffer());
            let [group_rows, group_columns] = scaling.group(40, 288);
            assert_eq!(buffer.len(), layout.bytes());
            let scales = scale_of(&tensor);
            for (row, column) in [(0, 0), (17, 130), (39, 287), (33, 31)] {
                let row_of_scales = if layout.rows() == 40 { row } else { row / group_rows };
                let offset = layout.offset(row_of_scales, column / group_columns);
                let stored = match &tensor.scales {
                    Scales::F32(_) => f32::from_le_bytes(buffer[offset..offset + 4].try_into().unwrap()),
                    Scales::E8m0(_) => crate::FloatFormat::E8m0.decode(buffer[offset].into()),
                    Scales::Ue4m3 { tensor, .. } => crate::FloatFormat::Ue4m3.decode(buffer[offset].into()) * tensor,
                };
                assert_eq!(stored, scales[row * 288 + column], "{scaling:?} {row} {column}");
            }
        }
    }

    #[test]
    fn shapes_that_do_not_fit_are_refused() {
        let quantize = |element, count, shape| {
            Scaling::PER_ROW.quantize(element, &vec![1.0; count], shape, Rounding::Nearest).unwrap_err()
        };
        let odd = Error::Indivisible { what: "columns", got: 3, by: 2 };
        assert_eq!(quantize(ElementFormat::E2m1, 6, [2, 3]), odd);
        assert_eq!(quantize(ElementFormat::E4m3, 0, [2, 0]), Error::Empty { shape: vec![2, 0] });
        let mismatch = Error::ShapeMismatch { shape: vec![2, 3], expected: 6, got: 5, unit: "values" };
        assert_eq!(quantize(ElementFormat::E4m3, 5, [2, 3]), mismatch);
    }
}
