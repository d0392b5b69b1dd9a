//! Whole models: a QLoRA training step through the run's own trainer, and generation over the cache.
//!
//! The first step of a small model must have the loss and the gradient norm that flex computes from the same weights and tokens; flex itself must
//! have the loss of random weights. A generated token must have the largest logit of a pass without the cache.
//! Trade-off: weights are random, since their values do not change the work; a step ends when its loss is on the host.

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;

use firebrick_arch::ModelConfig;
use firebrick_data::Batch;
use firebrick_hwprofile::HardwareProfile;
use firebrick_kernels::backends::Flex;
use firebrick_kernels::{BackendKind, BaseStorage, Kernels, step_work};
use firebrick_model::{BatchLimits, BuildOptions, Decoder, GenerateOptions, Sampler};
use firebrick_parallel::Ranks;
use firebrick_precision::difference::worst;
use firebrick_precision::{FloatType, Format};
use firebrick_train::bench::Synthetic;
use firebrick_trainer::RunError;
use firebrick_trainer::config::RunConfig;
use firebrick_trainer::plan::{DataShape, Plan, PlanInputs, PlanRequest};
use firebrick_trainer::run::assemble::{self, WeightSource};
use firebrick_trainer::run::device::dtype_of;
use firebrick_trainer::run::step::Trainer;
use toml::Value;

use super::{Scale, Setting, tolerance};
use crate::case::{Case, Comparison, Output, Prepared, axis, key, to_floats, work};
use crate::models::{LLAMA_1B, LLAMA_8B, Model, SMOLLM2_135M, SMOLLM2_360M};

/// The recipe of every step, over data that is never opened.
const RECIPE: &str = r#"
name = "bench"
seed = 0
base = "nf4_double_quant"
pack = true
[lora]
r = 16
alpha = 32
[data]
path = "synthetic tokens"
format = "text"
[train]
steps = 1
schedule = "constant"
warmup_steps = 0
recompute = "selective"
optimizer = "adamw_8bit"
loss_chunk_tokens = 1024
zero_stage = 0
[eval]
max_new_tokens = 1
"#;

/// The model, the rows and the row length of the step on which all backends must agree.
const SMALL: (Model, [usize; 2]) = (SMOLLM2_135M.first_layers(2), [1, 64]);

/// The first step of the small model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct StepReference {
    /// Mean cross entropy.
    loss: f32,
    /// Global norm of the gradients.
    grad_norm: f32,
}

impl StepReference {
    /// Computes the reference of the small step with flex.
    pub(crate) fn compute() -> Result<Self, RunError> {
        first_step::<Flex>(BackendKind::Flex)
    }
}

pub(super) fn cases<B: Kernels>(setting: &Setting<B>) -> Vec<Case<B>> {
    let short = |model: Model| model.first_layers(4);
    let steps: Vec<(Model, [usize; 2])> = match (setting.scale, setting.quick) {
        (Scale::Small, true) => vec![(short(SMOLLM2_135M), [1, 128])],
        (Scale::Small, false) if setting.kind == BackendKind::Wgpu => vec![(short(SMOLLM2_135M), [1, 128])],
        (Scale::Small, false) => {
            vec![(short(SMOLLM2_135M), [1, 256]), (SMOLLM2_135M, [1, 256]), (SMOLLM2_360M, [1, 256])]
        }
        (Scale::Medium, true) => vec![(SMOLLM2_135M, [1, 256])],
        (Scale::Medium, false) => vec![(SMOLLM2_135M, [1, 512]), (SMOLLM2_360M, [1, 512])],
        (Scale::Large, true) => vec![(SMOLLM2_135M, [4, 2048]), (SMOLLM2_360M, [4, 2048])],
        (Scale::Large, false) => vec![
            (SMOLLM2_135M, [4, 2048]),
            (SMOLLM2_360M, [4, 2048]),
            (LLAMA_1B, [4, 2048]),
            (short(LLAMA_8B), [2, 4096]),
        ],
    };
    let generated = if setting.scale == Scale::Small { short(SMOLLM2_135M) } else { SMOLLM2_135M };
    let mut cases: Vec<_> = steps.into_iter().map(|(model, size)| step(setting, model, size)).collect();
    cases.insert(1, generation(setting, generated));
    cases
}

