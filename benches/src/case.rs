//! A case of the matrix: its description, its inputs, the check of its result, and its timing.
//!
//! A case builds as many independent sets of inputs as the caches of the device require, and checks the result of the first call on the first set:
//! the timed call, not a smaller one. Then come warm-up and samples that each end with a synchronization. A sample is as many calls as fill a
//! millisecond, so that the synchronization and the clock do not affect the time of a short operation.
//! Trade-off: large results are checked in their first and last rows (and columns) only, because the full reference would take minutes. Calls of one
//! sample may overlap on the device, as they do in training; the latency of a single call is not reported.

use std::time::{Duration, Instant};

use burn_tensor::{DType, Tensor};
use firebrick_kernels::backends::Flex;
use firebrick_kernels::{Kernels, QuantizedWeight};
use firebrick_precision::difference::{is_within, relative_difference};
use firebrick_train::bench::timed;
use firebrick_trainer::RunError;
use firebrick_trainer::run::device::wait;

use crate::results::{Axis, Key, Work};

/// A piece of work on one backend.
pub(crate) struct Case<B: Kernels> {
    pub(crate) key: Key,
    pub(crate) work: Work,
    pub(crate) axis: Option<Axis>,
    /// The largest relative error that rounding explains.
    pub(crate) tolerance: f64,
    /// Bytes of one set of inputs; 0 if the time does not depend on the location of the inputs.
    pub(crate) set_bytes: f64,
    /// Builds one set of inputs.
    pub(crate) prepare: Box<dyn Fn() -> Prepared<B>>,
}

/// A set of inputs.
pub(crate) struct Prepared<B: Kernels> {
    /// Runs the operation on them once; it is queued, not waited for.
    pub(crate) call: Box<dyn FnMut() -> Output<B>>,
    /// Compares the result of the first call with the reference.
    pub(crate) check: Box<dyn FnOnce(Output<B>) -> Vec<Comparison>>,
}

impl<B: Kernels> Prepared<B> {
    pub(crate) fn new(
        call: impl FnMut() -> Output<B> + 'static,
        check: impl FnOnce(Output<B>) -> Vec<Comparison> + 'static,
    ) -> Self {
        Self { call: Box::new(call), check: Box::new(check) }
    }
}

/// The result of a call: tensors, a quantized weight, or a number on the host, such as a loss.
pub(crate) enum Output<B: Kernels> {
    Tensors(Vec<Tensor<B, 2>>),
    Weight(QuantizedWeight<B>),
    Number(f64),
}

impl<B: Kernels> Output<B> {
    pub(crate) fn tensors(self) -> Vec<Tensor<B, 2>> {
        let Self::Tensors(tensors) = self else { panic!("the call returns tensors") };
        tensors
    }

    pub(crate) fn weight(self) -> QuantizedWeight<B> {
        let Self::Weight(weight) = self else { panic!("the call returns a weight") };
        weight
    }

    pub(crate) fn number(self) -> f64 {
        let Self::Number(number) = self else { panic!("the call returns a number") };
        number
    }
}

/// A part of a result next to its reference.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Comparison {
    /// The compared part.
    pub(crate) what: &'static str,
    /// `‖got − expected‖ / ‖expected‖`; infinite where a value is not finite.
    pub(crate) error: f64,
}

impl Comparison {
    /// Compares values of one tensor.
    pub(crate) fn of(what: &'static str, got: &[f32], expected: &[f32]) -> Self {
        assert_eq!(got.len(), expected.len(), "{what}: as many values as the reference");
        let size = if expected.iter().all(|&value| value == 0.0) { 1.0 } else { 0.0 };
        Self { what, error: relative_difference(got, expected, size) }
    }

    /// Compares tensors.
    pub(crate) fn of_tensors<B: Kernels, const D: usize>(
        what: &'static str,
        got: Tensor<B, D>,
        expected: Tensor<Flex, D>,
    ) -> Self {
        Self::of(what, &to_floats(got), &to_floats(expected))
    }
}

