//! Losses outside of Firebrick's crates: direct preference optimization of one pair, and cross entropy with a penalty on the normalizer.
//!
//! They show that forward, loss and backward are separate calls, that a pass can leave the adapter out, that a loss returns log-probabilities and
//! takes weights, that another operation can replace the fused cross entropy, and that ordinary Burn operations run inside `pause`.
//! Trade-off: the first computes the log-probabilities of the targets twice, once to find their weights and once for the gradient; the
//! second has all logits at once.

use burn_tensor::activation::{sigmoid, softmax, softplus};
use burn_tensor::{IndexingUpdateOp, Tensor};
use firebrick_kernels::{
    CrossEntropy, CrossEntropyOptions, GradientSink, Kernels, LossTargets, Weight, WeightGradient,
};
use firebrick_model::{Decoder, LossOptions, MicroBatch, PassOptions};

/// Computes the loss of a pair of documents under the model with its adapter, against the model without it (Rafailov et al., Direct preference
/// optimization, 2023): `-log sigmoid(beta * (gain(chosen) - gain(rejected)))`, where a document's gain is how much more likely the adapter makes it.
/// The first `chosen` targets of the batch belong to the chosen document, the others to the rejected one. Gradients go to the sink.
pub fn preference_loss<B: Kernels>(
    model: &Decoder<B>,
    batch: &MicroBatch<B>,
    chosen: usize,
    beta: f64,
    sink: &mut dyn GradientSink<B>,
) -> Tensor<B, 1> {
    let device = model.device();
    let options = LossOptions { chunk_tokens: 20, gradient_scale: None, log_probs: true, temperature: 1.0 };
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

        // The cross entropy weighs the negative log-probability of each target, so its weights are minus the derivatives.
        let targets = LossTargets { weights_m: Some(weights_m), ..batch.targets.clone() };
        let options = LossOptions { gradient_scale: Some(1.0), log_probs: false, ..options };
        let d_hidden_nd = model.loss(hidden_nd, &targets, options, sink).d_hidden_nd;
        model.backward(tape, d_hidden_nd.expect("there is a gradient scale"), sink);
        loss
    })
}

/// Computes the cross entropy plus `penalty * logsumexp(logits)^2` of each target, which keeps the normalizer near one (Chowdhery et al., PaLM, 2022,
/// section 5): an operation for [`Decoder::loss_with`]. The head must be dense and in the format of the hidden states.
pub fn z_loss<B: Kernels>(
    penalty: f64,
) -> impl FnOnce(Tensor<B, 2>, &Weight<B>, &LossTargets<B>, CrossEntropyOptions<B>) -> CrossEntropy<B> {
    move |hidden_nd, head, targets, options| {
        let Weight::Dense(head_vd) = head else { panic!("this loss reads a dense head") };
        let of_logits = (options.logit_scale, options.soft_cap);
        assert_eq!(of_logits, (1.0, None), "this loss is of logits without a factor or a soft cap");
        B::pause(&hidden_nd.device(), || {
            let hidden_md = hidden_nd.clone().select(0, targets.positions_m.clone());
            let logits_mv = hidden_md.clone().matmul(head_vd.clone().transpose());
            let max_m1 = logits_mv.clone().max_dim(1);
            let log_sum_m1 = logits_mv.clone().sub(max_m1.clone()).exp().sum_dim(1).log().add(max_m1);
            let targets_m1 = targets.targets_m.clone().reshape([targets.count, 1]);
            let log_probs_m1 = logits_mv.clone().gather(1, targets_m1.clone()).sub(log_sum_m1.clone());
            let loss_sum = log_sum_m1.clone().powi_scalar(2).mul_scalar(penalty).sub(log_probs_m1.clone()).sum();

            let gradients = options.gradient_scale.map(|scale| {
                let slope_m1 = log_sum_m1.mul_scalar(2.0 * penalty).add_scalar(1.0);
                let minus_one_m1 = log_probs_m1.ones_like().neg();
                let d_logits_mv = softmax(logits_mv, 1)
                    .mul(slope_m1)
                    .scatter(1, targets_m1, minus_one_m1, IndexingUpdateOp::Add)
                    .mul_scalar(scale);
                let d_hidden_md = d_logits_mv.clone().matmul(head_vd.clone());
                let d_hidden_nd = hidden_nd.zeros_like().select_assign(
                    0,
                    targets.positions_m.clone(),
                    d_hidden_md,
                    IndexingUpdateOp::Add,
                );
                (d_hidden_nd, d_logits_mv.transpose().matmul(hidden_md))
            });
            let (d_hidden_nd, d_head_vd) = gradients.unzip();
            let d_weight_vd = match options.weight_gradient {
                WeightGradient::Frozen => None,
                WeightGradient::New => d_head_vd,
                WeightGradient::AddTo(sum) => d_head_vd.map(|part| sum.add(part)),
            };
            CrossEntropy { loss_sum, log_probs_m: None, correct: None, d_hidden_nd, d_weight_vd }
        })
    }
}
