//! A step of several micro-batches, through every gradient sink that exists, on one rank and on two.
//!
//! The models train every weight. Those with a tied head add to the embedding twice per micro-batch: first at the head, last at the
//! bottom.
//! Trade-off: ranks are threads of this process.

use std::collections::BTreeMap;
use std::thread;

use firebrick_data::Batch;
use firebrick_kernels::comm::local_group;
use firebrick_kernels::{GradientMap, GradientSink, Kernels};
use firebrick_model::{Decoder, PassOptions};
use firebrick_parallel::{Ranks, ReducingSink};
use firebrick_tests::{
    TRAINED, batch, host, host_gradients, in_turn, load, loss_options, on_every_backend, relative_difference, upload,
};

type Gradients = BTreeMap<String, Vec<f32>>;

/// Sequences of a step over all ranks: two micro-batches of three, three of two, and three of one on each of two ranks.
const SEQUENCES: usize = 6;
/// A tied head; a tied head and biases; no tied head.
const MODELS: [&str; 3] = ["tiny-llama-tied", "tiny-qwen2", "tiny-qwen3"];

/// Cuts the sequences into micro-batches. Sequence `n` has `4 + 3 n` loss tokens: a mean of the micro-batches' means would be wrong.
fn micro_batches(sequences_each: usize) -> Vec<Batch> {
    let ids =
        |sequence: usize| (0..24).map(|index| (sequence * 31 + index * 17 + index * index) as u32 % 256).collect();
    let all: Vec<Vec<u32>> = (0..SEQUENCES).map(ids).collect();
    let cut = |(number, rows): (usize, &[Vec<u32>])| {
        batch(rows, |row, index| index <= 4 + 3 * (number * sequences_each + row))
    };
    all.chunks(sequences_each).enumerate().map(cut).collect()
}

fn loss_tokens() -> usize {
    micro_batches(1).iter().map(Batch::loss_tokens).sum()
}

/// Runs the backward passes of a step; returns the sum of the losses.
fn backward<B: Kernels>(model: &Decoder<B>, batches: &[Batch], sink: &mut dyn GradientSink<B>) -> f32 {
    let options = loss_options(1.0 / loss_tokens() as f64);
    let mut loss = 0.0;
    for (index, batch) in batches.iter().enumerate() {
        sink.begin_micro_batch(index + 1 == batches.len());
        loss += host(model.loss_and_gradients(&upload(model, batch), PassOptions::default(), options, sink))[0];
    }
    loss
}

fn through_a_map<B: Kernels>(model: &Decoder<B>, batches: &[Batch]) -> (f32, Gradients) {
    let mut sink = GradientMap::default();
    let loss = backward(model, batches, &mut sink);
    (loss, host_gradients(&sink))
}

fn through_a_reducing_sink<B: Kernels>(model: &Decoder<B>, ranks: &Ranks, batches: &[Batch]) -> (f32, Gradients) {
    // Buckets are small, so that most gradients are summed inside the backward.
    let mut sink = ReducingSink::with_bucket_bytes(ranks, model.contributions(), 1 << 12);
    let loss = backward(model, batches, &mut sink);
    (loss, host_gradients(&sink.finish().expect("all ranks are there")))
}

/// Gives each rank every second micro-batch; returns the results in rank order.
fn on_two_ranks<B: Kernels>(name: &str) -> Vec<(f32, Gradients)> {
    let work = |ranks: Ranks| {
        let model = load::<B>(name, None, TRAINED);
        let share: Vec<Batch> = micro_batches(1).into_iter().skip(ranks.rank()).step_by(2).collect();
        through_a_reducing_sink(&model, &ranks, &share)
    };
    thread::scope(|scope| {
        let start = |communicator| scope.spawn(move || work(Ranks::new(communicator)));
        let threads: Vec<_> = local_group(2).into_iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join().expect("no rank panics")).collect()
    })
}

fn assert_same(context: &str, ours: &(f32, Gradients), expected: &(f32, Gradients)) {
    assert!((ours.0 / expected.0 - 1.0).abs() < 1e-6, "{context}: loss {} {}", ours.0, expected.0);
    assert!(ours.1.keys().eq(expected.1.keys()), "{context}");
    for (name, expected) in &expected.1 {
        let difference = relative_difference(&ours.1[name], expected);
        assert!(difference < 1e-5, "{context}, {name}: {difference:e}");
    }
}

fn every_sink<B: Kernels>() {
    for (turn, name) in MODELS.into_iter().enumerate() {
        let model = load::<B>(name, None, TRAINED);
        let expected = through_a_map(&model, &micro_batches(SEQUENCES));
        assert_eq!(expected.1.len(), model.parameters().len());
        for each in in_turn::<B, _>(&[2, 3], turn) {
            let batches = micro_batches(each);
            let count = batches.len();
            assert_same(&format!("{name}, map, {count}"), &through_a_map(&model, &batches), &expected);
            let reduced = through_a_reducing_sink(&model, &Ranks::single(), &batches);
            assert_same(&format!("{name}, reducing sink, {count}"), &reduced, &expected);
        }
        let ranks = on_two_ranks::<B>(name);
        assert!(ranks[0].1 == ranks[1].1, "{name}: both ranks get the same bits");
        assert_same(name, &(ranks[0].0 + ranks[1].0, ranks[0].1.clone()), &expected);
    }
}

on_every_backend!(accumulation_and_ranks_give_the_gradients_of_one_large_batch_through_every_sink, every_sink);
