//! What ranks do together, as operations on tensors: sums, gathers, broadcasts.
//!
//! A [`Communicator`] names the ranks of a job and carries bytes between them. The reference bodies move tensors through host memory
//! and add them in rank order, so every rank gets the same bits; a backend with a library of its own connects it and overrides them.
//! Every rank calls the same operations in the same order.
//! Trade-off: the reference gathers everything on every rank: exact and small, not for scale.

#[cfg(feature = "flex")]
pub(crate) mod conformance;
mod local;
mod payload;
pub mod reference;

use std::any::Any;
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use burn_tensor::{Tensor, backend::Backend};

use crate::Readback;
pub use local::local_group;
pub use payload::{Exchange, Loan, Payload, PayloadLayout};

/// The name of every operation between devices in a trace.
pub const COLLECTIVE: &str = "collective";

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
        /// What the transport reported.
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
    /// The library that carries tensors between devices is missing or does not work.
    #[error(
        "rank {rank} cannot connect its device to those of the other ranks: {problem}. FIREBRICK_COLLECTIVES=host on every rank sends \
         tensors through host memory instead, which is slow"
    )]
    NoLibrary {
        /// This rank.
        rank: usize,
        /// What the library, or the search for it, reported.
        problem: String,
    },
}

impl CommError {
    /// Ends an operation that returns tensors, and cannot return this error: weights that other ranks have did not arrive.
    pub fn raise(self) -> ! {
        // The hook of panics prints nothing for it: the caller that catches it reports it.
        std::panic::resume_unwind(Box::new(self))
    }

    /// Runs `work` and returns the error that [`CommError::raise`] ended it with, if one did. Panics go on.
    ///
    /// # Errors
    /// That error.
    pub fn catch<T>(work: impl FnOnce() -> T) -> Result<T, Self> {
        std::panic::catch_unwind(AssertUnwindSafe(work)).map_err(|payload| match payload.downcast::<Self>() {
            Ok(error) => *error,
            Err(other) => std::panic::resume_unwind(other),
        })
    }
}

/// Carries bytes between ranks.
pub trait Transport: Send + Sync {
    /// The bytes of every rank, in rank order. Returns when all have arrived.
    ///
    /// # Errors
    /// [`CommError::Lost`].
    fn all_gather(&self, operation: &'static str, bytes: Vec<u8>) -> Result<Vec<Arc<[u8]>>, CommError>;

    /// Why the job cannot go on: a rank is gone or failed. `None` while all is well.
    fn lost(&self) -> Option<String> {
        None
    }

    /// Tells all ranks that this one cannot go on, and why.
    fn fail(&self, problem: &str) {
        let _ = problem;
    }

    /// Ends the connection of a rank that has nothing more to exchange, which is then no loss to the others.
    fn close(&self) {}

    /// Once a rank is lost, starts a thread that calls `act` with the reason; at once if that has happened already. It is never
    /// called if the job finishes cleanly.
    fn when_lost(&self, act: Box<dyn FnOnce(&str) + Send>) {
        drop(act);
    }
}

/// What a backend's own library knows of the ranks of a job.
pub trait DeviceSide: Any + Send + Sync {
    /// Why the library's results are not to be used any more.
    fn failure(&self) -> Option<String>;
}

/// The ranks of a job, as one of them sees it.
#[derive(Clone)]
pub struct Communicator {
    rank: usize,
    world_size: usize,
    transport: Option<Arc<dyn Transport>>,
    /// What a backend's own library knows of these ranks, once it is connected.
    device_side: Arc<OnceLock<Arc<dyn DeviceSide>>>,
    /// Nanoseconds that exchanges of bytes have taken, waiting for other ranks included.
    exchanged_ns: Arc<AtomicU64>,
    /// Exchanges of bytes that go on.
    exchanging: Arc<AtomicUsize>,
}

impl fmt::Debug for Communicator {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Communicator(rank {} of {})", self.rank, self.world_size)
    }
}

