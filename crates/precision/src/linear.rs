//! Linear layers in 8 and 4 bits on the host: the reference of `y = x Wᵀ` with quantized operands.
//!
//! `x` is `[tokens, inputs]`, the weight `[outputs, inputs]`, both row-major; the result is `[tokens, outputs]`. Sums are in
//! f64 and rounded once to f32, so what remains is the error of quantizing. With e(x) and e(w) the errors of the values
//! that [`Scaling::quantize`] states,
//!
//! `|y - x·w| <= Σ |x| e(w) + |w| e(x) + e(x) e(w)`, plus one part in 2^23 of `Σ |x||w|`.
//!
//! Trade-off: slow. It is what kernels are compared with, not what trains.

use crate::element::ElementFormat;
use crate::encoder::Rounding;
use crate::error::{Error, Result};
use crate::scaled::{ScaledTensor, quantize_with_scale};
use crate::scaling::{Scaling, check_matrix};

/// The sizes of a linear layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LinearShape {
    /// Rows of `x` and of the result.
    pub tokens: usize,
    /// Columns of `x` and of the weight.
    pub inputs: usize,
    /// Rows of the weight, columns of the result.
    pub outputs: usize,
}

/// A linear layer in E4M3 with current scales, one per row of `x` and of the weight.
///
/// Shapes: `x` `[tokens, inputs]`, `weight` `[outputs, inputs]`, result `[tokens, outputs]`. Range: any finite f32; each
/// row is scaled so that its largest magnitude becomes 448. Error: e(v) is at most `|v| / 16`, and at least
/// `amax / 458,752` (half the smallest number) where that is more, amax being the row's. A row with a NaN or an infinity
/// gives NaN.
///
/// # Errors
/// [`Error::Empty`], [`Error::ShapeMismatch`].
pub fn fp8_linear(x: &[f32], weight: &[f32], shape: LinearShape) -> Result<Vec<f32>> {
    quantized_linear(x, weight, shape, ElementFormat::E4m3, [Scaling::PER_ROW; 2])
}

/// A linear layer in E2M1 with one given scale per tensor: codes of `x / scale_x` and `weight / scale_w`.
///
/// Shapes as [`fp8_linear`]; `inputs` is even. Range: `6 · scale`; values beyond it saturate, and an infinity does too.
/// E2M1 has one mantissa bit (0, 0.5, 1, 1.5, 2, 3, 4, 6), so within the range e(v) is at most `|v| / 4`, or `scale / 4`
/// where that is more: values below a quarter of the scale vanish. With `scale = amax / 6` nothing saturates. A NaN has no
/// code and becomes 6 times the scale: check before.
///
/// # Errors
/// [`Error::UnusableScale`] unless the scales are positive normal numbers; [`Error::Indivisible`], [`Error::Empty`],
/// [`Error::ShapeMismatch`].
pub fn fp4_linear(x: &[f32], weight: &[f32], scale_x: f32, scale_w: f32, shape: LinearShape) -> Result<Vec<f32>> {
    let operand = |what, values: &[f32], rows, scale: f32| {
        if !scale.is_normal() || scale < 0.0 {
            return Err(Error::UnusableScale { what, got: scale });
        }
        let divided: Vec<f32> = values.iter().map(|value| value / scale).collect();
        quantize_with_scale(ElementFormat::E2m1, &divided, [rows, shape.inputs], scale, 1.0)
    };
    let x = operand("scale_x", x, shape.tokens, scale_x)?;
    scaled_linear(&x, &operand("scale_w", weight, shape.outputs, scale_w)?)
}

/// A linear layer in NVFP4: groups of 16 along `inputs` with a UE4M3 scale each, and one f32 per tensor.
///
/// Shapes as [`fp8_linear`]; `inputs` is even, a multiple of 16 where a GPU has to do it. Range: any finite f32. Error:
/// with a the amax of the group and A that of the tensor, e(v) is at most `max(|v| / 4, a / 20)` for all values but the
/// largest of a group, which may lose `a / 16`; groups with a below `A / 458,752` become zeros. A NaN or an infinity
/// makes the whole tensor NaN.
///
/// # Errors
/// As [`fp4_linear`].
pub fn nvfp4_linear(x: &[f32], weight: &[f32], shape: LinearShape) -> Result<Vec<f32>> {
    quantized_linear(x, weight, shape, ElementFormat::E2m1, [Scaling::NVFP4; 2])
}

fn quantized_linear(
    x: &[f32],
    weight: &[f32],
    shape: LinearShape,
    element: ElementFormat,
    [scaling_x, scaling_w]: [Scaling; 2],
) -> Result<Vec<f32>> {
    let LinearShape { tokens, inputs, outputs } = shape;
    check_matrix(weight.len(), outputs, inputs)?;
    let x = scaling_x.quantize(element, x, [tokens, inputs], Rounding::Nearest)?;
    scaled_linear(&x, &scaling_w.quantize(element, weight, [outputs, inputs], Rounding::Nearest)?)
}

