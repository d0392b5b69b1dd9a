//! The subjects of the matrix, one file each: the cases of a backend, most important first.
//!
//! Trade-off: the kind of device decides the sizes without a measurement, so a slow device skips the last cases for lack of time.

mod attention;
mod comm;
mod data;
mod gemm;
mod loss;
mod model;
mod optimizer;
mod rows;
mod weights;

use burn_tensor::{DType, Distribution, Tensor};
use firebrick_kernels::{BackendKind, Kernels};

use crate::case::Case;
use crate::models::{LLAMA_1B, LLAMA_8B, Model, SMOLLM2_135M};

pub(crate) use model::StepReference;

/// The scale of a device's cases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scale {
    /// A processor, or a graphics driver that runs on one.
    Small,
    /// A GPU through wgpu, whose operations are not tuned for it.
    Medium,
    /// A GPU through CUDA.
    Large,
}

/// The settings for building the cases of one backend.
pub(crate) struct Setting<B: Kernels> {
    pub(crate) kind: BackendKind,
    pub(crate) device: B::Device,
    pub(crate) scale: Scale,
    pub(crate) quick: bool,
    /// Whether the device multiplies 8-bit floats.
    pub(crate) has_fp8: bool,
    /// The expected result of a small model's first step; `None` on the backend that computes it.
    pub(crate) reference: Option<StepReference>,
}

impl<B: Kernels> Setting<B> {
    /// Returns the model whose layers give the sizes.
    fn model(&self) -> Model {
        match self.scale {
            Scale::Small => SMOLLM2_135M,
            Scale::Medium => LLAMA_1B,
            Scale::Large => LLAMA_8B,
        }
    }

    /// Returns the tokens of a micro-batch.
    fn tokens(&self) -> usize {
        match self.scale {
            Scale::Small => 256,
            Scale::Medium => 1024,
            Scale::Large => 4096,
        }
    }

    /// Returns the compute format of training here, and its name.
    fn main_format(&self) -> (DType, &'static str) {
        if self.kind == BackendKind::Cuda { (DType::BF16, "bf16") } else { (DType::F32, "f32") }
    }

    /// Returns all compute formats of the backend, the main one first.
    pub(crate) fn formats(&self) -> Vec<(DType, &'static str)> {
        let mut formats = vec![self.main_format()];
        if self.kind == BackendKind::Cuda {
            formats.extend([(DType::F32, "f32"), (DType::F16, "f16")]);
        }
        formats
    }

    /// Returns the values of a sweep, fewer in the short run.
    fn sweep(&self, quick: &[usize], whole: &[usize]) -> Vec<usize> {
        if self.quick { quick.to_vec() } else { whole.to_vec() }
    }
}

/// Builds all cases of a backend.
pub(crate) fn cases<B: Kernels>(setting: &Setting<B>) -> Vec<Case<B>> {
    type Subject<B> = fn(&Setting<B>) -> Vec<Case<B>>;
    let subjects: [Subject<B>; 8] = [
        gemm::cases,
        attention::cases,
        model::cases,
        rows::cases,
        loss::cases,
        weights::cases,
        optimizer::cases,
        comm::cases,
    ];
    let mut cases: Vec<Case<B>> = subjects.into_iter().flat_map(|cases| cases(setting)).collect();
    if setting.kind == BackendKind::Flex {
        cases.extend(data::cases(setting));
    }
    cases
}

/// Returns the relative error that several roundings to a format explain.
fn tolerance(dtype: DType) -> f64 {
    2.0 * firebrick_kernels::conformance::tolerance(dtype)
}

/// Creates random values in `-scale..scale`.
fn random<B: Kernels, const D: usize>(shape: [usize; D], scale: f64, dtype: DType, device: &B::Device) -> Tensor<B, D> {
    Tensor::<B, D>::random(shape, Distribution::Uniform(-scale, scale), device).cast(dtype)
}

/// Number of rows or columns at each end of a matrix.
const EDGE: usize = 32;

