//! Orders our stream after and before all other work in its context, without access to CubeCL's streams.
//!
//! CubeCL does not expose its streams, but works in the device's primary context, and since CUDA 12.5 a context as a whole can
//! be recorded and made to wait. A section of our work is therefore bracketed like this, without any host wait:
//!
//! ```text
//! begin:  cuCtxRecordEvent(context, begun)      everything submitted to the context so far ...
//!         cuStreamWaitEvent(stream, begun)      ... precedes what our stream does next
//! end:    cuEventRecord(ended, stream)          everything submitted to our stream ...
//!         cuCtxWaitEvent(context, ended)        ... precedes what is submitted to the context next
//! ```
//!
//! With an older driver the host waits for the context when a section begins, and for our stream when it ends.
//!
//! Trade-off: this orders ALL streams of the context, in both directions, so a copy or a collective on a side stream also
//! delays ours. A handoff belongs at the edges of a section of work, not around each call. CubeCL submits from its own
//! queue thread: preceding work must have been submitted, not only requested, when the section begins (getting the address
//! of a buffer from CubeCL waits for that thread).

use std::sync::Arc;

use crate::error::CudaError;
use crate::stream::{Event, Stream};

/// Our stream with the two events that order it against the rest of its context.
pub struct StreamHandoff {
    stream: Arc<Stream>,
    begun: Event,
    ended: Event,
}

impl StreamHandoff {
    /// Creates the two events for `stream`.
    pub fn new(stream: impl Into<Arc<Stream>>) -> Result<Self, CudaError> {
        let stream = stream.into();
        let (begun, ended) = (Event::new(stream.context())?, Event::new(stream.context())?);
        Ok(Self { stream, begun, ended })
    }

    /// Orders the stream after everything submitted to the context so far. Until [`StreamHandoff::end`], no other work
    /// may use device memory of this section, because CubeCL reuses freed memory in the order of its own stream. No stream of the
    /// context may be recording a graph: an older driver waits.
    pub fn begin(&self) -> Result<(), CudaError> {
        let context = self.stream.context();
        // SAFETY: the stream retains the context, and the event was created in it.
        let is_recorded = unsafe { context.driver().record_context(context.handle(), self.begun.handle())? };
        if is_recorded { self.stream.wait_for(&self.begun) } else { context.synchronize() }
    }

    /// Orders everything that is submitted to the context from now on after the stream's work so far. Must also be called
    /// when the section failed, or CubeCL runs ahead of work already submitted.
    pub fn end(&self) -> Result<(), CudaError> {
        self.stream.record(&self.ended)?;
        let context = self.stream.context();
        // SAFETY: the stream retains the context, and the event was created in it.
        let waits = unsafe { context.driver().make_context_wait(context.handle(), self.ended.handle())? };
        if waits { Ok(()) } else { self.stream.synchronize() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::context::Context;
    use crate::driver::Driver;

    /// Needs a GPU; returns early without one.
    #[test]
    fn sections_are_ordered_with_all_work_of_the_context() {
        let Ok(driver) = Driver::load() else { return };
        sections_are_ordered(&driver);
        sections_are_ordered(&driver.without_context_events());
    }

    fn sections_are_ordered(driver: &Driver) {
        let context = Context::retain(driver, 0).expect("device 0 of a loaded driver");
        let side = Stream::new(&context).expect("a second stream");
        let (start, end) = (Event::timed(&context).expect("event"), Event::timed(&context).expect("event"));
        let handoff = StreamHandoff::new(Stream::new(&context).expect("a stream")).expect("handoff");

        side.record(&start).expect("record");
        for _ in 0..2 {
            handoff.begin().expect("begin");
            handoff.end().expect("end");
        }
        side.record(&end).expect("record");

        end.synchronize().expect("synchronize");
        assert!(end.milliseconds_since(&start).expect("both are done") >= 0.0);
        context.synchronize().expect("synchronize");
        let memory = context.memory().expect("memory");
        assert!(0 < memory.free_bytes && memory.free_bytes <= memory.total_bytes);
    }
}
