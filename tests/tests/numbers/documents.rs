//! Documents of a packed sequence do not see each other, forward or backward.

use std::collections::BTreeMap;

use burn_tensor::DType;
use firebrick_data::{Batch, IGNORE_INDEX};
use firebrick_kernels::Kernels;
use firebrick_model::{BuildOptions, Decoder, HfFolder, ModelConfig, PassOptions, Recompute};
use firebrick_tests::{
    FROZEN, Golden, MIXTURES, TRAINED, every_next_token, families, fixture, host, in_turn, largest_difference, load,
    loss_and_gradients, on_every_backend, packed, relative_difference, upload,
};

use crate::backward::POLICIES;

/// Start of the second document in the golden sequences.
const SECOND: usize = 19;

fn mean_loss<B: Kernels>(model: &Decoder<B>, batch: &Batch) -> f32 {
    host(model.loss_only(&upload(model, batch), 16))[0] / batch.loss_tokens() as f32
}

fn packed_equals_separate<B: Kernels>() {
    for family in families::<B>() {
        let golden = Golden::open(&format!("{family}-packed"));
        let model = load::<B>(family, None, FROZEN);
        let documents = [golden.ids("doc0.input_ids"), golden.ids("doc1.input_ids")];
        let together = packed(&[&documents[0], &documents[1]]);
        assert_eq!(together.input_ids, golden.ids("packed.input_ids"));
        assert_eq!(together.positions, golden.ids("packed.position_ids"));
        assert_eq!(together.cu_seqlens, golden.ids("packed.cu_seqlens"));

        let alone = [golden.f32s("doc0.logits"), golden.f32s("doc1.logits")].concat();
        let difference = largest_difference(&host(model.logits(&upload(&model, &together))), &alone);
        assert!(difference < 2e-4, "{family}: a logit differs by {difference:e}");
        let loss_agrees = |batch: &Batch, key: &str| {
            let (ours, expected) = (mean_loss(&model, batch), golden.f32s(key)[0]);
            assert!((ours - expected).abs() < 1e-5, "{family}, {key}: {ours} {expected}");
        };
        loss_agrees(&together, "packed.loss");
        for (number, document) in documents.iter().enumerate() {
            loss_agrees(&every_next_token(document, document.len()), &format!("doc{number}.loss"));
        }
    }
}

on_every_backend!(packed_documents_of_every_family_have_the_logits_and_losses_they_have_alone, packed_equals_separate);

/// Families whose layers have a state, in rows of documents that are as short as one token.
const OF_STATES: [&str; 4] = ["tiny-lfm2", "tiny-lfm3", "tiny-olmo-hybrid", "tiny-qwen3-5"];

/// Loads a model all of whose weights train, for so many positions.
fn whole<B: Kernels>(family: &str, positions: usize) -> Decoder<B> {
    let folder = fixture(family);
    let config = ModelConfig::read(&folder).expect("the model has a readable config");
    let weights = HfFolder::open(&folder).expect("the model has weights");
    let options = BuildOptions::new(TRAINED, DType::F32, positions);
    Decoder::load(&weights, config, &options, &B::Device::default(), &mut |_| ()).expect("it loads")
}

fn short_documents<B: Kernels>() {
    for (turn, family) in OF_STATES.into_iter().enumerate() {
        let golden = Golden::open(&format!("{family}-documents"));
        let (ids, ends) = (golden.ids("input_ids"), golden.ids("cu_seqlens"));
        let documents: Vec<&[u32]> = ends.windows(2).map(|pair| &ids[pair[0] as usize..pair[1] as usize]).collect();
        let batch = packed(&documents);
        let mut model = whole::<B>(family, ids.len());
        let assert_logits = |model: &Decoder<B>| {
            let difference = largest_difference(&host(model.logits(&upload(model, &batch))), &golden.f32s("logits"));
            assert!(difference < 2e-4, "{family}: a logit differs by {difference:e}");
        };
        assert_logits(&model);
        // At last in tiles that begin inside of documents, some after their first token.
        let of_policies = in_turn::<B, _>(&POLICIES, turn).into_iter().map(|recompute| (recompute, usize::MAX / 2));
        for (recompute, tokens) in of_policies.chain([(Recompute::Full, ids.len() / 3), (Recompute::Full, 8)]) {
            model.tile_tokens = tokens;
            let pass = PassOptions { recompute, ..PassOptions::default() };
            let (loss, gradients) = loss_and_gradients(&model, &batch, pass);
            let (loss, expected) = (loss / batch.loss_tokens() as f32, golden.f32s("loss")[0]);
            assert!((loss - expected).abs() < 1e-5, "{family}, {recompute:?}: loss {loss}, not {expected}");
            assert_eq!(gradients.keys().cloned().collect::<Vec<_>>(), golden.keys("grad."), "{family}");
            for (name, gradient) in &gradients {
                let difference = relative_difference(gradient, &golden.f32s(&format!("grad.{name}")));
                assert!(difference < 1e-3, "{family}, {recompute:?}, {name}: {difference:e}");
            }
        }
        assert_logits(&model);
    }
}

on_every_backend!(documents_of_a_token_train_as_by_themselves, short_documents);

/// The results of a batch: the loss of the document that counts, its gradients by name, the logits of both documents.
struct Results {
    loss: f32,
    gradients: BTreeMap<String, Vec<f32>>,
    logits: [Vec<f32>; 2],
}

fn results<B: Kernels>(model: &Decoder<B>, batch: &Batch) -> Results {
    let (loss, gradients) = loss_and_gradients(model, batch, PassOptions::default());
    let mut first = host(model.logits(&upload(model, batch)));
    let second = first.split_off(SECOND * model.config.spec.vocab_size);
    Results { loss, gradients, logits: [first, second] }
}

/// Changes one document of the sequence, then the other; on other backends than flex one of them, in turn. Every result of the unchanged one must stay
/// the same to the bit. Mixtures are excluded: an expert's GEMMs read the rows of all documents together, and their number decides the order of their
/// sums. Another test covers mixtures: packed documents have the same results as alone.
fn no_leak<B: Kernels>() {
    for (turn, family) in families::<B>().into_iter().filter(|family| !MIXTURES.contains(family)).enumerate() {
        let ids = Golden::open(&format!("{family}-packed")).ids("packed.input_ids");
        let model = load::<B>(family, Some(&format!("{family}-lora")), FROZEN);
        let spans = [0..SECOND, SECOND..ids.len()];
        for changed in in_turn::<B, _>(&[0, 1], turn) {
            let batch_of = |ids: &[u32]| {
                let mut batch = packed(&[&ids[..SECOND], &ids[SECOND..]]);
                batch.targets[spans[changed].clone()].fill(IGNORE_INDEX);
                batch
            };
            let mut other = ids.clone();
            other[spans[changed].clone()].iter_mut().for_each(|id| *id = (*id * 7 + 13) % 256);
            let before = results(&model, &batch_of(&ids));
            let after = results(&model, &batch_of(&other));
            let unchanged = 1 - changed;
            assert_eq!(before.logits[unchanged], after.logits[unchanged], "{family}: logits of document {unchanged}");
            assert_ne!(before.logits[changed], after.logits[changed], "{family}: the change shows in its document");
            assert_eq!(before.loss, after.loss, "{family}: loss of document {unchanged}");
            assert_eq!(before.gradients, after.gradients, "{family}: gradients of document {unchanged}");
        }
    }
}

on_every_backend!(a_document_changes_no_bit_of_its_neighbor, no_leak);
