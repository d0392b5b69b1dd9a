//! The losses of a run that transformers recorded (`tests/golden/make_curve_golden.py`), and those of the same run here.
//!
//! Trade-off: a file of the weights would be large, so they follow from the names of tensors, by a rule that is written twice, there and here.

use std::fs;
use std::path::Path;

use burn_tensor::DType;
use firebrick_kernels::Kernels;
use firebrick_model::{BuildOptions, Decoder, HfFolder, read_config};
use firebrick_optim::{Optimizer, OptimizerConfig, OptimizerKind, Schedule, ScheduleKind, TrainedWeights};
use firebrick_parallel::Ranks;
use firebrick_trainer::run::step::{StepSettings, Trainer};
use safetensors::Dtype;
use safetensors::tensor::{TensorView, serialize_to_file};

use crate::{Golden, TRAINED, golden_file, packed};

/// Documents of a step.
const DOCUMENTS: usize = 4;

/// Trains the model of a recorded run whole and in f32, two documents in a micro-batch; returns the losses of its steps and the recorded ones. The
/// model's files go to `folder`.
pub fn loss_curves<B: Kernels>(golden: &str, folder: &Path) -> [Vec<f32>; 2] {
    let recorded = Golden::open(golden);
    let tokens: Vec<u32> = recorded.u8s("tokens").into_iter().map(u32::from).collect();
    let mut rest = tokens.as_slice();
    let document = |length: u32| {
        let (document, after) = rest.split_at(length as usize);
        rest = after;
        document
    };
    let documents: Vec<&[u32]> = recorded.ids("lengths").into_iter().map(document).collect();
    let longest = documents.iter().map(|document| document.len()).max().expect("the run has documents");
    write_model(golden, folder);
    let mut trainer = trainer::<B>(folder, longest, f64::from(recorded.f32s("learning_rate")[0]));
    let step = |documents: &[&[u32]]| {
        let batches: Vec<_> = documents.chunks(DOCUMENTS / 2).map(packed).collect();
        trainer.step(&batches).expect("one rank reaches itself").read().loss
    };
    [documents.chunks(DOCUMENTS).map(step).collect(), recorded.f32s("losses")]
}

fn trainer<B: Kernels>(folder: &Path, positions: usize, rate: f64) -> Trainer<B> {
    let (config, weights) =
        (read_config(folder).expect("it was written"), HfFolder::open(folder).expect("it was written"));
    let options = BuildOptions::new(TRAINED, DType::F32, positions);
    let model = Decoder::load(&weights, config, &options, &B::Device::default(), &mut |_| ()).expect("it loads");
    Trainer {
        model,
        optimizer: Optimizer::new(OptimizerConfig {
            kind: OptimizerKind::AdamW,
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-8,
            weight_decay: 0.01,
            weights: TrainedWeights::default(),
            max_grad_norm: Some(1.0),
        }),
        schedule: Schedule { kind: ScheduleKind::Constant, peak: rate, lowest: 0.0, warmup_steps: 0, total_steps: 100 },
        ranks: Ranks::single(),
        settings: StepSettings { loss_chunk_tokens: 64, ..StepSettings::default() },
    }
}

/// Writes the model that a recorded run starts with.
fn write_model(golden: &str, folder: &Path) {
    fs::copy(golden_file(&format!("{golden}.json")), folder.join("config.json")).expect("the run has a config");
    let tensors = read_config(folder).expect("the config is supported").spec.tensors();
    let bytes = |name: &str, shape: &[usize]| values(name, shape).flat_map(f32::to_le_bytes).collect();
    let bytes: Vec<Vec<u8>> = tensors.iter().map(|tensor| bytes(&tensor.name, &tensor.shape)).collect();
    let views = tensors.iter().zip(&bytes).map(|(tensor, bytes)| {
        let view = TensorView::new(Dtype::F32, tensor.shape.clone(), bytes).expect("the shape has as many values");
        (tensor.name.as_str(), view)
    });
    serialize_to_file(views, None, &folder.join("model.safetensors")).expect("it is written");
}

/// Iterates over the values of a tensor: the hash of each place from -1 to 1, times the root of 3 over the inputs of a matrix; in a vector a quarter of
/// it around 1, and in a norm of queries that times the root of 8 over the width of a head.
fn values(name: &str, shape: &[usize]) -> impl Iterator<Item = f32> {
    let seed = name.bytes().fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    let is_vector = shape.len() == 1;
    let factor = match *shape {
        [width] if name.ends_with("q_norm.weight") => (8.0 / width as f32).sqrt(),
        [_] => 1.0,
        [_, inputs] => (3.0 / inputs as f32).sqrt(),
        _ => panic!("{name} is a vector or a matrix"),
    };
    let count: usize = shape.iter().product();
    (0..count as u32).map(move |index| {
        let bits = mixed(index.wrapping_mul(0x9e37_79b9).wrapping_add(seed));
        let uniform = (bits >> 8) as f32 / 8_388_608.0 - 1.0;
        factor * if is_vector { 1.0 + 0.25 * uniform } else { uniform }
    })
}

/// Mixes bits as the end of MurmurHash3 does.
fn mixed(mut bits: u32) -> u32 {
    for (shift, factor) in [(16, 0x85eb_ca6b), (13, 0xc2b2_ae35)] {
        bits = (bits ^ (bits >> shift)).wrapping_mul(factor);
    }
    bits ^ (bits >> 16)
}
