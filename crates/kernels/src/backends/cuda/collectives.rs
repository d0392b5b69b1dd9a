//! Operations between devices, on a side stream, while the engine's stream goes on computing.
//!
//! Order: the side stream waits for the engine's work so far, which wrote the tensors; the operation runs; the engine's stream waits for
//! its end when the section ends. Until then the tensors are held here, and nothing of the section may read them. So a bucket of
//! gradients is summed over ranks while the backward computes the next one.
//! Trade-off: one side stream, so operations run one after the other, in the order of the calls, as all ranks must have it.

use std::cell::{OnceCell, RefCell};

use firebrick_cuda::{Context, CudaError, Event, Stream};

use super::failure::check;
use super::matrix::Primitive;

/// See the head of this file.
pub(super) struct Collectives {
    context: Context,
    /// Created by the first operation: a job of one rank has none.
    stream: OnceCell<Stream>,
    /// Tensors of operations that may still run, with their end.
    in_flight: RefCell<Vec<(Vec<Primitive>, Event)>>,
}

impl Collectives {
    pub(super) fn new(context: &Context) -> Self {
        Self { context: context.clone(), stream: OnceCell::new(), in_flight: RefCell::default() }
    }

    fn stream(&self) -> Result<&Stream, CudaError> {
        if self.stream.get().is_none() {
            let created = self.stream.set(Stream::new(&self.context)?);
            assert!(created.is_ok(), "one thread uses an engine");
        }
        Ok(self.stream.get().expect("it was just created"))
    }

    /// Submits an operation on `tensors` to the side stream, inside a section: after the work of `main`, the engine's stream, so far.
    /// `tensors` are held until it is done.
    pub(super) fn submit(
        &self,
        main: &Stream,
        tensors: Vec<Primitive>,
        operation: impl FnOnce(&Stream) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let side = self.stream()?;
        let ready = Event::new(&self.context)?;
        main.record(&ready)?;
        side.wait_for(&ready)?;
        let submitted = operation(side);
        let done = Event::new(&self.context)?;
        side.record(&done)?;
        self.in_flight.borrow_mut().push((tensors, done));
        submitted
    }

    /// Makes the engine's stream wait for every operation, so that the end of a section is after them.
    pub(super) fn settle(&self, main: &Stream) {
        for (tensors, done) in self.in_flight.borrow_mut().drain(..) {
            check("waiting for other ranks", main.wait_for(&done));
            drop(tensors);
        }
    }

    /// Waits until all operations are done, and lets go of their tensors.
    pub(super) fn synchronize(&self) -> Result<(), CudaError> {
        let waited = self.stream.get().map_or(Ok(()), Stream::synchronize);
        self.in_flight.borrow_mut().clear();
        waited
    }
}
