//! Which rank this is, of how many, and the small exchanges that are not gradients: counts, loss sums, barriers.
//!
//! Every rank calls the same exchanges in the same order.
//! Trade-off: counts go through host memory, one message per call; there are a few per step.

use burn_tensor::Tensor;
use firebrick_kernels::{CommError, Communicator, Kernels};

use crate::error::ParallelError;

/// The ranks of a job, as one of them sees it. Clones are the same rank.
#[derive(Clone, Debug)]
pub struct Ranks {
    communicator: Communicator,
}

impl Ranks {
    /// A job of one rank: every sum is its only term.
    pub fn single() -> Self {
        Self::new(Communicator::single())
    }

    /// The rank of a communicator.
    pub fn new(communicator: Communicator) -> Self {
        Self { communicator }
    }

    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.communicator.rank()
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.communicator.world_size()
    }

    /// Whether this rank writes the run folder and prints.
    pub fn is_main(&self) -> bool {
        self.rank() == 0
    }

    /// A count summed over all ranks, for example the loss tokens of a step.
    ///
    /// # Errors
    /// A rank is gone or exchanges something else.
    pub fn all_reduce_count(&self, count: u64) -> Result<u64, ParallelError> {
        let operation = "all_reduce_count";
        let gathered = self.communicator.all_gather_bytes(operation, count.to_le_bytes().to_vec())?;
        let mut sum = 0;
        for (rank, bytes) in gathered.iter().enumerate() {
            let mismatch = |_| CommError::Mismatch { rank, operation, expected: size_of::<u64>(), got: bytes.len() };
            sum += u64::from_le_bytes(bytes[..].try_into().map_err(mismatch)?);
        }
        Ok(sum)
    }

    /// A tensor `[1]` f32 summed over all ranks, for example the sum of the losses of a step. With one rank, the tensor itself.
    ///
    /// # Errors
    /// As [`Ranks::all_reduce_count`].
    pub fn all_reduce_scalar<B: Kernels>(&self, scalar: Tensor<B, 1>) -> Result<Tensor<B, 1>, ParallelError> {
        let mut sums = self.all_reduce_sum::<B>(vec![scalar])?;
        Ok(sums.pop().expect("a sum over ranks has as many tensors as it was given"))
    }

    /// Returns once every rank has called it.
    ///
    /// # Errors
    /// As [`Ranks::all_reduce_count`].
    pub fn barrier(&self) -> Result<(), ParallelError> {
        self.communicator.all_gather_bytes("barrier", Vec::new())?;
        Ok(())
    }

    /// Each tensor summed over all ranks, in one exchange; the same bits on every rank.
    pub(crate) fn all_reduce_sum<B: Kernels>(
        &self,
        tensors: Vec<Tensor<B, 1>>,
    ) -> Result<Vec<Tensor<B, 1>>, ParallelError> {
        if self.world_size() == 1 { Ok(tensors) } else { Ok(B::all_reduce_sum(&self.communicator, tensors)?) }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use burn_flex::Flex;
    use firebrick_kernels::comm::local_group;

    use super::*;

    fn scalar(value: f32) -> Tensor<Flex, 1> {
        Tensor::from_floats([value], &Default::default())
    }

    #[test]
    fn sums_over_one_rank_are_their_only_term() {
        let ranks = Ranks::single();
        assert_eq!((ranks.rank(), ranks.world_size(), ranks.is_main()), (0, 1, true));
        assert_eq!(ranks.all_reduce_count(7).unwrap(), 7);
        assert_eq!(ranks.all_reduce_scalar(scalar(1.5)).unwrap().into_scalar(), 1.5);
        ranks.barrier().unwrap();
    }

    #[test]
    fn every_rank_gets_the_sum_of_counts_and_scalars() {
        thread::scope(|scope| {
            for communicator in local_group(3) {
                scope.spawn(move || {
                    let ranks = Ranks::new(communicator);
                    assert_eq!(ranks.is_main(), ranks.rank() == 0);
                    let count = u64::MAX / 4 + ranks.rank() as u64;
                    assert_eq!(ranks.all_reduce_count(count).unwrap(), u64::MAX / 4 * 3 + 3);
                    let sum = ranks.all_reduce_scalar(scalar(ranks.rank() as f32 - 0.5)).unwrap();
                    assert_eq!(sum.into_scalar(), 1.5);
                    ranks.barrier().unwrap();
                });
            }
        });
    }

    #[test]
    fn ranks_that_exchange_different_things_get_an_error() {
        thread::scope(|scope| {
            for communicator in local_group(2) {
                scope.spawn(move || {
                    let ranks = Ranks::new(communicator);
                    let result = if ranks.is_main() { ranks.barrier() } else { ranks.all_reduce_count(1).map(|_| ()) };
                    let message = result.unwrap_err().to_string();
                    assert!(message.contains("barrier") && message.contains("all_reduce_count"), "{message}");
                });
            }
        });
    }
}
