//! State that the operations of one thread on one device share: the stream, cuBLASLt, compiled programs, scratch memory,
//! addresses and the trace. It knows nothing of the subjects, which keep their state next to it (`device.rs`).
//!
//! Invariants that every operation relies on:
//! - All device work of the engine is on one stream, in the order of the calls; launches may wait on the host until something else is
//!   submitted (`Repeats` of firebrick-cuda). Memory that is freed after a call is reused only by later work on the same stream, so dropping
//!   a tensor whose kernels are still queued is safe inside a section.
//! - CubeCL's pool has one stream for all threads and buffers of exactly the requested size (`configure` in `on_cubecl/`). The driver, too, may reuse freed
//!   memory only in stream order.
//! - Other threads may request Burn operations at any time. So a section holds all memory that it uses until CubeCL's stream is ordered
//!   after it (`address.rs`), orders its stream after CubeCL's wherever it gets memory from there (`tensor.rs`), and reuses only memory
//!   that no other thread has used in the meantime (`recycled.rs`).
//! - Only one thread at a time is inside a section of a device (`section.rs`).
//! - Values derived from parameters (converted weights) are valid for one section: no parameter may be updated in a section that has already
//!   used it.
//!
//! Trade-off: the engine is thread-local. A second thread gets a separate stream and scratch memory.

mod address;
mod constants;
mod elementwise;
mod every_program;
mod experts;
mod failure;
mod gemm;
mod launch;
mod matrix;
mod program;
mod scratch;
mod section;
mod tensor;
mod trace;
mod watch;

pub(super) use constants::{
    ADAMW_PIECE, CROSS_ENTROPY_THREADS, DISPATCHED_ROWS, MAX_EXPERTS, MAX_STRIDES, MAX_TENSORS, MOMENT_BLOCK,
    NARROW_TENSORS, NORM_PIECE, PAIR_THREADS, RANGE_PIECE, TOKENS_PER_BLOCK, cached_queries, cached_threads,
};
pub use every_program::every_program;
pub(super) use experts::{OfExperts, WIDE_STAGES, expert_stages};
pub(super) use failure::{check, check_launch};
pub(super) use gemm::{Gemm, GemmScales};
pub(super) use launch::{BlockArguments, Launch, arguments, grid, grid_of, rows_and_columns, threads_for};
pub use matrix::Cuda;
pub(super) use matrix::{DeviceBlock, MatrixView, Primitive, float, int_tensor, payload, primitive, tensor, view};
pub(super) use program::{DeltaPart, DeltaSizes, FlashVariant, SoftCap, Source, WeightValues};
pub(super) use scratch::{Contents, ScratchSlot};
pub(super) use trace::Cost;
pub(super) use watch::lock_of;
pub use watch::watch_burn_operations;

use std::cell::{Cell, RefCell};
use std::panic::resume_unwind;
use std::rc::Rc;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::thread::ScopedJoinHandle;

use burn_tensor::DType;
use cubecl::client::ComputeClient;
use cubecl::cuda::{CudaDevice, CudaRuntime};
use cubecl::prelude::Runtime;
use cubecl::server::Handle;
use firebrick_cuda::{BlasLt, Context, CudaError, Driver, Event, Libraries, Repeats, Stream, StreamHandoff};

use address::Addresses;
use program::Programs;
use scratch::Scratch;
use trace::Trace;
use watch::BurnWatch;

use crate::backends::on_cubecl::{Owner, Recycled, configure, handle_number, prepare, uses};

