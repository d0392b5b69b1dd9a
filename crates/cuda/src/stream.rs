//! Streams (queues of device work) and events (marks in streams, which order one stream after another).
//!
//! Not supported: priorities, and callbacks on the host.

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{CUevent, CUevent_flags, CUevent_wait_flags, CUresult, CUstream};

use crate::context::Context;
use crate::error::CudaError;

/// A queue of device work. It is non-blocking: it is not synchronized with the legacy default stream, so events are the only
/// order between streams.
pub struct Stream {
    context: Context,
    handle: CUstream,
}

// SAFETY: a CUstream is an opaque handle; the driver API accepts it from any thread and does its own locking.
unsafe impl Send for Stream {}
// SAFETY: as above; no field changes after construction.
unsafe impl Sync for Stream {}

/// A mark in the order of a device's work: recorded in one stream, waited for by others or by the host.
pub struct Event {
    context: Context,
    handle: CUevent,
}

// SAFETY: a CUevent is an opaque handle; the driver API accepts it from any thread and does its own locking.
unsafe impl Send for Event {}
// SAFETY: as above; no field changes after construction.
unsafe impl Sync for Event {}

impl Stream {
    /// Creates an empty stream.
    pub fn new(context: &Context) -> Result<Self, CudaError> {
        let create = || result::stream::create(result::stream::StreamKind::NonBlocking);
        let handle = context.with_current(|| context.driver().checked("cuStreamCreate", create()))?;
        Ok(Self { context: context.clone(), handle })
    }

    /// Returns the stream's context.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Returns the handle, alive as long as `self`.
    pub(crate) fn handle(&self) -> CUstream {
        self.handle
    }

    /// Marks the work submitted so far. An event that was recorded before is moved here; waits that were already submitted keep
    /// waiting for the old mark.
    pub fn record(&self, event: &Event) -> Result<(), CudaError> {
        same_device("cuEventRecord", &self.context, &event.context)?;
        // SAFETY: both handles are alive, since their owners are borrowed, and belong to one context.
        let recorded = unsafe { result::event::record(event.handle, self.handle) };
        self.context.driver().checked("cuEventRecord", recorded)
    }

    /// Makes later work of this stream wait for the mark; the host does not wait. There is no wait for an event that was never
    /// recorded.
    pub fn wait_for(&self, event: &Event) -> Result<(), CudaError> {
        same_device("cuStreamWaitEvent", &self.context, &event.context)?;
        let flags = CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both handles are alive, since their owners are borrowed, and belong to one context.
        let waiting = unsafe { result::stream::wait_event(self.handle, event.handle, flags) };
        self.context.driver().checked("cuStreamWaitEvent", waiting)
    }

    /// Blocks the host until the stream's work is done.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: the handle is alive as long as `self`.
        let done = unsafe { result::stream::synchronize(self.handle) };
        self.context.driver().checked("cuStreamSynchronize", done)
    }
}

impl Event {
    /// Creates an event for ordering, without a time stamp, which makes it cheaper.
    pub fn new(context: &Context) -> Result<Self, CudaError> {
        Self::with_flags(context, CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    /// Creates an event with a time stamp, for [`Event::milliseconds_since`].
    pub fn timed(context: &Context) -> Result<Self, CudaError> {
        Self::with_flags(context, CUevent_flags::CU_EVENT_DEFAULT)
    }

    fn with_flags(context: &Context, flags: CUevent_flags) -> Result<Self, CudaError> {
        let create = || context.driver().checked("cuEventCreate", result::event::create(flags));
        Ok(Self { handle: context.with_current(create)?, context: context.clone() })
    }

    /// Blocks the host until the marked work is done; returns at once if the event was never recorded.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: the handle is alive as long as `self`.
        let done = unsafe { result::event::synchronize(self.handle) };
        self.context.driver().checked("cuEventSynchronize", done)
    }

    /// Returns whether the marked work is done; an event that was never recorded is.
    ///
    /// # Errors
    /// Errors of the driver, also those of earlier work.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        // SAFETY: the handle is alive as long as `self`.
        match unsafe { result::event::query(self.handle) } {
            Err(DriverError(CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            done => self.context.driver().checked("cuEventQuery", done).map(|()| true),
        }
    }

    /// Returns the milliseconds of device time from `start` to this event, to about half a microsecond. Both events
    /// must be [`Event::timed`], recorded, and done.
    pub fn milliseconds_since(&self, start: &Event) -> Result<f32, CudaError> {
        same_device("cuEventElapsedTime", &start.context, &self.context)?;
        // SAFETY: both handles are alive, since their owners are borrowed, and belong to one context.
        unsafe { self.context.driver().elapsed_ms(start.handle, self.handle) }
    }

    /// Returns the handle, alive as long as `self`.
    pub(crate) fn handle(&self) -> CUevent {
        self.handle
    }
}

/// Rejects handles of two devices; the driver would only report an invalid handle.
pub(crate) fn same_device(call: &'static str, first: &Context, second: &Context) -> Result<(), CudaError> {
    let (first, second) = (first.ordinal(), second.ordinal());
    if first == second { Ok(()) } else { Err(CudaError::DifferentDevices { call, first, second }) }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: created by cuStreamCreate and destroyed once; the driver finishes queued work first. The status is ignored:
        // it is an error only if the driver is already shutting down with the process.
        let _ = unsafe { result::stream::destroy(self.handle) };
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created by cuEventCreate and destroyed once; waits already submitted are not affected. The status is
        // ignored: it is an error only if the driver is already shutting down with the process.
        let _ = unsafe { result::event::destroy(self.handle) };
    }
}
