//! GEMMs in 8-bit floats in ordinary Burn operations: decodes the codes to their values and multiplies those exactly.
//!
//! The recipe is that of `firebrick_precision::linear`; `backends/cuda/linear/operands/fp8/mod.rs` explains the fast
//! implementation. Adapters are not included: their GEMMs run in the compute format.
//! Trade-off: rounding uses sums of floats that push out the lower bits, which is valid only if those sums are rounded to f32.

use burn_tensor::backend::Backend;
use burn_tensor::{DType, Tensor};
use firebrick_precision::AMAX_FLOOR;
use firebrick_precision::linear::{TOP_OF_ROWS, top_of_weight};

use crate::dtype::{to_dtype, to_f32};
use crate::weights::reference::dense;
use crate::weights::{Weight, WeightOps};

/// Computes `x Wᵀ`, `[n, o]`, with the rows of both in E4M3.
pub(super) fn product<B: WeightOps>(x_ni: Tensor<B, 2>, weight_oi: &Weight<B>) -> Tensor<B, 2> {
    let dtype = x_ni.dtype();
    let (x, x_scale) = codes(x_ni, TOP_OF_ROWS);
    let (weight, scale) = weight_codes(weight_oi);
    to_dtype(x.mul(x_scale).matmul(weight.mul(scale).transpose()), dtype)
}

/// Computes `dy W`, `[n, i]`: the row scales of W are multiplied into `dy`, which leaves the codes of W.
pub(super) fn input_gradient<B: WeightOps>(dy_no: Tensor<B, 2>, weight_oi: &Weight<B>) -> Tensor<B, 2> {
    let dtype = dy_no.dtype();
    let (weight, scale_o1) = weight_codes(weight_oi);
    let (dy, dy_scale) = codes(to_f32(dy_no).mul(scale_o1.transpose()), TOP_OF_ROWS);
    to_dtype(dy.mul(dy_scale).matmul(weight), dtype)
}

fn weight_codes<B: WeightOps>(weight: &Weight<B>) -> (Tensor<B, 2>, Tensor<B, 2>) {
    let stored = match weight {
        Weight::Quantized(weight) => Some(weight.format),
        Weight::Dense(_) => None,
    };
    codes(dense(weight, DType::F32), top_of_weight(stored))
}

/// Quantizes each row: returns the values of the codes, f32, and the scale of each row, `[rows, 1]`.
fn codes<B: Backend>(values: Tensor<B, 2>, top: f32) -> (Tensor<B, 2>, Tensor<B, 2>) {
    let values = to_f32(values);
    // The floor keeps rows of zeros from dividing by zero.
    let largest = values.clone().abs().max_dim(1).clamp_min(AMAX_FLOOR);
    let scale = largest.div_scalar(top);
    (to_e4m3(values.div(scale.clone())), scale)
}

/// Rounds to the nearest E4M3 values, ties to even; returns f32.
fn to_e4m3<B: Backend>(values: Tensor<B, 2>) -> Tensor<B, 2> {
    debug_assert_eq!(values.dtype(), DType::F32);
    // Adding and subtracting 2^20 times a value keeps its four upper bits; below 2^-6 the step is 2^-9 for every value.
    let shifted = values.clone().mul_scalar(1_048_577.0);
    let normal = shifted.clone().sub(shifted.sub(values.clone()));
    let subnormal = values.clone().add_scalar(24_576.0).sub_scalar(24_576.0);
    let is_subnormal = values.abs().lower_elem(0.015_625);
    normal.mask_where(is_subnormal, subnormal).clamp(-448.0, 448.0)
}

#[cfg(test)]
mod tests {
    use burn_flex::Flex;
    use firebrick_precision::{NarrowFloat, fp8_linear};

    use super::*;
    use crate::testing::random;

    #[test]
    fn rounding_is_that_of_the_format() {
        let values: Vec<f32> =
            (-4000..4000).map(|k| k as f32 * 0.11).chain((0..4000).map(|k| k as f32 * 1e-5)).collect();
        let expected: Vec<f32> =
            values.iter().map(|&value| NarrowFloat::E4m3.decode(NarrowFloat::E4m3.encode(value))).collect();
        let tensor = Tensor::<Flex, 1>::from_floats(values.as_slice(), &Default::default()).unsqueeze::<2>();
        assert_eq!(to_e4m3(tensor).into_data().to_vec::<f32>().unwrap(), expected);
    }

    #[test]
    fn products_are_those_of_the_host() {
        let (x, weight) = (random::<Flex, 2>(1, [9, 160]), random::<Flex, 2>(2, [7, 160]));
        let [host_x, host_weight] = [&x, &weight].map(|values| values.to_data().to_vec::<f32>().unwrap());
        let expected = fp8_linear(&host_x, &host_weight, 160);
        let got = product(x, &Weight::Dense(weight)).into_data().to_vec::<f32>().unwrap();
        for (got, expected) in got.iter().zip(&expected) {
            // The codes are equal, but the sum is in f32 here and in f64 there.
            assert!((got - expected).abs() < 1e-4, "{got} for {expected}");
        }
    }
}
