//! Time by operation, from device events around each launch.
//!
//! Trade-off: while a trace is recorded, each launch has two events around it, so the sum of the parts is a little more than an
//! untraced pass takes. Without one it costs a branch per launch.

use std::cell::RefCell;

use firebrick_cuda::Event;

use super::engine::Engine;
use super::failure::check;
use crate::TracedOperation;

/// The work that an operation cannot avoid, which its time is compared with.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cost {
    /// Operations of matrix units.
    pub flops: f64,
    /// Bytes read and written.
    pub bytes: f64,
    /// `m`, `n` and `k` of a GEMM.
    pub gemm: Option<[usize; 3]>,
}

struct Span {
    name: &'static str,
    cost: Cost,
    start: Event,
    end: Event,
}

/// See the head of this file.
#[derive(Default)]
pub(super) struct Trace {
    recording: RefCell<Option<Recording>>,
}

struct Recording {
    /// The beginning, which the others are measured from.
    origin: Event,
    spans: Vec<Span>,
}

impl Trace {
    /// Starts to record; what was recorded before is dropped. Waits for the device, so that the trace begins now for both.
    pub(super) fn start(&self, engine: &Engine) {
        check("waiting for the device", engine.context().synchronize());
        let origin = check("recording an event", engine.mark());
        check("waiting for the device", origin.synchronize());
        *self.recording.borrow_mut() = Some(Recording { origin, spans: Vec::new() });
    }

    /// Ends recording: launches in order. Waits for the device.
    pub(super) fn finish(&self, engine: &Engine) -> Vec<TracedOperation> {
        let Some(Recording { origin, spans }) = self.recording.borrow_mut().take() else { return Vec::new() };
        check("waiting for the device", engine.context().synchronize());
        let between = |start: &Event, end: &Event| f64::from(check("reading an event", end.milliseconds_since(start)));
        let operation = |span: Span| TracedOperation {
            name: span.name,
            start_ms: between(&origin, &span.start),
            milliseconds: between(&span.start, &span.end),
            flops: span.cost.flops,
            bytes: span.cost.bytes,
            gemm: span.cost.gemm,
        };
        spans.into_iter().map(operation).collect()
    }
}

impl Engine {
    /// Runs `work`, which submits to the stream, between two events if a trace is being recorded.
    pub(super) fn traced<R>(&self, name: &'static str, cost: Cost, work: impl FnOnce() -> R) -> R {
        if self.trace.recording.borrow().is_none() {
            return work();
        }
        let start = check("recording an event", self.mark());
        let result = work();
        let end = check("recording an event", self.mark());
        if let Some(recording) = self.trace.recording.borrow_mut().as_mut() {
            recording.spans.push(Span { name, cost, start, end });
        }
        result
    }
}