fn step<B: Kernels>(setting: &Setting<B>, model: Model, [rows, length]: [usize; 2]) -> Case<B> {
    let (kind, device, reference) = (setting.kind, setting.device.clone(), setting.reference);
    let (dtype, format) = setting.main_format();
    let count = rows * length;
    let work = match plan(kind, &model, [rows, length]) {
        Ok((plan, config)) => {
            let exact = step_work(&config.spec, &plan.training, 1, length as f64);
            work(count as f64, "tokens", exact.matmul_flops + exact.fp8_flops + exact.attention_flops, exact.bytes)
        }
        // Forward and backward through frozen weights take 4 operations per parameter and token.
        Err(_) => {
            let parameters = model.parameters() as f64;
            work(count as f64, "tokens", 4.0 * parameters * count as f64, parameters)
        }
    };
    let prepare = move || {
        let mut trainer = trainer::<B>(kind, &model, [rows, length], &device);
        let mut batches = batches(&model, [rows, length]);
        let call = move || {
            let trainer = trainer.as_mut().unwrap_or_else(|error| panic!("{error}"));
            Output::Number(f64::from(loss_of(trainer, &batches.next_batch())))
        };
        let check = move |output: Output<B>| {
            let finite = if output.number().is_finite() { 0.0 } else { f64::INFINITY };
            let mut comparisons = vec![Comparison { what: "loss is finite", error: finite }];
            comparisons.extend(compare(first_step::<B>(kind), reference));
            comparisons
        };
        Prepared::new(call, check)
    };
    Case {
        key: key("step", "qlora_nf4", &model.name(), format, &[("rows", rows), ("length", length)]),
        work,
        axis: axis("model size", model.parameters() as usize),
        tolerance: if reference.is_some() { tolerance(dtype) } else { 2e-2 },
        set_bytes: 0.0,
        prepare: Box::new(prepare),
    }
}

/// Compares the small step with flex's, or with the expected result of random weights.
fn compare(got: Result<StepReference, RunError>, reference: Option<StepReference>) -> Vec<Comparison> {
    let got = got.unwrap_or_else(|error| panic!("{error}"));
    let Some(expected) = reference else {
        let uniform = (SMALL.0.vocab as f32).ln();
        return vec![Comparison::of("loss of random weights", &[got.loss], &[uniform])];
    };
    vec![
        Comparison::of("loss of the small model", &[got.loss], &[expected.loss]),
        Comparison::of("gradient norm of the small model", &[got.grad_norm], &[expected.grad_norm]),
    ]
}

fn first_step<B: Kernels>(kind: BackendKind) -> Result<StepReference, RunError> {
    let (model, size) = SMALL;
    let mut trainer = trainer::<B>(kind, &model, size, &B::device_of(0))?;
    let numbers = trainer.step(&[batches(&model, size).next_batch()])?.read();
    Ok(StepReference { loss: numbers.loss, grad_norm: numbers.grad_norm })
}

fn loss_of<B: Kernels>(trainer: &mut Trainer<B>, batch: &Batch) -> f32 {
    let outcome = trainer.step(std::slice::from_ref(batch)).unwrap_or_else(|error| panic!("{error}"));
    outcome.read().loss
}

fn batches(model: &Model, [rows, row_len]: [usize; 2]) -> Synthetic {
    Synthetic { rows, row_len, documents: 1, vocab_size: model.vocab, seed: 0 }
}

fn trainer<B: Kernels>(
    kind: BackendKind,
    model: &Model,
    size: [usize; 2],
    device: &B::Device,
) -> Result<Trainer<B>, RunError> {
    let (plan, config) = plan(kind, model, size)?;
    assemble::trainer::<B>(&plan, &config, WeightSource::Seed, Ranks::single(), device, &mut |_| ())
}

/// Plans the recipe for a folder that contains only this model's config.json.
fn plan(kind: BackendKind, model: &Model, [rows, row_len]: [usize; 2]) -> Result<(Plan, ModelConfig), RunError> {
    let failed = |error: std::io::Error| RunError::DeviceFailed {
        operation: "writing a config.json to a temporary folder".to_owned(),
        message: error.to_string(),
        advice: "Set TMPDIR to a folder that can be written.".to_owned(),
    };
    let folder = tempfile::tempdir().map_err(failed)?;
    std::fs::write(folder.path().join("config.json"), model.config_json()).map_err(failed)?;
    let overrides = [
        format!("model={}", Value::String(folder.path().display().to_string())),
        format!("backend={kind}"),
        format!("max_seq_len={row_len}"),
        format!("compute={}", if kind == BackendKind::Cuda { FloatType::Bf16 } else { FloatType::F32 }),
        format!("train.micro_batch_size={rows}"),
    ];
    let config = RunConfig::from_toml(RECIPE, Path::new("bench-matrix"), &overrides)?;
    let data = DataShape {
        rows,
        row_len,
        longest_document: row_len,
        documents_per_row: 1,
        loss_tokens_per_row: row_len,
        has_chats: false,
        report: "random tokens".to_owned(),
    };
    let (model, profile, request) = (model.config(), HardwareProfile::detect(), PlanRequest::default());
    let inputs =
        PlanInputs { config: &config, profile: &profile, model: &model, data: &data, world_size: 1, request: &request };
    Ok((Plan::resolve(inputs)?, model))
}

const PROMPTS: usize = 4;
const PROMPT_TOKENS: usize = 32;

