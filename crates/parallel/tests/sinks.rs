//! Tests that every gradient sink gives the same sums: a map, a reducing sink on one rank, and reducing sinks on several ranks that share the data.
//!
//! The model has a tied embedding, which gets two contributions per micro-batch; steps have several micro-batches; GEMMs add in place
//! where a sink lends its sum. Most gradients are small integers: then sums are exact in f32 and independent of their order.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::thread;

use burn_flex::Flex;
use burn_tensor::{DType, Tensor};
use firebrick_arch::{EMBEDDING, FINAL_NORM, Role};
use firebrick_kernels::comm::{Transport, local_group};
use firebrick_kernels::{CommError, Communicator, Contributions, GradientMap, GradientSink, OptimizerOps, Parameter};
use firebrick_parallel::{ParallelError, Ranks, ReducingSink, ShardingSink};

/// Micro-batches of a step over all ranks: divisible by every number of ranks in these tests.
const MICRO_BATCHES: usize = 18;
/// Bucket sizes in bytes: every gradient alone, a few together, all in one.
const BUCKETS: [usize; 3] = [1, 200, 1 << 20];

const UP: &str = "model.layers.0.mlp.up_proj.weight";
const DOWN: &str = "model.layers.0.mlp.down_proj.weight";

/// Lists the parameters in the order of the backward. The embedding is also the head: it comes first and last.
fn parameters() -> Vec<Parameter<Flex>> {
    [
        (EMBEDDING, vec![11, 4], Role::Embedding),
        (FINAL_NORM, vec![4], Role::Norm),
        (DOWN, vec![4, 8], Role::Projection),
        (UP, vec![8, 4], Role::Projection),
        (EMBEDDING, vec![11, 4], Role::Embedding),
    ]
    .into_iter()
    .map(|(name, shape, role)| {
        let values = vec![0.0; shape.iter().product()];
        Parameter::from_host(name, &shape, role, values, &Default::default())
    })
    .collect()
}

fn contributions() -> Contributions {
    Contributions::with_twice(vec![EMBEDDING.into()])
}

/// The values of a micro-batch, a contribution and this many elements.
type Values = fn(usize, usize, usize) -> Vec<f32>;

/// Returns integers from -8 to 8 that differ between micro-batches, contributions and elements.
fn integers(micro_batch: usize, contribution: usize, elements: usize) -> Vec<f32> {
    let seed = micro_batch * 31 + contribution * 7;
    (0..elements).map(|index| ((index * index + seed * (index + 3)) % 17) as f32 - 8.0).collect()
}

/// Returns values whose sums depend on the order of their terms.
fn fractions(micro_batch: usize, contribution: usize, elements: usize) -> Vec<f32> {
    let start = (micro_batch * 5 + contribution) as f32;
    (0..elements).map(|index| (start + index as f32 * 0.73).sin()).collect()
}

/// Runs the backward passes of a step. Projections add in place if the sink lends its sum.
fn backward<S: GradientSink<Flex>>(sink: &mut S, micro_batches: &[usize], values: Values) {
    backward_of(sink, &parameters(), micro_batches, values);
}

fn backward_of<S: GradientSink<Flex>>(
    sink: &mut S,
    parameters: &[Parameter<Flex>],
    micro_batches: &[usize],
    values: Values,
) {
    for (index, &micro_batch) in micro_batches.iter().enumerate() {
        sink.begin_micro_batch(index + 1 == micro_batches.len());
        for (contribution, parameter) in parameters.iter().enumerate() {
            let values = values(micro_batch, contribution, parameter.elements());
            let gradient = Tensor::from_floats(values.as_slice(), &Default::default());
            let lent = if parameter.role == Role::Projection { sink.lend(parameter) } else { None };
            match lent {
                Some(sum) => sink.give_back(parameter, Flex::accumulate(sum, gradient)),
                None => sink.add(parameter, gradient),
            }
        }
    }
}

type Bits = BTreeMap<Arc<str>, Vec<u32>>;

fn bits(gradients: &GradientMap<Flex>) -> Bits {
    let values = |gradient: &Tensor<Flex, 1>| gradient.to_data().convert::<f32>().to_vec::<f32>().unwrap();
    gradients
        .iter()
        .map(|(name, gradient)| (name.clone(), values(gradient).into_iter().map(f32::to_bits).collect()))
        .collect()
}

/// Returns the sums of a `GradientMap` for all micro-batches.
fn sums_of_a_map() -> Bits {
    let mut map = GradientMap::default();
    backward(&mut map, &(0..MICRO_BATCHES).collect::<Vec<_>>(), integers);
    bits(&map)
}

