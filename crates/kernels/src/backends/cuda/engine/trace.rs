//! Time by operation, from device events around each launch.
//!
//! Trade-off: while a trace is recorded, each launch has two events around it, so the parts add up to a little more
//! than an untraced pass. Without a trace, a launch costs one more branch.

use std::cell::RefCell;
use std::sync::Arc;

use firebrick_cuda::Event;

use super::failure::check;
use crate::TracedOperation;

/// The unavoidable work of an operation, to compare its time with.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Cost {
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
    start: Arc<Event>,
    end: Arc<Event>,
}

#[derive(Default)]
pub(crate) struct Trace {
    /// Start of the trace, from which the others are measured, and the launches since.
    recording: RefCell<Option<(Event, Vec<Span>)>>,
}

impl Trace {
    pub(super) fn is_recording(&self) -> bool {
        self.recording.borrow().is_some()
    }

    /// Starts to record from `origin` on; drops earlier records.
    pub(crate) fn start(&self, origin: Event) {
        *self.recording.borrow_mut() = Some((origin, Vec::new()));
    }

    pub(crate) fn record(&self, name: &'static str, cost: Cost, [start, end]: [impl Into<Arc<Event>>; 2]) {
        if let Some((_, spans)) = self.recording.borrow_mut().as_mut() {
            spans.push(Span { name, cost, start: start.into(), end: end.into() });
        }
    }

    /// Ends recording and returns the launches in order. The caller has waited for the device.
    pub(crate) fn finish(&self) -> Vec<TracedOperation> {
        let Some((origin, spans)) = self.recording.borrow_mut().take() else { return Vec::new() };
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
