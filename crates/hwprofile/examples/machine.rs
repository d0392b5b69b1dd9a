//! Prints what this machine is, or with `--record` what NVML says about it, as the recordings in `tests/recorded` hold it.
//!
//! Trade-off: identifiers of cards are printed as they are; replace them before a recording is kept.
#![allow(clippy::print_stdout, reason = "an example talks to its terminal")]

use firebrick_hwprofile::HardwareProfile;
use firebrick_hwprofile::nvidia::describe_this_machine;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    if std::env::args().any(|argument| argument == "--record") {
        println!("{}", serde_json::to_string_pretty(&describe_this_machine()?)?);
    } else {
        print!("{}", HardwareProfile::detect_with_adapters());
    }
    Ok(())
}
