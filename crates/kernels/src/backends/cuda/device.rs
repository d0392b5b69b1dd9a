//! A device as the operations of one thread use it: the engine, and what each subject keeps from one operation to the next.
//!
//! The engine knows no subject. So whatever subjects must do when a section ends or fails is done here.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ops::Deref;
use std::rc::Rc;
use std::sync::PoisonError;

use cubecl::cuda::CudaDevice;
use firebrick_cuda::CudaError;

use super::attention::library::{CudnnLimits, Library};
use super::comm::collectives::Collectives;
use super::engine::{Engine, MatrixView, check, lock_of};
use super::linear::operands::fp8::codes::{Fp8Scales, PreparedRows, RowScaling};
use super::memory::host_copies::HostCopies;
use super::memory::planned::{KeptWeights, Room};
use super::tables::Tables;

/// The state of one thread on one device.
pub(super) struct Device {
    // Dropped first: its waiting and recorded launches refer to the libraries below.
    engine: Engine,
    pub(super) library: Library,
    pub(super) fp8_scales: Fp8Scales,
    pub(super) row_scaling: Cell<RowScaling>,
    /// Rows in 8-bit floats for the next GEMM.
    pub(super) prepared_rows: RefCell<Option<PreparedRows>>,
    /// Allocation in which the section saves low-rank intermediates.
    pub(super) saved_low_rank: RefCell<Option<LowRankChunk>>,
    pub(super) kept: KeptWeights,
    pub(super) room: Room,
    pub(super) copies: HostCopies,
    pub(super) collectives: Collectives,
    pub(super) tables: Tables,
}

/// An allocation in which low-rank intermediates are saved, one after the other.
#[derive(Debug)]
pub(crate) struct LowRankChunk {
    pub memory: MatrixView,
    /// Ranks in use.
    pub used: usize,
}

thread_local! {
    static DEVICES: RefCell<HashMap<usize, Rc<Device>>> = RefCell::new(HashMap::new());
}

impl Deref for Device {
    type Target = Engine;

    fn deref(&self) -> &Engine {
        &self.engine
    }
}

impl Device {
    /// Returns this thread's state of a device; the first call builds it.
    pub(super) fn of(device: &CudaDevice) -> Rc<Self> {
        let known = DEVICES.with_borrow(|devices| devices.get(&device.index).cloned());
        known.unwrap_or_else(|| {
            // Another thread inside a section may be recording a graph, during which the driver rejects some calls.
            let _turn = lock_of(device.index).lock().unwrap_or_else(PoisonError::into_inner);
            let new = Rc::new(check("starting CUDA", Self::new(device)));
            new.tables.prepare(device);
            DEVICES.with_borrow_mut(|devices| devices.insert(device.index, new.clone()));
            new
        })
    }

    fn new(device: &CudaDevice) -> Result<Self, CudaError> {
        let (engine, library) = Engine::new(device, Library::new)?;
        let context = &engine.context;
        let info = context.driver().device(context.ordinal())?;
        Ok(Self {
            library: library?,
            fp8_scales: Fp8Scales::new(context),
            row_scaling: Cell::new(RowScaling::of(info.compute_capability)),
            prepared_rows: RefCell::default(),
            saved_low_rank: RefCell::default(),
            kept: KeptWeights::new(context),
            room: Room::default(),
            copies: HostCopies::new(context)?,
            collectives: Collectives::new(context),
            tables: Tables::default(),
            engine,
        })
    }

    /// Runs `work` with the stream ordered after all earlier work of CubeCL, and later work of CubeCL after it. Inside
    /// another section, just calls `work`.
    pub(super) fn section<R>(&self, work: impl FnOnce() -> R) -> R {
        if self.is_in_section() {
            return work();
        }
        self.open();
        let open = Open { device: self, is_closed: false };
        let result = work();
        self.copies.settle(self.stream());
        self.collectives.settle(self.stream());
        open.close();
        result
    }
}

/// Runs `work` in a section of this thread's device.
pub(super) fn in_section<R>(device: &CudaDevice, work: impl FnOnce(&Device) -> R) -> R {
    let device = Device::of(device);
    device.section(|| work(&device))
}

/// An outermost section. It also ends on error paths.
struct Open<'a> {
    device: &'a Device,
    is_closed: bool,
}

impl Open<'_> {
    fn close(mut self) {
        self.device.watch.verify();
        self.is_closed = true;
        *self.device.saved_low_rank.borrow_mut() = None;
        self.device.close();
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        if self.is_closed {
            return;
        }
        let device = self.device;
        device.abandon(|| {
            *device.prepared_rows.borrow_mut() = None;
            device.fp8_scales.clear();
            device.kept.clear();
            *device.saved_low_rank.borrow_mut() = None;
            // Copies between host and device may still use memory that unwinding frees. A failure here means that the
            // context is lost, which the failure already unwinding reports better.
            let _ = device.copies.synchronize();
            let _ = device.collectives.synchronize();
        });
    }
}

/// Makes this thread's attention on a device treat cuDNN's forward or backward as rejected, for tests of the fallbacks.
pub fn refuse_cudnn(device: &CudaDevice, forward: bool, backward: bool) {
    Device::of(device).library.refuse(forward, backward);
}

/// Sets other cuDNN limits for this thread's attention on a device and returns the previous ones, for tests of both kernels on small documents.
pub fn limit_cudnn(device: &CudaDevice, limits: CudnnLimits) -> CudnnLimits {
    Device::of(device).library.limits.replace(limits)
}

/// Sets whether this thread's repeated launches on a device are submitted as graphs (the default), for tests that graphs change no result.
pub fn use_graphs(device: &CudaDevice, on: bool) {
    Device::of(device).repeats.turn(on);
}

/// Returns the number of this thread's launches on a device that are in graphs, for tests that there are some.
pub fn launches_in_graphs(device: &CudaDevice) -> usize {
    Device::of(device).repeats.in_graphs()
}

/// Limits the shared memory per block that this thread's launches on a device assume, or with `None` removes the limit,
/// for tests of smaller cards. Returns the resulting bytes.
pub fn limit_shared_memory(device: &CudaDevice, bytes: Option<usize>) -> usize {
    let device = Device::of(device);
    device.limit_shared_memory(bytes);
    device.shared_bytes()
}

/// Returns the bytes of scratch memory that this thread's engine holds on a device, for tests that it stays bounded.
pub fn scratch_bytes(device: &CudaDevice) -> usize {
    Device::of(device).scratch.bytes()
}
