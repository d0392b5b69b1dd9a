//! A loss that Firebrick does not have, written outside its crates: direct preference optimization of one pair.
//!
//! It shows that forward, loss and backward are separate calls, that the adapter can be left out of a pass, that a loss returns
//! log-probabilities and takes weights, and that ordinary Burn operations run inside `pause`.
//! Trade-off: the log-probabilities of the targets are computed twice, once to find their weights and once for the gradient.

use burn_tensor::Tensor;
use burn_tensor::activation::{sigmoid, softplus};
use firebrick_kernels::{GradientSink, Kernels, LossTargets};
use firebrick_model::{Decoder, LossOptions, MicroBatch, PassOptions};

/// Loss of a pair of documents under the model with its adapter, against the model without it (Rafailov et al., Direct preference
/// optimization, 2023): `-log sigmoid(beta * (gain(chosen) - gain(rejected)))`, where the gain of a document is how much more likely the
/// adapter makes it. The first `chosen` targets of the batch belong to the chosen document, the others to the rejected one. Gradients go
/// to the sink.
pub fn preference_loss<B: Kernels>(
    model: &Decoder<B>,
    batch: &MicroBatch<B>,
    chosen: usize,
    beta: f64,
    sink: &mut dyn GradientSink<B>,
) -> Tensor<B, 1> {
    let device = model.device();
    let options = LossOptions { chunk_tokens: 20, gradient_scale: None, log_probs: true };
    B::section(device, || {
        let (base_nd, _) = model.forward(batch, PassOptions { adapters: false, ..PassOptions::default() });
        let base = model.loss(base_nd, &batch.targets, options, sink).log_probs_m.expect("they were requested");
        let (hidden_nd, tape) = model.forward(batch, PassOptions::default());
        let loss = model.loss(hidden_nd.clone(), &batch.targets, options, sink);
        let tuned = loss.log_probs_m.expect("they were requested");

        let (loss, weights_m) = B::pause(device, || {
            let gain_m = tuned.sub(base);
            let rejected = batch.targets.count - chosen;
            let gain = |start, length| gain_m.clone().narrow(0, start, length).sum();
            let margin = gain(0, chosen).sub(gain(chosen, rejected)).mul_scalar(beta);
            let slope = sigmoid(margin.clone().neg()).mul_scalar(beta);
            let weights = [slope.clone().repeat_dim(0, chosen), slope.neg().repeat_dim(0, rejected)];
            (softplus(margin.neg(), 1.0), Tensor::cat(weights.to_vec(), 0))
        });

        // The cross entropy weighs minus the log-probability of each target, so its weights are minus the derivatives.
        let targets = LossTargets { weights_m: Some(weights_m), ..batch.targets.clone() };
        let options = LossOptions { gradient_scale: Some(1.0), log_probs: false, ..options };
        let d_hidden_nd = model.loss(hidden_nd, &targets, options, sink).d_hidden_nd;
        model.backward(tape, d_hidden_nd.expect("there is a gradient scale"), sink);
        loss
    })
}
