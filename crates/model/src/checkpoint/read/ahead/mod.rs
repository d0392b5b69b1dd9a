//! Reads tensors ahead with threads, piece by piece, in the order in which one consumer takes them.
//!
//! Readers fill the buffers that CUDA copies from, so the read is the only copy on the host there; other backends join the pieces of a tensor. All
//! readers share an unquantized tensor of any size, which goes to the device while its later pieces are read; a quantized weight is one piece. The
//! bytes that are ready or being read are bounded; a piece above the bound is read alone. Weights whose codes turn out not to be kept (NVFP4 with a
//! negative scale) take more than was counted for them. Readers also hash what they read.
//! Trade-off: nothing is read after a piece that cannot be read: the consumer gets the tensors before it, then the error.

mod queue;
mod read;
#[cfg(test)]
mod tests;
mod values;

use std::collections::BTreeSet;
use std::thread;

use burn_tensor::DType;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

pub(crate) use self::queue::Limits;
use self::queue::Queue;
pub(crate) use self::read::Request;
use self::read::{Allocate, Job};
pub(crate) use self::values::{CodesOrValues, Values, keeps_narrow_scales};
use crate::checkpoint::read::{HfFolder, Holder};
use crate::error::ModelError;

/// The consumer's end. When it is dropped, readers finish their current pieces and end.
pub(crate) struct ReadAhead<'a> {
    queue: &'a Queue<'a>,
    taken: usize,
}

/// Runs `work` while threads read the requested tensors ahead of it; when this returns, they have ended.
///
/// # Errors
/// A tensor that is not there, in another shape, or in a format that is no weight's: before anything is read.
pub(crate) fn read_ahead<R>(
    folder: &HfFolder,
    requests: &[Request],
    limits: Limits,
    allocate: Allocate<'_>,
    work: impl FnOnce(&mut ReadAhead<'_>) -> R,
) -> Result<R, ModelError> {
    let (mut jobs, mut pieces) = (Vec::with_capacity(requests.len()), Vec::new());
    for (index, request) in requests.iter().enumerate() {
        let job = folder.job(request, pieces.len())?;
        pieces.extend(job.pieces(index, limits.piece));
        jobs.push(Job { pieces: job.pieces.start..pieces.len(), ..job });
    }
    let queue = Queue::new(jobs, pieces, limits, allocate);
    Ok(thread::scope(|scope| {
        // Created before the first reader: if one fails to start, dropping this ends the others.
        let mut ahead = ReadAhead { queue: &queue, taken: 0 };
        queue.start(scope);
        work(&mut ahead)
    }))
}

impl HfFolder {
    /// Builds the job of a request, with the index of its first piece.
    fn job<'a>(&'a self, request: &'a Request, first_piece: usize) -> Result<Job<'a>, ModelError> {
        let holder = self.locate_shaped(&request.name, &request.shape)?;
        let (stored, keeps) = match holder {
            Holder::Plain(shard) => (shard.weight_dtype(&request.name, &request.name)?, None),
            Holder::OfExpert(slice) => (slice.weight_dtype(&request.name)?, None),
            Holder::Quantized(weight) => (DType::F32, weight.format().filter(|format| request.format == Some(*format))),
        };
        let (dtype, pieces) = (request.dtype.unwrap_or(stored), first_piece..first_piece);
        Ok(Job { name: &request.name, holder, shape: &request.shape, dtype, keeps, pieces })
    }
}

impl<'a> ReadAhead<'a> {
    /// Returns the next tensor in the order of the requests. Take its pieces before the next tensor.
    pub(crate) fn take(&mut self, name: &str) -> Values<'a> {
        let Some(job) = self.queue.jobs.get(self.taken).filter(|job| job.name == name) else {
            panic!("tensors are taken in the order in which they were requested, so not {name} now")
        };
        self.taken += 1;
        Values::ahead(self.queue, job)
    }

    /// Returns the hash of names and contents of all tensors, each counted once. It does not depend on the order in which pieces were read.
    pub(crate) fn hash(&self) -> u64 {
        let (hashes, mut hash, mut seen) = (self.queue.hashes(), Xxh3::new(), BTreeSet::new());
        for job in self.queue.jobs.iter().filter(|job| seen.insert(job.name)) {
            let of_tensor = match &hashes[job.pieces.clone()] {
                &[of_piece] => of_piece,
                of_pieces => xxh3_64(&of_pieces.iter().flat_map(|hash| hash.to_le_bytes()).collect::<Vec<_>>()),
            };
            hash.update(job.name.as_bytes());
            hash.update(&of_tensor.to_le_bytes());
        }
        hash.digest()
    }
}

impl Drop for ReadAhead<'_> {
    fn drop(&mut self) {
        self.queue.close();
    }
}
