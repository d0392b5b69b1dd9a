//! Tests sampling through NVML's calls, with a library of fixed answers (`fake_nvml.c`) in place of the driver's.
#![cfg(unix)]

use std::process::Command;
use std::time::{Duration, Instant};

use firebrick_hwprofile::usage::{Gauge, Throttle, Usage, UsageMonitor, UsageTarget};

/// Returns the reading of two samples of a card, and the notes.
fn watch(uuid: &str) -> (Usage, Vec<String>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("libfake_nvml.so");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fake_nvml.c");
    let compiler =
        Command::new("cc").args(["-shared", "-fPIC", "-Wall", "-Werror", "-o"]).arg(&path).arg(source).status();
    assert!(compiler.expect("cc, which building this project needs too").success());
    let library = Some(path);
    let monitor = UsageMonitor::start(UsageTarget::Nvidia { uuid: uuid.to_owned(), library });
    let started = Instant::now();
    while monitor.samples() < 2 {
        assert!(started.elapsed() < Duration::from_secs(60), "no two samples were taken");
        std::thread::sleep(Duration::from_millis(5));
    }
    (monitor.take(), monitor.notes())
}

#[test]
fn a_hopper_card_reports_the_counters_of_gpm() {
    let (usage, notes) = watch("GPU-hopper");
    let read = |gauge| usage.get(gauge).unwrap_or(f64::NAN);
    assert_eq!(
        [Gauge::GpuUtil, Gauge::SmUtil, Gauge::TensorUtil, Gauge::DramUtil].map(read),
        [97.0, 88.5, 61.25, 47.0]
    );
    assert_eq!([Gauge::PowerW, Gauge::TemperatureC, Gauge::SmMhz].map(read), [612.5, 61.0, 1755.0]);
    assert!((read(Gauge::PcieTxGbS) - 1.048_576).abs() < 1e-9 && (read(Gauge::PcieRxGbS) - 2.097_152).abs() < 1e-9);
    assert_eq!(usage.get(Gauge::NvlinkTxGbS), None, "a counter that is not supported is left out");
    assert_eq!(usage.get(Gauge::MemoryBusy), None, "bandwidth is counted, so the older figure is not needed");
    // The fake adds 250 J per call: one at the start, one per sample.
    assert!(read(Gauge::EnergyJ) >= 500.0 && read(Gauge::EnergyJ) % 250.0 == 0.0);
    assert_eq!(usage.throttle().iter().copied().collect::<Vec<_>>(), [Throttle::PowerCap]);
    assert!(notes.is_empty(), "{notes:?}");
    assert_eq!(usage.in_words().unwrap(), "GPU 97 %, tensor cores 61 %, 612 W, 61 °C, power cap");
}

#[test]
fn an_older_card_reports_what_it_has_and_what_is_missing_by_name() {
    let (usage, notes) = watch("GPU-ampere");
    let read = |gauge| usage.get(gauge);
    assert_eq!([Gauge::SmUtil, Gauge::TensorUtil, Gauge::DramUtil].map(read), [None; 3]);
    let older = [Gauge::GpuUtil, Gauge::MemoryBusy, Gauge::PcieTxGbS, Gauge::PcieRxGbS];
    assert_eq!(older.map(read), [97.0, 33.0, 2.0, 3.0].map(Some));
    let reasons: Vec<_> = usage.throttle().iter().copied().collect();
    assert_eq!(reasons, [Throttle::Thermal, Throttle::HardwareSlowdown]);
    assert!(notes.len() == 1 && notes[0].contains("tensor-core") && notes[0].contains("Hopper"), "{notes:?}");
}

#[test]
fn a_partitioned_card_is_refused_by_gpm_and_the_rest_is_read() {
    let (usage, notes) = watch("GPU-partitioned");
    assert_eq!(usage.get(Gauge::DramUtil), None);
    assert_eq!(usage.get(Gauge::PowerW), Some(612.5));
    assert!(notes.len() == 1 && notes[0].contains("MIG"), "{notes:?}");
}
