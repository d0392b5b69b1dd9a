//! Evaluation of a micro-batch: the loss without gradients, and how many targets the model would have chosen.
//!
//! Both come from the same logits, of a bounded number of rows at a time. Where the model computes in f32, that is one pass over the
//! head. In a half format the loss reads its logits before they are rounded, which no operation returns, so the head is applied a second
//! time for the choices.
//! A soft cap does not change which logit is highest, so choices are made before it.
//! Trade-off: that second time costs a half format the share of the head in a forward pass, 7 % of Llama-3.1-8B.

use burn_tensor::{DType, Int, Tensor};
use firebrick_kernels::{CrossEntropyOptions, Kernels, LossTargets, WeightGradient};

use crate::decoder::{Decoder, MicroBatch};

/// Result of [`Decoder::score`].
#[derive(Clone, Debug)]
pub struct Score<B: Kernels> {
    /// Sum of the cross entropies of the targets, `[1]` f32.
    pub loss_sum: Tensor<B, 1>,
    /// Number of targets that no other token has a higher logit than, `[1]` f32.
    pub correct: Tensor<B, 1>,
}

impl<B: Kernels> Decoder<B> {
    /// Sum of the cross entropies of the targets, `[1]`, without gradients.
    pub fn loss_only(&self, batch: &MicroBatch<B>, chunk_tokens: usize) -> Tensor<B, 1> {
        B::section(&self.device, || self.loss_of(self.hidden(batch), &batch.targets, chunk_tokens))
    }

    /// As [`Decoder::loss_only`], with the number of targets that the model would have chosen.
    ///
    /// # Panics
    /// If `chunk_tokens` is 0.
    pub fn score(&self, batch: &MicroBatch<B>, chunk_tokens: usize) -> Score<B> {
        B::section(&self.device, || {
            let hidden_nd = self.hidden(batch);
            if hidden_nd.dtype() == DType::F32 {
                self.score_in_one_pass(&hidden_nd, &batch.targets, chunk_tokens)
            } else {
                self.score_in_two_passes(hidden_nd, &batch.targets, chunk_tokens)
            }
        })
    }

    /// The loss and the choices from the same logits.
    fn score_in_one_pass(&self, hidden_nd: &Tensor<B, 2>, targets: &LossTargets<B>, chunk_tokens: usize) -> Score<B> {
        let mut score = Score { loss_sum: self.zero(), correct: self.zero() };
        let soft_cap = self.config.spec.logit_soft_cap;
        for start in (0..targets.count).step_by(chunk_tokens) {
            let Piece { hidden_cd, targets_c } = self.piece(hidden_nd, targets, start, chunk_tokens);
            let logits_cv = self.rounded_logits(hidden_cd);
            let (losses_c, _) = B::cross_entropy(logits_cv.clone(), targets_c.clone(), None, None, soft_cap);
            score = B::pause(&self.device, || Score {
                loss_sum: score.loss_sum.add(losses_c.sum()),
                correct: score.correct.add(correct(logits_cv, targets_c)),
            });
        }
        score
    }

    /// The loss as in training, then the choices from rounded logits. A piece has half as many rows, since its logits exist in two formats.
    fn score_in_two_passes(&self, hidden_nd: Tensor<B, 2>, targets: &LossTargets<B>, chunk_tokens: usize) -> Score<B> {
        let rows = chunk_tokens.div_ceil(2);
        let mut count = self.zero();
        for start in (0..targets.count).step_by(rows) {
            let Piece { hidden_cd, targets_c } = self.piece(&hidden_nd, targets, start, rows);
            let logits_cv = self.rounded_logits(hidden_cd);
            count = B::pause(&self.device, || count.add(correct(logits_cv.cast(DType::F32), targets_c)));
        }
        Score { loss_sum: self.loss_of(hidden_nd, targets, chunk_tokens), correct: count }
    }

    fn loss_of(&self, hidden_nd: Tensor<B, 2>, targets: &LossTargets<B>, chunk_tokens: usize) -> Tensor<B, 1> {
        let options = CrossEntropyOptions {
            chunk_tokens,
            gradient_scale: None,
            weight_gradient: WeightGradient::Frozen,
            log_probs: false,
            soft_cap: self.config.spec.logit_soft_cap,
        };
        B::linear_cross_entropy(hidden_nd, &self.head(), targets, options).loss_sum
    }

