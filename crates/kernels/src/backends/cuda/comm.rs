//! Collectives on CUDA: the reference bodies, in a pause of a running section.
//!
//! A pause releases the device, so that another rank in the same process can finish what this one waits for.
//! Trade-off: tensors go through host memory.

use burn_tensor::Tensor;

use super::engine::engine;
use super::matrix::Cuda;
use crate::comm::reference;
use crate::{CommError, CommOps, Communicator};

impl CommOps for Cuda {
    fn all_reduce_sum(ranks: &Communicator, tensors: Vec<Tensor<Self, 1>>) -> Result<Vec<Tensor<Self, 1>>, CommError> {
        match tensors.first().map(|tensor| tensor.device()) {
            Some(device) if ranks.world_size() > 1 => {
                engine(&device).pause(|| reference::all_reduce_sum(ranks, tensors))
            }
            _ => Ok(tensors),
        }
    }

    fn reduce_scatter_sum(ranks: &Communicator, tensor: Tensor<Self, 1>) -> Result<Tensor<Self, 1>, CommError> {
        engine(&tensor.device()).pause(|| reference::reduce_scatter_sum(ranks, tensor))
    }

    fn all_gather(ranks: &Communicator, part: Tensor<Self, 1>) -> Result<Tensor<Self, 1>, CommError> {
        engine(&part.device()).pause(|| reference::all_gather(ranks, part))
    }

    fn broadcast(ranks: &Communicator, tensor: Tensor<Self, 1>, root: usize) -> Result<Tensor<Self, 1>, CommError> {
        engine(&tensor.device()).pause(|| reference::broadcast(ranks, tensor, root))
    }
}
