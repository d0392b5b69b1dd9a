//! Collectives over tensors: sums and broadcasts, by a library that a backend has connected ([`DeviceSide`]), else through host memory.
//!
//! Inside a section a result may be stored, but operations may read it only after the section, because it may still be
//! in flight on another stream. The results of an [`Exchange`] may be read at once.

use burn_tensor::{Tensor, backend::Backend};

use super::{CommError, Communicator, reference};
use crate::payload::{Exchange, Loan, Payload};
use crate::session::Session;

/// A collective operation on a list of tensors. Every rank lists the same ones in the same order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Collective {
    /// Sums each tensor over all ranks.
    AllReduce,
    /// Sums each tensor for its root; on other ranks the result is undefined.
    Reduce,
    /// Replaces each tensor by that of its root.
    Broadcast,
    /// Copies each root's tensor, which the root only reads, into new memory on the other ranks.
    Lend,
}

impl Collective {
    /// Returns the name of the operation, for errors.
    pub fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce_sum",
            Self::Reduce => "start_reduce",
            Self::Broadcast => "broadcast_each",
            Self::Lend => "start_broadcast",
        }
    }
}

/// A backend's library that exchanges tensors between the devices of a job's ranks.
pub trait DeviceSide<B: Backend>: Send + Sync {
    /// Returns why the library's results must no longer be used, if so.
    fn failure(&self) -> Option<String>;

    /// Starts an operation on tensors of `device`. In a sum without a root, the root that a tensor names is ignored.
    fn start(
        &self,
        ranks: &Communicator,
        collective: Collective,
        tensors: Vec<Loan<B>>,
        device: &B::Device,
    ) -> Result<Exchange<B>, CommError>;
}

impl Communicator {
    /// Sums each tensor, f32 or bf16, over all ranks, in its format; every rank gets the same bits.
    ///
    /// # Errors
    /// [`CommError`] if a rank is gone or sends something else.
    pub fn all_reduce_sum<B: Session>(&self, tensors: Vec<Tensor<B, 1>>) -> Result<Vec<Tensor<B, 1>>, CommError> {
        let Some(device) = tensors.first().map(Tensor::device).filter(|_| self.world_size() > 1) else {
            return Ok(tensors);
        };
        let Some(side) = self.device_side::<B>() else {
            return B::pause(&device, || reference::all_reduce_sum(self, tensors));
        };
        let tensors = tensors.into_iter().map(|tensor| Loan::of(Payload::Values(tensor), 0)).collect();
        Ok(values(side.start(self, Collective::AllReduce, tensors, &device)?))
    }

    /// Sends each tensor from the rank that is named with it to every rank.
    pub fn broadcast_each<B: Session>(
        &self,
        tensors: Vec<(Tensor<B, 1>, usize)>,
    ) -> Result<Vec<Tensor<B, 1>>, CommError> {
        let Some(device) = device_of(&tensors) else { return Ok(Vec::new()) };
        Ok(values(match self.device_side::<B>() {
            Some(side) => side.start(self, Collective::Broadcast, rooted(tensors), &device)?,
            None => self.start_broadcast(rooted(tensors), &device)?,
        }))
    }

    /// Starts to send each payload from its root to every rank.
    pub fn start_broadcast<B: Session>(
        &self,
        loans: Vec<Loan<B>>,
        device: &B::Device,
    ) -> Result<Exchange<B>, CommError> {
        match self.device_side::<B>() {
            Some(side) => side.start(self, Collective::Lend, loans, device),
            None => B::pause(device, || Ok(Exchange::done(reference::broadcast_payloads(self, loans, device)?))),
        }
    }

    /// Starts to sum each tensor, f32 or bf16, over all ranks, for the rank that is named with it. On the others the result is undefined.
    pub fn start_reduce<B: Session>(&self, tensors: Vec<(Tensor<B, 1>, usize)>) -> Result<Exchange<B>, CommError> {
        let Some(device) = device_of(&tensors) else { return Ok(Exchange::done(Vec::new())) };
        match self.device_side::<B>() {
            Some(side) => side.start(self, Collective::Reduce, rooted(tensors), &device),
            None => B::pause(&device, || {
                let sums = reference::reduce_each(self, tensors)?;
                Ok(Exchange::done(sums.into_iter().map(Payload::Values).collect()))
            }),
        }
    }
}

fn device_of<B: Backend>(tensors: &[(Tensor<B, 1>, usize)]) -> Option<B::Device> {
    tensors.first().map(|(tensor, _)| tensor.device())
}

fn rooted<B: Backend>(tensors: Vec<(Tensor<B, 1>, usize)>) -> Vec<Loan<B>> {
    tensors.into_iter().map(|(tensor, root)| Loan::of(Payload::Values(tensor), root)).collect()
}

/// Returns the results of an operation that the end of the section waits for.
fn values<B: Backend>(exchange: Exchange<B>) -> Vec<Tensor<B, 1>> {
    exchange.payloads.into_iter().map(Payload::into_values).collect()
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::testing::{Plain, random};

    #[derive(Default)]
    struct Library {
        failure: Mutex<Option<String>>,
        started: Mutex<Vec<Collective>>,
    }

    impl DeviceSide<Plain> for Library {
        fn failure(&self) -> Option<String> {
            self.failure.lock().unwrap().clone()
        }

        fn start(
            &self,
            _ranks: &Communicator,
            collective: Collective,
            tensors: Vec<Loan<Plain>>,
            _device: &burn_flex::FlexDevice,
        ) -> Result<Exchange<Plain>, CommError> {
            self.started.lock().unwrap().push(collective);
            Ok(Exchange::done(tensors.into_iter().filter_map(|loan| loan.own).collect()))
        }
    }

    #[test]
    fn a_failure_of_a_connected_library_is_one_of_every_clone_of_the_communicator() {
        let (communicator, library) = (Communicator::single(), Arc::new(Library::default()));
        let clone = communicator.clone();
        assert!(clone.is_exact_after_loss());
        communicator.connect_device::<Plain>(library.clone());
        assert!(!clone.is_exact_after_loss() && clone.check("a step").is_ok());
        *library.failure.lock().unwrap() = Some("a cable is out".to_owned());
        let message = clone.check("a step").unwrap_err().to_string();
        assert!(message.contains("during a step: a cable is out"), "{message}");
    }

    #[test]
    fn ranks_with_a_connected_library_exchange_tensors_by_it() {
        let library = Arc::new(Library::default());
        let ranks = crate::comm::local_group(2).remove(1);
        ranks.connect_device::<Plain>(library.clone());
        let tensor = || random::<Plain, 1>(1, [3]);
        let (expected, device) = (vec![tensor().into_data()], Default::default());
        let sums: Vec<Tensor<Plain, 1>> = ranks.all_reduce_sum(vec![tensor()]).unwrap();
        let shared: Vec<Tensor<Plain, 1>> = ranks.broadcast_each(vec![(tensor(), 0)]).unwrap();
        let reduced = values(ranks.start_reduce(vec![(tensor(), 1)]).unwrap());
        let lent = values(ranks.start_broadcast(vec![Loan::of(Payload::Values(tensor()), 1)], &device).unwrap());
        for found in [sums, shared, reduced, lent] {
            assert_eq!(found.into_iter().map(Tensor::into_data).collect::<Vec<_>>(), expected);
        }
        let expected = [Collective::AllReduce, Collective::Broadcast, Collective::Reduce, Collective::Lend];
        assert_eq!(*library.started.lock().unwrap(), expected);
    }
}
