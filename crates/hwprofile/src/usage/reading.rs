//! Samples, their sums, and the resulting reading.

use std::collections::{BTreeMap, BTreeSet};

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

use super::gauge::{Combine, Gauge};
use crate::throttle::Throttle;

/// One look at the machine.
#[derive(Debug, Default)]
pub(super) struct Sample {
    values: BTreeMap<Gauge, f64>,
    throttle: BTreeSet<Throttle>,
}

impl Sample {
    /// Adds what was read, if anything was.
    pub(super) fn set(&mut self, gauge: Gauge, value: Option<f64>) {
        if let Some(value) = value.filter(|value| value.is_finite()) {
            self.values.insert(gauge, value);
        }
    }

    pub(super) fn throttle(&mut self, reason: Throttle) {
        self.throttle.insert(reason);
    }
}

/// Samples since the last reading.
#[derive(Debug, Default)]
pub(super) struct Totals {
    values: BTreeMap<Gauge, (f64, u32)>,
    throttle: BTreeSet<Throttle>,
}

impl Totals {
    pub(super) fn add(&mut self, sample: &Sample) {
        for (&gauge, &value) in &sample.values {
            let (total, count) = self.values.entry(gauge).or_insert((0.0, 0));
            *total = match gauge.combine() {
                Combine::Mean => *total + value,
                Combine::Highest => total.max(value),
                Combine::Latest => value,
            };
            *count += 1;
        }
        self.throttle.extend(&sample.throttle);
    }

    /// Returns the reading and starts an empty one.
    pub(super) fn take(&mut self) -> Usage {
        let Self { values, throttle } = std::mem::take(self);
        let combined = |(gauge, (total, count)): (Gauge, (f64, u32))| {
            (gauge, if gauge.combine() == Combine::Mean { total / f64::from(count) } else { total })
        };
        Usage { values: values.into_iter().map(combined).collect(), throttle }
    }
}

/// Readings of an interval: averages of the gauges. In JSON one key per gauge ([`Gauge::name`]), and `throttle` with a list if there are reasons.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Usage {
    values: BTreeMap<Gauge, f64>,
    throttle: BTreeSet<Throttle>,
}

impl Usage {
    /// Creates a reading from these values.
    pub fn of(values: impl IntoIterator<Item = (Gauge, f64)>, throttle: impl IntoIterator<Item = Throttle>) -> Self {
        Self { values: values.into_iter().collect(), throttle: throttle.into_iter().collect() }
    }

    /// Returns a value, in the unit of its gauge; `None` if it was not sampled.
    pub fn get(&self, gauge: Gauge) -> Option<f64> {
        self.values.get(&gauge).copied()
    }

    /// Returns all values, in the order of [`Gauge::ALL`].
    pub fn values(&self) -> impl Iterator<Item = (Gauge, f64)> {
        self.values.iter().map(|(gauge, value)| (*gauge, *value))
    }

    /// Returns every reason for low clocks in the samples of the interval.
    pub fn throttle(&self) -> &BTreeSet<Throttle> {
        &self.throttle
    }

    /// Returns whether nothing was sampled.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// Formats `GPU 98 %, tensor cores 61 %, 650 W, 61 °C, power cap`: a few words for a progress line; `None` without a card.
    pub fn in_words(&self) -> Option<String> {
        let with = |gauge, before: &str, after: &str| Some(format!("{before}{:.0}{after}", self.get(gauge)?));
        let parts = [
            with(Gauge::GpuUtil, "GPU ", " %"),
            with(Gauge::TensorUtil, "tensor cores ", " %"),
            with(Gauge::PowerW, "", " W"),
            with(Gauge::TemperatureC, "", " °C"),
        ];
        let reasons = self.throttle.iter().map(|reason| reason.name().to_owned());
        let parts: Vec<String> = parts.into_iter().flatten().chain(reasons).collect();
        (!parts.is_empty()).then(|| parts.join(", "))
    }
}

impl Serialize for Usage {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        for (gauge, value) in self.values() {
            map.serialize_entry(gauge.name(), &value)?;
        }
        if !self.throttle.is_empty() {
            map.serialize_entry("throttle", &self.throttle)?;
        }
        map.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(values: &[(Gauge, f64)]) -> Sample {
        let mut sample = Sample::default();
        values.iter().for_each(|&(gauge, value)| sample.set(gauge, Some(value)));
        sample
    }

    #[test]
    fn a_reading_joins_its_samples_by_their_kind() {
        let mut totals = Totals::default();
        totals.add(&sample(&[(Gauge::PowerW, 600.0), (Gauge::TemperatureC, 70.0), (Gauge::EnergyJ, 10.0)]));
        let mut second = sample(&[(Gauge::PowerW, 700.0), (Gauge::TemperatureC, 60.0), (Gauge::EnergyJ, 30.0)]);
        second.throttle(Throttle::PowerCap);
        second.set(Gauge::SmMhz, Some(f64::NAN));
        totals.add(&second);
        let usage = totals.take();
        let read = [Gauge::PowerW, Gauge::TemperatureC, Gauge::EnergyJ, Gauge::SmMhz].map(|gauge| usage.get(gauge));
        assert_eq!(read, [Some(650.0), Some(70.0), Some(30.0), None]);
        assert_eq!(usage.in_words().unwrap(), "650 W, 70 °C, power cap");
        assert!(totals.take().is_empty());
    }

    #[test]
    fn json_has_the_keys_of_what_was_sampled_and_nothing_else() {
        let usage = Usage::of([(Gauge::GpuUtil, 98.0), (Gauge::DramUtil, 41.5)], [Throttle::PowerCap]);
        assert_eq!(
            serde_json::to_string(&usage).unwrap(),
            r#"{"gpu_util":98.0,"dram_util":41.5,"throttle":["power_cap"]}"#
        );
        assert_eq!(serde_json::to_string(&Usage::default()).unwrap(), "{}");
        assert_eq!(Usage::of([(Gauge::HostMemory, 1.0)], []).in_words(), None);
    }
}
