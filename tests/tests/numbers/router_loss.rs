//! The auxiliary loss that balances experts against transformers: its value, and the gradients of everything that trains, with padding and without,
//! under every recompute policy; and how micro-batches of a step share it.
//!
//! Trade-off: the weight of the loss is far above a usual one, so that a wrong gradient of it could not pass for rounding.

use std::collections::BTreeMap;
use std::slice;
use std::thread;

use burn_tensor::{DType, Tensor};
use firebrick_arch::Role;
use firebrick_data::{Batch, DocumentSet, Example, IGNORE_INDEX, PackOptions, PackedDataset, PairRows};
use firebrick_kernels::backends::Flex;
use firebrick_kernels::comm::local_group;
use firebrick_kernels::{GemmFormat, Kernels, PairLoss, PairLossKind};
use firebrick_model::{
    BaseStorage, BuildOptions, Decoder, HfFolder, LoraConfig, ModelConfig, PassOptions, Recompute, TargetModules,
};
use firebrick_optim::LossScaling;
use firebrick_parallel::Ranks;
use firebrick_tests::{
    FROZEN, Golden, MIXTURES, TRAINED, every_next_token, fixture, in_turn, load, loss_options, numbers_and_gradients,
    on_every_backend, packed, relative_difference, trainer_of, upload,
};
use firebrick_trainer::config::ZeroStage;
use firebrick_trainer::run::preference::{PairObjective, Reference};
use firebrick_trainer::run::step::{StepNumbers, Trainer};

use crate::forward::TOKENS;

const POLICIES: [Recompute; 4] = [Recompute::Full, Recompute::Projections, Recompute::Selective, Recompute::None];

/// Golden files with their models and adapters; padding is in the second and the third.
const CASES: [(&str, &str, Option<&str>, BaseStorage); 3] = [
    ("tiny-qwen3-moe-router-loss", "tiny-qwen3-moe", None, TRAINED),
    ("tiny-gpt-oss-router-loss", "tiny-gpt-oss", None, TRAINED),
    ("tiny-mixtral-lora-router-loss", "tiny-mixtral", Some("tiny-mixtral-lora"), FROZEN),
];

fn pass(recompute: Recompute) -> PassOptions {
    PassOptions { recompute, offload: recompute.may_offload(), ..PassOptions::default() }
}

/// Returns the batch of a golden file: each sequence ends with padding, a document of its own.
fn batch_of(golden: &Golden) -> Batch {
    let mut batch = every_next_token(&golden.ids("input_ids"), TOKENS);
    batch.cu_seqlens = vec![0];
    for (row, length) in golden.ids("lengths").into_iter().enumerate() {
        let (start, length) = (row * TOKENS, length as usize);
        batch.targets[start + length - 1..start + TOKENS].fill(IGNORE_INDEX);
        batch.positions[start + length..start + TOKENS].iter_mut().zip(0..).for_each(|(at, index)| *at = index);
        batch.cu_seqlens.push((start + length) as u32);
        if length < TOKENS {
            batch.cu_seqlens.push((start + TOKENS) as u32);
            batch.padding += TOKENS - length;
        }
    }
    batch
}

/// Returns the mean cross entropy and the auxiliary loss of a golden file's batch, with their gradients.
fn losses_and_gradients<B: Kernels>(
    model: &Decoder<B>,
    golden: &Golden,
    policy: Recompute,
) -> ([f32; 2], BTreeMap<String, Vec<f32>>) {
    let batch = batch_of(golden);
    let mut on_device = upload(model, &batch);
    let is_token: Vec<bool> =
        golden.ids("lengths").into_iter().flat_map(|length| (0..TOKENS).map(move |at| at < length as usize)).collect();
    let weight = Tensor::from_floats(golden.f32s("coefficient").as_slice(), model.device());
    model.add_router_loss(&mut on_device, (batch.padding > 0).then_some(is_token.as_slice()), weight);
    let options = loss_options(1.0 / batch.loss_tokens() as f64);
    let (numbers, gradients) = numbers_and_gradients(model, &on_device, pass(policy), options);
    ([numbers[0] / batch.loss_tokens() as f32, numbers[1]], gradients)
}

