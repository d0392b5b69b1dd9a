//! Repeated timings of the same work, and how much they differ.
//!
//! Trade-off: three numbers, no distribution.

use std::time::Instant;

use serde::Serialize;

/// Seconds of repeated work. The median is what is reported; the minimum shows what the machine can do undisturbed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// The middle one; of an even number, the mean of the two in the middle.
    pub median: f64,
    /// The minimum.
    pub min: f64,
    /// The maximum.
    pub max: f64,
}

impl Spread {
    /// # Panics
    /// Without any sample, or with one that is not a number.
    pub fn of(mut samples: Vec<f64>) -> Self {
        assert!(!samples.is_empty(), "a spread needs at least one sample");
        samples.sort_by(|a, b| a.partial_cmp(b).expect("seconds are numbers"));
        let middle = samples.len() / 2;
        let median =
            if samples.len() % 2 == 1 { samples[middle] } else { 0.5 * (samples[middle - 1] + samples[middle]) };
        Self { median, min: samples[0], max: samples[samples.len() - 1] }
    }
}

/// Seconds that `work` takes, and what it returns.
pub fn timed<T>(work: impl FnOnce() -> T) -> (f64, T) {
    let started = Instant::now();
    let result = work();
    (started.elapsed().as_secs_f64(), result)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_not_moved_by_one_slow_sample() {
        assert_eq!(Spread::of(vec![2.0, 900.0, 1.0]), Spread { median: 2.0, min: 1.0, max: 900.0 });
        assert_eq!(Spread::of(vec![4.0, 1.0, 2.0, 3.0]).median, 2.5);
    }
}
