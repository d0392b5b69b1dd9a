//! An AMD card's usage through sysfs, as the kernel driver `amdgpu` reports it.
//!
//! Trade-off: sysfs has neither memory bandwidth nor link traffic; energy is integrated from power.

use std::path::PathBuf;
use std::time::Instant;

use super::gauge::Gauge;
use super::reading::Sample;
use crate::amd::{integer, monitors};

/// A card and the energy that it has used since the first sample.
#[derive(Debug)]
pub(super) struct Card {
    folder: PathBuf,
    energy_j: f64,
    last: Option<(Instant, f64)>,
}

impl Card {
    pub(super) fn new(folder: PathBuf) -> Self {
        Self { folder, energy_j: 0.0, last: None }
    }

    pub(super) fn read(&mut self, sample: &mut Sample) {
        let of_monitor = |files: &[&str]| {
            let found =
                monitors(&self.folder).find_map(|monitor| files.iter().find_map(|file| integer(&monitor, file)));
            found.map(|value| value as f64)
        };
        sample.set(Gauge::GpuUtil, integer(&self.folder, "gpu_busy_percent").map(|percent| percent as f64));
        sample.set(Gauge::MemoryBusy, integer(&self.folder, "mem_busy_percent").map(|percent| percent as f64));
        sample.set(Gauge::TemperatureC, of_monitor(&["temp1_input"]).map(|milli| milli / 1e3));
        sample.set(Gauge::SmMhz, of_monitor(&["freq1_input"]).map(|hertz| hertz / 1e6));
        // Newer cards report the current power, older ones an average over some milliseconds.
        let power = of_monitor(&["power1_average", "power1_input"]).map(|micro| micro / 1e6);
        sample.set(Gauge::PowerW, power);
        if let Some(watts) = power {
            let now = Instant::now();
            if let Some((then, before)) = self.last.replace((now, watts)) {
                self.energy_j += now.duration_since(then).as_secs_f64() * (watts + before) / 2.0;
            }
            sample.set(Gauge::EnergyJ, Some(self.energy_j));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::usage::reading::Totals;

    #[test]
    fn files_of_the_driver_become_percent_watts_degrees_and_mhz() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("hwmon/hwmon3")).unwrap();
        for (file, text) in [
            ("gpu_busy_percent", "97"),
            ("mem_busy_percent", "40"),
            ("hwmon/hwmon3/power1_input", "612000000"),
            ("hwmon/hwmon3/temp1_input", "58000"),
            ("hwmon/hwmon3/freq1_input", "2100000000"),
        ] {
            std::fs::write(root.path().join(file), format!("{text}\n")).unwrap();
        }
        let mut card = Card::new(root.path().to_owned());
        let mut totals = Totals::default();
        for _ in 0..2 {
            let mut sample = Sample::default();
            card.read(&mut sample);
            totals.add(&sample);
        }
        let usage = totals.take();
        let gauges = [Gauge::GpuUtil, Gauge::MemoryBusy, Gauge::PowerW, Gauge::TemperatureC, Gauge::SmMhz];
        assert_eq!(gauges.map(|gauge| usage.get(gauge).unwrap()), [97.0, 40.0, 612.0, 58.0, 2100.0]);
        assert!(usage.get(Gauge::EnergyJ).unwrap() > 0.0);
        assert_eq!(usage.get(Gauge::DramUtil), None, "sysfs does not report it");
    }
}