fn losses_and_all_gradients<B: Kernels>() {
    for (turn, (name, model, adapter, storage)) in CASES.into_iter().enumerate() {
        let (golden, model) = (Golden::open(name), load::<B>(model, adapter, storage));
        for policy in in_turn::<B, _>(&POLICIES, turn) {
            let ([loss, aux_loss], gradients) = losses_and_gradients(&model, &golden, policy);
            for (ours, key) in [(loss, "loss"), (aux_loss, "aux_loss")] {
                let expected = golden.f32s(key)[0];
                assert!((ours - expected).abs() < 1e-5 * expected, "{name}, {policy:?}: {key} {ours}, not {expected}");
            }
            let names = golden.keys("grad.");
            assert_eq!(names, gradients.keys().cloned().collect::<Vec<_>>(), "{name}, {policy:?}");
            for key in names {
                let difference = relative_difference(&gradients[&key], &golden.f32s(&format!("grad.{key}")));
                assert!(difference < 1e-3, "{name}, {policy:?}, {key}: {difference:e}");
            }
        }
    }
}

on_every_backend!(
    the_auxiliary_loss_and_all_gradients_equal_those_of_transformers_under_every_policy,
    losses_and_all_gradients
);

#[test]
fn recomputing_layers_changes_no_bit_of_the_auxiliary_loss_and_its_gradients() {
    for (name, model, adapter, storage) in CASES {
        let (golden, model) = (Golden::open(name), load::<Flex>(model, adapter, storage));
        let saved = losses_and_gradients(&model, &golden, Recompute::None);
        for policy in POLICIES {
            assert!(losses_and_gradients(&model, &golden, policy) == saved, "{name}, {policy:?}");
        }
    }
}

#[test]
fn a_router_of_modules_to_save_has_the_gradient_that_it_has_where_everything_trains() {
    let golden = Golden::open("tiny-qwen3-moe-router-loss");
    let folder = fixture("tiny-qwen3-moe");
    let lora = LoraConfig {
        r: 4,
        target_modules: TargetModules::from_names(vec!["q_proj".to_owned()]),
        modules_to_save: Some(vec!["gate".to_owned()]),
        ..LoraConfig::default()
    };
    let options = BuildOptions {
        storage: FROZEN,
        lora: Some(lora),
        seed: 1,
        compute_dtype: DType::F32,
        gemms: GemmFormat::Compute,
        max_positions: TOKENS,
        sequence_tokens: TOKENS,
    };
    let (config, weights) = (ModelConfig::read(&folder).unwrap(), HfFolder::open(&folder).unwrap());
    let model = Decoder::<Flex>::load(&weights, config, &options, &Default::default(), &mut |_| ()).unwrap();
    let (_, gradients) = losses_and_gradients(&model, &golden, Recompute::Full);
    let router = "model.layers.1.mlp.gate.weight";
    let (_, gradient) = gradients.iter().find(|(name, _)| name.ends_with(router)).expect("the router trains");
    let difference = relative_difference(gradient, &golden.f32s(&format!("grad.{router}")));
    assert!(difference < 1e-3, "{difference:e}");
    assert!(model.parameters().iter().any(|parameter| parameter.role == Role::LoraA), "it has an adapter too");
}

/// Returns a trainer with the auxiliary loss.
fn balancing(model: &str, adapter: Option<&str>, storage: BaseStorage, weight: f64) -> Trainer<Flex> {
    let mut trainer = trainer_of(load::<Flex>(model, adapter, storage), PassOptions::default());
    trainer.settings.router_aux_loss = Some(weight);
    trainer
}

fn numbers(trainer: &mut Trainer<Flex>, batches: &[Batch]) -> StepNumbers {
    trainer.step(batches).expect("one rank reaches itself").read()
}

fn assert_close(found: f32, expected: f32) {
    assert!((found - expected).abs() < 1e-5 * expected, "{found}, not {expected}");
}

