//! Training in float16: the loss scale preserves small gradients, steps follow those in f32, and steps that overflow are skipped.
//!
//! Trade-off: CPU backends compute in float16 here although no plan allows it, since it tests the same code without a device. On wgpu
//! activations are f32.

use std::collections::BTreeMap;

use burn_tensor::{DType, Tensor};
use firebrick_data::Batch;
use firebrick_kernels::backends::Flex;
use firebrick_kernels::{GradientMap, GradientSink, Kernels};
use firebrick_model::{BaseStorage, Decoder, PassOptions};
use firebrick_optim::{LossScaling, Optimizer, OptimizerConfig, OptimizerKind, Schedule, ScheduleKind, TrainedWeights};
use firebrick_parallel::Ranks;
use firebrick_precision::{FloatType, Format};
use firebrick_tests::{
    FROZEN, Golden, every_next_token, host, host_gradients, is_wgpu, load_in, loss_options, on_every_backend,
    relative_difference, upload,
};
use firebrick_trainer::run::step::{StepNumbers, StepSettings, Trainer};

/// A frozen base in the format of its GEMMs.
const FROZEN_F16: BaseStorage = BaseStorage::Frozen(Format::Float(FloatType::F16));
/// Number of loss tokens in one step of `configs/h100.toml`.
const LOSS_TOKENS: f64 = 196_608.0;

fn golden_batch() -> Batch {
    every_next_token(&Golden::open("tiny-llama-lora-train").ids("input_ids"), 48)
}

/// Computes the gradients of a share of a large step, with the loss multiplied by `scale` and the gradients divided by it.
fn gradients<B: Kernels>(dtype: DType, storage: BaseStorage, scale: f32) -> BTreeMap<String, Vec<f32>> {
    let model: Decoder<B> = load_in("tiny-llama", Some("tiny-llama-lora"), storage, dtype);
    let mut batch = upload(&model, &golden_batch());
    batch.targets.weights_m = Some(Tensor::ones([batch.targets.count], model.device()).mul_scalar(scale));
    let mut gradients = GradientMap::default();
    gradients.begin_micro_batch(true);
    model.loss_and_gradients(&batch, PassOptions::default(), loss_options(1.0 / LOSS_TOKENS), &mut gradients);
    let mut gradients = host_gradients(&gradients);
    gradients.values_mut().flatten().for_each(|value| *value /= scale);
    gradients
}

fn gradients_survive<B: Kernels>() {
    if is_wgpu::<B>() {
        return;
    }
    let expected = gradients::<Flex>(DType::F32, FROZEN, 1.0);
    let difference = |scale| {
        let ours = gradients::<B>(DType::F16, FROZEN_F16, scale);
        assert!(ours.keys().eq(expected.keys()));
        expected.iter().map(|(name, expected)| relative_difference(&ours[name], expected)).fold(0.0, f64::max)
    };
    let (with, without) = (difference(LossScaling::default().initial), difference(1.0));
    assert!(with < 2e-2, "relative difference {with:e} with the loss scale");
    assert!(without > 10.0 * with, "relative difference {without:e} without, {with:e} with the loss scale");
}

on_every_backend!(float16_keeps_the_gradients_of_a_large_step_only_with_a_loss_scale, gradients_survive);

fn trainer<B: Kernels>(dtype: DType, storage: BaseStorage, scaling: Option<LossScaling>) -> Trainer<B> {
    let optimizer = Optimizer::new(OptimizerConfig {
        kind: OptimizerKind::AdamW,
        beta1: 0.9,
        beta2: 0.999,
        epsilon: 1e-6,
        weight_decay: 0.01,
        weights: TrainedWeights::default(),
        max_grad_norm: Some(1.0),
    });
    let device = B::Device::default();
    Trainer {
        model: load_in("tiny-llama", Some("tiny-llama-lora"), storage, dtype),
        optimizer: match scaling {
            Some(scaling) => optimizer.with_loss_scaling(scaling, &device),
            None => optimizer,
        },
        schedule: Schedule { kind: ScheduleKind::Linear, peak: 1e-3, warmup_steps: 2, total_steps: 20, lowest: 0.0 },
        ranks: Ranks::single(),
        settings: StepSettings { loss_chunk_tokens: 20, ..StepSettings::default() },
    }
}

fn step<B: Kernels>(trainer: &mut Trainer<B>) -> StepNumbers {
    trainer.step(&[golden_batch()]).expect("one rank reaches itself").read()
}

fn steps_follow_f32<B: Kernels>() {
    if is_wgpu::<B>() {
        return;
    }
    let mut expected = trainer::<Flex>(DType::F32, FROZEN, None);
    let mut ours =
        trainer::<B>(DType::F16, FROZEN_F16, Some(LossScaling { growth_interval: 3, ..LossScaling::default() }));
    for index in 0..8 {
        let (ours, expected) = (step(&mut ours), step(&mut expected));
        assert!(!ours.was_skipped(), "step {index}");
        assert!((ours.loss - expected.loss).abs() < 5e-3, "step {index}: {ours:?}, in f32 {expected:?}");
        assert!(
            (ours.grad_norm / expected.grad_norm - 1.0).abs() < 2e-2,
            "step {index}: {ours:?}, in f32 {expected:?}"
        );
        let doubled = [1.0, 2.0, 4.0][index / 3];
        assert_eq!(ours.loss_scale, Some(doubled * 65_536.0), "step {index}");
    }
}

on_every_backend!(steps_in_float16_follow_those_in_f32_while_the_scale_grows, steps_follow_f32);

fn parameters<B: Kernels>(trainer: &Trainer<B>) -> Vec<Vec<f32>> {
    trainer.model.parameters().into_iter().map(|parameter| host(parameter.value.clone())).collect()
}

/// A scale that overflows float16 is injected; it is halved until the gradients fit. Then the steps are those of a run that began there.
fn overflows_are_skipped<B: Kernels>() {
    if is_wgpu::<B>() {
        return;
    }
    let injected = LossScaling { initial: 2f32.powi(40), ..LossScaling::default() };
    let mut ours = trainer::<B>(DType::F16, FROZEN_F16, Some(injected));
    let start = parameters(&ours);
    let (mut skipped, mut first) = (0, step(&mut ours));
    while first.was_skipped() {
        assert_eq!(first.loss_scale, Some(2f32.powi(40 - skipped)));
        assert!(first.loss.is_finite(), "the loss itself is in f32");
        assert_eq!(parameters(&ours), start, "a skipped step changes no parameter");
        skipped += 1;
        assert!(skipped < 40, "the scale fits at last");
        first = step(&mut ours);
    }
    assert!(skipped > 5, "{skipped} skipped steps");
    let scale = 2f32.powi(40 - skipped);
    assert_eq!(first.loss_scale, Some(scale));
    let mut fresh =
        trainer::<B>(DType::F16, FROZEN_F16, Some(LossScaling { initial: scale, ..LossScaling::default() }));
    for _ in 0..3 {
        assert_eq!(first, step(&mut fresh));
        assert_eq!(
            parameters(&ours),
            parameters(&fresh),
            "moments, bias corrections and rates too are those of a fresh run"
        );
        first = step(&mut ours);
    }
    let state = ours.optimizer.loss_scale_state().expect("there is loss scaling");
    assert_eq!((state.scale, state.good_steps, state.skipped_steps), (scale, 4, skipped as u64));
    assert_eq!(ours.optimizer.steps(), skipped as u64 + 4);
}

on_every_backend!(overflows_are_skipped_until_the_scale_fits_and_leave_no_trace, overflows_are_skipped);
