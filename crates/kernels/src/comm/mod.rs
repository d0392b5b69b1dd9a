//! Collective operations of ranks on tensors: sums and broadcasts.
//!
//! A [`Communicator`] names the ranks of a job and carries bytes between them. The reference bodies move tensors through host memory
//! and add them in rank order, so every rank gets the same bits; a backend with a library of its own connects it ([`DeviceSide`]).
//! Every rank calls the same operations in the same order.

mod collectives;
mod local;
mod reference;

use std::any::Any;
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use burn_tensor::backend::Backend;

pub use collectives::{Collective, DeviceSide};
pub use local::local_group;

/// The name of all operations between devices in a trace.
pub const COLLECTIVE: &str = "collective";

/// Errors in the communication between ranks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "messages say what variants and their fields are")]
pub enum CommError {
    /// A rank is gone, or a transport failed: the step must not be applied.
    #[error("rank {rank} of {world_size} lost its peers during {operation}: {problem}")]
    Lost { rank: usize, world_size: usize, operation: &'static str, problem: String },
    #[error("rank {rank} sent {got} bytes in {operation}, expected {expected}: ranks run different models or steps")]
    Mismatch { rank: usize, operation: &'static str, expected: usize, got: usize },
    /// The library that carries tensors between devices is missing or does not work.
    #[error(
        "rank {rank} cannot connect its device to those of the other ranks: {problem}. FIREBRICK_COLLECTIVES=host on every rank sends \
         tensors through host memory instead, which is slow"
    )]
    NoLibrary { rank: usize, problem: String },
}

impl CommError {
    /// Unwinds from an operation that returns tensors and cannot return this error, because weights of other ranks did not arrive.
    pub fn raise(self) -> ! {
        // The panic hook prints nothing for this: the caller that catches it reports it.
        std::panic::resume_unwind(Box::new(self))
    }

    /// Runs `work` and returns the error that [`CommError::raise`] ended it with, if any. Other panics continue.
    pub fn catch<T>(work: impl FnOnce() -> T) -> Result<T, Self> {
        std::panic::catch_unwind(AssertUnwindSafe(work)).map_err(|payload| match payload.downcast::<Self>() {
            Ok(error) => *error,
            Err(other) => std::panic::resume_unwind(other),
        })
    }
}

/// Carries bytes between ranks.
pub trait Transport: Send + Sync {
    /// Returns the bytes of every rank, in rank order, once all have arrived.
    fn all_gather(&self, operation: &'static str, bytes: Vec<u8>) -> Result<Vec<Arc<[u8]>>, CommError>;

    /// Returns why the job cannot continue, if a rank is gone or failed.
    fn lost(&self) -> Option<String> {
        None
    }

    /// Tells all ranks that this one cannot continue, and why.
    fn fail(&self, problem: &str) {
        let _ = problem;
    }

    /// Closes the connection of a rank that has nothing more to exchange; the others then do not count it as lost.
    fn close(&self) {}

    /// Starts a thread that calls `act` with the reason once a rank is lost, or at once if that has already happened.
    /// It is never called if the job finishes cleanly.
    fn when_lost(&self, act: Box<dyn FnOnce(&str) + Send>) {
        drop(act);
    }
}

struct Library {
    failure: Box<dyn Fn() -> Option<String> + Send + Sync>,
    /// `Arc<dyn DeviceSide<B>>` of the backend that connected it.
    side: Box<dyn Any + Send + Sync>,
}

/// The ranks of a job, as seen by one of them.
#[derive(Clone)]
pub struct Communicator {
    rank: usize,
    world_size: usize,
    transport: Option<Arc<dyn Transport>>,
    library: Arc<OnceLock<Library>>,
    /// Nanoseconds spent in byte exchanges, including waits for other ranks.
    exchanged_ns: Arc<AtomicU64>,
    exchanging: Arc<AtomicUsize>,
}

impl fmt::Debug for Communicator {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Communicator(rank {} of {})", self.rank, self.world_size)
    }
}

impl Communicator {
    /// Creates the communicator of a job with one rank, where every sum is its only term.
    pub fn single() -> Self {
        Self::over(0, 1, None)
    }