#[test]
fn a_step_reports_both_losses_and_its_gradients_are_of_their_sum_without_padding() {
    for (name, model, adapter, storage) in CASES {
        let golden = Golden::open(name);
        let squares = |key: &String| golden.f32s(&format!("grad.{key}")).iter().map(|v| v * v).sum::<f32>();
        let norm = golden.keys("grad.").iter().map(squares).sum::<f32>().sqrt();
        let weight = f64::from(golden.f32s("coefficient")[0]);
        let step = numbers(&mut balancing(model, adapter, storage, weight), &[batch_of(&golden)]);
        assert_close(step.loss, golden.f32s("loss")[0]);
        assert_close(step.aux_loss.expect("it has the auxiliary loss"), golden.f32s("aux_loss")[0]);
        assert!((step.grad_norm - norm).abs() < 1e-4 * norm, "{name}: {} {norm}", step.grad_norm);
    }
}

#[test]
fn micro_batches_of_a_step_share_the_mean_of_their_auxiliary_losses() {
    let ids = Golden::open("tiny-mixtral").ids("input_ids");
    let [one, other] = [&ids[..TOKENS], &ids[TOKENS..]].map(|ids| every_next_token(ids, TOKENS));
    let step = |batches: &[Batch]| numbers(&mut balancing("tiny-mixtral", None, TRAINED, 2.0), batches);
    let alone = [&one, &other].map(|batch| step(slice::from_ref(batch)));
    let [first, second] = alone.map(|step| step.aux_loss.unwrap());
    assert!((first - second).abs() > 1e-3, "{first} and {second} could be mistaken for each other");
    assert_close(step(&[one.clone(), other]).aux_loss.unwrap(), (first + second) / 2.0);
    let twice = step(&[one.clone(), one]);
    assert_close(twice.aux_loss.unwrap(), first);
    assert_close(twice.loss, alone[0].loss);
    assert_close(twice.grad_norm, alone[0].grad_norm);
}

#[test]
fn a_loss_scale_scales_the_gradients_of_the_auxiliary_loss_and_not_its_value() {
    let batch = every_next_token(&Golden::open("tiny-mixtral").ids("input_ids"), TOKENS);
    let trainer = || balancing("tiny-mixtral", None, TRAINED, 2.0);
    let expected = numbers(&mut trainer(), slice::from_ref(&batch));
    let Trainer { optimizer, model, .. } = trainer();
    let optimizer = optimizer.with_loss_scaling(LossScaling::default(), model.device());
    let found = numbers(&mut Trainer { optimizer, ..trainer() }, &[batch]);
    assert!(found.loss_scale.is_some_and(|scale| scale > 1.0));
    assert_close(found.aux_loss.unwrap(), expected.aux_loss.unwrap());
    assert_close(found.loss, expected.loss);
    assert_close(found.grad_norm, expected.grad_norm);
}

#[test]
fn ranks_share_the_mean_of_their_auxiliary_losses_with_whole_and_with_divided_gradients() {
    let ids = Golden::open("tiny-mixtral").ids("input_ids");
    let batches = [&ids[..TOKENS], &ids[TOKENS..]].map(|ids| every_next_token(ids, TOKENS));
    let expected = numbers(&mut balancing("tiny-mixtral", None, TRAINED, 2.0), &batches);
    for zero_stage in [ZeroStage::NONE, ZeroStage::GRADIENTS] {
        let work = |ranks: Ranks| {
            let batch = &batches[ranks.rank()];
            let mut trainer = balancing("tiny-mixtral", None, TRAINED, 2.0);
            trainer.settings.zero_stage = zero_stage;
            if zero_stage.divides_state() {
                let owners = ranks.owners(&trainer.model.parameters()).into_iter();
                let own = owners.filter(|(_, owner)| *owner == ranks.rank()).map(|(name, _)| name);
                trainer.optimizer = trainer.optimizer.owning(own);
            }
            numbers(&mut Trainer { ranks, ..trainer }, slice::from_ref(batch))
        };
        let found = thread::scope(|scope| {
            let start = |communicator| scope.spawn(move || work(Ranks::new(communicator)));
            let threads: Vec<_> = local_group(2).into_iter().map(start).collect();
            threads.into_iter().map(|thread| thread.join().expect("no rank panics")).collect::<Vec<_>>()
        });
        for step in found {
            assert_close(step.aux_loss.unwrap(), expected.aux_loss.unwrap());
            assert_close(step.loss, expected.loss);
            assert_close(step.grad_norm, expected.grad_norm);
        }
    }
}

