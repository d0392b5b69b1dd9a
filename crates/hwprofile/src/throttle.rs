//! Reasons for low clocks of a card.

use serde::{Deserialize, Serialize};

/// A reason for clocks below the card's maximum.
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
    /// Returns the name to print.
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
