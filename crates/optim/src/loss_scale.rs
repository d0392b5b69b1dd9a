//! Dynamic loss scaling for training in float16 (Micikevicius et al., Mixed precision training, 2018), with the counting of torch's `GradScaler`.
//!
//! The gradient of the loss is multiplied by a scale, so that small gradients of activations do not become 0. A step whose gradients overflow is
//! skipped and lowers the scale; many good steps in a row raise it. Scale and count stay on the device, so a step does not wait for the host. Bias
//! corrections and the schedule depend on the number of skipped steps, which is read one step late, when the device has computed it anyway.
//! Trade-off: the global norm decides whether a step is skipped, so gradients whose squares overflow f32 (a scaled norm above 1.8e19) are skipped
//! although each of them is finite.

use burn_tensor::{Bool, Tensor};
use firebrick_kernels::{Kernels, Readback};
use serde::{Deserialize, Serialize};

/// Constants of the scale's growth and backoff. The defaults are those of torch's `GradScaler`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScaling {
    /// Scale of the first step.
    pub initial: f32,
    /// Factor after `growth_interval` good steps in a row.
    pub growth: f32,
    /// Factor after a skipped step.
    pub backoff: f32,
    /// Good steps in a row that raise the scale.
    pub growth_interval: u32,
}

impl Default for LossScaling {
    fn default() -> Self {
        Self { initial: 65_536.0, growth: 2.0, backoff: 0.5, growth_interval: 2000 }
    }
}

/// Scale and count between two steps, for a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossScaleState {
    /// Scale of the next step.
    pub scale: f32,
    /// Good steps since the scale changed.
    pub good_steps: u32,
    /// Steps of the run that were skipped.
    pub skipped_steps: u64,
}

pub(crate) struct LossScaler<B: Kernels> {
    scaling: LossScaling,
    /// That of the next step, `[1]` f32.
    pub(crate) scale: Tensor<B, 1>,
    /// `[1]` f32: a whole number below the growth interval.
    good_steps: Tensor<B, 1>,
    skipped_steps: u64,
    /// Whether the last step was taken (1) or skipped (0), until that is read.
    last_step: Option<Readback>,
}

impl<B: Kernels> LossScaler<B> {
    pub(crate) fn new(scaling: LossScaling, device: &B::Device) -> Self {
        Self {
            scale: Tensor::from_floats([scaling.initial], device),
            good_steps: Tensor::zeros([1], device),
            skipped_steps: 0,
            last_step: None,
            scaling,
        }
    }

    /// Counts the skipped steps. Waits for the end of the last step.
    pub(crate) fn skipped_steps(&mut self) -> u64 {
        if let Some(last_step) = self.last_step.take() {
            let was_skipped = last_step.wait()[0] == 0.0;
            self.skipped_steps += u64::from(was_skipped);
        }
        self.skipped_steps
    }

    /// Ends a step; `is_finite` `[1]`: whether all its gradients were finite. This is `torch._amp_update_scale_`.
    pub(crate) fn end_step(&mut self, is_finite: Tensor<B, 1, Bool>) {
        self.skipped_steps();
        let LossScaling { growth, backoff, growth_interval, .. } = self.scaling;
        let good_steps = self.good_steps.clone().add_scalar(1.0);
        let grows = is_finite.clone().bool_and(good_steps.clone().greater_equal_elem(growth_interval));
        let grown = self.scale.clone().mul_scalar(growth);
        let raised = self.scale.clone().mask_where(grows.clone().bool_and(grown.clone().is_finite()), grown);
        let lowered = self.scale.clone().mul_scalar(backoff);
        self.scale = lowered.mask_where(is_finite.clone(), raised);
        self.good_steps = good_steps.mask_fill(grows.bool_or(is_finite.clone().bool_not()), 0.0);
        self.last_step = Some(B::read_later(vec![is_finite.float()]));
    }

    /// Returns the state for a checkpoint. Waits for the device.
    pub(crate) fn state(&mut self) -> LossScaleState {
        let skipped_steps = self.skipped_steps();
        let numbers = B::read_later(vec![self.scale.clone(), self.good_steps.clone()]).wait();
        LossScaleState { scale: numbers[0], good_steps: numbers[1] as u32, skipped_steps }
    }

    pub(crate) fn restore(&mut self, state: LossScaleState) {
        let device = self.scale.device();
        self.scale = Tensor::from_floats([state.scale], &device);
        self.good_steps = Tensor::from_floats([state.good_steps as f32], &device);
        (self.skipped_steps, self.last_step) = (state.skipped_steps, None);
    }
}

#[cfg(test)]
mod tests {
    use burn_flex::Flex;

    use super::*;

    fn finite(is_finite: bool) -> Tensor<Flex, 1, Bool> {
        Tensor::from_data([is_finite], &Default::default())
    }

    /// Implements `torch.amp.GradScaler.update` by its documentation, on the host.
    fn reference(state: &mut (f32, u32), is_finite: bool, scaling: &LossScaling) {
        let (scale, good_steps) = state;
        if !is_finite {
            (*scale, *good_steps) = (*scale * scaling.backoff, 0);
            return;
        }
        *good_steps += 1;
        if *good_steps == scaling.growth_interval {
            let grown = *scale * scaling.growth;
            (*scale, *good_steps) = (if grown.is_finite() { grown } else { *scale }, 0);
        }
    }

    #[test]
    fn scale_and_count_follow_torch() {
        // Also where a scale would overflow as it grows.
        for (initial, growth_interval) in [(LossScaling::default().initial, 3), (f32::MAX, 1)] {
            let scaling = LossScaling { initial, growth_interval, ..LossScaling::default() };
            let mut scaler = LossScaler::<Flex>::new(scaling, &Default::default());
            let (mut expected, mut skipped) = ((initial, 0), 0);
            for step in 0..40u32 {
                let is_finite = step % 7 != 2 && step % 11 != 5;
                scaler.end_step(finite(is_finite));
                reference(&mut expected, is_finite, &scaling);
                skipped += u64::from(!is_finite);
                let (scale, good_steps) = expected;
                assert_eq!(scaler.state(), LossScaleState { scale, good_steps, skipped_steps: skipped }, "{step}");
            }
            assert!(skipped > 5);
        }
    }

    #[test]
    fn a_restored_scaler_continues_the_saved_one() {
        let scaling = LossScaling { growth_interval: 4, ..LossScaling::default() };
        let mut saved = LossScaler::<Flex>::new(scaling, &Default::default());
        for is_finite in [true, false, true, true] {
            saved.end_step(finite(is_finite));
        }
        let mut restored = LossScaler::<Flex>::new(scaling, &Default::default());
        restored.restore(saved.state());
        for is_finite in [true, true, false, true] {
            saved.end_step(finite(is_finite));
            restored.end_step(finite(is_finite));
            assert_eq!(saved.state(), restored.state());
        }
    }
}
