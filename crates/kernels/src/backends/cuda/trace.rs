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
    spans: RefCell<Option<Vec<Span>>>,
}

impl Trace {
    /// Starts to record; what was recorded before is dropped.
    pub(super) fn start(&self) {
        *self.spans.borrow_mut() = Some(Vec::new());
    }

    /// Ends recording: launches in order. Waits for the device.
    pub(super) fn finish(&self, engine: &Engine) -> Vec<TracedOperation> {
        let spans = self.spans.borrow_mut().take().unwrap_or_default();
        check("waiting for the device", engine.context().synchronize());
        let operation = |span: Span| TracedOperation {
            name: span.name,
            milliseconds: f64::from(check("reading an event", span.end.milliseconds_since(&span.start))),
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
        if self.trace.spans.borrow().is_none() {
            return work();
        }
        let start = check("recording an event", self.mark());
        let result = work();
        let end = check("recording an event", self.mark());
        if let Some(spans) = self.trace.spans.borrow_mut().as_mut() {
            spans.push(Span { name, cost, start, end });
        }
        result
    }
}