impl Communicator {
    /// The communicator of a job of one rank: every sum is its only term.
    pub fn single() -> Self {
        Self::over(0, 1, None)
    }

    /// Rank `rank` of `world_size`, over a transport.
    ///
    /// # Panics
    /// If `rank` is not below `world_size`.
    pub fn new(rank: usize, world_size: usize, transport: Arc<dyn Transport>) -> Self {
        assert!(rank < world_size, "rank {rank} does not exist in a world of {world_size}");
        Self::over(rank, world_size, Some(transport))
    }

    fn over(rank: usize, world_size: usize, transport: Option<Arc<dyn Transport>>) -> Self {
        let (device_side, exchanged_ns, exchanging) = Default::default();
        Self { rank, world_size, transport, device_side, exchanged_ns, exchanging }
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

    /// Time that exchanges of bytes have taken so far, waiting for other ranks included.
    pub fn exchanged(&self) -> Duration {
        Duration::from_nanos(self.exchanged_ns.load(Ordering::Relaxed))
    }

    /// Whether this rank waits in an exchange of bytes just now.
    pub fn is_exchanging(&self) -> bool {
        self.exchanging.load(Ordering::Relaxed) > 0
    }

    /// Fails once a rank is lost: what was computed together since then must not be used.
    ///
    /// # Errors
    /// [`CommError::Lost`].
    pub fn check(&self, operation: &'static str) -> Result<(), CommError> {
        let of_transport = self.transport.as_ref().and_then(|transport| transport.lost());
        match of_transport.or_else(|| self.device_side.get().and_then(|side| side.failure())) {
            Some(problem) => Err(self.lost(operation, problem)),
            None => Ok(()),
        }
    }

    /// An error of this rank.
    pub fn lost(&self, operation: &'static str, problem: String) -> CommError {
        CommError::Lost { rank: self.rank, world_size: self.world_size, operation, problem }
    }

    /// Tells all ranks that this one cannot go on, and why.
    pub fn fail(&self, problem: &str) {
        if let Some(transport) = &self.transport {
            transport.fail(problem);
        }
    }

    /// Ends the connection of a rank that has nothing more to exchange, which is then no loss to the others.
    pub fn close(&self) {
        if let Some(transport) = &self.transport {
            transport.close();
        }
    }

    /// Once a rank is lost, starts a thread that calls `act` with the reason.
    pub fn when_lost(&self, act: impl FnOnce(&str) + Send + 'static) {
        if let Some(transport) = &self.transport {
            transport.when_lost(Box::new(act));
        }
    }

    /// What a backend stored with [`Communicator::connect_device`], if it is of this type.
    pub fn device_side<T: DeviceSide>(&self) -> Option<Arc<T>> {
        let side: Arc<dyn Any + Send + Sync> = self.device_side.get()?.clone();
        side.downcast().ok()
    }

    /// Stores what a backend's own library knows of these ranks, for all clones of this communicator.
    ///
    /// # Panics
    /// If something was stored before.
    pub fn connect_device<T: DeviceSide>(&self, side: Arc<T>) {
        assert!(self.device_side.set(side).is_ok(), "rank {} was connected twice", self.rank);
    }
}

/// Collectives over flat f32 tensors.
///
/// Inside a section a result may be stored, but is read by operations only after the section: it may still be under way on another
/// stream, while the section computes.
pub trait CommOps: Backend {
    /// The device of the rank with this number on its machine.
    fn device_of(local_rank: usize) -> Self::Device {
        let _ = local_rank;
        Self::Device::default()
    }

    /// Connects the devices of all ranks, where the backend has a library for that. Every rank calls it once, before the first
    /// collective. Returns what carries tensors between ranks, for the log.
    ///
    /// # Errors
    /// [`CommError::NoLibrary`], or as [`CommOps::all_reduce_sum`].
    fn connect(ranks: &Communicator, device: &Self::Device) -> Result<String, CommError> {
        let _ = (ranks, device);
        Ok("host memory and TCP, summed in rank order".to_owned())
    }

