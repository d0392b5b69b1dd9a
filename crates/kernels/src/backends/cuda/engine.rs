//! What the operations of one thread on one device share: our stream and its hand-over to CubeCL's, the libraries, compiled
//! programs, scratch memory, and the trace.
//!
//! CubeCL gives every thread a stream and a pool of its own unless told otherwise; [`configure`] tells it to keep one. A
//! training run uses one thread a device, so the engine is thread-local and needs no lock.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use burn_tensor::DType;
use cubecl::client::ComputeClient;
use cubecl::config::memory::PersistentMemory;
use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig};
use cubecl::cuda::{CudaDevice, CudaRuntime};
use cubecl::prelude::Runtime;
use firebrick_cuda::{BlasLt, Context, CudaError, Driver, Event, HandOver, Stream};

use super::attention::Attention;
use super::failure::check;
use super::launch_offload::HostCopies;
use super::program::Programs;
use super::scratch::Scratch;
use super::tables::Tables;
use super::tensor::{Primitive, address};
use super::trace::Trace;

/// See the head of this file.
pub(super) struct Engine {
    device: CudaDevice,
    client: ComputeClient<CudaRuntime>,
    context: Context,
    stream: Arc<Stream>,
    hand_over: HandOver,
    depth: Cell<usize>,
    sections: Cell<u64>,
    /// A tensor that nothing uses: asking for its address waits until CubeCL has submitted what it was given.
    submitted: RefCell<Option<Primitive>>,
    /// Temporary copies of the running section.
    kept: RefCell<Vec<Primitive>>,
    multiprocessors: usize,
    shared_bytes: usize,
    pub(super) blas: RefCell<BlasLt>,
    pub(super) attention: Attention,
    pub(super) programs: Programs,
    pub(super) scratch: Scratch,
    pub(super) copies: HostCopies,
    pub(super) tables: Tables,
    pub(super) trace: Trace,
}

thread_local! {
    static ENGINES: RefCell<HashMap<usize, Rc<Engine>>> = RefCell::new(HashMap::new());
}

/// Settings of CubeCL that training needs, made before anything else touches it: one stream whatever the thread, and
/// buffers of exactly the size asked for, kept for the next tensor of that size. CubeCL's default pools round up to pages of
/// a quarter of the card.
pub(super) fn configure() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        let mut config = CubeClRuntimeConfig::default();
        config.streaming.max_streams = 1;
        config.memory.persistent_memory = PersistentMemory::Enforced;
        CubeClRuntimeConfig::set(config);
    });
}

/// The engine of this thread for a device; made at the first call.
pub(super) fn engine(device: &CudaDevice) -> Rc<Engine> {
    let known = ENGINES.with_borrow(|engines| engines.get(&device.index).cloned());
    known.unwrap_or_else(|| {
        let engine = Rc::new(check("starting CUDA", Engine::new(device)));
        engine.tables.prepare(device);
        ENGINES.with_borrow_mut(|engines| engines.insert(device.index, engine.clone()));
        engine
    })
}

impl Engine {
    fn new(device: &CudaDevice) -> Result<Self, CudaError> {
        let driver = Driver::load()?;
        let info = driver.device(device.index)?;
        let client = CudaRuntime::client(device);
        let context = Context::retain(&driver, device.index)?;
        let stream = Arc::new(Stream::new(&context)?);
        Ok(Self {
            hand_over: HandOver::new(stream.clone())?,
            blas: RefCell::new(BlasLt::new(&context)?),
            attention: Attention::new(&context)?,
            programs: Programs::new(&context)?,
            scratch: Scratch::new(&context),
            copies: HostCopies::new(&context)?,
            tables: Tables::default(),
            multiprocessors: info.multiprocessors as usize,
            shared_bytes: info.shared_memory_per_block_bytes as usize,
            trace: Trace::default(),
            depth: Cell::new(0),
            sections: Cell::new(0),
            submitted: RefCell::new(None),
            kept: RefCell::default(),
            device: device.clone(),
            client,
            context,
            stream,
        })
    }

    /// The device.
    pub(super) fn device(&self) -> &CudaDevice {
        &self.device
    }

    /// Multiprocessors of the device.
    pub(super) fn multiprocessors(&self) -> usize {
        self.multiprocessors
    }

    /// Shared memory that a block may have.
    pub(super) fn shared_bytes(&self) -> usize {
        self.shared_bytes
    }

    /// CubeCL's client for the device: whose memory tensors live in.
    pub(super) fn client(&self) -> &ComputeClient<CudaRuntime> {
        &self.client
    }

    /// The device's context.
    pub(super) fn context(&self) -> &Context {
        &self.context
    }

    /// The stream that all our work goes to.
    pub(super) fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Number of the running outermost section: what is derived from parameters is valid within one.
    pub(super) fn section_number(&self) -> u64 {
        self.sections.get()
    }

    /// Runs `work` with our stream ordered after all of CubeCL's earlier work, and CubeCL's later work after ours. Inside
    /// another section this is a plain call.
    pub(super) fn section<R>(&self, work: impl FnOnce() -> R) -> R {
        if self.depth.get() > 0 {
            return work();
        }
        self.sections.set(self.sections.get() + 1);
        let open = Open::new(self);
        let result = work();
        self.copies.settle(self);
        open.close();
        result
    }

    /// Runs ordinary Burn operations in the middle of a section: after our work so far, and before what comes of it. For the
    /// rare shape that no kernel here takes.
    pub(super) fn pause<R>(&self, work: impl FnOnce() -> R) -> R {
        let depth = self.depth.replace(0);
        if depth > 0 {
            check("leaving a section", self.hand_over.end());
        }
        let result = work();
        if depth > 0 {
            self.begin();
        }
        self.depth.set(depth);
        result
    }

    /// Keeps a temporary copy until the section ends, so that its memory is not given to a tensor that a launch writes while
    /// it reads the copy.
    pub(super) fn keep(&self, copy: &Primitive) {
        if self.depth.get() > 0 {
            self.kept.borrow_mut().push(copy.clone());
        }
    }

    fn begin(&self) {
        self.wait_until_submitted();
        check("entering a section", self.hand_over.begin());
    }

    /// Blocks until CubeCL's queue thread has given the driver everything that was asked for so far.
    fn wait_until_submitted(&self) {
        let mut submitted = self.submitted.borrow_mut();
        let marker = submitted.get_or_insert_with(|| self.empty([1], DType::F32));
        address(marker);
    }

    /// A new timed event, recorded on our stream.
    pub(super) fn mark(&self) -> Result<Event, CudaError> {
        let event = Event::timed(&self.context)?;
        self.stream.record(&event)?;
        Ok(event)
    }
}

/// An outermost section; ends on the error paths too, so that a failure never lets CubeCL run ahead of work already
/// submitted.
struct Open<'a> {
    engine: &'a Engine,
    closed: bool,
}

impl<'a> Open<'a> {
    fn new(engine: &'a Engine) -> Self {
        engine.begin();
        engine.depth.set(1);
        Self { engine, closed: false }
    }

    fn close(mut self) {
        self.closed = true;
        self.engine.depth.set(0);
        self.engine.kept.borrow_mut().clear();
        check("leaving a section", self.engine.hand_over.end());
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        if !self.closed {
            self.engine.depth.set(0);
            self.engine.kept.borrow_mut().clear();
            // A failure here means that the context is lost: the one that is already on its way says so better.
            let _ = self.engine.hand_over.end();
        }
    }
}
