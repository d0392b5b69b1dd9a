//! How a case is timed: warm-up, then samples that each end with a synchronization, over inputs that are fresh to the caches.
//!
//! A sample is as many calls as fill a millisecond, so that the synchronization and the clock do not show in the time of a short
//! operation. Calls take the sets of inputs in turn.
//! Trade-off: calls of one sample may overlap on the device, as they do in training; the latency of a single call is not reported.

use std::time::{Duration, Instant};

use firebrick_kernels::Kernels;
use firebrick_trainer::RunError;
use firebrick_trainer::run::device::wait;

use super::super::spread::timed;
use super::case::{Case, Comparison, Output, Prepared};

/// How long and how often.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Effort {
    /// Samples are taken until they fill this time.
    pub target: Duration,
    /// After this time one sample is enough.
    pub longest: Duration,
    /// At least so many, if they take less than four times the target; at least [`FEWEST`] otherwise.
    pub min_samples: usize,
    /// Inputs have this many bytes together, if there are not too many of them.
    pub fresh_bytes: f64,
    /// After this moment one sample is enough.
    pub deadline: Instant,
}

/// Samples of work that takes long.
pub(super) const FEWEST: usize = 3;
/// Samples of work that takes no time.
const MAX_SAMPLES: usize = 200;
/// Calls per sample.
const MAX_CALLS: usize = 64;
/// Sets of inputs.
const MAX_SETS: usize = 32;
/// Seconds that a sample should last.
const SAMPLE_S: f64 = 1e-3;

/// What the clock found.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Samples {
    /// Seconds per call of each sample.
    pub seconds: Vec<f64>,
    /// Calls per sample.
    pub calls: usize,
    /// Sets of inputs.
    pub input_sets: usize,
    /// The result next to the reference.
    pub comparisons: Vec<Comparison>,
}

/// Runs a case: first the call that is checked, then warm-up and samples. Of a result that is wrong no time is taken.
///
/// # Errors
/// The device failed.
pub(super) fn run<B: Kernels>(case: &Case<B>, effort: Effort, device: &B::Device) -> Result<Samples, RunError> {
    let Prepared { mut call, check } = (case.prepare)();
    wait::<B>(device)?;
    let output = call();
    wait::<B>(device)?;
    let comparisons = check(output);
    if comparisons.iter().any(|comparison| comparison.error > case.tolerance) {
        return Ok(Samples { seconds: Vec::new(), calls: 0, input_sets: 1, comparisons });
    }
    let mut sets = vec![call];
    let wanted = if case.set_bytes > 0.0 { (effort.fresh_bytes / case.set_bytes).ceil() as usize } else { 1 };
    // Work on inputs that fill the caches several times over finds nothing of its last call there.
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
    // Work that takes so long is warm after the checked call, and each sample counts.
    let is_long = first >= effort.target.as_secs_f64();
    let (warm, mut seconds) = if is_long { (first, vec![first]) } else { (sample(2)?, Vec::new()) };
    let calls = ((SAMPLE_S / warm).ceil() as usize).clamp(1, MAX_CALLS);
    let started = Instant::now();
    while !is_enough(seconds.len(), started.elapsed(), effort) {
        seconds.push(sample(calls)?);
    }
    Ok(Samples { seconds, calls, input_sets: sets.len(), comparisons })
}

/// Whether so many samples in so much time are enough.
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

    use burn_tensor::Tensor;
    use firebrick_kernels::backends::Flex;

    use super::super::case::{key, tokens};
    use super::*;

    fn effort() -> Effort {
        let deadline = Instant::now() + Duration::from_secs(3600);
        let longest = Duration::from_secs(3600);
        Effort { target: Duration::from_millis(1), longest, min_samples: 4, fresh_bytes: 1e3, deadline }
    }

    /// A case over sets of 100 bytes whose result is `value` where the reference is 1; counts sets and calls.
    fn case(value: f32, counts: &Rc<[Cell<usize>; 2]>) -> Case<Flex> {
        let counts = counts.clone();
        let prepare = move || {
            counts[0].set(counts[0].get() + 1);
            let counts = counts.clone();
            let result = move || Tensor::<Flex, 2>::full([1, 1], value, &Default::default());
            Prepared::<Flex> {
                call: Box::new(move || {
                    counts[1].set(counts[1].get() + 1);
                    Output::Tensors(vec![result()])
                }),
                check: Box::new(|output| {
                    let got = output.tensors().remove(0);
                    vec![Comparison::of_tensors("the value", got, Tensor::ones([1, 1], &Default::default()))]
                }),
            }
        };
        let key = key("a", "b", "c", "f32", &[]);
        let work = tokens(1, 1.0, 1.0);
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