/// Runs `work` on one thread per rank; returns the results in rank order.
fn on_ranks<T: Send>(world_size: usize, work: impl Fn(Ranks) -> T + Sync) -> Vec<T> {
    let work = &work;
    thread::scope(|scope| {
        let threads: Vec<_> = local_group(world_size)
            .into_iter()
            .map(|communicator| scope.spawn(move || work(Ranks::new(communicator))))
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn share(ranks: &Ranks) -> Vec<usize> {
    (0..MICRO_BATCHES).skip(ranks.rank()).step_by(ranks.world_size()).collect()
}

/// Computes the gradients of a step in which each rank gets its share of the micro-batches.
fn reduce(ranks: &Ranks, bucket_bytes: usize, values: Values) -> Result<GradientMap<Flex>, ParallelError> {
    let mut sink = ReducingSink::with_bucket_bytes(ranks, contributions(), bucket_bytes);
    backward(&mut sink, &share(ranks), values);
    sink.finish()
}

#[test]
fn one_rank_gives_the_sums_of_the_map_bit_for_bit() {
    for values in [integers as Values, fractions] {
        let mut map = GradientMap::default();
        backward(&mut map, &[0, 1, 2], values);
        for bucket_bytes in BUCKETS {
            let mut sink = ReducingSink::with_bucket_bytes(&Ranks::single(), contributions(), bucket_bytes);
            backward(&mut sink, &[0, 1, 2], values);
            assert_eq!(bits(&sink.finish().unwrap()), bits(&map));
        }
    }
}

/// Bf16 holds the integers of these sums.
#[test]
fn sums_in_bf16_are_those_of_one_rank_and_stay_in_bf16() {
    let expected = sums_of_a_map();
    let matrix = |parameter: Parameter<Flex>| match parameter.shape.len() {
        1 => parameter,
        _ => parameter.in_format(DType::BF16),
    };
    let parameters: Vec<_> = parameters().into_iter().map(matrix).collect();
    let in_bf16 = |gradients: GradientMap<Flex>| {
        assert!(gradients.iter().all(|(name, sum)| (sum.dtype() == DType::BF16) == (name.as_ref() != FINAL_NORM)));
        bits(&gradients)
    };
    for world_size in [1, 2, 3] {
        let all = on_ranks(world_size, |ranks| {
            let mut sink = ReducingSink::with_bucket_bytes(&ranks, contributions(), 200).with_bf16_sums(true);
            backward_of(&mut sink, &parameters, &share(&ranks), integers);
            let owners = ranks.owners(&parameters[..4].iter().collect::<Vec<_>>());
            let mut sharding = ShardingSink::<Flex>::new(&ranks, owners, contributions(), 200).with_bf16_sums(true);
            backward_of(&mut sharding, &parameters, &share(&ranks), integers);
            [in_bf16(sink.finish().unwrap()), in_bf16(sharding.finish().unwrap())]
        });
        let mut shares = Bits::new();
        for [sums, share] in all {
            assert_eq!(sums, expected, "{world_size} ranks");
            shares.extend(share);
        }
        assert_eq!(shares, expected, "{world_size} ranks");
    }
}

#[test]
fn every_rank_gets_the_same_bits() {
    for world_size in [2, 3] {
        let sums = on_ranks(world_size, |ranks| bits(&reduce(&ranks, 200, fractions).unwrap()));
        assert!(sums.windows(2).all(|pair| pair[0] == pair[1]), "{world_size} ranks");
    }
}

/// Gives every rank its share of the micro-batches of a step; returns the gradients that this rank owns afterwards.
fn shard(ranks: &Ranks, bucket_bytes: usize, values: Values) -> Result<GradientMap<Flex>, ParallelError> {
    // The embedding is listed twice, for its two contributions.
    let parameters = &parameters()[..4];
    let parameters: Vec<&Parameter<Flex>> = parameters.iter().collect();
    let owners = ranks.owners(&parameters);
    let mut sink = ShardingSink::<Flex>::new(ranks, owners, contributions(), bucket_bytes);
    backward(&mut sink, &share(ranks), values);
    sink.finish()
}

#[test]
fn sums_of_all_ranks_whole_or_divided_are_those_of_one() {
    let expected = sums_of_a_map();
    for world_size in [2, 3, 6] {
        for bucket_bytes in BUCKETS {
            let mut all = Bits::new();
            let both = on_ranks(world_size, |ranks| {
                [reduce, shard].map(|step| bits(&step(&ranks, bucket_bytes, integers).unwrap()))
            });
            for [sums, share] in both {
                assert_eq!(sums, expected, "{world_size} ranks, buckets of {bucket_bytes} bytes");
                for (name, sum) in share {
                    assert!(all.insert(name.clone(), sum).is_none(), "{name} is on two of {world_size} ranks");
                }
            }
            assert_eq!(all, expected, "{world_size} ranks, buckets of {bucket_bytes} bytes");
        }
    }
}

#[test]
fn divided_gradients_are_exchanged_each_time() {
    let mirror = Arc::new(Mirror::default());
    let ranks = Ranks::new(Communicator::new(0, 2, mirror.clone()));
    let owners = parameters()[..4].iter().map(|parameter| (parameter.name.clone(), 0)).collect();
    let mut sink = ShardingSink::<Flex>::new(&ranks, owners, contributions(), 200);
    backward(&mut sink, &[0, 1], integers);
    let bytes = [4 * (4 + 32 + 32), 4 * 44];
    assert_eq!(mirror.exchanges(), [&bytes[..], &bytes[..1]].concat());
    let sums = sink.finish().unwrap();
    assert_eq!(mirror.exchanges(), [bytes, bytes].concat());
    let mut map = GradientMap::default();
    backward(&mut map, &[0, 0, 1, 1], integers);
    assert_eq!(bits(&sums), bits(&map));
}

/// A second rank that always has the same bytes as the first, and a record of the size of each exchange.
#[derive(Default)]
struct Mirror {
    exchanges: Mutex<Vec<usize>>,
}

impl Mirror {
    fn exchanges(&self) -> Vec<usize> {
        self.exchanges.lock().unwrap().clone()
    }
}

impl Transport for Mirror {
    fn all_gather(&self, _operation: &'static str, bytes: Vec<u8>) -> Result<Vec<Arc<[u8]>>, CommError> {
        self.exchanges.lock().unwrap().push(bytes.len());
        let bytes: Arc<[u8]> = bytes.into();
        Ok(vec![bytes.clone(), bytes])
    }
}

#[test]
fn full_buckets_are_reduced_inside_the_backward() {
    let mirror = Arc::new(Mirror::default());
    let ranks = Ranks::new(Communicator::new(0, 2, mirror.clone()));
    let mut sink = ReducingSink::with_bucket_bytes(&ranks, contributions(), 200);
    backward(&mut sink, &[0, 1, 2], integers);
    // Final norm (4 values), down_proj (32) and up_proj (32) are complete before the embedding (44) is.
    assert_eq!(mirror.exchanges(), [4 * (4 + 32 + 32)]);
    let sums = sink.finish().unwrap();
    assert_eq!(mirror.exchanges(), [4 * (4 + 32 + 32), 4 * 44]);

    let mut map = GradientMap::default();
    backward(&mut map, &[0, 0, 1, 1, 2, 2], integers);
    assert_eq!(bits(&sums), bits(&map));
}

/// Returns more adapters than are added at once, of aligned and unaligned sizes, whose order is not that of their names.
fn adapters() -> Vec<Parameter<Flex>> {
    let adapter = |index: usize| {
        let (name, elements) = (format!("adapter.{}", index * 37 % 150), 1 + index % 9);
        let role = if index.is_multiple_of(2) { Role::LoraA } else { Role::LoraB };
        Parameter::from_host(name, &[elements], role, vec![0.0; elements], &Default::default())
    };
    (0..150).map(adapter).collect()
}

#[test]
fn adapters_are_exchanged_as_one_tensor() {
    let adapters = adapters();
    let parameters: Vec<_> = adapters.iter().collect();
    let elements: usize = adapters.iter().map(|adapter| adapter.elements().next_multiple_of(4)).sum();
    let in_backward: Vec<_> = self::adapters().into_iter().rev().collect();
    let mut map = GradientMap::default();
    backward_of(&mut map, &in_backward, &(0..MICRO_BATCHES).collect::<Vec<_>>(), integers);

    let mirror = Arc::new(Mirror::default());
    let ranks = Ranks::new(Communicator::new(0, 2, mirror.clone()));
    let mut sink = ReducingSink::for_parameters(&ranks, Contributions::default(), &parameters);
    backward_of(&mut sink, &in_backward, &[0, 1, 2], integers);
    assert!(mirror.exchanges().is_empty());
    assert_eq!(sink.finish().unwrap().len(), 150);
    assert_eq!(mirror.exchanges(), [4 * elements]);

    for world_size in [1, 2, 3] {
        let sums = on_ranks(world_size, |ranks| {
            let mut sink = ReducingSink::for_parameters(&ranks, Contributions::default(), &parameters);
            backward_of(&mut sink, &in_backward, &share(&ranks), integers);
            bits(&sink.finish().unwrap())
        });
        assert!(sums.iter().all(|sums| *sums == bits(&map)), "{world_size} ranks");
    }
}

#[test]
fn a_rank_that_dies_gives_an_error_on_the_others() {
    type Step = fn(&Ranks, usize, Values) -> Result<GradientMap<Flex>, ParallelError>;
    for (world_size, step) in [(2, reduce as Step), (3, reduce), (2, shard)] {
        for bucket_bytes in BUCKETS {
            let results = on_ranks(world_size, |ranks| {
                // The last rank leaves before its backward.
                (ranks.rank() + 1 < world_size).then(|| step(&ranks, bucket_bytes, integers).unwrap_err())
            });
            for (rank, result) in results[..world_size - 1].iter().enumerate() {
                let error = result.clone().unwrap();
                assert!(
                    matches!(error, ParallelError::Comm(CommError::Lost { rank: noticed, .. }) if noticed == rank),
                    "{error}"
                );
            }
        }
    }
}

#[test]
#[should_panic(expected = "got 1 of 2 contributions")]
fn finish_refuses_a_step_with_a_contribution_missing() {
    let mut sink = ReducingSink::<Flex>::new(&Ranks::single(), contributions());
    let embedding = &parameters()[0];
    sink.begin_micro_batch(true);
    sink.add(embedding, Tensor::ones([embedding.elements()], &Default::default()));
    let _ = sink.finish();
}
