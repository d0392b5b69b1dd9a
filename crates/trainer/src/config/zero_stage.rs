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

    /// Returns whether ZeRO has this stage.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stage_is_written_as_its_number_and_divides_what_those_before_it_divide() {
        let divided = |stage: ZeroStage| [stage.divides_state(), stage.divides_gradients(), stage.divides_weights()];
        let stages = [ZeroStage::NONE, ZeroStage::STATE, ZeroStage::GRADIENTS, ZeroStage::WEIGHTS];
        for (number, stage) in stages.into_iter().enumerate() {
            let written = serde_json::to_string(&stage).unwrap();
            assert_eq!((written.as_str(), stage.to_string()), (number.to_string().as_str(), number.to_string()));
            assert_eq!(serde_json::from_str::<ZeroStage>(&written).unwrap(), stage);
            assert_eq!(divided(stage), [number >= 1, number >= 2, number >= 3]);
            assert!(stage.exists());
        }
        assert!(!serde_json::from_str::<ZeroStage>("4").unwrap().exists());
    }
}
