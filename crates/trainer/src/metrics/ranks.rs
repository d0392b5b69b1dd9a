//! Times that every rank of a job measured of its steps. They show the slowest rank and the cost of communication.
//!
//! A rank's own time is the step without waiting for other ranks, so the slowest rank has the longest, although all ranks end their steps together.
//! Trade-off: a device's time is taken from the host's clock around a step, so single steps are off by the host's delay; means are not.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Times that one rank measured of a step, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RankTimes {
    /// The step without `comm_wait`.
    pub own: f64,
    /// Exchanges of tensors; all exchanges, if ranks exchange tensors through host memory.
    pub collectives: f64,
    /// The part of `collectives` that no other work hides.
    pub comm_wait: f64,
}

impl RankTimes {
    /// Rounds to whole microseconds, as ranks send them.
    pub fn to_microseconds(self) -> [u64; 3] {
        [self.own, self.collectives, self.comm_wait].map(|ms| (1e3 * ms).round() as u64)
    }

    /// Reverses [`RankTimes::to_microseconds`].
    pub fn from_microseconds(numbers: [u64; 3]) -> Self {
        let [own, collectives, comm_wait] = numbers.map(|us| us as f64 / 1e3);
        Self { own, collectives, comm_wait }
    }
}

/// Times of a step, or means over steps, of every rank. Milliseconds, in rank order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RankMetrics {
    /// The rank with the longest own time.
    pub slowest: usize,
    /// Time of the step without waiting for other ranks.
    pub own_ms: Vec<f64>,
    /// Time in collectives.
    pub collectives_ms: Vec<f64>,
    /// Time in which only communication was going on.
    pub comm_wait_ms: Vec<f64>,
}

impl RankMetrics {
    /// Collects the times of all ranks, in rank order.
    ///
    /// # Panics
    /// If there is no rank.
    pub fn new(times: &[RankTimes]) -> Self {
        let of = |part: fn(&RankTimes) -> f64| times.iter().map(part).collect::<Vec<f64>>();
        let own_ms = of(|times| times.own);
        let slowest = (0..own_ms.len()).max_by(|&a, &b| own_ms[a].total_cmp(&own_ms[b])).expect("a job has ranks");
        Self {
            slowest,
            own_ms,
            collectives_ms: of(|times| times.collectives),
            comm_wait_ms: of(|times| times.comm_wait),
        }
    }

    /// Returns the numbers for sinks that plot: the slowest rank, its own time, and rank 0's time in collectives.
    pub(super) fn scalars(&self) -> Vec<(String, f64)> {
        let values = [
            ("slowest", self.slowest as f64),
            ("slowest_own_ms", self.own_ms[self.slowest]),
            ("collectives_ms", self.collectives_ms[0]),
        ];
        values.map(|(name, value)| (format!("ranks/{name}"), value)).into()
    }

    fn fastest(&self) -> usize {
        let own = &self.own_ms;
        (0..own.len()).min_by(|&a, &b| own[a].total_cmp(&own[b])).expect("a job has ranks")
    }
}

impl fmt::Display for RankMetrics {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
        let (slowest, fastest) = (self.slowest, self.fastest());
        let (own, collectives, exposed) = (mean(&self.own_ms), mean(&self.collectives_ms), mean(&self.comm_wait_ms));
        write!(
            formatter,
            "rank {slowest} is slowest with {:.2} ms of its own per step, rank {fastest} fastest with {:.2}; collectives {collectives:.2} \
             ms, {exposed:.2} of it exposed ({:.1} %)",
            self.own_ms[slowest],
            self.own_ms[fastest],
            100.0 * exposed / (own + exposed)
        )
    }
}

/// Averages the steps of a process. The first step, which compiles and allocates, counts only if there are no others.
#[derive(Clone, Debug, Default)]
pub struct RankMeter {
    steps: u64,
    sums: Vec<RankTimes>,
}

impl RankMeter {
    /// Adds a step.
    pub fn add(&mut self, times: &[RankTimes]) {
        if self.steps < 2 {
            self.sums = vec![RankTimes::default(); times.len()];
        }
        self.steps += 1;
        for (sum, times) in self.sums.iter_mut().zip(times) {
            sum.own += times.own;
            sum.collectives += times.collectives;
            sum.comm_wait += times.comm_wait;
        }
    }

    /// Returns the means; `None` before any step.
    pub fn mean(&self) -> Option<RankMetrics> {
        let steps = self.steps.saturating_sub(1).max(1) as f64;
        let mean = |sum: &RankTimes| RankTimes {
            own: sum.own / steps,
            collectives: sum.collectives / steps,
            comm_wait: sum.comm_wait / steps,
        };
        let means: Vec<RankTimes> = self.sums.iter().map(mean).collect();
        (!means.is_empty()).then(|| RankMetrics::new(&means))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(own: f64, collectives: f64, comm_wait: f64) -> RankTimes {
        RankTimes { own, collectives, comm_wait }
    }

    #[test]
    fn the_slowest_rank_has_the_longest_own_time() {
        let metrics = RankMetrics::new(&[times(90.0, 4.0, 10.0), times(99.0, 2.0, 1.0), times(95.0, 3.0, 5.0)]);
        assert_eq!((metrics.slowest, metrics.fastest()), (1, 0));
        let text = metrics.to_string();
        assert!(
            text.starts_with("rank 1 is slowest with 99.00 ms") && text.contains("rank 0 fastest with 90.00"),
            "{text}"
        );
        assert!(text.contains("collectives 3.00 ms, 5.33 of it exposed (5.3 %)"), "{text}");
    }

    #[test]
    fn the_mean_leaves_the_first_step_out() {
        let mut meter = RankMeter::default();
        assert_eq!(meter.mean(), None);
        meter.add(&[times(1000.0, 0.0, 0.0), times(900.0, 0.0, 100.0)]);
        assert_eq!(meter.mean().unwrap().own_ms, [1000.0, 900.0]);
        meter.add(&[times(10.0, 1.0, 0.0), times(8.0, 1.0, 2.0)]);
        meter.add(&[times(12.0, 3.0, 0.0), times(8.0, 3.0, 4.0)]);
        let mean = meter.mean().unwrap();
        assert_eq!(
            (mean.own_ms, mean.collectives_ms, mean.comm_wait_ms),
            (vec![11.0, 8.0], vec![2.0, 2.0], vec![0.0, 3.0])
        );
    }

    #[test]
    fn times_survive_to_the_microsecond() {
        let sent = times(760.1234, 0.71, 0.0);
        assert_eq!(RankTimes::from_microseconds(sent.to_microseconds()), times(760.123, 0.71, 0.0));
    }
}