    /// The targets from `start` on, `rows` of them at most.
    fn piece(&self, hidden_nd: &Tensor<B, 2>, targets: &LossTargets<B>, start: usize, rows: usize) -> Piece<B> {
        let length = rows.min(targets.count - start);
        B::pause(&self.device, || {
            let positions_c = targets.positions_m.clone().narrow(0, start, length);
            Piece {
                hidden_cd: hidden_nd.clone().select(0, positions_c),
                targets_c: targets.targets_m.clone().narrow(0, start, length),
            }
        })
    }

    fn zero(&self) -> Tensor<B, 1> {
        B::pause(&self.device, || Tensor::zeros([1], (&self.device, DType::F32)))
    }
}

/// Some of the targets, and the hidden states that predict them.
struct Piece<B: Kernels> {
    hidden_cd: Tensor<B, 2>,
    targets_c: Tensor<B, 1, Int>,
}

/// How many rows of logits `[c, v]` are highest at their target, `[1]` f32.
fn correct<B: Kernels>(logits_cv: Tensor<B, 2>, targets_c: Tensor<B, 1, Int>) -> Tensor<B, 1> {
    let rows = targets_c.dims()[0];
    let target_c1 = logits_cv.clone().gather(1, targets_c.reshape([rows, 1]));
    let is_right_c1 = target_c1.greater_equal(logits_cv.max_dim(1));
    is_right_c1.float().cast(DType::F32).sum()
}

#[cfg(test)]
mod tests {
    use firebrick_kernels::backends::Flex;
    use firebrick_kernels::{BaseStorage, GemmFormat};
    use firebrick_precision::Format;

    use super::*;
    use crate::load::BuildOptions;
    use crate::test_config::tiny;

    #[test]
    fn one_pass_over_the_head_scores_as_two_and_as_the_loss_of_training() {
        let options = BuildOptions {
            storage: BaseStorage::Frozen(Format::F32),
            lora: None,
            seed: 3,
            compute_dtype: DType::F32,
            gemms: GemmFormat::Compute,
            max_positions: 64,
            sequence_tokens: 64,
        };
        let model = Decoder::<Flex>::random(tiny(&[]).unwrap(), &options, &Default::default()).unwrap();
        let ids: Vec<u32> = (0..20).map(|token| token * 7 % 11).collect();
        let targets: Vec<i64> = (0..20).map(|token| if token % 4 == 3 { -100 } else { token * 5 % 11 }).collect();
        let batch = model.upload(&ids, &targets, &(0..20).collect::<Vec<_>>(), &[0, 20]);
        let host = |value: Tensor<Flex, 1>| value.into_scalar();
        let loss = host(model.loss_only(&batch, 5));
        for chunk_tokens in [1, 4, 100] {
            let hidden_nd = model.hidden(&batch);
            let once = model.score_in_one_pass(&hidden_nd, &batch.targets, chunk_tokens);
            let twice = model.score_in_two_passes(hidden_nd, &batch.targets, chunk_tokens);
            assert_eq!(host(once.correct), host(twice.correct));
            assert!((host(once.loss_sum) - loss).abs() < 1e-4 && (host(twice.loss_sum) - loss).abs() < 1e-4);
        }
    }

    #[test]
    fn without_targets_nothing_is_right_and_nothing_is_lost() {
        let options = BuildOptions {
            storage: BaseStorage::Trained,
            lora: None,
            seed: 3,
            compute_dtype: DType::F32,
            gemms: GemmFormat::Compute,
            max_positions: 8,
            sequence_tokens: 8,
        };
        let model = Decoder::<Flex>::random(tiny(&[]).unwrap(), &options, &Default::default()).unwrap();
        let score = model.score(&model.upload(&[1, 2], &[-100, -100], &[0, 1], &[0, 2]), 4);
        assert_eq!((score.loss_sum.into_scalar(), score.correct.into_scalar()), (0.0, 0.0));
    }
}
