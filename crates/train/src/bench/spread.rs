//! Repeated timings of the same work: their middle, their extent, and how much they disagree.
//!
//! Every benchmark of the project reports this type.
//! Trade-off: five numbers, no distribution; the samples themselves are not saved.

use std::fmt;
use std::time::Instant;

use serde::{Deserialize, Serialize};

/// Seconds (or another unit) of repeated work. The median is what is reported; the minimum shows what the machine can do undisturbed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// Minimum.
    pub min: f64,
    /// A quarter of the samples is below this.
    pub p25: f64,
    /// Median; of an even number, the mean of the two in the middle.
    pub median: f64,
    /// A quarter of the samples is above this.
    pub p75: f64,
    /// Maximum.
    pub max: f64,
}

impl Spread {
    /// # Panics
    /// Without any sample, or with one that is not a number.
    pub fn of(mut samples: Vec<f64>) -> Self {
        assert!(!samples.is_empty(), "a spread needs at least one sample");
        assert!(samples.iter().all(|sample| !sample.is_nan()), "samples are numbers, got {samples:?}");
        samples.sort_by(f64::total_cmp);
        let last = samples.len() - 1;
        Self {
            min: samples[0],
            p25: quantile(&samples, 0.25),
            median: quantile(&samples, 0.5),
            p75: quantile(&samples, 0.75),
            max: samples[last],
        }
    }

    /// The distance of the quartiles over the median: what the samples disagree by, without the few slowest.
    pub fn relative_spread(&self) -> f64 {
        (self.p75 - self.p25) / self.median
    }

    /// All numbers times a factor: another unit.
    pub fn times(self, factor: f64) -> Self {
        let Self { min, p25, median, p75, max } = self;
        Self { min: factor * min, p25: factor * p25, median: factor * median, p75: factor * p75, max: factor * max }
    }
}

/// Linear interpolation between the two nearest of ascending samples (the default of numpy).
fn quantile(ascending: &[f64], share: f64) -> f64 {
    let place = share * (ascending.len() - 1) as f64;
    let (below, above) = (ascending[place.floor() as usize], ascending[place.ceil() as usize]);
    below + (above - below) * place.fract()
}

impl fmt::Display for Spread {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{:.1} ({:.1}, {:.1})", self.median, self.min, self.max)
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
        let spread = Spread::of(vec![2.0, 900.0, 1.0]);
        assert_eq!((spread.min, spread.median, spread.max), (1.0, 2.0, 900.0));
        assert_eq!(Spread::of(vec![4.0, 1.0, 2.0, 3.0]).median, 2.5);
    }

    #[test]
    fn quartiles_are_those_of_numpy() {
        // numpy.percentile([1, 2, 3, 4, 10], [25, 75]) is [2, 4]; of [1, 2, 3, 4] it is [1.75, 3.25].
        let spread = Spread::of(vec![10.0, 4.0, 3.0, 2.0, 1.0]);
        assert_eq!((spread.p25, spread.p75), (2.0, 4.0));
        assert!((spread.relative_spread() - 2.0 / 3.0).abs() < 1e-12);
        let spread = Spread::of(vec![4.0, 1.0, 2.0, 3.0]);
        assert_eq!((spread.p25, spread.p75), (1.75, 3.25));
    }

    #[test]
    fn one_sample_has_no_spread() {
        let spread = Spread::of(vec![3.0]);
        assert_eq!(spread, Spread { min: 3.0, p25: 3.0, median: 3.0, p75: 3.0, max: 3.0 });
        assert_eq!(spread.relative_spread(), 0.0);
    }

    #[test]
    fn another_unit_scales_every_number() {
        let spread = Spread::of(vec![1.0, 2.0, 4.0]).times(1e3);
        assert_eq!((spread.min, spread.median, spread.max), (1e3, 2e3, 4e3));
    }
}
