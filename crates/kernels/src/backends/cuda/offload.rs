//! Tensors that wait in pinned host memory: copied out and back on a side stream while other work runs.
//!
//! A tensor that is being copied out is held until the copy is done: the engine's stream waits for a copy before the memory it reads
//! is freed, and that is when two younger copies are under way. Pinned buffers are kept for the next pass, since allocating them
//! costs more than a step.
//! Trade-off: up to two tensors more on the device than are in use.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::Arc;

use burn_tensor::{DType, Tensor};
use cubecl::cuda::CudaDevice;
use firebrick_cuda::{Context, CudaError, Event, PinnedBuffer, Stream};

use super::engine::{Cuda, Engine, engine};
use super::failure::check;
use super::launch::at;
use super::memory::{Lent, Pool, shared};
use super::tensor::{MatrixView, tensor};
use crate::Offloaded;

/// Tensors held for copies that may still run.
const MAX_IN_FLIGHT: usize = 2;
/// Uploads whose buffers may still be read.
const MAX_UPLOADS: usize = 3;

/// A tensor's copy in host memory, and the tensor that it is being copied back to.
pub(super) struct HostCopy {
    /// `None` once the tensor is back.
    buffer: Option<PinnedBuffer>,
    shape: [usize; 2],
    dtype: DType,
    /// The end of the last copy that uses the buffer.
    done: Arc<Event>,
    coming: Option<MatrixView>,
}

impl Drop for HostCopy {
    /// A copy that is dropped unread (when a failure unwinds) may still be under way.
    fn drop(&mut self) {
        if self.buffer.is_some() {
            // A failure here means that the context is lost, and with it the copy.
            let _ = self.done.synchronize();
        }
    }
}

/// See the head of this file.
pub(super) struct HostCopies {
    context: Context,
    side: Stream,
    free: Pool,
    /// Buffers of uploads that may still run, oldest first.
    uploading: RefCell<VecDeque<(Lent, Event)>>,
    /// Tensors being copied out, oldest first, with the end of their copy.
    leaving: RefCell<VecDeque<(MatrixView, Arc<Event>)>>,
}

impl HostCopies {
    pub(super) fn new(context: &Context) -> Result<Self, CudaError> {
        Ok(Self {
            context: context.clone(),
            side: Stream::new(context)?,
            free: Pool::default(),
            uploading: RefCell::default(),
            leaving: RefCell::default(),
        })
    }

    /// Makes the engine's stream wait for every copy that is under way, so that the end of a section is after them.
    pub(super) fn settle(&self, engine: &Engine) {
        for (matrix, done) in self.leaving.borrow_mut().drain(..) {
            check("waiting for a copy", engine.stream().wait_for(&done));
            drop(matrix);
        }
    }

    /// Waits until all copies of the side stream are done, and lets go of what they read.
    pub(super) fn synchronize(&self) -> Result<(), CudaError> {
        let waited = self.side.synchronize();
        self.leaving.borrow_mut().clear();
        waited
    }

    /// Returns the pinned buffers to the system. The caller has waited for the device.
    pub(super) fn release(&self) {
        for (buffer, done) in self.uploading.borrow_mut().drain(..) {
            check("waiting for an upload", done.synchronize());
            drop(buffer);
        }
        self.free.clear();
        shared(&CudaDevice { index: self.context.ordinal() }).1.clear();
    }

    /// Allocates buffers ahead of the first pass, on a thread of its own: pinning 8 GiB of host memory takes about a second. A
    /// failure shows when the first pass asks for what is missing.
    pub(super) fn reserve(&self, count: usize, bytes: usize) {
        let (context, free) = (self.context.clone(), self.free.clone());
        std::thread::spawn(move || {
            for _ in 0..count {
                match PinnedBuffer::new(&context, bytes) {
                    Ok(buffer) => free.put(buffer),
                    Err(_) => break,
                }
            }
        });
    }

