//! A case of the matrix before it runs: what it is, how its inputs are built, and how its result is checked.
//!
//! A case builds as many independent sets of inputs as the caches of the device require, and checks the result of the first call of
//! the first set: the call that is timed, not a smaller one.
//! Trade-off: large results are checked in their first and last rows (and columns) only; the reference of the whole would take minutes.

use std::collections::BTreeMap;

use burn_tensor::{DType, Tensor};
use firebrick_kernels::backends::Flex;
use firebrick_kernels::{Kernels, QuantizedWeight};

use super::key::Key;
use super::results::{Axis, Work};

/// A piece of work on one backend.
pub(super) struct Case<B: Kernels> {
    /// What it is.
    pub key: Key,
    /// How much it is.
    pub work: Work,
    /// Its place in a sweep.
    pub axis: Option<Axis>,
    /// The largest relative error that rounding explains.
    pub tolerance: f64,
    /// Bytes of one set of inputs; 0 for work that does not depend on where its inputs lie.
    pub set_bytes: f64,
    /// Builds one set of inputs.
    pub prepare: Box<dyn Fn() -> Prepared<B>>,
}

/// A set of inputs.
pub(super) struct Prepared<B: Kernels> {
    /// Does the work on them once; queued, not waited for.
    pub call: Box<dyn FnMut() -> Output<B>>,
    /// Compares the result of the first call with the reference.
    pub check: Box<dyn FnOnce(Output<B>) -> Vec<Comparison>>,
}

/// What a call returns.
pub(super) enum Output<B: Kernels> {
    /// Tensors.
    Tensors(Vec<Tensor<B, 2>>),
    /// A quantized weight.
    Weight(QuantizedWeight<B>),
    /// A number on the host, such as a loss.
    Number(f64),
}

impl<B: Kernels> Output<B> {
    /// # Panics
    /// If the call returned something else: the check belongs to another case.
    pub(super) fn tensors(self) -> Vec<Tensor<B, 2>> {
        match self {
            Self::Tensors(tensors) => tensors,
            _ => panic!("the call returns tensors"),
        }
    }

    /// # Panics
    /// As [`Self::tensors`].
    pub(super) fn weight(self) -> QuantizedWeight<B> {
        match self {
            Self::Weight(weight) => weight,
            _ => panic!("the call returns a weight"),
        }
    }

    /// # Panics
    /// As [`Self::tensors`].
    pub(super) fn number(self) -> f64 {
        match self {
            Self::Number(number) => number,
            _ => panic!("the call returns a number"),
        }
    }
}

/// A part of a result next to its reference.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Comparison {
    /// Which part.
    pub what: &'static str,
    /// `‖got − expected‖ / ‖expected‖`; infinite where a value is not finite.
    pub error: f64,
}

impl Comparison {
    /// Compares values of one tensor.
    ///
    /// # Panics
    /// If there are not as many of both: the check is wrong.
    pub(super) fn of(what: &'static str, got: &[f32], expected: &[f32]) -> Self {
        assert_eq!(got.len(), expected.len(), "{what}: as many values as the reference");
        let square = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>().sqrt();
        let pairs = || got.iter().zip(expected);
        let difference = square(&mut pairs().map(|(got, expected)| f64::from(*got) - f64::from(*expected)));
        let size = square(&mut expected.iter().map(|value| f64::from(*value)));
        let error = if size > 0.0 { difference / size } else { difference };
        Self { what, error: if error.is_nan() { f64::INFINITY } else { error } }
    }

    /// The same for tensors.
    pub(super) fn of_tensors<B: Kernels, const D: usize>(
        what: &'static str,
        got: Tensor<B, D>,
        expected: Tensor<Flex, D>,
    ) -> Self {
        Self::of(what, &to_floats(got), &to_floats(expected))
    }
}

/// The parts of a [`Key`] that a subject decides.
pub(super) fn key(subject: &str, pass: &str, what: &str, format: &str, sizes: &[(&str, usize)]) -> Key {
    let sizes: BTreeMap<String, u64> = sizes.iter().map(|&(name, size)| (name.to_owned(), size as u64)).collect();
    let [subject, pass, what, format] = [subject, pass, what, format].map(str::to_owned);
    Key { backend: String::new(), subject, pass, what, format, sizes }
}

/// Work whose throughput counts tokens.
pub(super) fn tokens(tokens: usize, flops: f64, bytes: f64) -> Work {
    Work { flops, bytes, units: tokens as f64, unit: "tokens".to_owned() }
}

/// A place in a sweep over tokens.
pub(super) fn token_axis(tokens: usize) -> Option<Axis> {
    Some(Axis { name: "tokens".to_owned(), value: tokens as f64 })
}

/// The values of a tensor on the host.
pub(super) fn to_floats<B: Kernels, const D: usize>(tensor: Tensor<B, D>) -> Vec<f32> {
    tensor.into_data().convert_dtype(DType::F32).to_vec().expect("converted to f32")
}

/// A tensor with the values of another one, in f32 on the CPU, where the references run.
pub(super) fn to_reference<B: Kernels, const D: usize>(tensor: Tensor<B, D>) -> Tensor<Flex, D> {
    Tensor::from_data(tensor.into_data().convert_dtype(DType::F32), &Default::default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_relative_to_the_size_of_the_reference() {
        let comparison = Comparison::of("x", &[3.0, 4.0, 0.5], &[3.0, 4.0, 0.0]);
        assert!((comparison.error - 0.1).abs() < 1e-12, "{comparison:?}");
        assert_eq!(Comparison::of("x", &[1.0, 2.0], &[1.0, 2.0]).error, 0.0);
        assert_eq!(Comparison::of("x", &[0.25], &[0.0]).error, 0.25);
    }

    #[test]
    fn a_value_that_is_no_number_is_an_infinite_error() {
        assert_eq!(Comparison::of("x", &[f32::NAN], &[1.0]).error, f64::INFINITY);
        assert_eq!(Comparison::of("x", &[f32::INFINITY], &[1.0]).error, f64::INFINITY);
    }
}
