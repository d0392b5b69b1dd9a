//! Collectives between two ranks of this process that exchange tensors through host memory.
//!
//! Trade-off: both ranks share one device and no library carries tensors between them, so this is the path of CPUs and tests;
//! `train bench --gpus N` times steps whose gradients NCCL reduces.

use std::thread;

use burn_tensor::{DType, Tensor};
use firebrick_kernels::backends::Flex;
use firebrick_kernels::comm::local_group;
use firebrick_kernels::{Communicator, Kernels};

use super::{Scale, Setting, random, tolerance};
use crate::case::{Case, Comparison, Output, Prepared, key, to_reference, work};

const RANKS: usize = 2;

/// A collective by its name: what a rank does, and what rank 0 gets from the tensors of both.
struct Collective<B: Kernels> {
    name: &'static str,
    run: fn(&Communicator, Tensor<B, 1>) -> Tensor<B, 1>,
    expected: fn([Tensor<Flex, 1>; RANKS]) -> Tensor<Flex, 1>,
}

const NOT_LOST: &str = "ranks of one process are not lost";

fn collectives<B: Kernels>() -> [Collective<B>; 3] {
    [
        Collective {
            name: "all_reduce_sum",
            run: |ranks, tensor| B::all_reduce_sum(ranks, vec![tensor]).expect(NOT_LOST).remove(0),
            expected: |[first, second]| first.add(second),
        },
        Collective {
            name: "reduce_scatter_sum",
            run: |ranks, tensor| B::reduce_scatter_sum(ranks, tensor).expect(NOT_LOST),
            expected: |of_ranks| {
                let [first, second] = of_ranks.map(|tensor| {
                    let half = tensor.dims()[0].div_ceil(RANKS);
                    tensor.narrow(0, 0, half)
                });
                first.add(second)
            },
        },
        Collective {
            name: "all_gather",
            run: |ranks, tensor| B::all_gather(ranks, tensor).expect(NOT_LOST),
            expected: |of_ranks| Tensor::cat(of_ranks.into(), 0),
        },
    ]
}

pub(super) fn cases<B: Kernels>(setting: &Setting<B>) -> Vec<Case<B>> {
    collectives().map(|collective| case(setting, collective)).into()
}

fn case<B: Kernels>(setting: &Setting<B>, Collective { name, run, expected }: Collective<B>) -> Case<B> {
    let elements = if setting.scale == Scale::Large { 1 << 22 } else { 1 << 20 };
    let device = setting.device.clone();
    let bytes = 4.0 * (RANKS * elements) as f64;
    let sizes = [("ranks", RANKS), ("elements", elements)];
    let prepare = move || {
        let tensors: [Tensor<B, 1>; RANKS] = std::array::from_fn(|_| random([elements], 1.0, DType::F32, &device));
        let (group, inputs) = (local_group(RANKS), tensors.clone());
        let call = move || {
            let run = |rank: usize| run(&group[rank], inputs[rank].clone());
            let of_first = thread::scope(|scope| {
                let other = scope.spawn(|| drop(run(1)));
                let result = run(0);
                other.join().expect("a rank of this process does not fail alone");
                result
            });
            Output::Tensors(vec![of_first.unsqueeze_dim(0)])
        };
        Prepared::new(call, move |output: Output<B>| {
            let expected = expected(tensors.map(to_reference)).unsqueeze_dim(0);
            vec![Comparison::of_tensors("tensor of rank 0", output.tensors().remove(0), expected)]
        })
    };
    Case {
        key: key("collective", name, "2 ranks of one process through host memory", "f32", &sizes),
        work: work(bytes, "bytes", elements as f64, 2.0 * bytes),
        axis: None,
        tolerance: tolerance(DType::F32),
        set_bytes: bytes,
        prepare: Box::new(prepare),
    }
}
