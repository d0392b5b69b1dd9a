//! This rank, the number of ranks, and the small exchanges that are not gradients: counts, loss sums, barriers.
//!
//! Every rank calls the same exchanges in the same order.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use burn_tensor::Tensor;
use firebrick_kernels::{BackendKind, CommError, Communicator, Kernels, Parameter};

use crate::agreement::{Facts, agree};
use crate::error::ParallelError;
use crate::owners::owners;
use crate::placement::Placement;
use crate::rendezvous;

/// The ranks of a job, as seen by one of them. Clones are the same rank. Every exchange fails if a rank is gone or exchanges something else.
#[derive(Clone, Debug)]
pub struct Ranks {
    communicator: Communicator,
    local_rank: usize,
    local_world_size: usize,
}

impl Ranks {
    /// Creates a job of one rank: every sum is its only term.
    pub fn single() -> Self {
        Self::new(Communicator::single())
    }

    /// Creates the rank of a communicator.
    pub fn new(communicator: Communicator) -> Self {
        Self { communicator, local_rank: 0, local_world_size: 1 }
    }

    /// Joins a job: waits until all its ranks are there.
    ///
    /// # Errors
    /// A rank that does not come in time, or one that is not accepted.
    pub fn join(placement: &Placement) -> Result<Self, ParallelError> {
        let communicator = rendezvous::join(placement)?;
        let &Placement { local_rank, local_world_size, .. } = placement;
        Ok(Self { communicator, local_rank, local_world_size })
    }

    /// Returns the number of this rank, from 0.
    pub fn rank(&self) -> usize {
        self.communicator.rank()
    }

    /// Returns the number of ranks.
    pub fn world_size(&self) -> usize {
        self.communicator.world_size()
    }

    /// Returns whether this rank writes the run folder and prints.
    pub fn is_main(&self) -> bool {
        self.rank() == 0
    }

    /// Returns the index of this rank on its machine, which selects its device.
    pub fn local_rank(&self) -> usize {
        self.local_rank
    }

    /// Returns the number of ranks on this machine, which share its cores and its memory.
    pub fn local_world_size(&self) -> usize {
        self.local_world_size
    }

    /// Returns the carrier of bytes and tensors between the ranks, for collectives that this type does not have.
    pub fn communicator(&self) -> &Communicator {
        &self.communicator
    }

    /// Refuses ranks that would compute different runs.
    ///
    /// # Errors
    /// [`ParallelError::Differs`], the same on all ranks; or a rank is gone.
    pub fn agree(&self, facts: &Facts) -> Result<(), ParallelError> {
        if self.world_size() == 1 { Ok(()) } else { agree(&self.communicator, facts) }
    }

    /// Connects the devices of all ranks, if the backend has a library for that. Returns the name of what carries tensors between them; `None` with
    /// one rank.
    ///
    /// # Errors
    /// A library that is missing, or a rank is gone.
    pub fn connect(&self, backend: BackendKind) -> Result<Option<String>, ParallelError> {
        if self.world_size() == 1 {
            return Ok(None);
        }
        Ok(Some(backend.connect(&self.communicator, self.local_rank)?))
    }

    /// Returns whether a step that ended before a rank was lost is complete, which is false if its sums may still have been under way.
    pub fn is_exact_after_loss(&self) -> bool {
        self.communicator.is_exact_after_loss()
    }

    /// Gathers the bytes of every rank, in rank order. `operation` names the exchange in errors.
    pub fn all_gather(&self, operation: &'static str, bytes: Vec<u8>) -> Result<Vec<Arc<[u8]>>, ParallelError> {
        Ok(self.communicator.all_gather_bytes(operation, bytes)?)
    }

    /// Gathers the numbers of every rank, in rank order; all ranks pass the same number of them.
    pub fn all_gather_numbers<const N: usize>(
        &self,
        operation: &'static str,
        numbers: [u64; N],
    ) -> Result<Vec<[u64; N]>, ParallelError> {
        let own: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        let expected = own.len();
        let gathered = self.communicator.all_gather_bytes(operation, own)?;
        let read = |(rank, bytes): (usize, &Arc<[u8]>)| {
            if bytes.len() != expected {
                return Err(CommError::Mismatch { rank, operation, expected, got: bytes.len() });
            }
            let (values, _) = bytes.as_chunks::<8>();
            Ok(std::array::from_fn(|index| u64::from_le_bytes(values[index])))
        };
        Ok(gathered.iter().enumerate().map(read).collect::<Result<_, _>>()?)
    }

    /// Returns the bytes of rank 0 on every rank; the others' bytes are ignored.
    pub fn from_main(&self, operation: &'static str, bytes: Vec<u8>) -> Result<Arc<[u8]>, ParallelError> {
        let own = if self.is_main() { bytes } else { Vec::new() };
        let mut gathered = self.communicator.all_gather_bytes(operation, own)?;
        Ok(gathered.swap_remove(0))
    }