/// `left rightᵀ` of two quantized matrices with as many columns: `[left.rows, right.rows]`.
///
/// # Errors
/// [`Error::ShapeMismatch`] if the columns differ.
pub fn scaled_linear(left: &ScaledTensor, right: &ScaledTensor) -> Result<Vec<f32>> {
    let columns = left.columns;
    if right.columns != columns {
        let (shape, expected) = (vec![right.rows, right.columns], right.rows * columns);
        return Err(Error::ShapeMismatch { shape, expected, got: right.rows * right.columns, unit: "values" });
    }
    let [left, right] = [left, right].map(ScaledTensor::dequantize);
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>() as f32;
    let rows = left.chunks(columns);
    Ok(rows.flat_map(|a| right.chunks(columns).map(move |b| dot(a, b)).collect::<Vec<_>>()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_values::Draws;

    const SHAPE: LinearShape = LinearShape { tokens: 9, inputs: 160, outputs: 7 };

    fn operands(seed: u64) -> [Vec<f32>; 2] {
        let mut draws = Draws(seed);
        [draws.vector(SHAPE.tokens * SHAPE.inputs, 3.0), draws.vector(SHAPE.outputs * SHAPE.inputs, 0.02)]
    }

    /// Checks the bound of the header with the error that `error` allows a value, given the amax of its row's group of
    /// `group` values.
    fn assert_bound(y: &[f32], [x, w]: &[Vec<f32>; 2], group: usize, error: impl Fn(f32, f32) -> f32) {
        let errors = |values: &[f32]| -> Vec<f64> {
            let row = |row: &[f32]| {
                let groups = row.chunks(group).flat_map(|group| {
                    let amax = group.iter().fold(0.0_f32, |amax, value| amax.max(value.abs()));
                    group.iter().map(move |value| (value.abs(), amax))
                });
                groups.map(|(value, amax)| f64::from(error(value, amax))).collect::<Vec<_>>()
            };
            values.chunks(SHAPE.inputs).flat_map(row).collect()
        };
        let [x_errors, w_errors] = [errors(x), errors(w)];
        for (index, y) in y.iter().enumerate() {
            let (from_x, from_w) = (index / SHAPE.outputs * SHAPE.inputs, index % SHAPE.outputs * SHAPE.inputs);
            let (mut exact, mut bound) = (0.0, 0.0);
            for column in 0..SHAPE.inputs {
                let [a, b] = [x[from_x + column], w[from_w + column]].map(f64::from);
                let [ea, eb] = [x_errors[from_x + column], w_errors[from_w + column]];
                exact += a * b;
                bound += a.abs() * eb + b.abs() * ea + ea * eb + (a * b).abs() * 2_f64.powi(-23);
            }
            assert!((f64::from(*y) - exact).abs() <= bound, "{y} for {exact}, bound {bound}");
            assert!((f64::from(*y) - exact).abs() > 0.0, "quantizing must show");
        }
    }

    #[test]
    fn fp8_linear_keeps_its_error_bound() {
        for seed in 80..90 {
            let [x, w] = operands(seed);
            let y = fp8_linear(&x, &w, SHAPE).unwrap();
            assert_bound(&y, &[x, w], SHAPE.inputs, |value, amax| (value / 16.0).max(amax / 458_752.0) * 1.000_001);
        }
    }

    #[test]
    fn fp4_linear_keeps_its_error_bound_and_saturates() {
        let [x, w] = operands(91);
        let [scale_x, scale_w] = [&x, &w].map(|v| v.iter().fold(0.0_f32, |amax, v| amax.max(v.abs())) / 6.0);
        let y = fp4_linear(&x, &w, scale_x, scale_w, SHAPE).unwrap();
        let scale = |value: f32| if value > 0.1 { scale_x } else { scale_w };
        // Both operands in one bound: their scales differ by more than a hundred.
        let bound = |value: f32, amax: f32| (value / 4.0).max(scale(amax) / 4.0) * 1.000_001;
        assert_bound(&y, &[x, w], SHAPE.inputs, bound);
        let one = LinearShape { tokens: 1, inputs: 2, outputs: 1 };
        assert_eq!(fp4_linear(&[100.0, f32::INFINITY], &[1.0, 1.0], 1.0, 1.0, one).unwrap(), [12.0]);
        assert_eq!(fp4_linear(&[2.5, 0.2], &[1.0, 6.0], 1.0, 1.0, one).unwrap(), [2.0]);
    }

    #[test]
    fn nvfp4_linear_keeps_its_error_bound() {
        for seed in 92..102 {
            let [x, w] = operands(seed);
            let y = nvfp4_linear(&x, &w, SHAPE).unwrap();
            let bound = |value: f32, amax: f32| {
                (value / 4.0).max(amax / 20.0).max(if value == amax { amax / 16.0 } else { 0.0 }) * 1.000_01
            };
            assert_bound(&y, &[x, w], 16, bound);
        }
    }

    #[test]
    fn a_row_that_is_not_finite_gives_nan_there_and_nowhere_else() {
        let [mut x, w] = operands(103);
        x[2 * SHAPE.inputs + 5] = f32::INFINITY;
        let y = fp8_linear(&x, &w, SHAPE).unwrap();
        for (index, value) in y.iter().enumerate() {
            assert_eq!(value.is_nan(), index / SHAPE.outputs == 2, "{index}");
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let [x, w] = operands(104);
        for scale in [0.0, -1.0, f32::NAN, f32::INFINITY, 1e-40] {
            let error = fp4_linear(&x, &w, 1.0, scale, SHAPE).unwrap_err();
            assert!(matches!(error, Error::UnusableScale { what: "scale_w", .. }), "{error}");
        }
        assert!(matches!(fp8_linear(&x, &w[1..], SHAPE).unwrap_err(), Error::ShapeMismatch { .. }));
        assert!(matches!(fp8_linear(&x[1..], &w, SHAPE).unwrap_err(), Error::ShapeMismatch { .. }));
    }
}
