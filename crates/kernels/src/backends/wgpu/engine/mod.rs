//! Launches of our own on the device that CubeCL uses, in sections.
//!
//! One queue takes all work, ours and CubeCL's, in the order in which it is submitted. CubeCL submits late, on threads of its own; so a section begins
//! by having it submit what it holds, and ends by submitting what we have recorded. In between no operation of Burn may run (`pause`).
//! - Memory that a section has bound is not given to anything else until the section is submitted: it holds the handles.
//! - One thread at a time is inside a section. Other threads may use Burn at any time, with the limits that `Session::section` names.
//! - All threads share one stream of CubeCL (`on_cubecl::configure`).
//!
//! Trade-off: programs and bind groups are kept per thread.

mod fill;
mod gpu;
mod half;
mod launch;
mod program;
mod template;
mod tensor;
#[cfg(test)]
mod tests;
mod trace;

pub(super) use gpu::Matrices;
pub(super) use gpu::lacks_matrices;
pub(in crate::backends) use gpu::probe;
pub(super) use half::{DividedBy, Half};
pub(super) use launch::{Operand, in_a_row};
pub(super) use program::Kernel;
#[cfg(test)]
pub(super) use program::compile_elsewhere;
pub use tensor::Wgpu;
pub(super) use tensor::{Matrix, Primitive, int_primitive, int_tensor, primitive, tensor};
pub(super) use trace::Cost;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::{Mutex, MutexGuard, PoisonError};

use burn_tensor::backend::Backend;
use cubecl::server::Handle;
use cubecl::wgpu::WgpuDevice;
use rustc_hash::FxHashMap;

use crate::backends::on_cubecl::{DeviceFailure, Recycled, prepare, suppressed_message};
use gpu::Gpu;
use half::Halves;
use launch::{GroupKey, Pace, Recording};
use program::Programs;
use tensor::Buffers;
use trace::Trace;

/// The thread that is inside a section holds it.
static TURN: Mutex<()> = Mutex::new(());

thread_local! {
    static ENGINE: RefCell<Option<Rc<Engine>>> = const { RefCell::new(None) };
}

/// What launches of one thread keep.
pub(super) struct Engine {
    gpu: &'static Gpu,
    programs: Programs,
    groups: RefCell<FxHashMap<GroupKey, wgpu::BindGroup>>,
    buffers: RefCell<Buffers>,
    recycled: Recycled,
    recording: RefCell<Option<Recording>>,
    pace: Pace,
    pub(super) trace: Trace,
    /// Whether new memory is filled with NaN.
    is_filled: Cell<bool>,
    /// Minimum rows of new matrices whose rows are counted by [`Engine::room`].
    min_rows: Cell<usize>,
    /// The most bytes that tensors of sections had at once.
    most_bytes: Cell<usize>,
    /// Copies in float16, while products are by matrix units.
    halves: Halves,
    emulates: Cell<bool>,
    /// Handles that the open section has bound.
    held: RefCell<Vec<Handle>>,
    depth: Cell<usize>,
    turn: RefCell<Option<MutexGuard<'static, ()>>>,
}

/// Runs `work` in a section of this thread.
pub(super) fn in_section<R>(work: impl FnOnce(&Engine) -> R) -> R {
    let engine = Engine::get();
    engine.section(|| work(&engine))
}

impl Engine {
    /// Returns this thread's engine; the first call opens the device.
    pub(super) fn get() -> Rc<Self> {
        let known = ENGINE.with_borrow(Clone::clone);
        known.unwrap_or_else(|| {
            let gpu = Gpu::get();
            prepare();
            let new = Rc::new(Self {
                gpu,
                programs: Programs::default(),
                groups: RefCell::default(),
                buffers: RefCell::default(),
                recycled: Recycled::default(),
                recording: RefCell::default(),
                pace: Pace::default(),
                trace: Trace::default(),
                is_filled: Cell::new(false),
                min_rows: Cell::new(0),
                most_bytes: Cell::new(0),
                halves: Halves::default(),
                emulates: Cell::new(false),
                held: RefCell::default(),
                depth: Cell::new(0),
                turn: RefCell::default(),
            });
            ENGINE.with_borrow_mut(|engine| *engine = Some(new.clone()));
            new
        })
    }

