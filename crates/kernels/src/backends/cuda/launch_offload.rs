//! Tensors that wait in pinned host memory: copied out and back on a side stream, beside our work.
//!
//! A tensor that is being copied out is held until the copy is done: our stream waits for a copy before the memory it reads
//! is given back, and that is when two younger copies are under way. Pinned buffers are kept for the next pass, since
//! allocating them costs more than a step.

#![allow(unsafe_code, reason = "launching device work is unsafe; the launch files are where it is answered for")]

use std::any::Any;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};

use burn_tensor::{DType, Tensor};
use cubecl::cuda::CudaDevice;
use firebrick_cuda::{Context, CudaError, Driver, Event, PinnedBuffer, Stream};

use super::Cuda;
use super::engine::{Engine, engine};
use super::failure::check;
use super::launch_rows::at;
use super::tensor::{Matrix, tensor};
use crate::host_buffer::Memory;
use crate::{HostBuffer, Offloaded};

/// Tensors held for copies that may still run.
const IN_FLIGHT: usize = 2;
/// Uploads whose buffers may still be read.
const UPLOADS: usize = 3;

/// Pinned buffers that nobody uses, shared with the threads that fill them.
#[derive(Clone, Default)]
struct Pool(Arc<Mutex<Vec<PinnedBuffer>>>);

impl Pool {
    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<PinnedBuffer>> {
        // Nothing that can panic happens under the lock.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A buffer of exactly `bytes`, from the pool or new.
    fn take(&self, context: &Context, bytes: usize) -> Result<PinnedBuffer, CudaError> {
        let mut free = self.lock();
        if let Some(index) = free.iter().position(|buffer| buffer.len() == bytes) {
            return Ok(free.swap_remove(index));
        }
        drop(free);
        PinnedBuffer::new(context, bytes)
    }
}

/// A tensor's copy in host memory, and the tensor that it is being copied back to.
pub(super) struct HostCopy {
    buffer: PinnedBuffer,
    shape: [usize; 2],
    dtype: DType,
    coming: Option<(Matrix, Event)>,
}

/// See the head of this file.
pub(super) struct HostCopies {
    context: Context,
    side: Stream,
    free: Pool,
    /// Buffers of uploads that may still run, oldest first.
    uploading: RefCell<VecDeque<(Lent, Event)>>,
    /// Tensors being copied out, oldest first, with the end of their copy.
    leaving: RefCell<VecDeque<(Matrix, Event)>>,
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

    /// Makes our stream wait for every copy that is under way, so that a section's end is theirs too.
    pub(super) fn settle(&self, engine: &Engine) {
        for (matrix, done) in self.leaving.borrow_mut().drain(..) {
            check("waiting for a copy", engine.stream().wait_for(&done));
            drop(matrix);
        }
    }

    /// Gives the pinned buffers back to the system.
    pub(super) fn release(&self) {
        for (buffer, done) in self.uploading.borrow_mut().drain(..) {
            check("waiting for an upload", done.synchronize());
            drop(buffer);
        }
        self.free.lock().clear();
        shared(&CudaDevice { index: self.context.ordinal() }).1.lock().clear();
    }

    /// Allocates buffers ahead of the first pass, on a thread of its own: locking pages takes about a second for 8 GiB. A
    /// failure shows when the first pass asks for what is missing.
    pub(super) fn reserve(&self, count: usize, bytes: usize) {
        let (context, free) = (self.context.clone(), self.free.clone());
        std::thread::spawn(move || {
            for _ in 0..count {
                match PinnedBuffer::new(&context, bytes) {
                    Ok(buffer) => free.lock().push(buffer),
                    Err(_) => break,
                }
            }
        });
    }

    /// Keeps an upload's buffer until its copy is done, and lets go of those that are.
    fn keep_until(&self, buffer: Lent, done: Event) {
        let mut uploading = self.uploading.borrow_mut();
        uploading.push_back((buffer, done));
        while uploading.len() > UPLOADS {
            if let Some((buffer, done)) = uploading.pop_front() {
                check("waiting for an upload", done.synchronize());
                drop(buffer);
            }
        }
    }

    fn out(&self, engine: &Engine, matrix: Matrix) -> Result<HostCopy, CudaError> {
        let bytes = matrix.rows * matrix.width * matrix.element_bytes();
        let buffer = self.free.take(&self.context, bytes)?;
        let (ready, done) = (Event::new(&self.context)?, Event::new(&self.context)?);
        engine.stream().record(&ready)?;
        self.side.wait_for(&ready)?;
        // SAFETY: the matrix is dense and held until our stream has waited for the copy; the buffer is not read or reused
        // before a later copy of the same side stream.
        unsafe { self.side.copy_to_host(&buffer, at(matrix.address), bytes)? };
        self.side.record(&done)?;
        let copy = HostCopy { buffer, shape: [matrix.rows, matrix.width], dtype: matrix.dtype, coming: None };
        let mut leaving = self.leaving.borrow_mut();
        leaving.push_back((matrix, done));
        if leaving.len() > IN_FLIGHT
            && let Some((oldest, done)) = leaving.pop_front()
        {
            engine.stream().wait_for(&done)?;
            drop(oldest);
        }
        Ok(copy)
    }

