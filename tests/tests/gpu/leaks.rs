//! Packed documents on a card: changing one changes nothing of its neighbors.
//!
//! Trade-off: one width of heads, with and without a window; other tests compare the rest with the CPU.

use std::collections::BTreeMap;

use firebrick_data::Batch;
use firebrick_kernels::Kernels;
use firebrick_kernels::backends::Cuda;
use firebrick_kernels::backends::cuda::refuse_cudnn;
use firebrick_model::{Decoder, PassOptions};
use firebrick_tests::{TRAINED, host, relative_difference, upload};

use super::{half, has_card, loss_and_gradients, random_model, sequence_of};

/// The loss, its gradients by name, and the logits of each document.
type Results = (f32, BTreeMap<String, Vec<f32>>, Vec<Vec<f32>>);

fn results<B: Kernels>(model: &Decoder<B>, batch: &Batch) -> Results {
    let (loss, gradients) = loss_and_gradients(model, batch, PassOptions::default());
    let logits = host(model.logits(&upload(model, batch)));
    let of_document = |bounds: &[u32]| {
        let [start, end] = [bounds[0], bounds[1]].map(|token| token as usize * model.config.spec.vocab_size);
        logits[start..end].to_vec()
    };
    (loss, gradients, batch.cu_seqlens.windows(2).map(of_document).collect())
}

/// Changes one document at a time. Logits and loss of the others stay the same to the bit; so do the gradients if sums have a fixed order
/// (`to_the_bit`), otherwise they differ no more than those of two runs on the same sequence.
fn assert_no_leak<B: Kernels>(family: &str, lengths: &[usize], to_the_bit: bool) {
    let model = random_model::<B>(family, 64, half(), TRAINED);
    for changed in [0, lengths.len() / 2, lengths.len() - 1] {
        let before = results(&model, &sequence_of(lengths, Some(changed), 0));
        let after = results(&model, &sequence_of(lengths, Some(changed), 91));
        assert_eq!(before.0, after.0, "{family}: loss without document {changed}");
        for (document, (before, after)) in before.2.iter().zip(&after.2).enumerate() {
            let (same, expected) = (before == after, document != changed);
            assert_eq!(same, expected, "{family}: logits of document {document}, {changed} of {lengths:?} was changed");
        }
        assert_eq!(before.1.len(), after.1.len());
        assert!(before.1.values().all(|values| values.iter().any(|&value| value != 0.0)), "there are gradients");
        for (name, values) in &before.1 {
            let difference = relative_difference(&after.1[name], values);
            let allowed = if to_the_bit { 0.0 } else { 1e-2 };
            assert!(
                difference <= allowed,
                "{family}: gradient of {name} moved by {difference:e} with document {changed} of {lengths:?}"
            );
        }
    }
}

/// The flash kernels add in a fixed order. cuDNN's backward does not, once a document is longer than a tile. A window that hides
/// anything always goes to the flash kernels.
#[test]
fn changing_a_document_changes_nothing_of_its_neighbors_on_the_card() {
    if !has_card() {
        return;
    }
    let (few, many) = ([19, 45, 64], [300, 17, 257, 40, 280, 1, 129, 64, 300, 33]);
    for without_cudnn in [true, false] {
        refuse_cudnn(&Default::default(), without_cudnn, without_cudnn);
        for lengths in [&few[..], &many[..]] {
            assert_no_leak::<Cuda>("tiny-llama", lengths, without_cudnn);
            assert_no_leak::<Cuda>("tiny-mistral", lengths, true);
        }
    }
}