/// Builds the parts of a [`Key`] that a subject decides.
pub(crate) fn key(subject: &str, pass: &str, what: &str, format: &str, sizes: &[(&str, usize)]) -> Key {
    let sizes = sizes.iter().map(|&(name, size)| (name.to_owned(), size as u64)).collect();
    let [subject, pass, what, format] = [subject, pass, what, format].map(str::to_owned);
    Key { backend: String::new(), subject, pass, what, format, sizes }
}

/// Builds the work of a call whose throughput counts `units`.
pub(crate) fn work(units: f64, unit: &str, flops: f64, bytes: f64) -> Work {
    Work { flops, bytes, units, unit: unit.to_owned() }
}

/// Builds a place in a sweep.
pub(crate) fn axis(name: &str, value: usize) -> Option<Axis> {
    Some(Axis { name: name.to_owned(), value: value as f64 })
}

/// Copies the values of a tensor to the host.
pub(crate) fn to_floats<B: Kernels, const D: usize>(tensor: Tensor<B, D>) -> Vec<f32> {
    tensor.into_data().convert_dtype(DType::F32).to_vec().expect("converted to f32")
}

/// Copies a tensor in f32 to the CPU, where the references run.
pub(crate) fn to_reference<B: Kernels, const D: usize>(tensor: Tensor<B, D>) -> Tensor<Flex, D> {
    Tensor::from_data(tensor.into_data().convert_dtype(DType::F32), &Default::default())
}

/// Duration and number of the samples.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Effort {
    /// Samples are taken until they fill this time.
    pub(crate) target: Duration,
    /// After this time one sample is enough.
    pub(crate) longest: Duration,
    /// Minimum number of samples, if they take less than four times the target; [`FEWEST`] otherwise.
    pub(crate) min_samples: usize,
    /// Target for the total bytes of all input sets, up to a maximum number of sets.
    pub(crate) fresh_bytes: f64,
    /// After this moment one sample is enough.
    pub(crate) deadline: Instant,
}

/// Samples of work that takes long.
pub(crate) const FEWEST: usize = 3;
/// Samples of work that takes no time.
const MAX_SAMPLES: usize = 200;
/// Calls per sample.
const MAX_CALLS: usize = 64;
/// Sets of inputs.
const MAX_SETS: usize = 32;
/// Seconds that a sample should last.
const SAMPLE_S: f64 = 1e-3;

/// The measured times.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Samples {
    /// Seconds per call of each sample.
    pub(crate) seconds: Vec<f64>,
    /// Calls per sample.
    pub(crate) calls: usize,
    /// Sets of inputs.
    pub(crate) input_sets: usize,
    /// The result next to the reference.
    pub(crate) comparisons: Vec<Comparison>,
}

/// Runs a case: first the checked call, then warm-up and samples. A case with a wrong result is not timed.
pub(crate) fn run<B: Kernels>(case: &Case<B>, effort: Effort, device: &B::Device) -> Result<Samples, RunError> {
    let Prepared { mut call, check } = (case.prepare)();
    wait::<B>(device)?;
    let output = call();
    wait::<B>(device)?;
    let comparisons = check(output);
    if !comparisons.iter().all(|comparison| is_within(comparison.error, case.tolerance)) {
        return Ok(Samples { seconds: Vec::new(), calls: 0, input_sets: 1, comparisons });
    }
    let mut sets = vec![call];
    let wanted = if case.set_bytes > 0.0 { (effort.fresh_bytes / case.set_bytes).ceil() as usize } else { 1 };
    // If the inputs are several times larger than the caches, no call finds the previous call's data there.
    let fewest = if case.set_bytes > 0.0 && case.set_bytes < effort.fresh_bytes { 2 } else { 1 };
    for _ in 1..wanted.clamp(fewest, MAX_SETS) {
        sets.push((case.prepare)().call);
    }
    wait::<B>(device)?;
    let mut next = 0;
    let mut sample = |calls: usize| -> Result<f64, RunError> {
        let (seconds, done) = timed(|| {
            for _ in 0..calls {
                drop::<Output<B>>(sets[next]());
                next = (next + 1) % sets.len();
            }
            wait::<B>(device)
        });
        done?;
        Ok(seconds / calls as f64)
    };
    let first = sample(1)?;
    // An operation this long is warm after the checked call, and each sample counts.
    let is_long = first >= effort.target.as_secs_f64();
    let (warm, mut seconds) = if is_long { (first, vec![first]) } else { (sample(2)?, Vec::new()) };
    let calls = ((SAMPLE_S / warm).ceil() as usize).clamp(1, MAX_CALLS);
    let started = Instant::now();
    while !is_enough(seconds.len(), started.elapsed(), effort) {
        seconds.push(sample(calls)?);
    }
    Ok(Samples { seconds, calls, input_sets: sets.len(), comparisons })
}

