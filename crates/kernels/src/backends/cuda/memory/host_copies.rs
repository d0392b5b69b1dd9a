//! Copies between tensors and pinned host memory, on one side stream per direction, while other work runs.
//!
//! To the host: the outgoing stream waits for the engine's stream (which wrote the tensor), copies, and records `done`; the tensor is held until the
//! engine's stream waits for `done`, which is when two later copies are in flight, or when everything is settled: between forward and backward, and
//! when the section ends. Back: the incoming stream waits for `done` and for the engine's stream (whose earlier work may still read the memory that
//! the new tensor got), copies, and records a new `done`; the engine's stream waits for that before the tensor is used. Only then does the pinned
//! buffer return to the pool, so a later copy to the host, which waits for the engine's stream, never overtakes the copy back that reads the buffer.
//! Pinned buffers are kept for the next pass, since allocating them takes time.
//! Trade-off: up to two more tensors on the device than are in use.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use burn_tensor::{DType, TensorData};
use cubecl::cuda::CudaDevice;
use firebrick_cuda::{Context, CudaError, Event, PinnedBuffer, Stream};

use super::pinned::{Lent, Pool, shared};
use crate::backends::cuda::engine::{MatrixView, Primitive, check};
use crate::memory::Readback;

/// Maximum tensors held for copies that may still run.
const MAX_IN_FLIGHT: usize = 2;
/// Maximum uploads whose buffers may still be read.
const MAX_UPLOADS: usize = 8;

/// Maximum recorded waits for restored tensors until they are requested: more than those of one step.
const MAX_WAITS: usize = 1 << 14;

/// A tensor's copy in host memory, and the tensor that it is being copied back to.
pub(crate) struct HostCopy {
    /// `None` once the tensor is restored.
    buffer: Option<PinnedBuffer>,
    pub(crate) shape: [usize; 2],
    pub(crate) dtype: DType,
    /// The end of the last copy that uses the buffer.
    pub(crate) done: Arc<Event>,
    /// The tensor that it is being copied back to.
    pub(super) coming: Option<MatrixView>,
}

impl HostCopy {
    pub(super) fn to_data(&self) -> TensorData {
        let buffer = self.buffer.as_ref().expect("a copy that was restored is gone");
        check("waiting for a copy", self.done.synchronize());
        TensorData::from_bytes_vec(buffer.to_vec(), self.shape, self.dtype)
    }
}

impl Drop for HostCopy {
    /// Waits for a copy that is dropped unread (when a failure unwinds) and may still be in flight.
    fn drop(&mut self) {
        if self.buffer.is_some() {
            // A failure here means that the context is lost, and with it the copy.
            let _ = self.done.synchronize();
        }
    }
}

/// Numbers on their way to the host. They return their buffers to the pool when dropped.
pub(crate) struct CopiedNumbers {
    buffers: Vec<Lent>,
    done: Event,
}

impl CopiedNumbers {
    pub(crate) fn wait(self) -> Vec<f32> {
        check("waiting for numbers of the device", self.done.synchronize());
        self.buffers.iter().flat_map(|buffer| buffer.as_chunks().0).map(|&bytes| f32::from_ne_bytes(bytes)).collect()
    }
}

impl Drop for CopiedNumbers {
    /// Waits for the copies, so that no buffer returns to the pool while one may still write it.
    fn drop(&mut self) {
        // A failure here means that the context is lost, and with it the copies.
        let _ = self.done.synchronize();
    }
}

/// Start and end of a stretch of work on a stream.
pub(crate) type Span = (Arc<Event>, Arc<Event>);

/// Returns the time of all of these together in milliseconds, once they are done.
pub(crate) fn milliseconds(spans: Vec<Span>) -> Readback {
    let of = |(start, end): &Span| {
        end.synchronize()?;
        end.milliseconds_since(start)
    };
    Readback::new(move || vec![spans.iter().map(|span| check("reading an event", of(span))).sum()])
}

