//! Training on a loss of log-probabilities that the host computes, as GRPO's: one pass over the layers, two over the head.
//!
//! ```text
//! log-probabilities        forward, head
//! derivatives by them      the host, from all of the micro-batch's
//! gradients                head with these as weights, backward
//! ```
//!
//! Trade-off: the device waits for the host between the passes over the head, some milliseconds per micro-batch, so a loss is host arithmetic that is
//! the same on every backend.

use burn_tensor::Tensor;
use firebrick_kernels::{GradientSink, Kernels, LossTargets};

use crate::decoder::{Decoder, LossOptions, MicroBatch};
use crate::pass::PassOptions;

impl<B: Kernels> Decoder<B> {
    /// Computes the log-probability of each target of a micro-batch at a temperature, in their order, with or without adapters.
    pub fn log_probs(&self, batch: &MicroBatch<B>, adapters: bool, chunk_tokens: usize, temperature: f64) -> Vec<f32> {
        self.begin_mixers(batch);
        let log_probs_m = B::section(self.device(), || {
            let hidden_nd = self.hidden(batch, adapters);
            let has_targets = batch.targets.count > 0;
            has_targets.then(|| self.log_probs_of(hidden_nd, &batch.targets, chunk_tokens, temperature))
        });
        log_probs_m.map_or_else(Vec::new, host)
    }

    /// Runs forward and backward of a micro-batch. `derivatives` gets the log-probability of each target at the options' temperature and returns the
    /// derivative of the loss by each; the gradients go to the sink, times the gradient scale of the options and `factor` `[1]`. Returns the
    /// auxiliary loss if the micro-batch has one.
    ///
    /// # Panics
    /// If the loss options have no gradient scale, or there are not as many derivatives as targets.
    pub fn policy_gradients(
        &self,
        batch: &MicroBatch<B>,
        pass: PassOptions,
        loss: LossOptions,
        factor: Option<Tensor<B, 1>>,
        derivatives: impl FnOnce(&[f32]) -> Vec<f32>,
        sink: &mut dyn GradientSink<B>,
    ) -> Option<Tensor<B, 1>> {
        self.begin_mixers(batch);
        let count = batch.targets.count;
        let (hidden_nd, tape, log_probs_m) = B::section(self.device(), || {
            let (hidden_nd, tape) = self.forward(batch, pass);
            let log_probs_m = (count > 0)
                .then(|| self.log_probs_of(hidden_nd.clone(), &batch.targets, loss.chunk_tokens, loss.temperature));
            (hidden_nd, tape, log_probs_m)
        });
        let derivatives = derivatives(&log_probs_m.map_or_else(Vec::new, host));
        assert_eq!(derivatives.len(), count, "a derivative per target");
        // The cross entropy is minus the log-probability.
        let weights: Vec<f32> = derivatives.iter().map(|derivative| -derivative).collect();
        let weights_m = (count > 0).then(|| {
            let weights_m = Tensor::<B, 1>::from_floats(weights.as_slice(), self.device());
            factor.into_iter().fold(weights_m, Tensor::mul)
        });
        let targets = LossTargets { weights_m, ..batch.targets.clone() };
        B::section(self.device(), || {
            let router_loss = tape.router_loss();
            let loss = self.loss(hidden_nd, &targets, loss, sink);
            self.backward(tape, loss.d_hidden_nd.expect("gradients need a gradient scale"), sink);
            router_loss
        })
    }
}

fn host<B: Kernels>(values: Tensor<B, 1>) -> Vec<f32> {
    values.into_data().to_vec().expect("log-probabilities are f32")
}