    /// Creates rank `rank` of `world_size`, over a transport.
    ///
    /// # Panics
    /// If `rank` is not below `world_size`.
    pub fn new(rank: usize, world_size: usize, transport: Arc<dyn Transport>) -> Self {
        assert!(rank < world_size, "rank {rank} does not exist in a world of {world_size}");
        Self::over(rank, world_size, Some(transport))
    }

    fn over(rank: usize, world_size: usize, transport: Option<Arc<dyn Transport>>) -> Self {
        let (library, exchanged_ns, exchanging) = Default::default();
        Self { rank, world_size, transport, library, exchanged_ns, exchanging }
    }

    /// Returns this rank, from 0.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the number of ranks.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// Returns the bytes of every rank, in rank order.
    pub fn all_gather_bytes(&self, operation: &'static str, bytes: Vec<u8>) -> Result<Vec<Arc<[u8]>>, CommError> {
        match &self.transport {
            Some(transport) => {
                let started = Instant::now();
                self.exchanging.fetch_add(1, Ordering::Relaxed);
                let gathered = transport.all_gather(operation, bytes);
                self.exchanging.fetch_sub(1, Ordering::Relaxed);
                self.exchanged_ns.fetch_add(started.elapsed().as_nanos() as u64, Ordering::Relaxed);
                gathered
            }
            None => Ok(vec![bytes.into()]),
        }
    }

    /// Returns the time spent in byte exchanges so far, including waits for other ranks.
    pub fn exchanged(&self) -> Duration {
        Duration::from_nanos(self.exchanged_ns.load(Ordering::Relaxed))
    }

    /// Returns whether this rank currently waits in a byte exchange.
    pub fn is_exchanging(&self) -> bool {
        self.exchanging.load(Ordering::Relaxed) > 0
    }

    /// Fails once a rank is lost, because results that were computed together since then must not be used.
    pub fn check(&self, operation: &'static str) -> Result<(), CommError> {
        let of_transport = self.transport.as_ref().and_then(|transport| transport.lost());
        match of_transport.or_else(|| self.library.get().and_then(|library| (library.failure)())) {
            Some(problem) => Err(self.lost(operation, problem)),
            None => Ok(()),
        }
    }

    /// Builds the error of this rank.
    pub fn lost(&self, operation: &'static str, problem: String) -> CommError {
        CommError::Lost { rank: self.rank, world_size: self.world_size, operation, problem }
    }

    /// Tells all ranks that this one cannot continue, and why.
    pub fn fail(&self, problem: &str) {
        if let Some(transport) = &self.transport {
            transport.fail(problem);
        }
    }

    /// Closes the connection of a rank that has nothing more to exchange; the others then do not count it as lost.
    pub fn close(&self) {
        if let Some(transport) = &self.transport {
            transport.close();
        }
    }

    /// Starts a thread that calls `act` with the reason once a rank is lost.
    pub fn when_lost(&self, act: impl FnOnce(&str) + Send + 'static) {
        if let Some(transport) = &self.transport {
            transport.when_lost(Box::new(act));
        }
    }

    /// Returns whether results that were returned before a rank was lost are correct. With a library they may be wrong,
    /// because they may still be in flight.
    pub fn is_exact_after_loss(&self) -> bool {
        self.library.get().is_none()
    }

    /// Returns the library that [`Communicator::connect_device`] stored.
    fn device_side<B: Backend>(&self) -> Option<&dyn DeviceSide<B>> {
        let side = self.library.get()?.side.downcast_ref::<Arc<dyn DeviceSide<B>>>();
        Some(&**side.expect("a job computes on one backend"))
    }

    /// Makes all clones of this communicator exchange a backend's tensors through its library.
    ///
    /// # Panics
    /// If one is already connected.
    pub fn connect_device<B: Backend>(&self, side: Arc<dyn DeviceSide<B>>) {
        let of_failure = side.clone();
        let library = Library { failure: Box::new(move || of_failure.failure()), side: Box::new(side) };
        assert!(self.library.set(library).is_ok(), "rank {} was connected twice", self.rank);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_that_ends_a_computation_is_caught_as_it_was_raised() {
        let error = Communicator::single().lost("gathering weights", "rank 1 is gone".to_owned());
        let raised = error.clone();
        assert_eq!(CommError::catch(|| raised.raise()), Err::<(), _>(error));
        assert_eq!(CommError::catch(|| 7), Ok(7));
    }
}