    /// Whether results that were returned before a rank was lost are right. Not where they may still be under way.
    fn is_exact_after_loss(ranks: &Communicator) -> bool {
        let _ = ranks;
        true
    }

    /// Milliseconds for which the device has waited for other ranks since the last call, to be read later as one number: communication
    /// that no other work hides. `None` where it is not measured.
    fn comm_wait(device: &Self::Device) -> Option<Readback> {
        let _ = device;
        None
    }

    /// Milliseconds of operations between devices since the last call, to be read later as one number: what hides behind other work
    /// included, and waiting for ranks that come later. `None` where it is not measured.
    fn comm_time(device: &Self::Device) -> Option<Readback> {
        let _ = device;
        None
    }

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

    /// Each tensor as it is on the rank that is named with it, on every rank.
    ///
    /// # Errors
    /// As [`CommOps::all_reduce_sum`].
    fn broadcast_each(
        ranks: &Communicator,
        tensors: Vec<(Tensor<Self, 1>, usize)>,
    ) -> Result<Vec<Tensor<Self, 1>>, CommError> {
        reference::broadcast_each(ranks, tensors)
    }

    /// Starts to give every rank the payloads that one of them has. Every rank lists the same ones in the same order.
    ///
    /// # Errors
    /// As [`CommOps::all_reduce_sum`].
    fn start_broadcast(
        ranks: &Communicator,
        loans: Vec<Loan<Self>>,
        device: &Self::Device,
    ) -> Result<Exchange<Self>, CommError> {
        Ok(Exchange::done(reference::broadcast_payloads(ranks, loans, device)?))
    }

    /// Starts to sum each f32 tensor over all ranks, for the rank that is named with it. On the others the result has no meaning.
    ///
    /// # Errors
    /// As [`CommOps::all_reduce_sum`].
    fn start_reduce(ranks: &Communicator, tensors: Vec<(Tensor<Self, 1>, usize)>) -> Result<Exchange<Self>, CommError> {
        let sums = reference::reduce_each(ranks, tensors)?;
        Ok(Exchange::done(sums.into_iter().map(Payload::Values).collect()))
    }

    /// The results of an exchange, in the order in which it was started. Operations of the same section may read them.
    fn finish(exchange: Exchange<Self>, device: &Self::Device) -> Vec<Payload<Self>> {
        let _ = device;
        exchange.payloads
    }

    /// The tensor of rank `root`, on every rank.
    ///
    /// # Errors
    /// As [`CommOps::all_reduce_sum`].
    fn broadcast(ranks: &Communicator, tensor: Tensor<Self, 1>, root: usize) -> Result<Tensor<Self, 1>, CommError> {
        reference::broadcast(ranks, tensor, root)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[derive(Default)]
    struct Library(Mutex<Option<String>>);

    impl DeviceSide for Library {
        fn failure(&self) -> Option<String> {
            self.0.lock().unwrap().clone()
        }
    }

    #[test]
    fn an_error_that_ends_a_computation_is_caught_as_it_was_raised() {
        let error = Communicator::single().lost("gathering weights", "rank 1 is gone".to_owned());
        let raised = error.clone();
        assert_eq!(CommError::catch(|| raised.raise()), Err::<(), _>(error));
        assert_eq!(CommError::catch(|| 7), Ok(7));
    }

    #[test]
    fn a_failure_of_a_connected_library_is_one_of_every_clone_of_the_communicator() {
        let (communicator, library) = (Communicator::single(), Arc::new(Library::default()));
        let clone = communicator.clone();
        assert!(clone.device_side::<Library>().is_none());
        communicator.connect_device(library.clone());
        assert!(clone.device_side::<Library>().is_some() && clone.check("a step").is_ok());
        *library.0.lock().unwrap() = Some("a cable is out".to_owned());
        let message = clone.check("a step").unwrap_err().to_string();
        assert!(message.contains("during a step: a cable is out"), "{message}");
    }
}