    /// Copies the parameter values of rank 0 to every rank.
    pub fn broadcast_parameters<'a, B: Kernels>(
        &self,
        parameters: impl IntoIterator<Item = &'a mut Parameter<B>>,
    ) -> Result<(), ParallelError> {
        if self.world_size() == 1 {
            return Ok(());
        }
        for parameter in parameters {
            let shared = self.communicator.broadcast_each(vec![(parameter.value.clone(), 0)])?;
            parameter.value = shared.into_iter().next().expect("one tensor was shared");
        }
        Ok(())
    }

    /// Returns the rank that updates each parameter, by its name, when ranks divide the optimizer's state.
    pub fn owners<B: Kernels>(&self, parameters: &[&Parameter<B>]) -> BTreeMap<Arc<str>, usize> {
        let sizes = parameters.iter().map(|parameter| (parameter.name.as_ref(), parameter.elements()));
        let names = parameters.iter().map(|parameter| parameter.name.clone());
        names.zip(owners(sizes, self.world_size())).collect()
    }

    /// Copies the value of each parameter from its owner, the rank given with it, to every rank.
    pub fn share_updates<B: Kernels>(
        &self,
        mut parameters: Vec<(&mut Parameter<B>, usize)>,
    ) -> Result<(), ParallelError> {
        let Some((first, _)) = parameters.first().filter(|_| self.world_size() > 1) else { return Ok(()) };
        let placeholder = Tensor::zeros([1], &first.value.device());
        // Values are taken out, so that a backend can write in place.
        let take = |(parameter, owner): &mut (&mut Parameter<B>, usize)| {
            (std::mem::replace(&mut parameter.value, placeholder.clone()), *owner)
        };
        let values: Vec<_> = parameters.iter_mut().map(take).collect();
        let shared = self.communicator.broadcast_each(values)?;
        for ((parameter, _), value) in parameters.into_iter().zip(shared) {
            parameter.value = value;
        }
        Ok(())
    }

    /// Fails once another rank is lost: results that were computed together since then must not be used.
    pub fn check(&self, operation: &'static str) -> Result<(), ParallelError> {
        Ok(self.communicator.check(operation)?)
    }

    /// Returns the total time of exchanges through host memory, including the wait for other ranks.
    pub fn exchanged(&self) -> Duration {
        self.communicator.exchanged()
    }

    /// Tells all ranks that this one cannot go on, and why.
    pub fn fail(&self, problem: &str) {
        self.communicator.fail(problem);
    }

    /// Starts a thread that calls `act` with the reason once another rank is lost.
    pub fn when_lost(&self, act: impl FnOnce(&str) + Send + 'static) {
        self.communicator.when_lost(act);
    }

    /// Waits until every rank has nothing more to exchange; after that, the end of a rank is no loss to the others.
    pub fn leave(&self) -> Result<(), ParallelError> {
        self.barrier()?;
        self.communicator.close();
        Ok(())
    }

    /// Sums a count over all ranks, for example the loss tokens of a step.
    pub fn all_reduce_count(&self, count: u64) -> Result<u64, ParallelError> {
        Ok(self.all_gather_numbers("all_reduce_count", [count])?.iter().map(|[count]| count).sum())
    }

    /// Sums a tensor `[1]` f32 over all ranks, for example the losses of a step. With one rank it returns the tensor itself.
    pub fn all_reduce_scalar<B: Kernels>(&self, scalar: Tensor<B, 1>) -> Result<Tensor<B, 1>, ParallelError> {
        let mut sums = self.all_reduce_sum::<B>(vec![scalar])?;
        Ok(sums.pop().expect("a sum over ranks has as many tensors as it was given"))
    }

    /// Returns once every rank has called it.
    pub fn barrier(&self) -> Result<(), ParallelError> {
        self.communicator.all_gather_bytes("barrier", Vec::new())?;
        Ok(())
    }

    /// Sums each tensor over all ranks, in one exchange; every rank gets the same bits.
    pub fn all_reduce_sum<B: Kernels>(&self, tensors: Vec<Tensor<B, 1>>) -> Result<Vec<Tensor<B, 1>>, ParallelError> {
        if self.world_size() == 1 { Ok(tensors) } else { Ok(self.communicator.all_reduce_sum(tensors)?) }
    }
}

#[cfg(test)]
mod tests {
    use burn_flex::Flex;

    use super::*;

    #[test]
    fn sums_over_one_rank_are_their_only_term() {
        let ranks = Ranks::single();
        assert_eq!((ranks.rank(), ranks.world_size(), ranks.is_main()), (0, 1, true));
        assert_eq!(ranks.all_reduce_count(7).unwrap(), 7);
        let scalar: Tensor<Flex, 1> = Tensor::from_floats([1.5], &Default::default());
        assert_eq!(ranks.all_reduce_scalar(scalar).unwrap().into_scalar(), 1.5);
        ranks.barrier().unwrap();
    }
}