    /// Keeps an upload's buffer until its copy is done, and lets go of those that are.
    pub(super) fn keep_until(&self, buffer: Lent, done: Event) {
        let mut uploading = self.uploading.borrow_mut();
        uploading.push_back((buffer, done));
        while uploading.len() > MAX_UPLOADS {
            if let Some((buffer, done)) = uploading.pop_front() {
                check("waiting for an upload", done.synchronize());
                drop(buffer);
            }
        }
    }

    fn out(&self, engine: &Engine, matrix: MatrixView) -> Result<HostCopy, CudaError> {
        let bytes = matrix.bytes();
        let buffer = self.free.take(&self.context, bytes)?;
        let (ready, done) = (Event::new(&self.context)?, Arc::new(Event::new(&self.context)?));
        engine.stream().record(&ready)?;
        self.side.wait_for(&ready)?;
        // SAFETY: the matrix is dense and held until the engine's stream has waited for the copy; the buffer is not read or
        // reused before a later copy of the same side stream.
        unsafe { self.side.copy_to_host(&buffer, at(matrix.address), bytes)? };
        self.side.record(&done)?;
        let copy = HostCopy {
            buffer: Some(buffer),
            shape: [matrix.rows, matrix.width],
            dtype: matrix.dtype,
            done: done.clone(),
            coming: None,
        };
        let mut leaving = self.leaving.borrow_mut();
        leaving.push_back((matrix, done));
        if leaving.len() > MAX_IN_FLIGHT
            && let Some((oldest, done)) = leaving.pop_front()
        {
            engine.stream().wait_for(&done)?;
            drop(oldest);
        }
        Ok(copy)
    }

    fn back(&self, engine: &Engine, copy: &mut HostCopy) -> Result<(), CudaError> {
        let Some(buffer) = copy.buffer.as_ref().filter(|_| copy.coming.is_none()) else { return Ok(()) };
        let [rows, width] = copy.shape;
        let matrix = engine.empty_matrix(rows, width, copy.dtype);
        let (ready, done) = (Event::new(&self.context)?, Arc::new(Event::new(&self.context)?));
        // The new tensor's memory may be that of one which the engine's stream still reads.
        engine.stream().record(&ready)?;
        self.side.wait_for(&ready)?;
        // SAFETY: the tensor has the bytes of the buffer and is held by the copy; the buffer is kept until a later copy of the
        // same side stream.
        unsafe { self.side.copy_to_device(at(matrix.address), buffer, buffer.len())? };
        self.side.record(&done)?;
        copy.coming = Some(matrix);
        copy.done = done;
        Ok(())
    }
}

/// See [`crate::MemoryOps::offload`].
pub(super) fn offload(x_nd: Tensor<Cuda, 2>) -> Offloaded<Cuda> {
    let engine = engine(&x_nd.device());
    engine.section(|| {
        let matrix = engine.flat(x_nd);
        Offloaded::elsewhere(check("copying to the host", engine.copies.out(&engine, matrix)))
    })
}

/// See [`crate::MemoryOps::prefetch`].
pub(super) fn prefetch(offloaded: &mut Offloaded<Cuda>, engine: &Engine) {
    if let Some(copy) = offloaded.elsewhere_mut::<HostCopy>() {
        engine.section(|| check("copying from the host", engine.copies.back(engine, copy)));
    }
}

/// See [`crate::MemoryOps::restore`].
pub(super) fn restore(offloaded: Offloaded<Cuda>, engine: &Engine) -> Tensor<Cuda, 2> {
    match offloaded.into_parts::<HostCopy>() {
        Ok(x_nd) => x_nd,
        Err(mut copy) => engine.section(|| {
            check("copying from the host", engine.copies.back(engine, &mut copy));
            check("waiting for a copy", engine.stream().wait_for(&copy.done));
            let matrix = copy.coming.take().expect("the copy was started above");
            if let Some(buffer) = copy.buffer.take() {
                engine.copies.free.put(buffer);
            }
            tensor(matrix.tensor)
        }),
    }
}
