//! Losses of preference training: computes a loss from the log-probabilities of two answers to one prompt, and for each
//! target the weight under which the cross entropy has the gradient of that loss.
//!
//! The head runs twice over a micro-batch, once for the log-probabilities of its targets and then with these weights
//! for the gradients, so the full logits never exist. Sources: DPO (Rafailov et al., 2023), IPO (Azar et al., 2023),
//! robust DPO (Chowdhury et al., 2024), ORPO (Hong et al., 2024), each as TRL computes it.

pub mod reference;

use burn_tensor::{Int, Tensor, backend::Backend};

/// Assignment of a micro-batch's targets to answers. Documents alternate: the chosen one of a pair, then the rejected one.
#[derive(Clone, Debug)]
pub struct PairTargets<B: Backend> {
    /// The document of each target, `[m]`, ascending from 0.
    pub documents_m: Tensor<B, 1, Int>,
    /// Start of each document's targets, followed by the end of the last, `[2p + 1]`.
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

/// Function from the margin between two answers to a loss.
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

impl PairLossKind {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Sigmoid, Self::Robust, Self::Hinge, Self::Ipo, Self::OddsRatio];
}

/// The training objective of pairs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PairLoss {
    /// The loss over the margin.
    pub kind: PairLossKind,
    /// The scale of the margin, above 0.
    pub beta: f64,
    /// The probability that a label is wrong, in `[0, 0.5)`.
    pub label_smoothing: f64,
}

/// Log-probabilities of the documents of a micro-batch, `[2p]` f32 each.
#[derive(Clone, Debug)]
pub struct PairLogProbs<B: Backend> {
    /// Sums over the targets of each answer.
    pub answers: Tensor<B, 1>,
    /// Sums over all targets of each document; `None`: the same as `answers`.
    pub all: Option<Tensor<B, 1>>,
    /// Sums over the answers under the reference model; `None` for a loss without one.
    pub reference: Option<Tensor<B, 1>>,
}

/// Options of the weights that [`super::LossOps::pair_loss`] gives to targets.
#[derive(Clone, Debug)]
pub struct PairWeights<B: Backend> {
    /// Weight of the cross entropy of each target in a chosen document, in addition to the pair loss; 0: none.
    pub nll_factor: f64,
    /// A factor of all weights, `[1]` f32: the loss scale; `None`: 1.
    pub factor: Option<Tensor<B, 1>>,
}

/// Number of values in [`PairResult::numbers`].
pub const PAIR_NUMBERS: usize = 7;

/// Result of [`super::LossOps::pair_loss`].
#[derive(Clone, Debug)]
pub struct PairResult<B: Backend> {
    /// Weight of each target's cross entropy, `[m]` f32, under which [`super::LossOps::linear_cross_entropy`] returns the gradients of this loss.
    pub weights_m: Tensor<B, 1>,
    /// Sums over the pairs, `[7]` f32: the loss of the margin; the cross entropy of all targets in chosen documents;
    /// the rewards of chosen and of rejected answers; the number of pairs whose chosen answer has the higher reward;
    /// and the log-probabilities of chosen and of rejected answers (per target for [`PairLossKind::OddsRatio`]).
    pub numbers: Tensor<B, 1>,
}

impl<B: Backend> PairTargets<B> {
    /// Uploads targets in document order: `documents[d]` has one entry per target of document `d`, true if it belongs to the answer.
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