/// Returns the first and the last indices of an axis of this length.
fn edges(length: usize) -> Vec<(usize, usize)> {
    if length <= 2 * EDGE { vec![(0, length)] } else { vec![(0, EDGE), (length - EDGE, EDGE)] }
}

/// Joins the slices of a tensor at both ends of an axis.
fn at_edges<B: Kernels>(x: &Tensor<B, 2>, axis: usize) -> Tensor<B, 2> {
    let slices = edges(x.dims()[axis]).into_iter().map(|(start, length)| x.clone().narrow(axis, start, length));
    Tensor::cat(slices.collect(), axis)
}

#[cfg(test)]
mod tests {
    use firebrick_kernels::WeightOps;
    use firebrick_kernels::backends::Flex;

    use super::*;
    use crate::case::{Output, Prepared};
    use crate::options::SUBJECTS;

    #[test]
    fn edges_cover_short_axes_and_both_ends_of_long_ones() {
        assert_eq!(edges(64), [(0, 64)]);
        assert_eq!(edges(100), [(0, 32), (68, 32)]);
        let matrix = random::<Flex, 2>([100, 3], 1.0, DType::F32, &Default::default());
        let cut = at_edges(&matrix, 0);
        assert_eq!(cut.dims(), [64, 3]);
        let last = |x: &Tensor<Flex, 2>| x.clone().narrow(0, x.dims()[0] - 1, 1).into_data();
        assert_eq!(last(&cut), last(&matrix));
        assert_eq!(at_edges(&matrix, 1).dims(), [100, 3]);
    }

    /// Creates the settings for the smallest cases of a backend in the short run, with their expected results.
    fn setting() -> Setting<Flex> {
        Setting {
            kind: BackendKind::Flex,
            device: Default::default(),
            scale: Scale::Small,
            quick: true,
            has_fp8: false,
            reference: None,
        }
    }

    /// Adds an error to the result that no rounding explains.
    fn with_an_error(output: Output<Flex>) -> Output<Flex> {
        match output {
            Output::Tensors(mut tensors) => {
                let last = tensors.pop().expect("a call returns something");
                tensors.push(last.mul_scalar(1.02));
                Output::Tensors(tensors)
            }
            Output::Weight(weight) => {
                let values = Flex::dequantize_weight(&weight).mul_scalar(1.5);
                Output::Weight(Flex::quantize_weight(values, weight.format))
            }
            Output::Number(number) => Output::Number(number + 1.0),
        }
    }

    #[test]
    fn every_result_passes_its_check_and_one_with_an_error_does_not() {
        // Whole models take minutes in an unoptimized build; their checks have separate tests.
        let is_quick = |case: &Case<Flex>| !matches!(case.key.subject.as_str(), "step" | "generation");
        for case in cases(&setting()).into_iter().filter(is_quick) {
            let is_right = |change: fn(Output<Flex>) -> Output<Flex>| {
                let Prepared { mut call, check } = (case.prepare)();
                let comparisons = check(change(call()));
                assert!(!comparisons.is_empty(), "{}", case.key);
                comparisons.iter().all(|comparison| comparison.error <= case.tolerance)
            };
            assert!(is_right(|output| output), "{}", case.key);
            assert!(!is_right(with_an_error), "{}: an error passed", case.key);
        }
    }

    #[test]
    fn every_subject_is_there_and_no_two_cases_are_the_same() {
        let cases = cases(&setting());
        for subject in SUBJECTS.split(',') {
            assert!(cases.iter().any(|case| case.key.subject == subject), "{subject}");
        }
        for format in firebrick_precision::QuantFormat::ALL {
            assert!(cases.iter().any(|case| case.key.subject == "quantize" && case.key.format == format.name()));
        }
        let mut keys: Vec<_> = cases.iter().map(|case| case.key.clone()).collect();
        keys.sort();
        keys.dedup();
        assert_eq!(keys.len(), cases.len());
        for case in &cases {
            assert!(case.work.bytes > 0.0 && case.work.units > 0.0, "{}", case.key);
        }
    }
}
