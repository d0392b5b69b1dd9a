//! Measures the accuracy of a result of random values: its slope over the expected values, and the remaining noise.

use burn_flex::Flex;
use burn_tensor::{DType, Distribution, Tensor, TensorData, backend::Backend};

pub(crate) fn random(shape: [usize; 2], size: f64) -> TensorData {
    Tensor::<Flex, 2>::random(shape, Distribution::Normal(0.0, size), (&Default::default(), DType::F32)).into_data()
}

pub(crate) fn host<B: Backend>(values: Tensor<B, 2>) -> Vec<f64> {
    values.into_data().convert::<f32>().to_vec::<f32>().unwrap().into_iter().map(f64::from).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Returns the slope of `got` over `expected`, and the residual relative to `expected`.
pub(crate) fn slope_and_noise(got: &[f64], expected: &[f64]) -> (f64, f64) {
    let size = dot(expected, expected);
    let slope = dot(got, expected) / size;
    let left: Vec<f64> = got.iter().zip(expected).map(|(got, expected)| got - slope * expected).collect();
    (slope, (dot(&left, &left) / size).sqrt())
}
