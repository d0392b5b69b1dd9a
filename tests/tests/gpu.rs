//! Whole runs on an NVIDIA card against the same runs on the CPU. Part of the GPU suite (`cargo xtask dist --tests`); without
//! a card each test says so and passes.
#![cfg(feature = "cuda")]

use std::collections::BTreeMap;

use burn_tensor::DType;
use firebrick_data::{Batch, IGNORE_INDEX};
use firebrick_kernels::backend::{Cuda, use_own_attention};
use firebrick_kernels::{GradientMap, Kernels};
use firebrick_model::{BaseStorage, BuildOptions, Llama, LlamaConfig, PassOptions, Recompute};
use firebrick_tests::{every_next_token, finish, fixture, host, recipe, relative_difference, step_losses};
use tempfile::tempdir;

#[expect(clippy::print_stderr, reason = "a test that is not run must be seen")]
fn has_card() -> bool {
    match firebrick_kernels::probe::cuda() {
        Ok(()) => true,
        Err(reason) => {
            eprintln!("SKIPPED: {reason}");
            false
        }
    }
}

fn losses(backend: &str, changes: &[&str]) -> Vec<f64> {
    let output = tempdir().unwrap();
    let backend = format!("backend={backend}");
    let steps =
        [backend.as_str(), "train.steps=20", "train.warmup_steps=2", "train.learning_rate=1e-3", "data.eval_fraction="];
    let summary = finish(recipe(output.path(), &[&steps, changes].concat()), false);
    assert_eq!(summary.steps, 20);
    step_losses(&output.path().join("run"))
}

/// Every step's loss on the card is the CPU's, to a hundredth.
fn assert_agrees(changes: &[&str]) {
    let (ours, expected) = (losses("cuda", changes), losses("flex", changes));
    assert_eq!((ours.len(), expected.len()), (20, 20));
    for (step, (ours, expected)) in ours.iter().zip(&expected).enumerate() {
        assert!((ours - expected).abs() < 1e-2, "{changes:?}, step {}: {ours} on cuda, {expected} on flex", step + 1);
    }
}

#[test]
fn twenty_steps_of_qlora_in_bf16_have_the_losses_of_the_cpu() {
    if has_card() {
        assert_agrees(&["train.bf16=true", "train.optimizer=paged_adamw_8bit"]);
    }
}

#[test]
fn twenty_steps_of_qlora_in_f32_have_the_losses_of_the_cpu() {
    if has_card() {
        assert_agrees(&["train.bf16=false"]);
    }
}

#[test]
fn recomputation_and_offloading_change_no_loss() {
    if has_card() {
        let full = losses("cuda", &["train.recompute=full", "train.offload=true"]);
        for changes in [
            &["train.recompute=full", "train.offload=false"][..],
            &["train.recompute=selective"],
            &["train.recompute=none"],
        ] {
            let other = losses("cuda", changes);
            let apart = full.iter().zip(&other).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(apart < 1e-3, "{changes:?} differs by {apart}");
        }
    }
}

/// A small model of random weights with heads as wide as the card's attention takes them; every weight trains.
fn random_model<B: Kernels>(dtype: DType, longest: usize) -> Llama<B> {
    let mut config = LlamaConfig::read(&fixture("tiny-llama")).expect("the model has a readable config");
    (config.hidden_size, config.head_dim, config.intermediate_size) = (128, 64, 192);
    let build = BuildOptions {
        storage: BaseStorage::Trained,
        lora: None,
        seed: 3,
        compute_dtype: dtype,
        max_positions: longest,
    };
    Llama::random(config, &build, &B::Device::default()).expect("there is no adapter that may not fit")
}

/// One row of documents; every next token is trained but in the document `changed`, whose tokens `shift` makes others.
fn row_of(lengths: &[usize], changed: usize, shift: u32) -> Batch {
    let mut row = Batch {
        rows: 1,
        row_len: 0,
        input_ids: vec![],
        targets: vec![],
        positions: vec![],
        cu_seqlens: vec![0],
        padding: 0,
    };
    for (document, &length) in lengths.iter().enumerate() {
        let own = if document == changed { shift } else { 0 };
        let ids: Vec<u32> = (0..length as u32).map(|index| (index * 37 + 11 * document as u32 + own) % 256).collect();
        let mut part = every_next_token(&ids, length);
        if document == changed {
            part.targets.fill(IGNORE_INDEX);
        }
        row.input_ids.extend(part.input_ids);
        row.targets.extend(part.targets);
        row.positions.extend(part.positions);
        row.row_len += length;
        row.cu_seqlens.push(row.row_len as u32);
    }
    row
}

/// The loss, its gradients by name, and the logits of each document.
type Seen = (Vec<f32>, BTreeMap<String, Vec<f32>>, Vec<Vec<f32>>);

fn everything<B: Kernels>(model: &Llama<B>, batch: &Batch) -> Seen {
    let on_device = model.upload(&batch.input_ids, &batch.targets, &batch.positions, &batch.cu_seqlens);
    let mut gradients = GradientMap::default();
    let options = PassOptions { recompute: Recompute::Full, offload: false, gradient_scale: 0.1, chunk_tokens: 64 };
    let loss = host(model.loss_and_gradients(&on_device, options, &mut gradients));
    let gradients = gradients.iter().map(|(name, values)| (name.to_string(), host(values.clone()))).collect();
    let logits = host(model.logits(&on_device));
    let of_document = |bounds: &[u32]| {
        let [start, end] = [bounds[0], bounds[1]].map(|token| token as usize * model.config.vocab_size);
        logits[start..end].to_vec()
    };
    (loss, gradients, batch.cu_seqlens.windows(2).map(of_document).collect())
}

/// Changes one document at a time. What the others' logits and loss are stays to the bit; so do the gradients where sums have
/// a fixed order (`to_the_bit`), elsewhere they stay as near as two runs on the same row are.
fn assert_no_leak<B: Kernels>(dtype: DType, lengths: &[usize], to_the_bit: bool) {
    let model = random_model::<B>(dtype, lengths.iter().copied().max().expect("there are documents"));
    for changed in [0, lengths.len() / 2, lengths.len() - 1] {
        let before = everything(&model, &row_of(lengths, changed, 0));
        let after = everything(&model, &row_of(lengths, changed, 91));
        assert_eq!(before.0, after.0, "loss without document {changed}");
        for (document, (before, after)) in before.2.iter().zip(&after.2).enumerate() {
            let same = before == after;
            assert_eq!(
                same,
                document != changed,
                "logits of document {document}, {changed} of {lengths:?} was changed"
            );
        }
        assert_eq!(before.1.len(), after.1.len());
        assert!(before.1.values().all(|values| values.iter().any(|&value| value != 0.0)), "there are gradients");
        for (name, values) in &before.1 {
            let apart = relative_difference(&after.1[name], values);
            let allowed = if to_the_bit { 0.0 } else { 1e-2 };
            assert!(apart <= allowed, "gradient of {name} moved by {apart:e} with document {changed} of {lengths:?}");
        }
    }
}

/// Of the card's own attention all is fixed. cuDNN's backward adds in no fixed order once a document is longer than a tile.
#[test]
fn changing_a_document_changes_nothing_of_its_neighbours_on_the_card() {
    if !has_card() {
        return;
    }
    let (few, many) = ([19, 45, 64], [300, 17, 257, 40, 280, 1, 129, 64, 300, 33]);
    for own in [true, false] {
        use_own_attention(&Default::default(), own);
        for lengths in [&few[..], &many[..]] {
            assert_no_leak::<Cuda>(DType::BF16, lengths, own);
        }
    }
}
