//! What holds the clocks of a card down.
//!
//! Trade-off: what drivers distinguish further (heat of chip or memory, seen by hardware or driver) is one reason here.

use serde::{Deserialize, Serialize};

/// Why a card runs below its highest clocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Throttle {
    /// It draws what its power limit allows.
    #[serde(alias = "power limit")]
    PowerCap,
    /// It or its memory is too hot.
    Thermal,
    /// The hardware halves its clocks: heat, power brake or a draw that rose too fast.
    HardwareSlowdown,
    /// The power supply requested less.
    PowerBrake,
    /// Another card of its group is slower.
    SyncBoost,
    /// Somebody set lower clocks.
    ApplicationClocks,
}

impl Throttle {
    /// Name to print.
    pub fn name(self) -> &'static str {
        match self {
            Self::PowerCap => "power cap",
            Self::Thermal => "too hot",
            Self::HardwareSlowdown => "hardware slowdown",
            Self::PowerBrake => "power brake",
            Self::SyncBoost => "sync boost",
            Self::ApplicationClocks => "application clocks",
        }
    }
}
