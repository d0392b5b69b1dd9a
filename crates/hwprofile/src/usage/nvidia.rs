//! An NVIDIA card's usage through NVML; on Hopper and later with the counters of GPM (`nvmlGpmSampleGet`, `nvmlGpmMetricsGet`).
//!
//! GPM compares two samples, so each reading stores its sample for the next one. NVML's own "memory utilization" is the share of time in which memory
//! was used at all, so without GPM it is reported under that name and not as bandwidth.
//! Trade-off: without GPM there is no tensor-core utilization and no NVLink traffic, and NVML measures PCIe traffic by waiting 20 ms per
//! direction.

use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use nvml_wrapper::enum_wrappers::device::PcieUtilCounter;
use nvml_wrapper::enums::gpm::GpmMetricId;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::gpm::gpm_metrics_get;
use nvml_wrapper::{Device, GpmSample, Nvml};

use super::Shared;
use super::gauge::Gauge;
use super::reading::Sample;
use crate::nvidia::CardConditions;

/// The counters, their gauges, and the factor from the counter's unit to the gauge's: percent, or MiB/s in 1e9 bytes per second.
const COUNTERS: [(GpmMetricId, Gauge, f64); 7] = [
    (GpmMetricId::SmUtil, Gauge::SmUtil, 1.0),
    (GpmMetricId::AnyTensorUtil, Gauge::TensorUtil, 1.0),
    (GpmMetricId::DramBwUtil, Gauge::DramUtil, 1.0),
    (GpmMetricId::PcieTxPerSec, Gauge::PcieTxGbS, MIB_IN_GB),
    (GpmMetricId::PcieRxPerSec, Gauge::PcieRxGbS, MIB_IN_GB),
    (GpmMetricId::NvlinkTotalTxPerSec, Gauge::NvlinkTxGbS, MIB_IN_GB),
    (GpmMetricId::NvlinkTotalRxPerSec, Gauge::NvlinkRxGbS, MIB_IN_GB),
];
const MIB_IN_GB: f64 = 1_048_576.0 / 1e9;

/// Samples a card until the monitor is dropped.
pub(super) fn watch(uuid: &str, library: Option<&Path>, shared: &Shared) -> Result<(), NvmlError> {
    let nvml = match library {
        Some(path) => Nvml::builder().lib_path(path.as_os_str()).init()?,
        None => Nvml::init()?,
    };
    let device = nvml.device_by_uuid(uuid)?;
    let (mut card, notes) = Card::new(&nvml, device);
    shared.lock().notes.extend(notes);
    shared.repeat(|sample| card.read(sample));
    Ok(())
}

struct Card<'nvml> {
    nvml: &'nvml Nvml,
    device: Device<'nvml>,
    energy_at_start_mj: Option<u64>,
    /// The sample of the last look; `None`: bandwidth and traffic come from NVML's older calls.
    gpm: Option<GpmSample<'nvml>>,
}

impl<'nvml> Card<'nvml> {
    /// Creates the card; also returns what cannot be sampled of it.
    fn new(nvml: &'nvml Nvml, device: Device<'nvml>) -> (Self, Vec<String>) {
        let first = first_sample(&device);
        let note = |why: &String| {
            format!("tensor-core and memory-bandwidth utilization and NVLink traffic are not sampled: {why}")
        };
        let notes = first.as_ref().err().map(note).into_iter().collect();
        let energy_at_start_mj = device.total_energy_consumption().ok();
        (Self { nvml, gpm: first.ok(), device, energy_at_start_mj }, notes)
    }

    fn read(&mut self, sample: &mut Sample) {
        let device = &self.device;
        let utilization = device.utilization_rates().ok();
        sample.set(Gauge::GpuUtil, utilization.as_ref().map(|rates| f64::from(rates.gpu)));
        let now = CardConditions::of(device);
        sample.set(Gauge::PowerW, now.power_mw.map(|milliwatts| f64::from(milliwatts) / 1e3));
        sample.set(Gauge::TemperatureC, now.temperature_c.map(f64::from));
        sample.set(Gauge::SmMhz, now.sm_mhz.map(f64::from));
        now.throttled_by.into_iter().for_each(|reason| sample.throttle(reason));
        if let (Some(start), Ok(now)) = (self.energy_at_start_mj, device.total_energy_consumption()) {
            sample.set(Gauge::EnergyJ, Some(now.saturating_sub(start) as f64 / 1e3));
        }
        match &mut self.gpm {
            // The counters between the last sample and this one.
            Some(before) => {
                let _alone = alone();
                let Ok(now) = device.gpm_sample() else { return };
                if let Ok(metrics) = gpm_metrics_get(self.nvml, before, &now, &COUNTERS.map(|(counter, ..)| counter)) {
                    for ((_, gauge, unit), metric) in COUNTERS.iter().zip(metrics) {
                        sample.set(*gauge, metric.ok().map(|metric| metric.value * unit));
                    }
                }
                *before = now;
            }
            None => {
                sample.set(Gauge::MemoryBusy, utilization.map(|rates| f64::from(rates.memory)));
                let kilobytes = |counter| device.pcie_throughput(counter).ok().map(|rate| f64::from(rate) / 1e6);
                sample.set(Gauge::PcieTxGbS, kilobytes(PcieUtilCounter::Send));
                sample.set(Gauge::PcieRxGbS, kilobytes(PcieUtilCounter::Receive));
            }
        }
    }
}

/// Serializes samples: NVML 580 crashes if two threads take or compare samples at the same time, as two runs in one process do.
fn alone() -> MutexGuard<'static, ()> {
    static GPM: Mutex<()> = Mutex::new(());
    GPM.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes the first sample of GPM, or returns why there is none. On a partitioned card it would cover one partition and disturb other readers.
fn first_sample<'nvml>(device: &Device<'nvml>) -> Result<GpmSample<'nvml>, String> {
    if device.mig_mode().is_ok_and(|mode| mode.current == 1) {
        return Err("the card is partitioned (MIG)".to_owned());
    }
    match device.gpm_support() {
        Ok(true) => {
            let _alone = alone();
            device.gpm_sample().map_err(|error| format!("GPM reports \"{error}\""))
        }
        Ok(false) => Err("NVML's GPM counters need a Hopper card or a later one".to_owned()),
        Err(error) => Err(format!("this driver has no GPM counters ({error})")),
    }
}
