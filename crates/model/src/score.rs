//! Evaluation of a micro-batch: the loss without gradients, and the number of targets that the model would have chosen.
//!
//! Both come from the same logits, for a bounded number of rows at a time, in one pass over the head.

use burn_tensor::Tensor;
use firebrick_kernels::{CrossEntropy, CrossEntropyOptions, Kernels};

use crate::decoder::{Decoder, MicroBatch};

/// Result of [`Decoder::score`].
#[derive(Clone, Debug)]
pub struct Score<B: Kernels> {
    /// Sum of the cross entropies of the targets, `[1]` f32.
    pub loss_sum: Tensor<B, 1>,
    /// Number of targets whose logit is the largest, `[1]` f32.
    pub correct: Tensor<B, 1>,
}

impl<B: Kernels> Decoder<B> {
    /// Computes the sum of the cross entropies of the targets, `[1]`, without gradients.
    pub fn loss_only(&self, batch: &MicroBatch<B>, chunk_tokens: usize) -> Tensor<B, 1> {
        self.evaluate(batch, chunk_tokens, false).loss_sum
    }

    /// Computes [`Decoder::loss_only`], and the number of targets that the model would have chosen.
    ///
    /// # Panics
    /// If `chunk_tokens` is 0.
    pub fn score(&self, batch: &MicroBatch<B>, chunk_tokens: usize) -> Score<B> {
        let CrossEntropy { loss_sum, correct, .. } = self.evaluate(batch, chunk_tokens, true);
        Score { loss_sum, correct: correct.expect("the count was requested") }
    }

    fn evaluate(&self, batch: &MicroBatch<B>, chunk_tokens: usize, correct: bool) -> CrossEntropy<B> {
        let options = CrossEntropyOptions { correct, ..self.without_gradients(chunk_tokens, 1.0) };
        B::section(&self.device, || {
            B::linear_cross_entropy(self.hidden(batch, true), &self.head(), &batch.targets, options)
        })
    }
}

#[cfg(test)]
mod tests {
    use firebrick_kernels::BaseStorage;
    use firebrick_kernels::backends::Flex;

    use super::*;
    use crate::test_config::{build_options, tiny};

    #[test]
    fn without_targets_nothing_is_scored() {
        let options = build_options(BaseStorage::Trained, 8);
        let model = Decoder::<Flex>::random(tiny(&[]).unwrap(), &options, None, &Default::default()).unwrap();
        let score = model.score(&model.upload(&[1, 2], &[-100, -100], &[0, 1], &[0, 2]).unwrap(), 4);
        assert_eq!((score.loss_sum.into_scalar(), score.correct.into_scalar()), (0.0, 0.0));
    }
}
