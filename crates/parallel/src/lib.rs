#![doc = include_str!("../README.md")]

use burn_tensor::{Tensor, backend::Backend};

/// What can go wrong between ranks.
#[derive(Debug, thiserror::Error)]
pub enum ParallelError {
    /// The machine list and this process disagree.
    #[error("rank {rank} does not exist in a world of {world_size}: ranks count from 0 to {}", world_size - 1)]
    RankOutOfRange {
        /// The rank that was given.
        rank: usize,
        /// The number of ranks.
        world_size: usize,
    },
}

/// Which of how many workers this process is. No other crate knows: they are handed numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct World {
    rank: usize,
    world_size: usize,
}

impl World {
    /// A world of one.
    pub fn single() -> Self {
        Self { rank: 0, world_size: 1 }
    }

    /// Rank `rank` of `world_size`.
    ///
    /// # Errors
    /// A rank that is not below the world size.
    pub fn new(rank: usize, world_size: usize) -> Result<Self, ParallelError> {
        if rank < world_size {
            Ok(Self { rank, world_size })
        } else {
            Err(ParallelError::RankOutOfRange { rank, world_size })
        }
    }

    /// This process, from 0.
    pub fn rank(self) -> usize {
        self.rank
    }

    /// All processes.
    pub fn world_size(self) -> usize {
        self.world_size
    }

    /// Whether this process writes the run folder and speaks to the user.
    pub fn is_main(self) -> bool {
        self.rank == 0
    }
}

/// What ranks do together. Every rank calls the same operations in the same order.
pub trait Collective<B: Backend> {
    /// Which rank this is.
    fn world(&self) -> World;

    /// Each tensor summed over all ranks.
    ///
    /// # Errors
    /// A rank that is gone, or a transport that failed; the step must then not be taken.
    fn all_reduce_sum(&self, tensors: Vec<Tensor<B, 1>>) -> Result<Vec<Tensor<B, 1>>, ParallelError>;

    /// A count summed over all ranks: the trained tokens of a step.
    ///
    /// # Errors
    /// As [`Collective::all_reduce_sum`].
    fn all_reduce_count(&self, count: u64) -> Result<u64, ParallelError>;

    /// Returns once every rank has arrived.
    ///
    /// # Errors
    /// As [`Collective::all_reduce_sum`].
    fn barrier(&self) -> Result<(), ParallelError>;
}

/// The collective of a world of one: every sum is its only term.
#[derive(Clone, Copy, Debug, Default)]
pub struct SingleRank;

impl<B: Backend> Collective<B> for SingleRank {
    fn world(&self) -> World {
        World::single()
    }

    fn all_reduce_sum(&self, tensors: Vec<Tensor<B, 1>>) -> Result<Vec<Tensor<B, 1>>, ParallelError> {
        Ok(tensors)
    }

    fn all_reduce_count(&self, count: u64) -> Result<u64, ParallelError> {
        Ok(count)
    }

    fn barrier(&self) -> Result<(), ParallelError> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_flex::Flex;

    #[test]
    fn a_sum_over_one_rank_is_its_term() {
        let term = Tensor::<Flex, 1>::from_floats([1.5, -2.0], &Default::default());
        let sums = SingleRank.all_reduce_sum(vec![term.clone()]).unwrap();
        assert_eq!(sums[0].to_data(), term.to_data());
        assert_eq!(Collective::<Flex>::all_reduce_count(&SingleRank, 7).unwrap(), 7);
    }

    #[test]
    fn a_rank_outside_the_world_is_refused() {
        assert!(World::new(1, 2).is_ok());
        let message = World::new(2, 2).unwrap_err().to_string();
        assert!(message.contains("rank 2") && message.contains("0 to 1"), "{message}");
    }
}