fn generation<B: Kernels>(setting: &Setting<B>, model: Model) -> Case<B> {
    let (device, (dtype, format)) = (setting.device.clone(), setting.main_format());
    let new_tokens = if setting.quick { 8 } else { 32 };
    let count = PROMPTS * new_tokens;
    let parameters = model.parameters() as f64;
    let storage = if dtype == burn_tensor::DType::BF16 { FloatType::Bf16 } else { FloatType::F32 };
    let prepare = move || {
        let decoder = decoder::<B>(&model, storage, &device).unwrap_or_else(|error| panic!("{error}"));
        let decoder = Rc::new(decoder);
        let prompts = batches(&model, [PROMPTS, PROMPT_TOKENS]).next_batch().input_ids;
        let prompts: Vec<Vec<u32>> = prompts.chunks(PROMPT_TOKENS).map(<[u32]>::to_vec).collect();
        let written = Rc::new(RefCell::new(Vec::new()));
        let (first, of_check, keep, model) = (prompts[0].clone(), written.clone(), decoder.clone(), decoder);
        let options = GenerateOptions {
            max_new_tokens: new_tokens,
            stop_tokens: Vec::new(),
            sampler: Sampler::greedy(),
            limits: BatchLimits::NONE,
        };
        let call = move || {
            let texts = model.generate(&prompts, &options).unwrap_or_else(|error| panic!("{error}"));
            let tokens = texts.iter().map(Vec::len).sum::<usize>();
            *written.borrow_mut() = texts;
            Output::Number(tokens as f64)
        };
        let check = move |output: Output<B>| {
            let counted = Comparison::of("number of tokens", &[output.number() as f32], &[count as f32]);
            vec![counted, without_cache(&keep, &first, &of_check.borrow()[0])]
        };
        Prepared::new(call, check)
    };
    Case {
        key: key("generation", "greedy", &model.name(), format, &[("prompts", PROMPTS), ("new_tokens", new_tokens)]),
        work: work(
            count as f64,
            "tokens",
            2.0 * parameters * (count + PROMPTS * PROMPT_TOKENS) as f64,
            parameters * (dtype.size() * new_tokens) as f64,
        ),
        axis: None,
        tolerance: tolerance(dtype),
        set_bytes: 0.0,
        prepare: Box::new(prepare),
    }
}

fn decoder<B: Kernels>(model: &Model, storage: FloatType, device: &B::Device) -> Result<Decoder<B>, RunError> {
    let build = BuildOptions::new(BaseStorage::Frozen(Format::Float(storage)), dtype_of(storage), 512);
    Ok(Decoder::random(model.config(), &build, None, device)?)
}

/// Returns the relative distance of the chosen tokens' logits from the largest ones in a pass over the whole text.
fn without_cache<B: Kernels>(decoder: &Decoder<B>, prompt: &[u32], written: &[u32]) -> Comparison {
    let ids: Vec<u32> = prompt.iter().chain(written).copied().collect();
    let count = ids.len();
    let positions: Vec<u32> = (0..count as u32).collect();
    let batch = decoder.upload(&ids, &vec![0; count], &positions, &[0, count as u32]);
    let batch = batch.expect("prompt and text are tokens of the model");
    let logits = decoder.logits(&batch);
    let [_, vocab] = logits.dims();
    let rows = to_floats(logits.narrow(0, prompt.len() - 1, written.len()));
    let gap = |(row, &token): (&[f32], &u32)| {
        let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        f64::from((largest - row[token as usize]) / largest.abs())
    };
    let error = worst(rows.chunks(vocab).zip(written).map(gap));
    Comparison { what: "logits of the chosen tokens", error }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_that_differs_from_the_reference_is_found() {
        let reference = StepReference { loss: 10.8, grad_norm: 0.5 };
        let worst_of = |got: StepReference, reference| {
            let comparisons = compare(Ok(got), reference);
            worst(comparisons.iter().map(|comparison| comparison.error))
        };
        assert_eq!(worst_of(reference, Some(reference)), 0.0);
        assert!(worst_of(StepReference { loss: 10.9, ..reference }, Some(reference)) > 5e-3);
        assert!(worst_of(StepReference { grad_norm: 0.6, ..reference }, Some(reference)) > 0.1);
        assert!(
            worst_of(reference, None) < 2e-2,
            "random weights give each of the 49152 tokens nearly the same probability"
        );
        assert!(worst_of(StepReference { loss: f32::NAN, ..reference }, None).is_infinite());
    }

    #[test]
    fn a_model_without_a_folder_has_a_plan() {
        let (plan, config) = plan(BackendKind::Flex, &SMOLLM2_135M.first_layers(2), [1, 64]).unwrap();
        assert_eq!((plan.micro_batch_size.value, plan.max_seq_len.value, config.spec.layers.len()), (1, 64, 2));
    }
}
