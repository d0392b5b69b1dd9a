//! Tensors that wait in pinned host memory, as the operations of a section: out, on their way back, and back.
//!
//! `host_copies.rs` has the streams and their order.
//! Trade-off: a tensor that was not prefetched is waited for in full.

use super::host_copies::HostCopy;
use crate::backends::cuda::engine::{Cost, Engine, Primitive, check};

/// See [`crate::MemoryOps::offload`].
pub(super) fn offload(engine: &Engine, x: Primitive) -> HostCopy {
    engine.section(|| {
        let matrix = engine.dense(engine.view_of(x));
        check("copying to the host", engine.copies.out(engine.stream(), matrix))
    })
}

/// See [`crate::MemoryOps::settle_offloads`].
pub(super) fn settle(engine: &Engine) {
    engine.section(|| engine.copies.settle(engine.stream()));
}

/// See [`crate::MemoryOps::prefetch`].
pub(super) fn prefetch(engine: &Engine, copy: Option<&mut HostCopy>) {
    if let Some(copy) = copy {
        engine.section(|| start_back(engine, copy));
    }
}

/// See [`crate::MemoryOps::restore`].
pub(super) fn restore(engine: &Engine, mut copy: HostCopy) -> Primitive {
    engine.section(|| {
        start_back(engine, &mut copy);
        let start = check("recording an event", engine.mark());
        let wait = || engine.stream().wait_for(&copy.done);
        check("waiting for a copy", engine.traced("wait for a copy from the host", Cost::default(), wait));
        engine.copies.waited((start, check("recording an event", engine.mark())));
        engine.copies.arrived(copy)
    })
}

/// Starts the copy back, unless it is under way.
fn start_back(engine: &Engine, copy: &mut HostCopy) {
    if !copy.is_coming() {
        let [rows, width] = copy.shape;
        let new = engine.empty_matrix(rows, width, copy.dtype);
        check("copying from the host", engine.copies.back(engine.stream(), copy, new));
    }
}