/// Returns whether there are enough samples for the elapsed time.
fn is_enough(samples: usize, elapsed: Duration, effort: Effort) -> bool {
    let is_late = elapsed > effort.longest || Instant::now() > effort.deadline;
    if samples >= MAX_SAMPLES || (samples > 0 && is_late) {
        return true;
    }
    let is_long = elapsed >= effort.target && samples >= effort.min_samples;
    is_long || (elapsed >= 4 * effort.target && samples >= FEWEST)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

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

    fn effort() -> Effort {
        let deadline = Instant::now() + Duration::from_secs(3600);
        let longest = Duration::from_secs(3600);
        Effort { target: Duration::from_millis(1), longest, min_samples: 4, fresh_bytes: 1e3, deadline }
    }

    /// Creates a case over sets of 100 bytes whose result is `value` where the reference is 1; counts sets and calls.
    fn case(value: f32, counts: &Rc<[Cell<usize>; 2]>) -> Case<Flex> {
        let counts = counts.clone();
        let prepare = move || {
            counts[0].set(counts[0].get() + 1);
            let counts = counts.clone();
            let result = move || Tensor::<Flex, 2>::full([1, 1], value, &Default::default());
            let call = move || {
                counts[1].set(counts[1].get() + 1);
                Output::Tensors(vec![result()])
            };
            let check = |output: Output<Flex>| {
                let got = output.tensors().remove(0);
                vec![Comparison::of_tensors("the value", got, Tensor::ones([1, 1], &Default::default()))]
            };
            Prepared::new(call, check)
        };
        let (key, work) = (key("a", "b", "c", "f32", &[]), work(1.0, "tokens", 1.0, 1.0));
        Case { key, work, axis: None, tolerance: 1e-3, set_bytes: 100.0, prepare: Box::new(prepare) }
    }

    #[test]
    fn inputs_together_exceed_the_caches() {
        let counts = Rc::default();
        let samples = run(&case(1.0, &counts), effort(), &Default::default()).unwrap();
        assert_eq!((samples.input_sets, counts[0].get()), (10, 10));
        assert!(samples.seconds.len() >= 4 && samples.calls >= 1, "{samples:?}");
        assert_eq!(samples.comparisons, [Comparison { what: "the value", error: 0.0 }]);
        assert!(
            counts[1].get() > samples.seconds.len() * samples.calls,
            "the checked call and the warm-up do not count"
        );
    }

    #[test]
    fn a_wrong_result_has_no_time() {
        let counts = Rc::default();
        let samples = run(&case(1.01, &counts), effort(), &Default::default()).unwrap();
        assert!((samples.comparisons[0].error - 0.01).abs() < 1e-6);
        assert_eq!((samples.seconds.len(), counts[1].get()), (0, 1));
    }

    #[test]
    fn short_work_fills_the_target_and_long_work_ends_after_three_samples() {
        let (ms, effort) = (Duration::from_millis, effort());
        assert!(!is_enough(3, ms(2), effort) && is_enough(4, ms(1), effort) && !is_enough(9, ms(0), effort));
        assert!(!is_enough(2, ms(99), effort) && is_enough(3, ms(4), effort) && is_enough(200, ms(0), effort));
        let late = Effort { deadline: Instant::now() - ms(1), ..effort };
        assert!(!is_enough(0, ms(0), late) && is_enough(1, ms(0), late));
        let slow = Effort { longest: ms(3), ..effort };
        assert!(!is_enough(1, ms(3), slow) && is_enough(1, ms(4), slow));
    }
}