/// The state of one thread on one device.
pub(super) struct Engine {
    device: CudaDevice,
    /// Owns the memory of tensors.
    client: ComputeClient<CudaRuntime>,
    pub(super) context: Context,
    // These two are dropped before the libraries that waiting and recorded launches refer to.
    pub(super) repeats: Rc<Repeats>,
    pub(super) scratch: Scratch,
    pub(super) handoff: StreamHandoff,
    pub(super) depth: Cell<usize>,
    /// Number of the outermost section.
    pub(super) sections: Cell<u64>,
    /// The first section of several in which no parameter changes, while they last.
    pub(super) unchanged_since: Cell<Option<u64>>,
    /// The lock that allows this thread to be inside a section of the device.
    pub(super) turn: RefCell<Option<MutexGuard<'static, ()>>>,
    /// Unused memory, whose address is requested to wait until CubeCL has submitted its work.
    pub(super) marker: RefCell<Option<Handle>>,
    pub(super) watch: BurnWatch,
    pub(super) multiprocessors: usize,
    /// Whether kernels may start before earlier work has ended.
    starts_early: bool,
    card_shared_bytes: usize,
    shared_bytes: Cell<usize>,
    pub(super) addresses: Addresses,
    pub(super) recycled: Recycled,
    pub(super) blas: RefCell<BlasLt>,
    pub(super) programs: Programs,
    /// Whether sizes of new tensors are rounded up to powers of two bytes, so that few sizes occur.
    pub(super) rounds_sizes: Cell<bool>,
    pub(super) trace: Trace,
}

/// Bits of a CubeCL handle number: more than a process ever allocates.
const NUMBER_BITS: u32 = 40;

/// Loads the driver, counts its devices, and finds and opens the libraries. Without this, CubeCL would panic if one is missing.
pub fn probe() -> Result<(), String> {
    let driver = Driver::load().map_err(|error| error.to_string())?;
    if driver.devices().map_err(|error| error.to_string())?.is_empty() {
        return Err("the NVIDIA driver is installed, but it lists no device".to_owned());
    }
    Libraries::find(&driver).map_err(|error| error.to_string())?;
    configure();
    Ok(())
}

/// Returns the number of devices that the driver lists; 0 without a driver.
pub fn device_count() -> usize {
    Driver::load().and_then(|driver| driver.devices()).map_or(0, |devices| devices.len())
}

/// Returns why a device has no kernels for activations of a format; `None` if it has, or where there is no such device.
pub(in crate::backends) fn format_refusal(device: &CudaDevice, dtype: DType) -> Option<String> {
    let info = Driver::load().and_then(|driver| driver.device(device.index)).ok()?;
    program::format_refusal(dtype, info.compute_capability)
}

/// Returns a thread's result, or continues its panic.
fn joined<T>(thread: ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| resume_unwind(panic))
}

impl Engine {
    /// Starts an engine. `beside` runs on another thread while the libraries load: they are large, and may have to be read from disk.
    pub(super) fn new<T: Send>(
        device: &CudaDevice,
        beside: impl FnOnce(&Context) -> T + Send,
    ) -> Result<(Self, T), CudaError> {
        prepare();
        let driver = Driver::load()?;
        let info = driver.device(device.index)?;
        let client = CudaRuntime::client(device);
        let context = Context::retain(&driver, device.index)?;
        // CubeCL allocates in the order of its stream, but memory that it allocates inside a section is used on ours.
        context.reuse_in_stream_order_only()?;
        let stream = Arc::new(Stream::new(&context)?);
        let repeats = Rc::new(Repeats::new(stream.clone()));
        let (blas, beside, programs) = std::thread::scope(|scope| {
            let blas = scope.spawn(|| BlasLt::new(&context));
            let beside = scope.spawn(|| beside(&context));
            let programs = Programs::new(&context);
            (joined(blas), joined(beside), programs)
        });
        let engine = Self {
            handoff: StreamHandoff::new(stream)?,
            blas: RefCell::new(blas?),
            programs: programs?,
            scratch: Scratch::new(&context, repeats.clone()),
            repeats,
            addresses: Addresses::new(&context, &client),
            recycled: Recycled::default(),
            multiprocessors: info.multiprocessors as usize,
            starts_early: info.compute_capability >= (9, 0) && driver.launches_early(),
            card_shared_bytes: info.shared_memory_per_block_bytes as usize,
            shared_bytes: Cell::new(info.shared_memory_per_block_bytes as usize),
            rounds_sizes: Cell::new(false),
            trace: Trace::default(),
            depth: Cell::new(0),
            sections: Cell::new(0),
            unchanged_since: Cell::new(None),
            turn: RefCell::new(None),
            marker: RefCell::new(None),
            watch: BurnWatch::new(),
            device: device.clone(),
            client,
            context,
        };
        Ok((engine, beside))
    }

