//! What ranks divide instead of each holding all of it (ZeRO): `train.zero_stage`.
//!
//! Trade-off: a stage that does not exist can be read; the check of the recipe then refuses it like any number outside its range.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What is divided over ranks. Each stage divides what the one before it divides, and more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
#[schemars(inline)]
pub struct ZeroStage(u8);

impl ZeroStage {
    /// Nothing: each rank has everything.
    pub const NONE: Self = Self(0);
    /// The optimizer's state.
    pub const STATE: Self = Self(1);
    /// Gradients too.
    pub const GRADIENTS: Self = Self(2);
    /// The weights of the layers too.
    pub const WEIGHTS: Self = Self(3);

    pub(super) fn exists(self) -> bool {
        self.0 <= Self::WEIGHTS.0
    }

    /// Returns whether a rank has only its share of the optimizer's state.
    pub fn divides_state(self) -> bool {
        self.0 >= Self::STATE.0
    }

    /// Returns whether a rank has only its share of the gradients.
    pub fn divides_gradients(self) -> bool {
        self.0 >= Self::GRADIENTS.0
    }

    /// Returns whether a rank has only its share of the weights of the layers.
    pub fn divides_weights(self) -> bool {
        self.0 >= Self::WEIGHTS.0
    }
}

impl fmt::Display for ZeroStage {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}", self.0)
    }
}
