//! Weights that ranks divide: a pass over them gives the numbers of a whole model, for every storage format of the base; and trained parameters are
//! listed in one order.
//!
//! Trade-off: ranks are threads of this process, and exchange through host memory.

use std::collections::BTreeMap;
use std::thread;

use burn_tensor::DType;
use firebrick_data::Batch;
use firebrick_kernels::backends::Flex;
use firebrick_kernels::comm::local_group;
use firebrick_kernels::{GradientMap, GradientSink, Kernels, Parameter, Recompute};
use firebrick_model::{BaseStorage, BatchLimits, Decoder, Division, GenerateOptions, PassOptions, Sampler};
use firebrick_parallel::Ranks;
use firebrick_precision::{Format, QuantFormat};
use firebrick_tests::{
    FAMILIES, FROZEN, NF4, TRAINED, every_next_token, host, host_gradients, in_turn, load, load_divided, loss_options,
    on_every_backend, upload,
};
use firebrick_trainer::plan::weight_owners;

use crate::forward::ADAPTERS;

/// Loss and gradients of a pass.
type Pass = (Vec<f32>, BTreeMap<String, Vec<f32>>);

/// The results of a model: losses and gradients under each recompute policy, a score, and answers.
#[derive(Debug, PartialEq)]
struct Numbers {
    passes: Vec<Pass>,
    score: Vec<f32>,
    answers: Vec<Vec<u32>>,
}

fn a_batch() -> Batch {
    let ids: Vec<u32> = (0..32).map(|index| index * 17 % 256).collect();
    every_next_token(&ids, 16)
}

fn numbers<B: Kernels>(model: &Decoder<B>, policies: &[Recompute]) -> Numbers {
    let on_device = upload(model, &a_batch());
    let pass = |&recompute: &Recompute| {
        let options = PassOptions { recompute, ..PassOptions::default() };
        let mut sink = GradientMap::default();
        sink.begin_micro_batch(true);
        let loss = model.loss_and_gradients(&on_device, options, loss_options(0.1), &mut sink);
        (host(loss), host_gradients(&sink))
    };
    let score = model.score(&on_device, 7);
    let options = GenerateOptions {
        max_new_tokens: 3,
        stop_tokens: Vec::new(),
        sampler: Sampler::greedy(),
        limits: BatchLimits::NONE,
    };
    Numbers {
        passes: policies.iter().map(pass).collect(),
        score: [host(score.loss_sum), host(score.correct)].concat(),
        answers: model.generate(&[vec![1, 2, 3], vec![4]], &options).expect("the answers are finite"),
    }
}

/// Computes the numbers of each of `world_size` ranks with its share of the weights.
fn on_ranks<B: Kernels>(
    world_size: usize,
    adapter: Option<&str>,
    storage: BaseStorage,
    policies: &[Recompute],
) -> Vec<Numbers> {
    let work = |ranks: Ranks| {
        let whole = load::<B>("tiny-llama", adapter, storage);
        let owners = weight_owners(&whole.config.spec, storage == TRAINED, world_size);
        assert_eq!(owners.len(), whole.layers().iter().flat_map(|layer| layer.linears()).count());
        let division = Division { communicator: ranks.communicator().clone(), owners };
        let model = load_divided::<B>("tiny-llama", adapter, storage, DType::F32, Some(division));
        assert!(model.is_divided() && model.base_hash() == whole.base_hash());
        let elements = |parameter: &Parameter<B>| parameter.value.dims()[0];
        let here: usize = model.parameters().into_iter().map(elements).sum();
        let all: usize = whole.parameters().into_iter().map(elements).sum();
        assert!(storage != TRAINED || here < all, "{here} of {all} trained values are here");
        let collected = model.collect_weights();
        let trained = if storage == TRAINED && ranks.is_main() { whole.layers().len() * 7 } else { 0 };
        assert_eq!(collected.len(), trained);
        for parameter in whole.parameters() {
            if let Some(values) = collected.get(&parameter.name) {
                assert_eq!(*values, host(parameter.value.clone()), "{}", parameter.name);
            }
        }
        numbers(&model, policies)
    };
    thread::scope(|scope| {
        let start = |communicator| scope.spawn(move || work(Ranks::new(communicator)));
        let threads: Vec<_> = local_group(world_size).into_iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join().expect("no rank panics")).collect()
    })
}

fn divided_weights<B: Kernels>() {
    let quantized = QuantFormat::ALL.map(|format| BaseStorage::Frozen(Format::Quantized(format)));
    let lora = Some("tiny-llama-lora");
    let cases = quantized.into_iter().chain([FROZEN]).map(|storage| (lora, storage)).chain([(None, TRAINED)]);
    let cases = cases.chain([NF4, FROZEN].map(|storage| (Some("tiny-llama-dora"), storage)));
    let policies = [Recompute::Full, Recompute::Projections, Recompute::Selective, Recompute::None];
    for (turn, (adapter, storage)) in cases.enumerate() {
        let policies = in_turn::<B, _>(&policies, turn);
        let whole = numbers(&load::<B>("tiny-llama", adapter, storage), &policies);
        for (rank, found) in on_ranks::<B>(2, adapter, storage, &policies).into_iter().enumerate() {
            assert!(found == whole, "rank {rank}, {storage:?}: {found:?} is not {whole:?}");
        }
    }
}

on_every_backend!(weights_that_ranks_divide_give_the_numbers_of_a_whole_model, divided_weights);

#[test]
fn parameters_are_updated_in_the_order_in_which_they_are_read() {
    let adapters = FAMILIES.map(|family| (format!("{family}-lora"), family));
    let adapters = adapters.iter().map(|(adapter, family)| (adapter.as_str(), *family)).collect::<Vec<_>>();
    let of_families = [FROZEN, NF4]
        .into_iter()
        .flat_map(|storage| adapters.iter().map(move |&(adapter, family)| (family, Some(adapter), storage)));
    let cases = of_families.chain(ADAPTERS.map(|(adapter, model)| (model, Some(adapter), FROZEN)));
    for (name, adapter, storage) in cases.chain(FAMILIES.map(|family| (family, None, TRAINED))) {
        let mut model = load::<Flex>(name, adapter, storage);
        let read: Vec<_> = model.parameters().iter().map(|parameter| parameter.name.clone()).collect();
        let updated: Vec<_> = model.parameters_mut().iter().map(|parameter| parameter.name.clone()).collect();
        assert!(!read.is_empty() && read == updated, "{name}, {adapter:?}, {storage:?}: {read:?} {updated:?}");
    }
}
