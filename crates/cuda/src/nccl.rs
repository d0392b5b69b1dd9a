//! Collectives between devices by NCCL, on a stream: sums of values in f32 or bf16, and broadcasts of bytes.
//!
//! Each rank of a job has its own communicator, for one device. Rank 0 generates an id, every rank gets it over another
//! connection, and all of them connect with it. AMD's RCCL exports the same functions under the same names.

mod symbols;

use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::context::Context;
use crate::error::CudaError;
use crate::stream::{Stream, same_device};
use symbols::{BFLOAT16, FLOAT32, IN_PROGRESS, Opaque, SUM, Status, Symbols, UINT8};

/// Time that [`NcclCommunicator::abort`] waits for a thread that is submitting and may itself wait for a rank that is gone.
const ABORT_WAIT: Duration = Duration::from_secs(2);

/// The loaded library.
#[derive(Clone, Copy)]
pub struct Nccl {
    symbols: &'static Symbols,
}

/// The id that all ranks of a communicator share before they connect: `ncclUniqueId`, which is passed by value.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NcclId(pub [u8; NcclId::BYTES]);

impl NcclId {
    /// Size of the id in bytes.
    pub const BYTES: usize = 128;
}

/// One rank's end of a communicator.
pub struct NcclCommunicator {
    symbols: &'static Symbols,
    context: Context,
    /// `None` after an abort.
    handle: Mutex<Option<Handle>>,
}

/// `ncclComm_t`.
struct Handle(Opaque);

// SAFETY: an ncclComm_t may be used from any thread, by one at a time (NCCL documentation, "Thread Safety"); it is behind a lock.
unsafe impl Send for Handle {}

impl Nccl {
    /// Finds and opens the library.
    ///
    /// # Errors
    /// Errors of [`crate::Driver::load`] and [`crate::Libraries::find`], [`CudaError::NcclNotFound`] or [`CudaError::BrokenLibrary`].
    pub fn load() -> Result<Self, CudaError> {
        Ok(Self { symbols: Symbols::load()? })
    }

    /// Returns the major, minor and patch version.
    pub fn version(&self) -> Result<(u32, u32, u32), CudaError> {
        let mut code = 0;
        // SAFETY: the pointer is valid for a write.
        let status = unsafe { (self.symbols.get_version)(&mut code) };
        self.symbols.checked("ncclGetVersion", status)?;
        Ok(version_of(u32::try_from(code).unwrap_or(0)))
    }

    /// Generates a new id, which rank 0 sends to the others.
    ///
    /// # Errors
    /// [`CudaError::Nccl`], for instance if no network interface can be used.
    pub fn new_id(&self) -> Result<NcclId, CudaError> {
        let mut id = NcclId([0; NcclId::BYTES]);
        // SAFETY: the pointer is valid for a write of the whole id.
        let status = unsafe { (self.symbols.get_unique_id)(&mut id) };
        self.symbols.checked("ncclGetUniqueId", status)?;
        Ok(id)
    }

    /// Connects rank `rank` of `count`, on the device of the context. Returns once all ranks have called it.
    ///
    /// # Errors
    /// [`CudaError::Nccl`], for instance if two ranks use one device.
    pub fn connect(
        &self,
        context: &Context,
        id: &NcclId,
        rank: usize,
        count: usize,
    ) -> Result<NcclCommunicator, CudaError> {
        let mut handle = ptr::null_mut();
        context.with_current(|| {
            // SAFETY: the pointer is valid for a write, the id is passed by value, and the context of the rank's device is current.
            let status = unsafe { (self.symbols.comm_init_rank)(&mut handle, number(count), *id, number(rank)) };
            self.symbols.checked("ncclCommInitRank", status)
        })?;
        let handle = Mutex::new(Some(Handle(handle)));
        Ok(NcclCommunicator { symbols: self.symbols, context: context.clone(), handle })
    }
}

impl NcclCommunicator {
    /// Sums each buffer (address, number of values, and whether they are bf16 instead of f32) over all ranks, in place, as one group on the stream.
    ///
    /// # Safety
    /// - The addresses must point to device memory of this context with that many values, which stays allocated until the stream has done the
    ///   work.
    /// - Other work that uses the buffers must be ordered before or after this on the stream.
    /// - Every rank must submit the same operations on buffers of the same sizes, in the same order.
    ///
    /// # Errors
    /// [`CudaError::NcclAborted`], [`CudaError::DifferentDevices`] or [`CudaError::Nccl`].
    pub unsafe fn all_reduce_sum(&self, stream: &Stream, buffers: &[(u64, usize, bool)]) -> Result<(), CudaError> {
        self.submit("ncclAllReduce", stream, buffers, |&(buffer, count, is_bf16), comm, stream| {
            let (data, format) = (pointer(buffer), format(is_bf16));
            // SAFETY: the buffer is the caller's promise; communicator and stream are alive, and of one device.
            unsafe { (self.symbols.all_reduce)(data, data, count, format, SUM, comm, stream) }
        })
    }

    /// Sums each buffer (as in [`NcclCommunicator::all_reduce_sum`], and a rank) over all ranks into the buffer of that rank, as one group on the
    /// stream.
    ///
    /// # Safety
    /// The requirements of [`NcclCommunicator::all_reduce_sum`] must hold.
    pub unsafe fn reduce_sum(&self, stream: &Stream, buffers: &[(u64, usize, bool, usize)]) -> Result<(), CudaError> {
        self.submit("ncclReduce", stream, buffers, |&(buffer, count, is_bf16, root), comm, stream| {
            let (data, format, root) = (pointer(buffer), format(is_bf16), number(root));
            // SAFETY: the buffer is the caller's promise; communicator and stream are alive, and of one device.
            unsafe { (self.symbols.reduce)(data, data, count, format, SUM, root, comm, stream) }
        })
    }