    fn back(&self, engine: &Engine, copy: &mut HostCopy) -> Result<(), CudaError> {
        if copy.coming.is_some() {
            return Ok(());
        }
        let [rows, width] = copy.shape;
        let matrix = engine.empty_matrix(rows, width, copy.dtype);
        let (ready, done) = (Event::new(&self.context)?, Event::new(&self.context)?);
        // The new tensor's memory may be that of one which our stream still reads.
        engine.stream().record(&ready)?;
        self.side.wait_for(&ready)?;
        // SAFETY: the tensor has the bytes of the buffer and is kept by the copy; the buffer is kept until a later copy of
        // the same side stream.
        unsafe { self.side.copy_to_device(at(matrix.address), &copy.buffer, copy.buffer.len())? };
        self.side.record(&done)?;
        copy.coming = Some((matrix, done));
        Ok(())
    }
}

/// See [`crate::Kernels::offload`].
pub(super) fn offload(x_nd: Tensor<Cuda, 2>) -> Offloaded<Cuda> {
    let engine = engine(&x_nd.device());
    engine.section(|| {
        let matrix = engine.flat(x_nd);
        Offloaded::elsewhere(check("copying to the host", engine.copies.out(&engine, matrix)))
    })
}

/// See [`crate::Kernels::prefetch`].
pub(super) fn prefetch(offloaded: &mut Offloaded<Cuda>, engine: &Engine) {
    if let Some(copy) = offloaded.elsewhere_mut::<HostCopy>() {
        engine.section(|| check("copying from the host", engine.copies.back(engine, copy)));
    }
}

/// See [`crate::Kernels::restore`].
pub(super) fn restore(offloaded: Offloaded<Cuda>, engine: &Engine) -> Tensor<Cuda, 2> {
    match offloaded.into_parts::<HostCopy>() {
        Ok(x_nd) => x_nd,
        Err(mut copy) => engine.section(|| {
            check("copying from the host", engine.copies.back(engine, &mut copy));
            let HostCopy { buffer, coming, .. } = copy;
            let (matrix, done) = coming.expect("the copy was begun above");
            check("waiting for a copy", engine.stream().wait_for(&done));
            engine.copies.free.lock().push(buffer);
            tensor(matrix.tensor)
        }),
    }
}

/// Pinned memory that comes from the pool and goes back to it.
struct Lent {
    buffer: Option<PinnedBuffer>,
    pool: Pool,
}

impl Deref for Lent {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.buffer.as_deref().unwrap_or_default()
    }
}

impl DerefMut for Lent {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.buffer.as_deref_mut().unwrap_or_default()
    }
}

impl Memory for Lent {
    fn into_any(self: Box<Self>) -> Box<dyn Any + Send> {
        self
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.pool.lock().push(buffer);
        }
    }
}

/// Contexts and pools by device, for threads that have no engine of their own.
fn shared(device: &CudaDevice) -> (Context, Pool) {
    static POOLS: Mutex<Vec<(usize, Context, Pool)>> = Mutex::new(Vec::new());
    let mut pools = POOLS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, context, pool)) = pools.iter().find(|(index, ..)| *index == device.index) {
        return (context.clone(), pool.clone());
    }
    let context = Driver::load().and_then(|driver| Context::retain(&driver, device.index));
    let (context, pool) = (check("starting CUDA", context), Pool::default());
    pools.push((device.index, context.clone(), pool.clone()));
    (context, pool)
}

/// See [`crate::Kernels::host_buffer`].
pub(super) fn host_buffer(device: &CudaDevice, bytes: usize) -> HostBuffer {
    let (context, pool) = shared(device);
    let buffer = check("allocating pinned memory", pool.take(&context, bytes));
    HostBuffer::new(Lent { buffer: Some(buffer), pool })
}

/// See [`crate::Kernels::upload`]. The buffer goes back to its pool when the copy is done, which the next upload waits for.
pub(super) fn upload(buffer: HostBuffer, shape: [usize; 2], dtype: DType, device: &CudaDevice) -> Tensor<Cuda, 2> {
    let bytes = shape[0] * shape[1] * dtype.size();
    assert_eq!(buffer.len(), bytes, "a tensor of shape {shape:?} in {dtype:?} has {bytes} bytes");
    let engine = engine(device);
    let lent = buffer.into_memory::<Lent>().expect("a buffer of this backend");
    engine.section(|| {
        let matrix = engine.empty_matrix(shape[0], shape[1], dtype);
        let pinned = lent.buffer.as_ref().expect("a lent buffer is there until it is dropped");
        // SAFETY: the tensor has the bytes of the buffer; the buffer is kept below until the copy is done.
        let copied = unsafe { engine.stream().copy_to_device(at(matrix.address), pinned, bytes) };
        check("copying to the device", copied);
        let done = check("recording an event", Event::new(engine.context()));
        check("recording an event", engine.stream().record(&done));
        engine.copies.keep_until(lent, done);
        tensor(matrix.tensor)
    })
}
