//! Operations between devices, on a side stream that runs alongside the engine's stream.
//!
//! The side stream waits for the engine's work so far, which wrote the tensors, and runs the operation; the engine's stream waits for its end when
//! the ticket is redeemed, at the latest when the section ends. Until then the tensors are kept alive here, and the section must not read them. So
//! the backward computes one bucket of gradients while another is summed over ranks, and one layer while the weights of the next arrive.
//! Trade-off: there is one side stream, so operations run one after the other, in the order of the calls, which must be equal on all ranks.

use std::cell::{Cell, OnceCell, RefCell};
use std::sync::Arc;

use firebrick_cuda::{Context, CudaError, Event, Stream};

use crate::backends::cuda::engine::{Primitive, check};
use crate::backends::cuda::memory::host_copies::Span;

/// The side stream with its operations in flight.
pub(crate) struct Collectives {
    context: Context,
    /// Created by the first operation; a job of one rank never creates it.
    stream: OnceCell<Stream>,
    in_flight: RefCell<Vec<InFlight>>,
    ticket: Cell<u64>,
    /// Around the engine's waits for other ranks.
    waits: RefCell<Vec<Span>>,
    /// Around the operations themselves.
    runs: RefCell<Vec<Span>>,
}

/// An operation that may still run: its tensors, and its end event.
struct InFlight {
    ticket: u64,
    tensors: Vec<Primitive>,
    done: Arc<Event>,
}

impl Collectives {
    pub(crate) fn new(context: &Context) -> Self {
        Self {
            context: context.clone(),
            stream: OnceCell::new(),
            in_flight: RefCell::default(),
            ticket: Cell::default(),
            waits: RefCell::default(),
            runs: RefCell::default(),
        }
    }

    fn stream(&self) -> Result<&Stream, CudaError> {
        if self.stream.get().is_none() {
            let created = self.stream.set(Stream::new(&self.context)?);
            assert!(created.is_ok(), "one thread uses an engine");
        }
        Ok(self.stream.get().expect("it was just created"))
    }

    /// Submits an operation on `tensors` to the side stream, inside a section, after the work so far of `main`, the
    /// engine's stream. Keeps `tensors` alive until the operation is done. Returns its ticket.
    pub(crate) fn submit(
        &self,
        main: &Stream,
        tensors: Vec<Primitive>,
        operation: impl FnOnce(&Stream) -> Result<(), CudaError>,
    ) -> Result<u64, CudaError> {
        let side = self.stream()?;
        let ready = Event::new(&self.context)?;
        main.record(&ready)?;
        side.wait_for(&ready)?;
        let start = self.mark(side)?;
        let submitted = operation(side);
        let done = self.mark(side)?;
        let ticket = self.ticket.replace(self.ticket.get() + 1);
        self.in_flight.borrow_mut().push(InFlight { ticket, tensors, done: done.clone() });
        self.runs.borrow_mut().push((start, done));
        submitted.map(|()| ticket)
    }

    /// Makes the engine's stream wait for one operation, unless it already has.
    pub(super) fn redeem(&self, ticket: u64, main: &Stream) {
        let mut in_flight = self.in_flight.borrow_mut();
        if let Some(index) = in_flight.iter().position(|operation| operation.ticket == ticket) {
            let operation = in_flight.remove(index);
            self.wait_for(main, std::iter::once(operation));
        }
    }

    /// Makes the engine's stream wait for every operation, so that they end before the section.
    pub(crate) fn settle(&self, main: &Stream) {
        if !self.in_flight.borrow().is_empty() {
            self.wait_for(main, self.in_flight.borrow_mut().drain(..));
        }
    }

    fn wait_for(&self, main: &Stream, operations: impl Iterator<Item = InFlight>) {
        let start = check("recording an event", self.mark(main));
        for InFlight { tensors, done, .. } in operations {
            check("waiting for other ranks", main.wait_for(&done));
            drop(tensors);
        }
        let end = check("recording an event", self.mark(main));
        self.waits.borrow_mut().push((start, end));
    }

    fn mark(&self, stream: &Stream) -> Result<Arc<Event>, CudaError> {
        let event = Event::timed(&self.context)?;
        stream.record(&event)?;
        Ok(Arc::new(event))
    }

    /// Returns the waits for other ranks since the last call.
    pub(crate) fn take_waits(&self) -> Vec<Span> {
        self.waits.take()
    }

    /// Returns start and end of the last submitted operation since [`Collectives::take_runs`].
    pub(super) fn last_run(&self) -> Option<Span> {
        self.runs.borrow().last().cloned()
    }

    /// Returns the operations since the last call.
    pub(crate) fn take_runs(&self) -> Vec<Span> {
        self.runs.take()
    }

    /// Waits until all operations are done, and releases their tensors.
    pub(crate) fn synchronize(&self) -> Result<(), CudaError> {
        let waited = self.stream.get().map_or(Ok(()), Stream::synchronize);
        self.in_flight.borrow_mut().clear();
        waited
    }
}
