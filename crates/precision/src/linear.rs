//! Linear layers in 8 bits: the one recipe of FP8, and its reference.
//!
//! GEMMs under `compute = "fp8"` multiply E4M3 with one f32 scale per row of each operand: the largest magnitude of the row becomes [`TOP_OF_ROWS`]
//! in activations and gradients, and [`top_of_weight`] in weights. Neither uses the whole range of E4M3, because the columns of an adapter share the
//! scale of their row: they may be 32 times the largest value of weights, and twice that of activations and gradients. Codes near 448 are no more
//! exact than codes near 14. Rows whose largest magnitude is below [`AMAX_FLOOR`](crate::AMAX_FLOOR) are scaled as if it were that. The reference and
//! the CUDA sources of `firebrick-kernels` use these constants.
//!
//! Shapes: `x` is `[tokens, inputs]`, `weight` `[outputs, inputs]`, both row-major; the result is `[tokens, outputs]`.
//!
//! Trade-off: sums are in f64 and rounded once to f32, so only the quantization error remains; slow, intended for comparisons.

use crate::float::NarrowFloat;
use crate::format::QuantFormat;
use crate::scaling::{f32_scale, larger};

/// Value to which the largest magnitude of an activation's or gradient's row is scaled.
pub const TOP_OF_ROWS: f32 = 224.0;

/// Returns the value to which the largest magnitude of a weight's row is scaled, for a weight that is stored in a format or dense.
/// Values of MXFP4 are 1 and 1.5 times powers of two: all of them are codes if the largest is 12. At 14 most would be rounded down.
pub const fn top_of_weight(stored: Option<QuantFormat>) -> f32 {
    match stored {
        Some(QuantFormat::Mxfp4) => 12.0,
        _ => 14.0,
    }
}

/// Computes `x Wᵀ` in FP8, with a dense weight. A row with a NaN or an infinity gives NaN.
///
/// # Panics
/// If `x` or `weight` does not consist of rows of `inputs` values.
pub fn fp8_linear(x: &[f32], weight: &[f32], inputs: usize) -> Vec<f32> {
    let nearest = |value| NarrowFloat::E4m3.decode(NarrowFloat::E4m3.encode(value));
    let operand = |values: &[f32], top: f32| -> Vec<f32> {
        let rows = values.chunks(inputs).flat_map(|row| {
            let (scale, _) = f32_scale(larger(0.0, row), top);
            row.iter().map(move |value| nearest(value / scale) * scale)
        });
        rows.collect()
    };
    product(&operand(x, TOP_OF_ROWS), &operand(weight, top_of_weight(None)), inputs)
}

fn product(x: &[f32], weight: &[f32], inputs: usize) -> Vec<f32> {
    let lengths = [x.len(), weight.len()];
    assert!(lengths.iter().all(|length| length.is_multiple_of(inputs)), "{lengths:?} values in rows of {inputs}");
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>() as f32;
    x.chunks(inputs).flat_map(|x| weight.chunks(inputs).map(move |weight| dot(x, weight))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_values::Draws;

    const TOKENS: usize = 9;
    const INPUTS: usize = 160;
    const OUTPUTS: usize = 7;

    fn operands(seed: u64) -> [Vec<f32>; 2] {
        let mut draws = Draws(seed);
        [draws.vector(TOKENS * INPUTS, 3.0), draws.vector(OUTPUTS * INPUTS, 0.02)]
    }

    /// Checks `|y - x·w| <= Σ |x| e(w) + |w| e(x) + e(x) e(w)` plus a rounding, where e bounds the error of quantizing.
    fn assert_bound(y: &[f32], [x, w]: &[Vec<f32>; 2], [x_errors, w_errors]: [Vec<f32>; 2]) {
        for (index, &y) in y.iter().enumerate() {
            let (of_x, of_w) = (index / OUTPUTS * INPUTS, index % OUTPUTS * INPUTS);
            let (mut exact, mut bound) = (0.0, 0.0);
            for k in 0..INPUTS {
                let [a, ea, b, eb] = [x[of_x + k], x_errors[of_x + k], w[of_w + k], w_errors[of_w + k]].map(f64::from);
                exact += a * b;
                bound += a.abs() * eb + b.abs() * ea + ea * eb + (a * b).abs() * 2_f64.powi(-23);
            }
            let error = (f64::from(y) - exact).abs();
            assert!(0.0 < error && error <= bound, "{y} for {exact}, bound {bound}: quantizing must show");
        }
    }

    #[test]
    fn fp8_linear_is_near_the_exact_product() {
        // Half a step is a 16th of the value, or half the smallest code.
        let errors = |values: &[f32], top: f32| -> Vec<f32> {
            let row = |row: &[f32]| {
                let scale = larger(0.0, row) / top;
                row.iter().map(|value| (value.abs() / 16.0).max(scale / 1024.0) * 1.000_001).collect::<Vec<_>>()
            };
            values.chunks(INPUTS).flat_map(row).collect()
        };
        for seed in 80..90 {
            let [x, w] = operands(seed);
            let y = fp8_linear(&x, &w, INPUTS);
            let errors = [errors(&x, 224.0), errors(&w, 14.0)];
            assert_bound(&y, &[x, w], errors);
        }
    }

    #[test]
    fn a_row_that_is_not_finite_gives_nan_there_and_nowhere_else() {
        for bad in [f32::INFINITY, f32::NAN] {
            let [mut x, w] = operands(103);
            x[2 * INPUTS + 5] = bad;
            for (index, value) in fp8_linear(&x, &w, INPUTS).into_iter().enumerate() {
                assert_eq!(value.is_nan(), index / OUTPUTS == 2, "{index}");
            }
        }
    }
}
