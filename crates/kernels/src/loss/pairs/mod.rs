//! Losses of preference training: from the log-probabilities of two answers to one prompt to a loss, and to the weight of each target with
//! which the cross entropy has the gradient of that loss.
//!
//! The head runs twice over a micro-batch: once for the log-probabilities of its targets, then with these weights for the gradients. So the
//! full logits never exist. Sources: DPO (Rafailov et al., 2023), IPO (Azar et al., 2023), robust DPO (Chowdhury et al., 2024), ORPO
//! (Hong et al., 2024), each as TRL computes it.
//! Trade-off: nothing of the first pass over the head is kept for the second.

pub mod reference;

use burn_tensor::{Int, Tensor, backend::Backend};

/// Which targets of a micro-batch belong to which answer. Documents alternate: the chosen one of a pair, then the rejected one.
#[derive(Clone, Debug)]
pub struct PairTargets<B: Backend> {
    /// The document of each target, `[m]`, ascending from 0.
    pub documents_m: Tensor<B, 1, Int>,
    /// Where the targets of each document begin, and their end, `[2p + 1]`.
    pub begins: Tensor<B, 1, Int>,
    /// 1 where a target belongs to an answer, 0 where it belongs to a prompt, `[m]` f32; `None`: all belong to answers.
    pub answers_m: Option<Tensor<B, 1>>,
    /// Targets of each answer, `[2p]` f32, at least 1.
    pub answer_counts: Tensor<B, 1>,
    /// `p`.
    pub pairs: usize,
    /// `m`.
    pub count: usize,
}

/// How the margin between two answers becomes a loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PairLossKind {
    /// DPO: `-(1 - s) log sigmoid(beta x) - s log sigmoid(-beta x)` of the margin `x` of the log ratios to the reference, with label
    /// smoothing `s`.
    Sigmoid,
    /// The same, unbiased under flipped labels: `(-(1 - s) log sigmoid(beta x) + s log sigmoid(-beta x)) / (1 - 2 s)`.
    Robust,
    /// `max(0, 1 - beta x)`.
    Hinge,
    /// `(x - 1 / (2 beta))^2`, with log ratios per target.
    Ipo,
    /// ORPO: `-beta log sigmoid` of the logarithm of the odds ratio, with log-probabilities per target; no reference.
    OddsRatio,
}

/// What a pair is trained for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PairLoss {
    /// The loss of the margin.
    pub kind: PairLossKind,
    /// Its scale, above 0.
    pub beta: f64,
    /// The probability that a label is wrong, 0 or more and below 0.5.
    pub label_smoothing: f64,
}

/// Log-probabilities of the documents of a micro-batch, `[2p]` f32 each.
#[derive(Clone, Debug)]
pub struct PairLogProbs<B: Backend> {
    /// Sums over the targets of each answer.
    pub answers: Tensor<B, 1>,
    /// Sums over all targets of each document; `None`: those of the answers.
    pub all: Option<Tensor<B, 1>>,
    /// Those of the answers under the reference; `None` for a loss without one.
    pub reference: Option<Tensor<B, 1>>,
}

/// How losses become weights of targets.
#[derive(Clone, Debug)]
pub struct PairWeights<B: Backend> {
    /// Weight of the cross entropy of each target of a chosen document, in addition to that of the pair; 0: none.
    pub nll_factor: f64,
    /// A factor of all weights, `[1]` f32: the loss scale; `None`: 1.
    pub factor: Option<Tensor<B, 1>>,
}

/// How many numbers [`PairResult::numbers`] has.
pub const PAIR_NUMBERS: usize = 7;

/// Result of [`super::LossOps::pair_loss`].
#[derive(Clone, Debug)]
pub struct PairResult<B: Backend> {
    /// Weight of each target's cross entropy, `[m]` f32: with these [`super::LossOps::linear_cross_entropy`] has the gradients of the loss.
    pub weights_m: Tensor<B, 1>,
    /// Sums over the pairs, `[7]` f32: of the loss of the margin, of the cross entropy of all targets of chosen documents, of the rewards of
    /// chosen and of rejected answers, of the pairs whose chosen answer has the higher reward, and of the log-probabilities of chosen
    /// and of rejected answers (per target for [`PairLossKind::OddsRatio`]).
    pub numbers: Tensor<B, 1>,
}

impl<B: Backend> PairTargets<B> {
    /// Targets in document order: `answers[d]` are those of document `d`, true where a target belongs to the answer.
    ///
    /// # Panics
    /// If documents do not come in pairs, or an answer has no target: the packer keeps pairs together.
    pub fn new(documents: &[Vec<bool>], device: &B::Device) -> Self {
        assert!(documents.len().is_multiple_of(2), "{} documents are no pairs", documents.len());
        let counts: Vec<f32> =
            documents.iter().map(|targets| targets.iter().filter(|&&counts| counts).count() as f32).collect();
        assert!(counts.iter().all(|&count| count > 0.0), "every answer has a target");
        let numbered = (0..).zip(documents);
        let document_of: Vec<i32> =
            numbered.flat_map(|(number, targets)| targets.iter().map(move |_| number)).collect();
        let mut begins = vec![0_i32];
        begins.extend(documents.iter().scan(0, |end, targets| {
            *end += targets.len() as i32;
            Some(*end)
        }));
        let flags: Vec<bool> = documents.concat();
        let is_mixed = flags.contains(&false);
        let flags: Vec<f32> = flags.into_iter().map(|is_answer| if is_answer { 1.0 } else { 0.0 }).collect();
        Self {
            count: document_of.len(),
            documents_m: Tensor::from_ints(document_of.as_slice(), device),
            begins: Tensor::from_ints(begins.as_slice(), device),
            answers_m: is_mixed.then(|| Tensor::from_floats(flags.as_slice(), device)),
            answer_counts: Tensor::from_floats(counts.as_slice(), device),
            pairs: documents.len() / 2,
        }
    }
}