/// The side streams of an engine, with their copies in flight.
pub(crate) struct HostCopies {
    context: Context,
    incoming: Stream,
    outgoing: Stream,
    free: Pool,
    /// Buffers of uploads that may still run, oldest first.
    uploading: RefCell<VecDeque<(Lent, Event)>>,
    /// Tensors being copied out, oldest first, with the end of their copy.
    leaving: RefCell<VecDeque<(MatrixView, Arc<Event>)>>,
    /// Around the engine's waits for restored tensors.
    waits: RefCell<Vec<Span>>,
    reserving: RefCell<Option<Reserving>>,
}

/// A thread that allocates buffers in advance. It is stopped and joined, since the driver must not be called while the process exits.
struct Reserving {
    is_stopped: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Reserving {
    fn drop(&mut self) {
        self.is_stopped.store(true, Ordering::Relaxed);
        // A panic there has been printed; the first pass requests the missing buffers.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl HostCopies {
    pub(crate) fn new(context: &Context) -> Result<Self, CudaError> {
        Ok(Self {
            context: context.clone(),
            incoming: Stream::new(context)?,
            outgoing: Stream::new(context)?,
            free: Pool::default(),
            uploading: RefCell::default(),
            leaving: RefCell::default(),
            waits: RefCell::default(),
            reserving: RefCell::default(),
        })
    }

    /// Makes the engine's stream wait for every copy in flight, and releases their sources, so that the copies end before the section.
    pub(crate) fn settle(&self, main: &Stream) {
        for (matrix, done) in self.leaving.borrow_mut().drain(..) {
            check("waiting for a copy", main.wait_for(&done));
            drop(matrix);
        }
    }

    /// Waits until all copies of the side streams are done, and releases their sources.
    pub(crate) fn synchronize(&self) -> Result<(), CudaError> {
        let waited = self.outgoing.synchronize().and(self.incoming.synchronize());
        self.leaving.borrow_mut().clear();
        waited
    }

    /// Copies the f32 of each matrix to the host, on the engine's stream: so few bytes take no longer than a launch.
    pub(crate) fn numbers(&self, main: &Stream, values: Vec<MatrixView>) -> Result<CopiedNumbers, CudaError> {
        let mut copied = CopiedNumbers { buffers: Vec::with_capacity(values.len()), done: Event::new(&self.context)? };
        let result = values.iter().try_for_each(|value| {
            assert!(value.dtype == DType::F32 && value.is_dense(), "numbers are f32");
            let buffer = self.free.lend(&self.context, value.bytes())?;
            // SAFETY: the values have that many bytes, in memory that only later work of this stream can reuse; the buffer is neither read
            // nor returned to its pool before `done`, or before the stream was waited for.
            let result = unsafe { main.copy_to_host(buffer.pinned(), value.address, value.bytes()) };
            copied.buffers.push(buffer);
            result
        });
        if let Err(error) = result.and_then(|()| main.record(&copied.done)) {
            // No event marks the end of the copies, so wait for the whole stream. If that fails, the context is lost anyway.
            let _ = main.synchronize();
            return Err(error);
        }
        Ok(copied)
    }

    /// Returns the values of a dense i32 matrix, after waiting for all work of the stream so far.
    pub(crate) fn integers(&self, main: &Stream, values: &MatrixView) -> Result<Vec<i32>, CudaError> {
        assert!(values.dtype == DType::I32 && values.is_dense(), "integers are read as they lie");
        let buffer = self.free.lend(&self.context, values.bytes())?;
        // SAFETY: the values have that many bytes, in memory that the caller holds; the buffer is read and returned to its pool after the
        // stream was waited for.
        let copied = unsafe { main.copy_to_host(buffer.pinned(), values.address, values.bytes()) };
        // Wait even if the copy was rejected, so that nothing can still write the buffer.
        main.synchronize().and(copied)?;
        Ok(buffer.as_chunks().0.iter().map(|&bytes| i32::from_ne_bytes(bytes)).collect())
    }

    /// Returns start and end of the engine's waits for restored tensors since the last call.
    pub(crate) fn take_waits(&self) -> Vec<Span> {
        self.waits.take()
    }

    pub(crate) fn waiting_bytes(&self) -> u64 {
        self.free.bytes()
    }

    /// Returns the pinned buffers to the system. The caller has waited for the device.
    pub(crate) fn release(&self) {
        for (buffer, done) in self.uploading.borrow_mut().drain(..) {
            check("waiting for an upload", done.synchronize());
            drop(buffer);
        }
        self.free.clear();
        shared(&CudaDevice { index: self.context.ordinal() }).1.clear();
    }

    /// Allocates the buffers before the first pass, on a separate thread: pinning 8 GiB of host memory takes about half
    /// a second. A failure appears when the first pass requests the missing buffers.
    pub(crate) fn reserve(&self, count: usize, bytes: usize) {
        let (context, free) = (self.context.clone(), self.free.clone());
        let is_stopped = Arc::new(AtomicBool::new(false));
        let stop = is_stopped.clone();
        let thread = std::thread::spawn(move || {
            for _ in (0..count).take_while(|_| !stop.load(Ordering::Relaxed)) {
                match PinnedBuffer::new(&context, bytes) {
                    Ok(buffer) => free.put(buffer),
                    Err(_) => break,
                }
            }
        });
        self.reserving.replace(Some(Reserving { is_stopped, thread: Some(thread) }));
    }

    /// Keeps an upload's buffer until its copy is done, and releases those whose copies are.
    pub(crate) fn keep_until(&self, buffer: Lent, done: Event) {
        let mut uploading = self.uploading.borrow_mut();
        uploading.push_back((buffer, done));
        let is_done = |event: &Event| check("asking for an upload", event.is_done());
        while uploading.len() > MAX_UPLOADS || uploading.front().is_some_and(|(_, done)| is_done(done)) {
            if let Some((buffer, done)) = uploading.pop_front() {
                check("waiting for an upload", done.synchronize());
                drop(buffer);
            }
        }
    }

    pub(crate) fn out(&self, main: &Stream, matrix: MatrixView) -> Result<HostCopy, CudaError> {
        let bytes = matrix.bytes();
        let buffer = self.free.take(&self.context, bytes)?;
        let (ready, done) = (Event::new(&self.context)?, Arc::new(Event::new(&self.context)?));
        main.record(&ready)?;
        self.outgoing.wait_for(&ready)?;
        // SAFETY: the matrix is dense and held until the engine's stream has waited for the copy. Earlier copies that read the buffer
        // are done once the engine's stream reaches `ready` (see the head of this file); it is not read before `done`.
        unsafe { self.outgoing.copy_to_host(&buffer, matrix.address, bytes)? };
        self.outgoing.record(&done)?;
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
            main.wait_for(&done)?;
            drop(oldest);
        }
        Ok(copy)
    }

    pub(crate) fn waited(&self, [start, end]: [Event; 2]) {
        let mut waits = self.waits.borrow_mut();
        waits.push((start.into(), end.into()));
        // If they are never read, they must not accumulate.
        let surplus = waits.len().saturating_sub(MAX_WAITS);
        waits.drain(..surplus);
    }

    /// Starts to copy back into a new tensor of the copy's shape and format.
    pub(crate) fn back(&self, main: &Stream, copy: &mut HostCopy, new: MatrixView) -> Result<(), CudaError> {
        let buffer = copy.buffer.as_ref().expect("a copy that was restored is gone");
        let (ready, done) = (Event::new(&self.context)?, Arc::new(Event::new(&self.context)?));
        // The new tensor's memory may have belonged to a tensor that the engine's stream still reads.
        main.record(&ready)?;
        self.incoming.wait_for(&ready)?;
        // The copy to this buffer may still be in flight.
        self.incoming.wait_for(&copy.done)?;
        // SAFETY: the tensor has the bytes of the buffer and is held by the copy. The buffer returns to the pool only once the engine's
        // stream waits for `done`, and every later copy into it waits for the engine's stream.
        unsafe { self.incoming.copy_to_device(new.address, buffer, buffer.len())? };
        self.incoming.record(&done)?;
        copy.coming = Some(new);
        copy.done = done;
        Ok(())
    }

    /// Returns the restored tensor, after making the engine's stream wait for its copy; the buffer returns to the pool.
    pub(super) fn arrived(&self, mut copy: HostCopy) -> Primitive {
        let matrix = copy.coming.take().expect("the copy was started");
        if let Some(buffer) = copy.buffer.take() {
            self.free.put(buffer);
        }
        matrix.tensor
    }
}
