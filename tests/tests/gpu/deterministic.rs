//! Runs with `train.deterministic`: two of a recipe, and one that was interrupted, have the same bytes.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use burn_tensor::DType;
use firebrick_kernels::backends::Cuda;
use firebrick_kernels::{RunShape, Session};
use firebrick_model::PassOptions;
use firebrick_tests::{
    NEW, NEWEST, NF4, TRAINED, finish, fixture, one_step, packed, recipe, snapshot, step_losses, trainer_of,
};
use tempfile::tempdir;

use super::gradients::fill_adapters;
use super::{compute_half, half, has_card, has_fp8, ids, random_model};

const FULL: [&str; 3] = ["bnb_4bit=", "lora=", "mode=full"];
const STEPS: usize = 6;
/// Runs that are compared; sums without a fixed order come out alike now and then.
const RUNS: usize = 4;

/// Returns weights, optimizer state and results of a run.
fn tensors(run: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = snapshot(run);
    files.retain(|path, _| path.extension().is_some_and(|extension| extension == "safetensors"));
    files
}

/// Asserts that two runs with these keys, and one of three parts, end with the same bytes and have the same losses.
fn assert_repeats(changes: &[&str]) {
    let keys = ["backend=cuda", "train.deterministic=true", "train.steps=4", "eval.every_steps=2"];
    let folders = [(); 3].map(|()| tempdir().unwrap());
    let [first, second, parts] = folders.each_ref().map(|folder| recipe(folder.path(), &[&keys, changes].concat()));
    finish(first, NEW);
    finish(second, NEW);
    assert_eq!([one_step(parts.clone(), NEW), one_step(parts.clone(), NEWEST)], [1, 2]);
    finish(parts, NEWEST);
    let [first, second, parts] = folders.each_ref().map(|folder| folder.path().join("run"));
    let expected = tensors(&first);
    assert!(expected.keys().any(|path| path.ends_with("step-4/optimizer.safetensors")), "{changes:?}");
    for (path, bytes) in expected {
        assert!(fs::read(second.join(&path)).unwrap() == bytes, "{changes:?}: {} of two runs", path.display());
        assert!(fs::read(parts.join(&path)).unwrap() == bytes, "{changes:?}: {} of a resumed run", path.display());
    }
    assert_eq!(step_losses(&first), step_losses(&second), "{changes:?}");
    assert_eq!(step_losses(&first), step_losses(&parts), "{changes:?}");
}

#[test]
fn two_runs_and_a_resumed_one_end_with_the_same_bytes() {
    if !has_card() {
        return;
    }
    let half = compute_half();
    assert_repeats(&[half, "pack=true"]);
    assert_repeats(&[half, "pack=false", "train.optimizer=paged_adamw_8bit", "lora.r=64", "lora.dropout=0.1"]);
    assert_repeats(&["compute=float32", "pack=true"]);
    assert_repeats(&[&FULL[..], &[half, "pack=true"]].concat());
}

#[test]
fn two_runs_of_experts_and_a_resumed_one_end_with_the_same_bytes() {
    if !has_card() {
        return;
    }
    let model = format!("model='{}'", fixture("tiny-qwen3-moe").display());
    let (model, half, balanced) = (model.as_str(), compute_half(), "train.router_aux_loss=true");
    let experts = "lora.target='.*(q_proj|gate_proj|up_proj|down_proj)'";
    assert_repeats(&[model, half, experts, balanced]);
    assert_repeats(&[&FULL[..], &[model, half, balanced]].concat());
}

#[test]
fn two_runs_in_fp8_and_a_resumed_one_end_with_the_same_bytes() {
    if has_card() && has_fp8() {
        assert_repeats(&["compute=fp8", "pack=true"]);
        assert_repeats(&[&FULL[..], &["compute=fp8", "pack=true"]].concat());
    }
}

/// Documents that are long enough for several blocks to add to each gradient of a query: of one length, which cuDNN takes, and of several.
#[test]
fn steps_over_long_documents_have_the_same_losses_each_time() {
    if !has_card() {
        return;
    }
    let device = Default::default();
    Cuda::open(&device, &RunShape { deterministic: true, ..RunShape::default() });
    for (storage, dtype) in [(NF4, half()), (TRAINED, half()), (TRAINED, DType::F32)] {
        for lengths in [vec![512; 8], vec![512, 390, 512, 401, 77]] {
            let documents: Vec<Vec<u32>> =
                lengths.iter().enumerate().map(|(number, &length)| ids(number, length, 7)).collect();
            let batch = [packed(&documents.iter().map(Vec::as_slice).collect::<Vec<_>>())];
            let losses = || {
                let mut model = random_model::<Cuda>("tiny-llama", 64, dtype, storage);
                fill_adapters(&mut model);
                let mut trainer = trainer_of(model, PassOptions::default());
                let mut step = |_| trainer.step(&batch).expect("one rank reaches itself").read().loss.to_bits();
                (0..STEPS).map(&mut step).collect::<Vec<u32>>()
            };
            let first = losses();
            for run in 1..RUNS {
                assert_eq!(losses(), first, "{storage:?} {dtype:?} {lengths:?}, run {run}");
            }
        }
    }
    Cuda::open(&device, &RunShape::default());
}
