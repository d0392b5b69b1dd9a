//! One optimizer step, from host batches to updated parameters. Nothing is read back from the device here.
//!
//! The loss is the sum over all trained tokens of the step divided by their number, over every micro-batch and every rank, so
//! 8 rows at once and 8 rows one by one give the same update. Gradients are summed in f32, reduced over ranks once, after the
//! last micro-batch, clipped to a global norm, and handed to the optimizer.

use burn_tensor::Tensor;
use firebrick_data::Batch;
use firebrick_kernels::{GradientMap, Kernels};
use firebrick_model::{Llama, PassOptions, Recompute};
use firebrick_optim::{Optimizer, Schedule};
use firebrick_parallel::Collective;

use crate::error::RunError;

/// What trains, and how one step is taken.
pub struct Trainer<B: Kernels> {
    /// The model.
    pub model: Llama<B>,
    /// Moments of its parameters.
    pub optimizer: Optimizer<B>,
    /// Learning rate by step.
    pub schedule: Schedule,
    /// The other ranks.
    pub collective: Box<dyn Collective<B>>,
    /// What the forward pass keeps.
    pub recompute: Recompute,
    /// Whether what it keeps waits in host memory.
    pub offload: bool,
    /// Rows of logits at a time.
    pub loss_chunk_tokens: usize,
}

/// What a step leaves behind, still on the device: the log reads it one step late.
pub struct StepOutcome<B: Kernels> {
    /// The step, from 1.
    pub step: u64,
    /// Sum of the cross entropies of this rank's trained tokens, `[1]`.
    pub loss_sum: Tensor<B, 1>,
    /// Global norm of the gradients before clipping, `[1]`.
    pub grad_norm: Tensor<B, 1>,
    /// Trained tokens of the step over all ranks.
    pub trained_tokens: u64,
    /// Learning rate that was used.
    pub learning_rate: f64,
}

impl<B: Kernels> Trainer<B> {
    /// Takes one step on this rank's micro-batches.
    ///
    /// # Errors
    /// The other ranks could not be reached.
    ///
    /// # Panics
    /// If no micro-batch has a trained token: the data crate refuses such rows.
    pub fn step(&mut self, micro_batches: &[Batch]) -> Result<StepOutcome<B>, RunError> {
        let here: u64 = micro_batches.iter().map(|batch| batch.trained_tokens() as u64).sum();
        let trained_tokens = self.collective.all_reduce_count(here)?;
        assert!(trained_tokens > 0, "a step needs at least one trained token");
        let gradient_scale = 1.0 / trained_tokens as f64;

        let mut gradients = GradientMap::default();
        let mut loss_sum = Tensor::<B, 1>::zeros([1], self.model.device());
        for batch in micro_batches {
            let on_device = self.model.upload(&batch.input_ids, &batch.targets, &batch.positions, &batch.cu_seqlens);
            let options = PassOptions {
                recompute: self.recompute,
                offload: self.offload,
                gradient_scale,
                chunk_tokens: self.loss_chunk_tokens,
            };
            loss_sum = loss_sum.add(self.model.loss_and_gradients(&on_device, options, &mut gradients));
        }
        gradients.try_map(|own| self.collective.all_reduce_sum(own))?;

        let step = self.optimizer.steps() + 1;
        let learning_rate = self.schedule.rate(step);
        let report = self.optimizer.step(self.model.parameters_mut(), gradients, learning_rate);
        Ok(StepOutcome { step, loss_sum, grad_norm: report.grad_norm, trained_tokens, learning_rate })
    }
}

/// Reads one f32 back from the device: waits for everything that was queued before it.
pub fn scalar<B: Kernels>(tensor: Tensor<B, 1>) -> f32 {
    tensor.into_data().convert::<f32>().to_vec::<f32>().expect("the value was just converted to f32")[0]
}
