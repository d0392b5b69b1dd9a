//! Pairs of answers: sums over documents, and the loss of the pairs with the weights of their targets. Kernels: `pairs.cu`.
//!
//! Both stay on the device, so that the host does not wait between the two passes over the head.

use burn_tensor::{DType, Tensor};

use crate::backends::cuda::device::{Device, in_section};
use crate::backends::cuda::engine::{BlockArguments, Cuda, MatrixView, PAIR_THREADS, Source, arguments, grid, tensor};
use crate::loss::pairs::{PAIR_NUMBERS, PairLogProbs, PairLoss, PairLossKind, PairResult, PairTargets, PairWeights};

/// Computes [`crate::LossOps::document_sums`].
pub(super) fn document_sums(
    values_m: Tensor<Cuda, 1>,
    targets: &PairTargets<Cuda>,
    of_answers: bool,
) -> Tensor<Cuda, 1> {
    in_section(&values_m.device(), |device| {
        let documents = 2 * targets.pairs;
        let values = device.flat_as(values_m, DType::F32);
        let marks = targets.answers_m.clone().filter(|_| of_answers).map(|marks| device.flat_as(marks, DType::F32));
        let begins = device.int_matrix(targets.begins.clone());
        let sums = device.view_of(device.empty([documents], DType::F32));
        let launch = Source::Pairs.launch(DType::F32, "document_sums", grid(documents, 256), 4 * targets.count);
        let arguments = arguments! {
            sums: rows(&sums), values: rows(&values), marks: address(address(marks.as_ref())), begins: rows(&begins),
        };
        // SAFETY: there is one value and, unless null, one mark per target, one block and one sum per document, and documents + 1 begins,
        // which end at the number of targets.
        unsafe { device.launch(launch, &arguments) };
        tensor(sums.tensor)
    })
}

/// Computes [`crate::LossOps::pair_loss`].
pub(super) fn pair_loss(
    device: &Device,
    log_probs: PairLogProbs<Cuda>,
    targets: &PairTargets<Cuda>,
    loss: PairLoss,
    weights: PairWeights<Cuda>,
) -> PairResult<Cuda> {
    let is_known = log_probs.reference.is_some() || loss.kind == PairLossKind::OddsRatio;
    assert!(is_known, "a loss of log ratios has a reference");
    let flat = |values: Tensor<Cuda, 1>| device.flat_as(values, DType::F32);
    let answers = flat(log_probs.answers);
    let all = log_probs.all.map(flat);
    let reference = log_probs.reference.map(flat);
    let counts = flat(targets.answer_counts.clone());
    let marks = targets.answers_m.clone().map(flat);
    let factor = weights.factor.map(flat);
    let begins = device.int_matrix(targets.begins.clone());
    let weights_m = device.view_of(device.empty([targets.count], DType::F32));
    let numbers = device.view_of(device.empty([PAIR_NUMBERS], DType::F32));
    let launch = Source::Pairs.launch(DType::F32, "pair_loss", grid(1, PAIR_THREADS as u32), 4 * targets.count);
    let arguments = arguments! {
        weights: rows(&weights_m), numbers: rows(&numbers), answers: rows(&answers),
        all: address(all.as_ref().map_or(answers.address, |all| all.address)),
        reference: address(reference.as_ref().map_or(answers.address, |reference| reference.address)),
        counts: rows(&counts), marks: address(address(marks.as_ref())), factor: address(address(factor.as_ref())),
        begins: rows(&begins), pairs: int(targets.pairs), kind: i32(number(loss.kind)), beta: float(loss.beta),
        smoothing: float(loss.label_smoothing), nll_factor: float(weights.nll_factor),
    };
    // SAFETY: log-probabilities and counts have one value per document, marks and weights one per target, documents + 1 begins end at the
    // number of targets, and there are seven numbers.
    unsafe { device.launch(launch, &arguments) };
    PairResult { weights_m: tensor(weights_m.tensor), numbers: tensor(numbers.tensor) }
}

/// Returns the number of a loss in `pairs.cu`.
fn number(kind: PairLossKind) -> i32 {
    match kind {
        PairLossKind::Sigmoid => 0,
        PairLossKind::Robust => 1,
        PairLossKind::Hinge => 2,
        PairLossKind::Ipo => 3,
        PairLossKind::OddsRatio => 4,
    }
}

fn address(values: Option<&MatrixView>) -> u64 {
    values.map_or(0, |values| values.address)
}