    /// Returns whether a section is open and not paused.
    pub(super) fn is_in_section(&self) -> bool {
        self.depth.get() > 0
    }

    /// Returns the device address of a tensor's first value. A section holds the memory until it ends.
    pub(super) fn address(&self, primitive: &Primitive) -> u64 {
        if !self.is_in_section() {
            return self.addresses.of(primitive);
        }
        let (address, is_new) = self.addresses.in_section(primitive, self.section_number());
        if is_new {
            // Another thread may have requested the tensor's computation after the section began.
            check("ordering streams", self.handoff.begin());
        }
        address
    }

    /// Identifies a tensor among all that a process ever has, so that a buffer derived from it is not confused with one
    /// derived from another tensor that got the same memory later.
    pub(super) fn source(&self, primitive: &Primitive) -> [u64; 2] {
        let offset = primitive.handle.offset_start.unwrap_or(0);
        let number = handle_number(&primitive.handle);
        let identity = number.map(|number| number as u64 | uses(number) << NUMBER_BITS);
        [identity.unwrap_or_else(|| self.address(primitive)), offset]
    }

    /// Returns what a buffer holds that is computed from these sources in this section, or in sections in which they are unchanged.
    pub(super) fn contents(&self, dtype: DType, sources: impl Into<Vec<u64>>) -> Contents {
        let section = self.unchanged_since.get().unwrap_or_else(|| self.section_number());
        Contents { section, dtype, sources: sources.into() }
    }

    /// Returns whether no other tensor has this tensor's memory, so that an operation that takes the tensor may write there.
    pub(super) fn is_unshared(&self, primitive: &Primitive) -> bool {
        let section = self.is_in_section().then(|| self.section_number());
        self.recycled.is_unshared(&primitive.handle).unwrap_or_else(|| self.addresses.is_unshared(primitive, section))
    }

    /// Identifies the tensor that has a tensor's memory now; `None` if it could not be distinguished from a later one.
    pub(super) fn owner(&self, primitive: &Primitive) -> Option<Owner> {
        handle_number(&primitive.handle).map(|number| Owner {
            section: self.section_number(),
            number,
            uses: uses(number),
        })
    }

    /// Returns whether no other tensor has had this memory since, in this section.
    pub(super) fn is_current(&self, owner: Owner) -> bool {
        owner.section == self.section_number() && owner.uses == uses(owner.number)
    }

    pub(super) fn device(&self) -> &CudaDevice {
        &self.device
    }

    /// Limits the shared memory per block that launches assume, or with `None` removes the limit.
    pub(super) fn limit_shared_memory(&self, bytes: Option<usize>) {
        self.shared_bytes.set(bytes.unwrap_or(usize::MAX).min(self.card_shared_bytes));
    }

    /// Returns the shared memory that a block may use.
    pub(super) fn shared_bytes(&self) -> usize {
        self.shared_bytes.get()
    }

    /// Returns the engine's stream, after submitting all waiting launches.
    pub(super) fn stream(&self) -> &Stream {
        check_launch(self.repeats.flush());
        self.repeats.stream()
    }

    /// Waits for all work of the device; no section may be open. Must not run while another thread is inside one,
    /// because the driver rejects waits while a graph is recorded.
    pub(super) fn synchronize(&self) {
        self.while_idle(|| ());
    }

    /// Waits for all work of the device, and runs `work` before another thread can begin a section.
    pub(super) fn while_idle<R>(&self, work: impl FnOnce() -> R) -> R {
        assert!(!self.is_in_section(), "a section does not wait for the device");
        let _turn = lock_of(self.device.index).lock().unwrap_or_else(PoisonError::into_inner);
        check("waiting for the device", self.context.synchronize());
        work()
    }

    pub(super) fn mark(&self) -> Result<Event, CudaError> {
        let event = Event::timed(&self.context)?;
        self.stream().record(&event)?;
        Ok(event)
    }
}
