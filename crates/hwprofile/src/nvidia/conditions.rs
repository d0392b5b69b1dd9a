//! Momentary state of an NVIDIA card: clocks, power, temperature, and the reasons for low clocks.

use std::collections::BTreeSet;

use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::{Clock, TemperatureSensor};
use nvml_wrapper::{Device, Nvml};
use serde::{Deserialize, Serialize};

use crate::throttle::Throttle;

/// A reading of a card. `None` for values that the card does not report.
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
    /// The reasons for clocks below their maximum, except idleness.
    pub throttled_by: BTreeSet<Throttle>,
}

impl CardConditions {
    pub(crate) fn of(card: &Device<'_>) -> Self {
        Self {
            sm_mhz: card.clock_info(Clock::SM).ok(),
            memory_mhz: card.clock_info(Clock::Memory).ok(),
            power_mw: card.power_usage().ok(),
            temperature_c: card.temperature(TemperatureSensor::Gpu).ok(),
            throttled_by: card.current_throttle_reasons().map(throttles).unwrap_or_default(),
        }
    }
}

/// Reads one card again and again.
pub struct ConditionsReader {
    nvml: Nvml,
    uuid: String,
}

impl ConditionsReader {
    /// Opens the card with this UUID ([`Gpu::uuid`](crate::Gpu)). `None` if NVML is not available.
    pub fn of_card(uuid: &str) -> Option<Self> {
        let nvml = Nvml::init().ok()?;
        nvml.device_by_uuid(uuid).ok()?;
        Some(Self { nvml, uuid: uuid.to_owned() })
    }

    /// Reads the card; `None` if it does not respond any more.
    pub fn read(&self) -> Option<CardConditions> {
        self.nvml.device_by_uuid(self.uuid.as_str()).ok().map(|card| CardConditions::of(&card))
    }
}

/// Converts the reasons, without idleness, which is no obstacle.
fn throttles(reasons: ThrottleReasons) -> BTreeSet<Throttle> {
    let known = [
        (ThrottleReasons::SW_POWER_CAP, Throttle::PowerCap),
        (ThrottleReasons::SW_THERMAL_SLOWDOWN, Throttle::Thermal),
        (ThrottleReasons::HW_THERMAL_SLOWDOWN, Throttle::Thermal),
        (ThrottleReasons::HW_SLOWDOWN, Throttle::HardwareSlowdown),
        (ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN, Throttle::PowerBrake),
        (ThrottleReasons::SYNC_BOOST, Throttle::SyncBoost),
        (ThrottleReasons::APPLICATIONS_CLOCKS_SETTING, Throttle::ApplicationClocks),
        (ThrottleReasons::DISPLAY_CLOCK_SETTING, Throttle::ApplicationClocks),
    ];
    known.into_iter().filter(|(bit, _)| reasons.contains(*bit)).map(|(_, reason)| reason).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bit_but_idleness_is_a_reason() {
        for bit in ThrottleReasons::all().iter() {
            assert_eq!(throttles(bit).len(), usize::from(bit != ThrottleReasons::GPU_IDLE), "{bit:?}");
        }
        assert_eq!(throttles(ThrottleReasons::all()).len(), 6);
        assert!(throttles(ThrottleReasons::empty()).is_empty());
    }

    #[test]
    fn a_card_that_is_not_there_has_no_reader() {
        assert!(ConditionsReader::of_card("GPU-00000000-0000-0000-0000-000000000000").is_none());
    }
}
