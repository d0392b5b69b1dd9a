//! The sum over two ranks in this process that exchange tensors through host memory.
//!
//! Trade-off: both ranks share one device and no library carries tensors between them, so this is the path of CPUs and tests;
//! `train bench --gpus N` times steps whose gradients NCCL reduces.

use std::thread;

use burn_tensor::{DType, Tensor};
use firebrick_kernels::Kernels;
use firebrick_kernels::comm::local_group;

use super::{Scale, Setting, random, tolerance};
use crate::case::{Case, Comparison, Output, Prepared, key, to_reference, work};

const RANKS: usize = 2;

pub(super) fn cases<B: Kernels>(setting: &Setting<B>) -> Vec<Case<B>> {
    let elements = if setting.scale == Scale::Large { 1 << 22 } else { 1 << 20 };
    let device = setting.device.clone();
    let bytes = 4.0 * (RANKS * elements) as f64;
    let sizes = [("ranks", RANKS), ("elements", elements)];
    let prepare = move || {
        let tensors: [Tensor<B, 1>; RANKS] = std::array::from_fn(|_| random([elements], 1.0, DType::F32, &device));
        let (group, inputs) = (local_group(RANKS), tensors.clone());
        let call = move || {
            let run = |rank: usize| {
                let sums = group[rank].all_reduce_sum(vec![inputs[rank].clone()]);
                sums.expect("ranks of one process are not lost").remove(0)
            };
            let of_first = thread::scope(|scope| {
                let other = scope.spawn(|| drop(run(1)));
                let result = run(0);
                other.join().expect("a rank of this process does not fail alone");
                result
            });
            Output::Tensors(vec![of_first.unsqueeze_dim(0)])
        };
        Prepared::new(call, move |output: Output<B>| {
            let [first, second] = tensors.map(to_reference);
            let expected = first.add(second).unsqueeze_dim(0);
            vec![Comparison::of_tensors("tensor of rank 0", output.tensors().remove(0), expected)]
        })
    };
    vec![Case {
        key: key("collective", "all_reduce_sum", "2 ranks of one process through host memory", "f32", &sizes),
        work: work(bytes, "bytes", elements as f64, 2.0 * bytes),
        axis: None,
        tolerance: tolerance(DType::F32),
        set_bytes: bytes,
        prepare: Box::new(prepare),
    }]
}
