//! Ordering our stream against everything else in the context, without CubeCL's stream in hand.
//!
//! CubeCL does not expose its streams, but it works in the device's primary context, and a context can be recorded and made
//! to wait as a whole. A section of our work is therefore bracketed like this, with no host wait anywhere:
//!
//! ```text
//! enter:  cuCtxRecordEvent(context, entered)    all that was submitted to the context so far ...
//!         cuStreamWaitEvent(stream, entered)    ... comes before what our stream does next
//! leave:  cuEventRecord(left, stream)           all that our stream was given ...
//!         cuCtxWaitEvent(context, left)         ... comes before whatever the context is given next
//! ```
//!
//! What it gives up: the order is between ALL streams of the context, in both directions, so a copy or a collective that
//! runs on a side stream holds ours up as well. A hand-over belongs at the edges of a section of work, not around each call.
//! CubeCL submits from its own queue thread: what must come before has to be submitted, not only asked for, when the section
//! is entered (taking a buffer's address from CubeCL waits for that thread).

use std::sync::Arc;

use crate::{CudaError, Event, Stream};

/// A stream of ours with the two events that tie it to the rest of its context.
pub struct HandOver {
    stream: Arc<Stream>,
    entered: Event,
    left: Event,
}

/// Our turn: from [`HandOver::enter`] until it is left or dropped, the stream's work is ordered after all earlier work of the
/// context. No Burn op may touch the device in between: CubeCL would reuse freed memory in the order of its own stream.
#[must_use = "dropping it at once ends the section before any work is in it"]
pub struct Section<'a> {
    hand_over: &'a HandOver,
    open: bool,
}

impl HandOver {
    /// Ties a stream to the rest of its context, and makes the two events for it.
    ///
    /// # Errors
    /// What the driver says.
    pub fn new(stream: impl Into<Arc<Stream>>) -> Result<Self, CudaError> {
        let stream = stream.into();
        let (entered, left) = (Event::new(stream.context())?, Event::new(stream.context())?);
        Ok(Self { stream, entered, left })
    }

    /// Orders the stream after everything that the context was given so far. Sections do not nest, which `&mut` says.
    ///
    /// # Errors
    /// What the driver says.
    pub fn enter(&mut self) -> Result<Section<'_>, CudaError> {
        self.begin()?;
        Ok(Section { hand_over: self, open: true })
    }

    /// What [`HandOver::enter`] does, without a guard: for a caller that keeps its own account of what is open.
    ///
    /// # Errors
    /// What the driver says.
    pub fn begin(&self) -> Result<(), CudaError> {
        let context = self.stream.context();
        // SAFETY: the context is retained by the stream, and the event was made in it.
        unsafe { context.driver().record_context(context.handle(), self.entered.handle())? };
        self.stream.wait_for(&self.entered)
    }

    /// Ends what [`HandOver::begin`] began: everything that the context is given from now on comes after our work so far.
    ///
    /// # Errors
    /// What the driver says.
    pub fn end(&self) -> Result<(), CudaError> {
        self.stream.record(&self.left)?;
        let context = self.stream.context();
        // SAFETY: the context is retained by the stream, and the event was made in it.
        unsafe { context.driver().make_context_wait(context.handle(), self.left.handle()) }
    }
}

impl Section<'_> {
    /// The stream that work of this section goes to.
    pub fn stream(&self) -> &Stream {
        &self.hand_over.stream
    }

    /// Orders everything that the context is given from now on after the work of this section.
    ///
    /// # Errors
    /// What the driver says; the section is over either way.
    pub fn leave(mut self) -> Result<(), CudaError> {
        self.open = false;
        self.hand_over.end()
    }
}

impl Drop for Section<'_> {
    /// Leaves on the error paths too, so that an early `?` never lets CubeCL run ahead of work already submitted.
    fn drop(&mut self) {
        if self.open {
            // A failure here means that the context is lost: the error that is already on its way says so better.
            let _ = self.hand_over.end();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Context, Driver};

    /// Says something only where there is a GPU: without a driver no stream can be made, which `driver` tests.
    #[test]
    fn a_section_orders_both_ways_and_ends_on_every_path() {
        let Ok(driver) = Driver::load() else { return };
        let context = Context::retain(&driver, 0).expect("device 0 of a loaded driver");
        let side = Stream::new(&context).expect("a second stream");
        let (start, end) = (Event::timed(&context).expect("event"), Event::timed(&context).expect("event"));
        let mut ours = HandOver::new(Stream::new(&context).expect("a stream")).expect("hand-over");

        side.record(&start).expect("record");
        let section = ours.enter().expect("enter");
        assert_eq!(section.stream().context().ordinal(), 0);
        section.leave().expect("leave");
        drop(ours.enter().expect("a section that is only dropped"));
        side.record(&end).expect("record");

        end.synchronize().expect("synchronize");
        assert!(start.is_done().expect("query"), "the side stream's first mark precedes its last");
        assert!(end.milliseconds_since(&start).expect("both are done") >= 0.0);
        context.synchronize().expect("synchronize");
        let memory = context.memory().expect("memory");
        assert!(0 < memory.free_bytes && memory.free_bytes <= memory.total_bytes);
    }
}
