//! One optimizer step, from host batches to updated parameters. Nothing is read back from the device here.
//!
//! The loss is the sum over all loss tokens of the step divided by their number, over every micro-batch and every rank, so 8 rows at
//! once and 8 rows one by one give the same update. Gradients are summed in f32, reduced over ranks during the last micro-batch,
//! clipped to a global norm, and passed to the optimizer.
//! Trade-off: the number of loss tokens is agreed on before the first forward pass, which costs one small reduction.

use burn_tensor::Tensor;
use firebrick_data::Batch;
use firebrick_kernels::{GradientSink, Kernels};
use firebrick_model::{Decoder, LossOptions, PassOptions};
use firebrick_optim::{Optimizer, Schedule};
use firebrick_parallel::{Ranks, ReducingSink};

use crate::error::RunError;

/// What trains, and how one step is taken.
pub struct Trainer<B: Kernels> {
    /// The model.
    pub model: Decoder<B>,
    /// State of its parameters.
    pub optimizer: Optimizer<B>,
    /// Learning rate by step.
    pub schedule: Schedule,
    /// The processes that train together.
    pub ranks: Ranks,
    /// What the forward pass saves, and where.
    pub pass: PassOptions,
    /// Rows of logits at a time.
    pub loss_chunk_tokens: usize,
}

/// The numbers of a step, still on the device: the log reads them one step late.
pub struct StepOutcome<B: Kernels> {
    /// The step, from 1.
    pub step: u64,
    /// Sum of the cross entropies of the loss tokens of all ranks, `[1]`.
    pub loss_sum: Tensor<B, 1>,
    /// Global norm of the gradients before clipping, `[1]`.
    pub grad_norm: Tensor<B, 1>,
    /// Loss tokens of the step over all ranks.
    pub loss_tokens: u64,
    /// The learning rate that was used.
    pub learning_rate: f64,
}

impl<B: Kernels> Trainer<B> {
    /// Takes one step on this rank's micro-batches.
    ///
    /// # Errors
    /// The other ranks could not be reached.
    ///
    /// # Panics
    /// If no micro-batch has a loss token: the data crate refuses such rows.
    pub fn step(&mut self, micro_batches: &[Batch]) -> Result<StepOutcome<B>, RunError> {
        let here: u64 = micro_batches.iter().map(|batch| batch.loss_tokens() as u64).sum();
        let loss_tokens = self.ranks.all_reduce_count(here)?;
        assert!(loss_tokens > 0, "a step needs at least one loss token");
        let loss_options = LossOptions {
            chunk_tokens: self.loss_chunk_tokens,
            gradient_scale: Some(1.0 / loss_tokens as f64),
            log_probs: false,
        };
        let mut sink = ReducingSink::new(&self.ranks, self.model.contributions());
        let mut loss_sum = Tensor::<B, 1>::zeros([1], self.model.device());
        for (index, batch) in micro_batches.iter().enumerate() {
            let on_device = self.model.upload(&batch.input_ids, &batch.targets, &batch.positions, &batch.cu_seqlens);
            sink.begin_micro_batch(index + 1 == micro_batches.len());
            loss_sum = loss_sum.add(self.model.loss_and_gradients(&on_device, self.pass, loss_options, &mut sink));
        }
        let gradients = sink.finish()?;
        let loss_sum = self.ranks.all_reduce_scalar(loss_sum)?;

        let step = self.optimizer.steps() + 1;
        let learning_rate = self.schedule.rate(step);
        let report = self.optimizer.step(self.model.parameters_mut(), gradients, learning_rate);
        Ok(StepOutcome { step, loss_sum, grad_norm: report.grad_norm, loss_tokens, learning_rate })
    }
}

/// Reads one f32 back from the device: waits for everything that was queued before it.
pub fn scalar<B: Kernels>(tensor: Tensor<B, 1>) -> f32 {
    tensor.into_data().convert::<f32>().to_vec::<f32>().expect("the value was just converted to f32")[0]
}
