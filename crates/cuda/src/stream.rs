//! Streams and events: queues of device work, and marks in them that order one queue after another.

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUevent, CUevent_flags, CUevent_wait_flags, CUresult, CUstream};

use crate::{Context, CudaError};

/// A queue of device work. Non-blocking: it does not wait for the legacy default stream, nor that for it, so all order
/// between streams is what events say.
pub struct Stream {
    context: Context,
    handle: CUstream,
}

// SAFETY: a CUstream is an opaque handle; the driver API takes it from any thread and does its own locking.
unsafe impl Send for Stream {}
// SAFETY: as above; no field changes after construction.
unsafe impl Sync for Stream {}

/// A mark in the order of a device's work: recorded in one stream, waited for by others or by the host.
pub struct Event {
    context: Context,
    handle: CUevent,
}

// SAFETY: a CUevent is an opaque handle; the driver API takes it from any thread and does its own locking.
unsafe impl Send for Event {}
// SAFETY: as above; no field changes after construction.
unsafe impl Sync for Event {}

impl Stream {
    /// A new, empty stream.
    ///
    /// # Errors
    /// What the driver says.
    pub fn new(context: &Context) -> Result<Self, CudaError> {
        let create = || result::stream::create(result::stream::StreamKind::NonBlocking);
        let handle = context.with_current(|| context.driver().checked("cuStreamCreate", create()))?;
        Ok(Self { context: context.clone(), handle })
    }

    /// The context that the stream works in.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Alive as long as `self`.
    pub(crate) fn handle(&self) -> CUstream {
        self.handle
    }

    /// Marks the work submitted so far. An event that was recorded before is moved here; who waits already keeps waiting
    /// for the old mark.
    ///
    /// # Errors
    /// [`CudaError::DifferentDevices`], or what the driver says.
    pub fn record(&self, event: &Event) -> Result<(), CudaError> {
        same_device("cuEventRecord", &self.context, &event.context)?;
        // SAFETY: both handles are alive, since their owners are borrowed, and belong to one context.
        let recorded = unsafe { result::event::record(event.handle, self.handle) };
        self.context.driver().checked("cuEventRecord", recorded)
    }

    /// Makes later work of this stream wait for the mark; the host does not wait. An event never recorded is no wait.
    ///
    /// # Errors
    /// [`CudaError::DifferentDevices`], or what the driver says.
    pub fn wait_for(&self, event: &Event) -> Result<(), CudaError> {
        same_device("cuStreamWaitEvent", &self.context, &event.context)?;
        let flags = CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both handles are alive, since their owners are borrowed, and belong to one context.
        let waiting = unsafe { result::stream::wait_event(self.handle, event.handle, flags) };
        self.context.driver().checked("cuStreamWaitEvent", waiting)
    }

    /// Blocks the host until the stream's work is done.
    ///
    /// # Errors
    /// What the driver says; an error of an earlier kernel can surface here.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: the handle is alive as long as `self`.
        let done = unsafe { result::stream::synchronize(self.handle) };
        self.context.driver().checked("cuStreamSynchronize", done)
    }
}

impl Event {
    /// An event for ordering: without a time stamp, which makes it cheaper.
    ///
    /// # Errors
    /// What the driver says.
    pub fn new(context: &Context) -> Result<Self, CudaError> {
        Self::with_flags(context, CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    /// An event with a time stamp, for [`Event::milliseconds_since`].
    ///
    /// # Errors
    /// What the driver says.
    pub fn timed(context: &Context) -> Result<Self, CudaError> {
        Self::with_flags(context, CUevent_flags::CU_EVENT_DEFAULT)
    }

    fn with_flags(context: &Context, flags: CUevent_flags) -> Result<Self, CudaError> {
        let create = || context.driver().checked("cuEventCreate", result::event::create(flags));
        Ok(Self { handle: context.with_current(create)?, context: context.clone() })
    }

    /// Blocks the host until the marked work is done; returns at once if the event was never recorded.
    ///
    /// # Errors
    /// What the driver says.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: the handle is alive as long as `self`.
        let done = unsafe { result::event::synchronize(self.handle) };
        self.context.driver().checked("cuEventSynchronize", done)
    }

    /// Whether the marked work is done, without waiting.
    ///
    /// # Errors
    /// What the driver says.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        // SAFETY: the handle is alive as long as `self`.
        match unsafe { sys::cuEventQuery(self.handle) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            status => self.context.driver().checked("cuEventQuery", status.result()).map(|()| true),
        }
    }

    /// Milliseconds of device time from `start` to this event, to about half a microsecond. Both events are
    /// [`Event::timed`], recorded, and done.
    ///
    /// # Errors
    /// [`CudaError::DifferentDevices`], or what the driver says, which includes an event that is not done.
    pub fn milliseconds_since(&self, start: &Event) -> Result<f32, CudaError> {
        same_device("cuEventElapsedTime", &start.context, &self.context)?;
        // SAFETY: both handles are alive, since their owners are borrowed, and belong to one context.
        unsafe { self.context.driver().elapsed_ms(start.handle, self.handle) }
    }

    /// The context that the event belongs to.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Alive as long as `self`.
    pub(crate) fn handle(&self) -> CUevent {
        self.handle
    }
}

/// Refuses handles of two devices, which the driver would only call invalid.
pub(crate) fn same_device(call: &'static str, first: &Context, second: &Context) -> Result<(), CudaError> {
    let (first, second) = (first.ordinal(), second.ordinal());
    if first == second { Ok(()) } else { Err(CudaError::DifferentDevices { call, first, second }) }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: made by cuStreamCreate and destroyed once; work still queued is finished by the driver first. The status
        // is dropped: it is an error only when the driver is already shutting down with the process.
        let _ = unsafe { result::stream::destroy(self.handle) };
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made by cuEventCreate and destroyed once; waits already submitted keep what they need. The status is
        // dropped: it is an error only when the driver is already shutting down with the process.
        let _ = unsafe { result::event::destroy(self.handle) };
    }
}
