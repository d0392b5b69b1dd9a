//! Collectives between two ranks of this process that exchange tensors through host memory.
//!
//! Trade-off: both ranks share one device and no library carries tensors between them, so this is the path of CPUs and tests;
//! `train bench --gpus N` times steps whose gradients NCCL reduces.

use std::thread;

use burn_tensor::{DType, Tensor};
use firebrick_kernels::comm::local_group;
use firebrick_kernels::{Communicator, Kernels};

use super::super::case::{Case, Comparison, Output, Prepared, key, to_reference};
use super::super::results::Work;
use super::{Scale, Setting, random, tolerance};

const RANKS: usize = 2;

/// Which collective.
#[derive(Clone, Copy)]
enum Collective {
    AllReduce,
    ReduceScatter,
    AllGather,
}

impl Collective {
    const ALL: [Self; 3] = [Self::AllReduce, Self::ReduceScatter, Self::AllGather];

    fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce_sum",
            Self::ReduceScatter => "reduce_scatter_sum",
            Self::AllGather => "all_gather",
        }
    }

    fn run<B: Kernels>(self, ranks: &Communicator, tensor: Tensor<B, 1>) -> Tensor<B, 1> {
        let result = match self {
            Self::AllReduce => B::all_reduce_sum(ranks, vec![tensor]).map(|mut tensors| tensors.remove(0)),
            Self::ReduceScatter => B::reduce_scatter_sum(ranks, tensor),
            Self::AllGather => B::all_gather(ranks, tensor),
        };
        result.expect("ranks of one process are not lost")
    }

    /// What rank 0 gets.
    fn expected<B: Kernels>(self, of_ranks: [Tensor<B, 1>; RANKS]) -> Tensor<B, 1> {
        let [first, second] = of_ranks;
        match self {
            Self::AllReduce => first.add(second),
            Self::ReduceScatter => {
                let half = first.dims()[0].div_ceil(RANKS);
                first.narrow(0, 0, half).add(second.narrow(0, 0, half))
            }
            Self::AllGather => Tensor::cat(vec![first, second], 0),
        }
    }
}

pub(super) fn cases<B: Kernels>(setting: &Setting<B>) -> Vec<Case<B>> {
    let elements = if setting.scale == Scale::Large { 1 << 22 } else { 1 << 20 };
    Collective::ALL.into_iter().map(|collective| case(setting, collective, elements)).collect()
}

fn case<B: Kernels>(setting: &Setting<B>, collective: Collective, elements: usize) -> Case<B> {
    let device = setting.device.clone();
    let bytes = 4.0 * (RANKS * elements) as f64;
    let sizes = [("ranks", RANKS), ("elements", elements)];
    Case {
        key: key("collective", collective.name(), "2 ranks of one process through host memory", "f32", &sizes),
        work: Work { flops: elements as f64, bytes: 2.0 * bytes, units: bytes, unit: "bytes".to_owned() },
        axis: None,
        tolerance: tolerance(DType::F32),
        set_bytes: bytes,
        prepare: Box::new(move || prepare(&device, collective, elements)),
    }
}

fn prepare<B: Kernels>(device: &B::Device, collective: Collective, elements: usize) -> Prepared<B> {
    let tensors: [Tensor<B, 1>; RANKS] = std::array::from_fn(|_| random([elements], 1.0, DType::F32, device));
    let group = local_group(RANKS);
    let inputs = tensors.clone();
    let call = move || {
        let run = |rank: usize| collective.run(&group[rank], inputs[rank].clone());
        let of_first = thread::scope(|scope| {
            let other = scope.spawn(|| drop(run(1)));
            let result = run(0);
            other.join().expect("a rank of this process does not fail alone");
            result
        });
        Output::Tensors(vec![of_first.unsqueeze_dim(0)])
    };
    let check = move |output: Output<B>| {
        let expected = collective.expected(tensors.map(to_reference)).unsqueeze_dim(0);
        vec![Comparison::of_tensors("tensor of rank 0", output.tensors().remove(0), expected)]
    };
    Prepared { call: Box::new(call), check: Box::new(check) }
}