#[test]
fn padding_alone_has_neither_an_auxiliary_loss_nor_gradients() {
    let batch = every_next_token(&Golden::open("tiny-mixtral").ids("input_ids"), TOKENS);
    let padding =
        Batch { targets: vec![IGNORE_INDEX; batch.targets.len()], padding: batch.targets.len(), ..batch.clone() };
    let step = |batches: &[Batch]| numbers(&mut balancing("tiny-mixtral", None, TRAINED, 2.0), batches);
    let both = step(&[batch.clone(), padding]);
    assert_close(2.0 * both.aux_loss.unwrap(), step(slice::from_ref(&batch)).aux_loss.unwrap());
    let halved = numbers(&mut balancing("tiny-mixtral", None, TRAINED, 1.0), &[batch]);
    assert_close(both.grad_norm, halved.grad_norm);
}

#[test]
fn documents_of_one_row_and_pairs_have_the_auxiliary_loss_of_the_same_documents_in_rows() {
    let ids = Golden::open("tiny-mixtral").ids("input_ids");
    let documents = [&ids[..20], &ids[TOKENS..TOKENS + 33]];
    let examples = documents.map(|tokens| Example {
        tokens: tokens.to_vec(),
        loss_mask: (0..tokens.len()).map(|index| index > 7).collect(),
    });
    let rows = |options: PackOptions| PackedDataset::new(DocumentSet::from_examples(&examples), options);
    let padded = rows(PackOptions { pack: false, ..PackOptions::new(TOKENS) }).batch(&[0, 1]);
    assert!(padded.padding > 0);
    let trainer = || balancing("tiny-mixtral", Some("tiny-mixtral-lora"), FROZEN, 2.0);
    let expected = numbers(&mut trainer(), &[padded]).aux_loss.unwrap();
    assert_close(numbers(&mut trainer(), &[packed(&documents)]).aux_loss.unwrap(), expected);

    let pairs = rows(PackOptions { pairs: Some(PairRows { prompt_loss: false }), ..PackOptions::new(80) }).batch(&[0]);
    assert_eq!((pairs.pair_count(), pairs.padding), (1, 80 - 53));
    let loss = PairLoss { kind: PairLossKind::Sigmoid, beta: 0.1, label_smoothing: 0.0 };
    let objective = PairObjective { loss, nll_weight: 0.0, reference: Reference::BaseWithoutAdapter };
    let of_pairs = |router_aux_loss| {
        let mut trainer = trainer();
        (trainer.settings.pairs, trainer.settings.router_aux_loss) = (Some(objective.clone()), router_aux_loss);
        numbers(&mut trainer, slice::from_ref(&pairs))
    };
    let (with, without) = (of_pairs(Some(2.0)), of_pairs(None));
    assert_close(with.aux_loss.unwrap(), expected);
    assert_eq!((with.loss, with.pairs, without.aux_loss), (without.loss, without.pairs, None));
    assert!((with.grad_norm - without.grad_norm).abs() > 1e-2 * without.grad_norm, "it has gradients");
}

#[test]
fn every_mixture_has_the_weight_that_transformers_gives_it_or_none() {
    for model in MIXTURES {
        let weight = ModelConfig::read(&fixture(model)).unwrap().router_aux_loss_coef;
        let has_none = ["tiny-glm4-moe", "tiny-lfm2-moe", "tiny-gemma4-moe"].contains(&model);
        assert_eq!(weight, (!has_none).then_some(0.001), "{model}");
    }
    assert_eq!(ModelConfig::read(&fixture("tiny-llama")).unwrap().router_aux_loss_coef, None);
}
