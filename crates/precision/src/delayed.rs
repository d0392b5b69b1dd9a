//! Delayed scaling, TransformerEngine's `DelayedScaling`: the scale of a tensor follows from its amax in earlier steps, so
//! that quantizing needs one pass.
//!
//! The host reference only. Training refuses this recipe: the scales depend on up to 1,024 earlier steps, so a run could be
//! resumed only with the history of every tensor in its checkpoint, and a tensor that grows suddenly saturates until the
//! history has seen it. Scaling by the current amax has neither fault, and where the amax is taken in the operation that
//! writes the tensor it costs no pass either.
//!
//! Trade-off: one tensor at a time, and no reduction of amax over ranks.

use std::collections::VecDeque;

use crate::amax::larger;
use crate::element::ElementFormat;
use crate::error::{Error, Result};
use crate::scaled::{ScaledTensor, quantize_with_scale};

/// The settings of delayed scaling, with TransformerEngine's names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DelayedScaling {
    /// Scales leave room for values 2^`margin` times the amax.
    pub margin: u8,
    /// Steps whose amax is remembered, at least 1.
    pub amax_history_len: usize,
    /// Which amax of the history counts.
    pub amax_compute_algo: AmaxComputeAlgo,
}

/// Which amax of the history counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AmaxComputeAlgo {
    /// The largest.
    Max,
    /// That of the step before.
    MostRecent,
}

impl DelayedScaling {
    /// TransformerEngine's defaults: no margin, the largest of 1,024 steps.
    pub const DEFAULT: Self = Self { margin: 0, amax_history_len: 1024, amax_compute_algo: AmaxComputeAlgo::Max };
}

/// The history and the factor of one tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct DelayedScale {
    settings: DelayedScaling,
    element: ElementFormat,
    /// The newest amax first.
    history: VecDeque<f32>,
    /// What the values of the next step are multiplied with.
    factor: f32,
}

impl DelayedScale {
    /// No history, factor 1.
    ///
    /// # Errors
    /// [`Error::LengthMismatch`] if the history has no place.
    pub fn new(settings: DelayedScaling, element: ElementFormat) -> Result<Self> {
        if settings.amax_history_len == 0 {
            return Err(Error::LengthMismatch { what: "amax_history_len", expected: 1, got: 0 });
        }
        Ok(Self { settings, element, history: VecDeque::new(), factor: 1.0 })
    }

    /// What the values of the next step are multiplied with.
    pub fn factor(&self) -> f32 {
        self.factor
    }

    /// Quantizes the matrix of one step with the factor from earlier steps (values beyond its range saturate), and then
    /// takes the amax of this one into account.
    ///
    /// # Errors
    /// As [`Scaling::quantize`](crate::Scaling::quantize).
    pub fn quantize(&mut self, values: &[f32], shape: [usize; 2]) -> Result<ScaledTensor> {
        let tensor = quantize_with_scale(self.element, values, shape, 1.0 / self.factor, self.factor)?;
        self.record(larger(0.0, values));
        Ok(tensor)
    }

    /// Takes the amax of a step into account: the factor becomes `max / amax / 2^margin`. It stays where the amax that
    /// counts is 0 or not finite, and is the largest f32 where it would be infinite.
    pub fn record(&mut self, amax: f32) {
        self.history.truncate(self.settings.amax_history_len - 1);
        self.history.push_front(amax);
        let counts = match self.settings.amax_compute_algo {
            AmaxComputeAlgo::Max => self.history.iter().fold(0.0, |largest, amax| larger(largest, &[*amax])),
            AmaxComputeAlgo::MostRecent => amax,
        };
        if counts > 0.0 && counts.is_finite() {
            let factor = self.element.format().max() / counts / 2_f32.powi(i32::from(self.settings.margin));
            self.factor = factor.min(f32::MAX);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scale(settings: DelayedScaling) -> DelayedScale {
        DelayedScale::new(settings, ElementFormat::E4m3).unwrap()
    }

    #[test]
    fn a_step_uses_the_factor_of_the_steps_before_it() {
        let mut scale = scale(DelayedScaling::DEFAULT);
        let first = scale.quantize(&[1.0, -2.0, 0.5, 600.0], [2, 2]).unwrap();
        assert_eq!(first.dequantize(), [1.0, -2.0, 0.5, 448.0]);
        assert_eq!(scale.factor(), 448.0 / 600.0);
        scale.record(896.0);
        let second = scale.quantize(&[896.0, 64.0], [1, 2]).unwrap();
        assert_eq!(second.dequantize(), [896.0, 64.0]);
    }

    #[test]
    fn the_history_forgets_and_the_margin_leaves_room() {
        let settings = DelayedScaling { margin: 2, amax_history_len: 3, amax_compute_algo: AmaxComputeAlgo::Max };
        let mut max = scale(settings);
        let mut recent = scale(DelayedScaling { amax_compute_algo: AmaxComputeAlgo::MostRecent, ..settings });
        let mut factors = Vec::new();
        for amax in [1.0, 8.0, 2.0, 4.0, 1.0, 1.0] {
            max.record(amax);
            recent.record(amax);
            factors.push((112.0 / max.factor(), 112.0 / recent.factor()));
        }
        assert_eq!(factors, [(1.0, 1.0), (8.0, 8.0), (8.0, 2.0), (8.0, 4.0), (4.0, 1.0), (4.0, 1.0)]);
    }

    #[test]
    fn zero_and_what_is_not_finite_leave_the_factor() {
        let mut scale = scale(DelayedScaling { amax_history_len: 1, ..DelayedScaling::DEFAULT });
        scale.record(2.0);
        for amax in [0.0, f32::INFINITY, f32::NAN] {
            scale.record(amax);
            assert_eq!(scale.factor(), 224.0, "{amax}");
        }
        scale.record(f32::MIN_POSITIVE);
        assert_eq!(scale.factor(), f32::MAX);
    }

    #[test]
    fn a_history_without_a_place_is_refused() {
        let settings = DelayedScaling { amax_history_len: 0, ..DelayedScaling::DEFAULT };
        let error = DelayedScale::new(settings, ElementFormat::E4m3).unwrap_err();
        assert_eq!(error, Error::LengthMismatch { what: "amax_history_len", expected: 1, got: 0 });
    }
}
