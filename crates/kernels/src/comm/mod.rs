//! What ranks do together, as operations on tensors: sums, gathers, broadcasts.
//!
//! A [`Communicator`] names the ranks of a job and carries bytes between them. The reference bodies move tensors through host memory
//! and add them in rank order, so every rank gets the same bits; a backend with a library of its own overrides them.
//! Every rank calls the same operations in the same order.
//! Trade-off: the reference gathers everything on every rank: exact and small, not for scale.

#[cfg(feature = "flex")]
pub(crate) mod conformance;
mod local;
pub mod reference;

use std::fmt;
use std::sync::Arc;

use burn_tensor::{Tensor, backend::Backend};

pub use local::local_group;

/// What can go wrong between ranks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommError {
    /// A rank is gone, or a transport failed: the step must not be taken.
    #[error("rank {rank} of {world_size} lost its peers during {operation}: {problem}")]
    Lost {
        /// The rank that noticed.
        rank: usize,
        /// Number of ranks.
        world_size: usize,
        /// What was under way.
        operation: &'static str,
        /// What the transport said.
        problem: String,
    },
    /// Ranks disagree about what is exchanged.
    #[error("rank {rank} sent {got} bytes in {operation}, expected {expected}: ranks run different models or steps")]
    Mismatch {
        /// The other rank.
        rank: usize,
        /// What was under way.
        operation: &'static str,
        /// Bytes expected.
        expected: usize,
        /// Bytes received.
        got: usize,
    },
}

/// Carries bytes between ranks.
pub trait Transport: Send + Sync {
    /// The bytes of every rank, in rank order. Returns when all have arrived.
    ///
    /// # Errors
    /// [`CommError::Lost`].
    fn all_gather(&self, operation: &'static str, bytes: Vec<u8>) -> Result<Vec<Arc<[u8]>>, CommError>;
}

/// The ranks of a job, as one of them sees it.
#[derive(Clone)]
pub struct Communicator {
    rank: usize,
    world_size: usize,
    transport: Option<Arc<dyn Transport>>,
}

impl fmt::Debug for Communicator {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Communicator(rank {} of {})", self.rank, self.world_size)
    }
}

impl Communicator {
    /// The communicator of a job of one rank: every sum is its only term.
    pub fn single() -> Self {
        Self { rank: 0, world_size: 1, transport: None }
    }

    /// Rank `rank` of `world_size`, over a transport.
    ///
    /// # Panics
    /// If `rank` is not below `world_size`.
    pub fn new(rank: usize, world_size: usize, transport: Arc<dyn Transport>) -> Self {
        assert!(rank < world_size, "rank {rank} does not exist in a world of {world_size}");
        Self { rank, world_size, transport: Some(transport) }
    }

    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// The bytes of every rank, in rank order.
    ///
    /// # Errors
    /// [`CommError::Lost`].
    pub fn all_gather_bytes(&self, operation: &'static str, bytes: Vec<u8>) -> Result<Vec<Arc<[u8]>>, CommError> {
        match &self.transport {
            Some(transport) => transport.all_gather(operation, bytes),
            None => Ok(vec![bytes.into()]),
        }
    }
}

/// Collectives over flat f32 tensors.
pub trait CommOps: Backend {
    /// Each tensor summed over all ranks; the same bits on every rank.
    ///
    /// # Errors
    /// [`CommError`]: a rank is gone or sends something else.
    fn all_reduce_sum(ranks: &Communicator, tensors: Vec<Tensor<Self, 1>>) -> Result<Vec<Tensor<Self, 1>>, CommError> {
        reference::all_reduce_sum(ranks, tensors)
    }

    /// This rank's part of the sum of a tensor over all ranks: equal parts in rank order, the last one shorter.
    ///
    /// # Errors
    /// As [`CommOps::all_reduce_sum`].
    fn reduce_scatter_sum(ranks: &Communicator, tensor: Tensor<Self, 1>) -> Result<Tensor<Self, 1>, CommError> {
        reference::reduce_scatter_sum(ranks, tensor)
    }

    /// The parts of all ranks, joined in rank order.
    ///
    /// # Errors
    /// As [`CommOps::all_reduce_sum`].
    fn all_gather(ranks: &Communicator, part: Tensor<Self, 1>) -> Result<Tensor<Self, 1>, CommError> {
        reference::all_gather(ranks, part)
    }

    /// The tensor of rank `root`, on every rank.
    ///
    /// # Errors
    /// As [`CommOps::all_reduce_sum`].
    fn broadcast(ranks: &Communicator, tensor: Tensor<Self, 1>, root: usize) -> Result<Tensor<Self, 1>, CommError> {
        reference::broadcast(ranks, tensor, root)
    }
}