    /// Copies the bytes of one rank to all ranks, for each buffer (address, number of bytes, that rank), as one group on the stream.
    ///
    /// # Safety
    /// The requirements of [`NcclCommunicator::all_reduce_sum`] must hold, in bytes.
    pub unsafe fn broadcast(&self, stream: &Stream, buffers: &[(u64, usize, usize)]) -> Result<(), CudaError> {
        self.submit("ncclBroadcast", stream, buffers, |&(buffer, bytes, root), comm, stream| {
            let (data, root) = (pointer(buffer), number(root));
            // SAFETY: the buffer is the caller's promise; communicator and stream are alive, and of one device.
            unsafe { (self.symbols.broadcast)(data, data, bytes, UINT8, root, comm, stream) }
        })
    }

    /// Returns the error of previously submitted work, such as a rank that cannot be reached. Returns at once, with
    /// `None` while another thread is submitting.
    pub fn failure(&self) -> Option<CudaError> {
        let Ok(handle) = self.handle.try_lock() else { return None };
        let Some(Handle(comm)) = *handle else { return Some(CudaError::NcclAborted) };
        let mut state: Status = 0;
        // SAFETY: the communicator is alive and locked, and the pointer is valid for a write.
        let status = unsafe { (self.symbols.get_async_error)(comm, &mut state) };
        let state = if status == 0 { state } else { status };
        match state {
            0 | IN_PROGRESS => None,
            failed => Some(self.symbols.error("an earlier operation", failed)),
        }
    }

    /// Ends all work of this communicator, also on the device: kernels that wait for another rank return, with
    /// undefined buffer contents. Returns whether this succeeded; it does not if another thread keeps submitting.
    pub fn abort(&self) -> bool {
        let started = Instant::now();
        let mut handle = loop {
            match self.handle.try_lock() {
                Ok(handle) => break handle,
                Err(TryLockError::Poisoned(poisoned)) => break poisoned.into_inner(),
                Err(TryLockError::WouldBlock) if started.elapsed() < ABORT_WAIT => sleep(Duration::from_millis(10)),
                Err(TryLockError::WouldBlock) => return false,
            }
        };
        if let Some(Handle(comm)) = handle.take() {
            let _ = self.context.with_current(|| {
                // SAFETY: created by ncclCommInitRank and taken out of its place, so it is freed once and not used again. The status
                // is ignored: nothing can be done about a communicator that cannot be aborted.
                let _ = unsafe { (self.symbols.comm_abort)(comm) };
                Ok(())
            });
        }
        true
    }

    /// Runs calls as one group, which NCCL submits together.
    fn group(&self, calls: impl FnOnce() -> Result<(), CudaError>) -> Result<(), CudaError> {
        // SAFETY: has no arguments; the group is ended below by the same thread.
        self.symbols.checked("ncclGroupStart", unsafe { (self.symbols.group_start)() })?;
        let called = calls();
        // SAFETY: a group of this thread is open.
        let ended = self.symbols.checked("ncclGroupEnd", unsafe { (self.symbols.group_end)() });
        called.and(ended)
    }

    /// Submits a call per buffer as one group; `submit` gets communicator and stream.
    fn submit<T>(
        &self,
        call: &'static str,
        stream: &Stream,
        buffers: &[T],
        submit: impl Fn(&T, Opaque, Opaque) -> Status,
    ) -> Result<(), CudaError> {
        same_device(call, &self.context, stream.context())?;
        let handle: MutexGuard<'_, Option<Handle>> = self.handle.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(Handle(comm)) = *handle else { return Err(CudaError::NcclAborted) };
        let submit = |buffer| self.symbols.checked(call, submit(buffer, comm, stream.handle().cast()));
        self.context.with_current(|| self.group(|| buffers.iter().try_for_each(submit)))
    }
}

impl Drop for NcclCommunicator {
    /// Aborts rather than destroys, because destroying waits for the other ranks, which may be gone.
    fn drop(&mut self) {
        self.abort();
    }
}

fn pointer(address: u64) -> *mut std::ffi::c_void {
    address as *mut std::ffi::c_void
}

fn format(is_bf16: bool) -> i32 {
    if is_bf16 { BFLOAT16 } else { FLOAT32 }
}

/// Converts a rank, or a number of ranks, to NCCL's type.
fn number(ranks: usize) -> i32 {
    i32::try_from(ranks).expect("there are fewer ranks than 2^31")
}

/// Decodes a version: 2708 is 2.7.8, 22703 is 2.27.3.
fn version_of(code: u32) -> (u32, u32, u32) {
    let major = if code < 10_000 { 1000 } else { 10_000 };
    (code / major, code % major / 100, code % 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_in_the_old_and_the_new_form() {
        assert_eq!([2708, 21805, 22703].map(version_of), [(2, 7, 8), (2, 18, 5), (2, 27, 3)]);
    }

    /// Needs a driver and the libraries; returns early without them.
    #[test]
    fn loading_gives_a_version_or_names_the_package() {
        match Nccl::load() {
            Ok(nccl) => assert_eq!(nccl.version().expect("a loaded library has a version").0, 2),
            Err(error @ CudaError::NcclNotFound { .. }) => assert!(error.to_string().contains("libnccl2"), "{error}"),
            Err(_) => {}
        }
    }
}
