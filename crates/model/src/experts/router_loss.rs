//! The auxiliary loss that balances the experts (Fedus et al., Switch Transformers, 2022), over the routers of all layers together, as transformers
//! computes it.
//!
//! With `E` experts and `R` tokens times routers, of which `c_e` chose expert `e`, and the sum `p_e` of its probabilities: `loss = E Σ c_e p_e / R²`.
//! A count has no gradient, so that of each probability, `E c_e / R²`, is known when the forward pass has ended, whatever layers recompute. Through
//! the softmax it is added to the gradient of the logits. Padding is no token and has no gradient.
//! Trade-off: ordinary Burn operations, for which a section pauses at each router in both passes.

use burn_tensor::{DType, IndexingUpdateOp, Tensor, TensorData};
use firebrick_arch::RouterScores;
use firebrick_kernels::{Kernels, Routing};

/// The auxiliary loss of a micro-batch, before its forward pass.
#[derive(Clone, Debug)]
pub(crate) struct RouterLoss<B: Kernels> {
    padding: Padding<B>,
    /// Number of tokens without padding.
    tokens: usize,
    /// Factor of the gradients, `[1]` f32.
    gradient_scale: Tensor<B, 1>,
}

/// 1 for each token and 0 for padding, `[n, 1]` f32; `None` if there is no padding.
#[derive(Clone, Debug)]
struct Padding<B: Kernels>(Option<Tensor<B, 2>>);

impl<B: Kernels> Padding<B> {
    fn without(&self, values_ne: Tensor<B, 2>) -> Tensor<B, 2> {
        match &self.0 {
            Some(is_token_n1) => values_ne.mul(is_token_n1.clone()),
            None => values_ne,
        }
    }
}

/// Sums over the routers of a forward pass.
pub(crate) struct RouterSums<B: Kernels> {
    of: RouterLoss<B>,
    routers: usize,
    /// For each expert the tokens that chose it, and the sum of its probabilities, `[1, e]` f32; `None` before the first router.
    sums: Option<[Tensor<B, 2>; 2]>,
}

/// The gradient of the loss, as each router adds it to that of its logits.
#[derive(Clone, Debug)]
pub(crate) struct RouterGradient<B: Kernels> {
    padding: Padding<B>,
    /// Gradient of each token's probabilities, `[1, e]` f32.
    d_scores_1e: Tensor<B, 2>,
}

impl<B: Kernels> RouterSums<B> {
    pub(crate) fn new(of: RouterLoss<B>) -> Self {
        Self { of, routers: 0, sums: None }
    }

    pub(crate) fn add(&mut self, routing: &Routing<B>) {
        assert_eq!(routing.router.scores, RouterScores::Softmax, "the auxiliary loss is one of probabilities");
        let (scores_ne, experts_nk) = (routing.scores_ne.clone(), routing.experts_nk.clone());
        let earlier = self.sums.take();
        let sums = B::pause(&scores_ne.device(), || {
            let each_nk = routing.weights_nk.ones_like();
            let chosen_ne = scores_ne.zeros_like().scatter(1, experts_nk, each_nk, IndexingUpdateOp::Add);
            let [chosen, scores] = [chosen_ne, scores_ne].map(|values| self.of.padding.without(values).sum_dim(0));
            match earlier {
                Some([all_chosen, all_scores]) => [all_chosen.add(chosen), all_scores.add(scores)],
                None => [chosen, scores],
            }
        });
        self.sums = Some(sums);
        self.routers += 1;
    }

    /// Returns the loss, `[1]` f32, and its gradient; zeros if there is nothing but padding.
    pub(crate) fn finish(self) -> (Tensor<B, 1>, RouterGradient<B>) {
        let RouterLoss { padding, tokens, gradient_scale } = self.of;
        let [chosen_1e, scores_1e] = self.sums.expect("a model with this loss has a router");
        let each = 1.0 / (self.routers * tokens).max(1) as f64;
        let experts = chosen_1e.dims()[1] as f64;
        let (loss, d_scores_1e) = B::pause(&chosen_1e.device(), || {
            let per_score_1e = chosen_1e.mul_scalar(each).mul_scalar(experts * each);
            // The sum of a whole tensor is one of Burn's atomic operations on a device: it would differ from run to run.
            let loss = per_score_1e.clone().mul(scores_1e).sum_dim(1).reshape([1]);
            (loss, per_score_1e.mul(gradient_scale.unsqueeze()))
        });
        (loss, RouterGradient { padding, d_scores_1e })
    }
}

impl<B: Kernels> RouterGradient<B> {
    /// Adds the gradient through a router's probabilities to that of its logits, `[n, e]`, whose format stays.
    pub(crate) fn add_to(&self, d_logits_ne: Tensor<B, 2>, routing: &Routing<B>) -> Tensor<B, 2> {
        let (scores_ne, dtype) = (routing.scores_ne.clone(), d_logits_ne.dtype());
        let in_format = |values: Tensor<B, 2>, dtype| if values.dtype() == dtype { values } else { values.cast(dtype) };
        B::pause(&scores_ne.device(), || {
            let mean_n1 = scores_ne.clone().mul(self.d_scores_1e.clone()).sum_dim(1);
            let d_scores_ne = self.d_scores_1e.clone().sub(mean_n1);
            let through_softmax_ne = self.padding.without(scores_ne.mul(d_scores_ne));
            in_format(in_format(d_logits_ne, DType::F32).add(through_softmax_ne), dtype)
        })
    }
}

impl<B: Kernels> RouterLoss<B> {
    /// Creates the loss of a micro-batch of `all` tokens. `is_token` says which are no padding; `None`: all.
    pub(crate) fn new(all: usize, is_token: Option<&[bool]>, gradient_scale: Tensor<B, 1>, device: &B::Device) -> Self {
        let mask = |is_token: &[bool]| {
            assert_eq!(is_token.len(), all, "a micro-batch of {all} tokens says of each whether it is padding");
            let values: Vec<f32> = is_token.iter().map(|&is_token| f32::from(is_token)).collect();
            Tensor::from_data(TensorData::new(values, [all, 1]), (device, DType::F32))
        };
        let tokens = is_token.map_or(all, |is_token| is_token.iter().filter(|&&is_token| is_token).count());
        Self { padding: Padding(is_token.map(mask)), tokens, gradient_scale }
    }
}

/// Appends the auxiliary loss to the numbers of a micro-batch, if there is one.
pub(crate) fn with_router_loss<B: Kernels>(numbers: Tensor<B, 1>, router_loss: Option<Tensor<B, 1>>) -> Tensor<B, 1> {
    match router_loss {
        Some(router_loss) => B::pause(&numbers.device(), || Tensor::cat(vec![numbers, router_loss], 0)),
        None => numbers,
    }
}
