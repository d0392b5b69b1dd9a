//! Collectives of a job of one rank: every result is the rank's own tensor.
//!
//! Trade-off: jobs of several ranks are tested where several devices or threads can be had; a self-test has one device.

use crate::Kernels;
use crate::comm::{CommError, Communicator};
use crate::conformance::check::{Check, Pair};
use burn_tensor::Tensor;

pub(crate) fn check<B: Kernels>(check: &mut Check<'_, B>) {
    let ranks = Communicator::single();
    let tensor: Pair<B, 1> = check.random_f32([33], 1.0);
    let first = |mut tensors: Vec<Tensor<B, 1>>| tensors.remove(0);
    let results: [(&str, Result<Tensor<B, 1>, CommError>); 4] = [
        ("all_reduce_sum", B::all_reduce_sum(&ranks, vec![tensor.0.clone()]).map(first)),
        ("reduce_scatter_sum", B::reduce_scatter_sum(&ranks, tensor.0.clone())),
        ("all_gather", B::all_gather(&ranks, tensor.0.clone())),
        ("broadcast", B::broadcast(&ranks, tensor.0.clone(), 0)),
    ];
    for (what, result) in results {
        check.same(what, result.is_ok());
        if let Ok(result) = result {
            check.compare(what, result, tensor.1.clone());
        }
    }
}
