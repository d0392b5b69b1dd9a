//! Prints the hardware profile of this machine; with `--watch` the usage of its first accelerator, ten times.
#![allow(clippy::print_stdout, reason = "an example talks to its terminal")]

use std::time::Duration;

use firebrick_hwprofile::HardwareProfile;
use firebrick_hwprofile::usage::{UsageMonitor, UsageTarget};

fn main() -> Result<(), serde_json::Error> {
    if !std::env::args().any(|argument| argument == "--watch") {
        print!("{}", HardwareProfile::detect_with_adapters());
        return Ok(());
    }
    let machine = HardwareProfile::detect();
    let target = machine.gpus.first().and_then(UsageTarget::of).unwrap_or_default();
    let monitor = UsageMonitor::start(target);
    for _ in 0..10 {
        std::thread::sleep(Duration::from_secs(1));
        println!("{}", serde_json::to_string(&monitor.take())?);
    }
    // What could not be sampled.
    monitor.notes().iter().for_each(|note| println!("note: {note}"));
    Ok(())
}
