//! What GEMMs in 8-bit floats compute, in ordinary Burn operations: the values that codes stand for, multiplied exactly.
//!
//! E4M3 has 4 bits of exponent and 3 of mantissa (`firebrick_precision::float`); the recipe is explained where it runs fast
//! (`backends/cuda/linear/operands/fp8/mod.rs`). Adapters are left out here: their own products are computed in the compute format.
//! Trade-off: rounding is done by sums of floats that push the lower bits out, which holds only where those sums are rounded to f32.

use burn_tensor::backend::Backend;
use burn_tensor::{DType, Tensor};
use firebrick_precision::QuantFormat;

use crate::dtype::{to_dtype, to_f32};
use crate::weights::reference::dense;
use crate::weights::{Weight, WeightOps};

/// What the largest value of a row of activations or gradients becomes; see `fp8.cu` next to it.
const TOP_OF_ROWS: f64 = 224.0;
/// Rows of zeros divide by something.
const SMALLEST_AMAX: f64 = 7.888609e-31;

/// What the largest value of a row of a weight becomes. Values of MXFP4 are 1 and 1.5 times powers of two: with 12 all of them are codes.
fn top_of_weight<B: Backend>(weight: &Weight<B>) -> f64 {
    match weight {
        Weight::Quantized(weight) if weight.format == QuantFormat::Mxfp4 => 12.0,
        Weight::Quantized(_) | Weight::Dense(_) => 14.0,
    }
}

/// `x Wᵀ`, `[n, o]`, with the rows of both in E4M3.
pub(super) fn product<B: WeightOps>(x_ni: Tensor<B, 2>, weight_oi: &Weight<B>) -> Tensor<B, 2> {
    let dtype = x_ni.dtype();
    let (x, x_scale) = codes(x_ni, TOP_OF_ROWS);
    let (weight, scale) = codes(dense(weight_oi, DType::F32), top_of_weight(weight_oi));
    to_dtype(x.mul(x_scale).matmul(weight.mul(scale).transpose()), dtype)
}

/// `dy W`, `[n, i]`: the scales of W's rows go into `dy`, and what is left of W are codes.
pub(super) fn input_gradient<B: WeightOps>(dy_no: Tensor<B, 2>, weight_oi: &Weight<B>) -> Tensor<B, 2> {
    let dtype = dy_no.dtype();
    let (weight, scale_o1) = codes(dense(weight_oi, DType::F32), top_of_weight(weight_oi));
    let (dy, dy_scale) = codes(to_f32(dy_no).mul(scale_o1.transpose()), TOP_OF_ROWS);
    to_dtype(dy.mul(dy_scale).matmul(weight), dtype)
}

/// The values of the codes of each row, f32, and the scale of each row, `[rows, 1]`.
fn codes<B: Backend>(values: Tensor<B, 2>, top: f64) -> (Tensor<B, 2>, Tensor<B, 2>) {
    let values = to_f32(values);
    let largest = values.clone().abs().max_dim(1).clamp_min(SMALLEST_AMAX);
    let scale = largest.div_scalar(top);
    (to_e4m3(values.div(scale.clone())), scale)
}

/// The nearest values of E4M3, ties to even; f32.
fn to_e4m3<B: Backend>(values: Tensor<B, 2>) -> Tensor<B, 2> {
    debug_assert_eq!(values.dtype(), DType::F32);
    // Adding and taking away 2^20 times a value leaves its four upper bits; below 2^-6 the step is 2^-9, whatever the value.
    let shifted = values.clone().mul_scalar(1_048_577.0);
    let normal = shifted.clone().sub(shifted.sub(values.clone()));
    let subnormal = values.clone().add_scalar(24_576.0).sub_scalar(24_576.0);
    let is_subnormal = values.abs().lower_elem(0.015_625);
    normal.mask_where(is_subnormal, subnormal).clamp(-448.0, 448.0)
}

#[cfg(test)]
mod tests {
    use burn_flex::Flex;
    use firebrick_precision::{FloatFormat, Overflow};

    use super::*;

    #[test]
    fn rounding_is_that_of_the_format() {
        let values: Vec<f32> =
            (-4000..4000).map(|k| k as f32 * 0.11).chain((0..4000).map(|k| k as f32 * 1e-5)).collect();
        let expected: Vec<f32> = values
            .iter()
            .map(|&value| FloatFormat::E4m3.decode(FloatFormat::E4m3.encode(value, Overflow::Saturate)))
            .collect();
        let tensor = Tensor::<Flex, 1>::from_floats(values.as_slice(), &Default::default()).unsqueeze::<2>();
        assert_eq!(to_e4m3(tensor).into_data().to_vec::<f32>().unwrap(), expected);
    }
}
