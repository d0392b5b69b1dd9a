//! What an NVIDIA card does at a moment: clocks, power, temperature, and what holds its clocks down.
//!
//! Trade-off: one reading, not a mean; what happens between two readings is not seen.

use nvml_wrapper::Nvml;
use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::{Clock, TemperatureSensor};
use serde::{Deserialize, Serialize};

/// A reading of a card. What the card does not report is `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CardConditions {
    /// Clock of the multiprocessors, MHz.
    pub sm_mhz: Option<u32>,
    /// Clock of the memory, MHz.
    pub memory_mhz: Option<u32>,
    /// Power of the board, milliwatts.
    pub power_mw: Option<u32>,
    /// Temperature of the chip, degrees Celsius.
    pub temperature_c: Option<u32>,
    /// What holds the clocks below their maximum, other than having nothing to do.
    pub throttled_by: Vec<String>,
}

/// Reads one card again and again.
pub struct ConditionsReader {
    nvml: Nvml,
    uuid: String,
}

impl ConditionsReader {
    /// For the card with this UUID, as [`Gpu::uuid`](crate::Gpu) has it. `None` where NVML cannot be asked.
    pub fn of_card(uuid: &str) -> Option<Self> {
        let nvml = Nvml::init().ok()?;
        nvml.device_by_uuid(uuid).ok()?;
        Some(Self { nvml, uuid: uuid.to_owned() })
    }

    /// The card now; `None` if it does not answer any more.
    pub fn read(&self) -> Option<CardConditions> {
        let card = self.nvml.device_by_uuid(self.uuid.as_str()).ok()?;
        Some(CardConditions {
            sm_mhz: card.clock_info(Clock::SM).ok(),
            memory_mhz: card.clock_info(Clock::Memory).ok(),
            power_mw: card.power_usage().ok(),
            temperature_c: card.temperature(TemperatureSensor::Gpu).ok(),
            throttled_by: card.current_throttle_reasons().map(names).unwrap_or_default(),
        })
    }
}

/// The reasons in words, without idleness, which is no obstacle.
fn names(reasons: ThrottleReasons) -> Vec<String> {
    let words = [
        (ThrottleReasons::APPLICATIONS_CLOCKS_SETTING, "application clocks"),
        (ThrottleReasons::SW_POWER_CAP, "power limit"),
        (ThrottleReasons::HW_SLOWDOWN, "hardware slowdown"),
        (ThrottleReasons::SYNC_BOOST, "clocks of a group"),
        (ThrottleReasons::SW_THERMAL_SLOWDOWN, "temperature, by the driver"),
        (ThrottleReasons::HW_THERMAL_SLOWDOWN, "temperature, by the hardware"),
        (ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN, "power brake"),
        (ThrottleReasons::DISPLAY_CLOCK_SETTING, "display clocks"),
    ];
    words.into_iter().filter(|(reason, _)| reasons.contains(*reason)).map(|(_, word)| word.to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_has_a_word_but_idleness() {
        assert_eq!(names(ThrottleReasons::all()).len(), 8);
        assert!(names(ThrottleReasons::GPU_IDLE).is_empty() && names(ThrottleReasons::empty()).is_empty());
        assert_eq!(names(ThrottleReasons::SW_POWER_CAP | ThrottleReasons::GPU_IDLE), ["power limit"]);
    }

    #[test]
    fn a_card_that_is_not_there_has_no_reader() {
        assert!(ConditionsReader::of_card("GPU-00000000-0000-0000-0000-000000000000").is_none());
    }
}