    /// Sets whether new memory is filled with NaN, for the self-test.
    pub(super) fn fill_new_memory(&self, on: bool) {
        self.is_filled.set(on);
    }

    /// Returns how products by matrix units are computed; `None` if the adapter has none.
    pub(super) fn matrices(&self) -> Option<Matrices> {
        if self.emulates.get() { Some(Matrices { lanes: 32, are_emulated: true }) } else { self.gpu.matrices.ok() }
    }

    /// Has plain code take the place of matrix units.
    #[cfg(test)]
    pub(super) fn emulate_matrices(&self) {
        self.emulates.set(true);
    }

    pub(super) fn is_in_section(&self) -> bool {
        self.depth.get() > 0
    }

    /// Returns how many f32 values may be in a tensor, so that a launch can bind it.
    pub(super) fn most_values(&self) -> usize {
        (self.gpu.limits.max_storage_buffer_binding_size / 4) as usize
    }

    /// Returns how many operands a launch may have.
    pub(super) fn most_operands(&self) -> usize {
        self.gpu.limits.max_storage_buffers_per_shader_stage as usize
    }

    /// Runs `work` after all work that CubeCL has been given, and before what it is given later. Inside another section, just calls `work`.
    pub(super) fn section<R>(&self, work: impl FnOnce() -> R) -> R {
        if self.is_in_section() {
            return work();
        }
        self.begin();
        self.depth.set(1);
        let open = Open { engine: self, is_closed: false };
        let result = work();
        open.close();
        result
    }

    /// Runs operations of Burn in the middle of a section, after the work so far and before the work that follows.
    pub(super) fn pause<R>(&self, work: impl FnOnce() -> R) -> R {
        let depth = self.depth.replace(0);
        if depth > 0 {
            self.end();
        }
        let result = work();
        if depth > 0 {
            self.begin();
        }
        self.depth.set(depth);
        result
    }

    fn begin(&self) {
        *self.turn.borrow_mut() = Some(TURN.lock().unwrap_or_else(PoisonError::into_inner));
        self.recycled.begin();
        self.flush_burn();
    }

    fn end(&self) {
        self.submit();
        self.held.borrow_mut().clear();
        *self.turn.borrow_mut() = None;
    }

    /// Has CubeCL submit all that it was given.
    fn flush_burn(&self) {
        if let Err(error) = self.gpu.client.flush() {
            self.gpu.check("an operation of Burn");
            let message = suppressed_message().unwrap_or_else(|| format!("{error:?}"));
            let out_of_memory = message.contains("emory");
            DeviceFailure { operation: "an operation of Burn", out_of_memory, message }.raise();
        }
    }

    fn hold(&self, handle: &Handle) {
        if !self.recycled.has(handle) {
            self.held.borrow_mut().push(handle.clone());
        }
    }

    pub(super) fn synchronize(&self) {
        assert!(!self.is_in_section(), "a section does not wait for the device");
        self.flush_burn();
        let _ = self.gpu.device.poll(wgpu::PollType::wait_indefinitely());
        self.gpu.check("waiting for the device");
    }

    /// Returns unused memory to the driver.
    pub(super) fn release(&self) {
        self.groups.borrow_mut().clear();
        self.buffers.borrow_mut().clear();
        self.recycled.release();
        Wgpu::memory_cleanup(&WgpuDevice::DefaultDevice);
        self.synchronize();
    }
}

/// An outermost section. It also ends on error paths.
struct Open<'a> {
    engine: &'a Engine,
    is_closed: bool,
}

impl Open<'_> {
    fn close(mut self) {
        self.is_closed = true;
        self.engine.depth.set(0);
        self.engine.end();
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        if !self.is_closed {
            // What is recorded belongs to results that nothing will read.
            let engine = self.engine;
            engine.depth.set(0);
            engine.recording.replace(None);
            engine.halves.replace(None);
            engine.held.borrow_mut().clear();
            engine.recycled.release();
            engine.groups.borrow_mut().clear();
            engine.buffers.borrow_mut().clear();
            *engine.turn.borrow_mut() = None;
        }
    }
}
