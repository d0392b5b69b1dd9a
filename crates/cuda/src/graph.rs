//! CUDA graphs: work that a stream recorded once, and that one call submits again.
//!
//! Trade-off: a graph repeats its work with the addresses that it was recorded with, so it can be launched only where all of them are
//! valid again. `repeats.rs` knows where that is.

use cudarc::driver::result::{graph, stream};
use cudarc::driver::sys::{CUgraphExec, CUgraphInstantiate_flags, CUstreamCaptureMode};

use crate::context::Context;
use crate::error::CudaError;
use crate::stream::{Stream, same_device};

/// Recorded work of a stream, ready to be launched.
pub struct Graph {
    context: Context,
    handle: CUgraphExec,
}

impl Stream {
    /// Records what `work` submits to this stream, which does not run.
    ///
    /// Calls of other threads are not affected, but for those that concern all streams of the context (`cuCtxSynchronize`, and
    /// [`crate::StreamHandoff`]): they fail while this records.
    ///
    /// # Errors
    /// Those of `work`, or errors of the driver: not everything can be recorded. The stream is usable afterwards.
    pub fn record_graph(&self, work: impl FnOnce() -> Result<(), CudaError>) -> Result<Graph, CudaError> {
        let context = self.context();
        let driver = context.driver();
        context.with_current(|| {
            // Only what was submitted before is recorded: libraries have loaded their kernels, and nothing is allocated.
            let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
            // SAFETY: the stream is alive.
            driver.checked("cuStreamBeginCapture", unsafe { stream::begin_capture(self.handle(), mode) })?;
            let worked = work();
            // SAFETY: the stream is alive, and recording began above.
            let ended = driver.checked("cuStreamEndCapture", unsafe { stream::end_capture(self.handle()) });
            worked?;
            let recorded = ended?;
            // SAFETY: the graph was recorded just now, and is destroyed once. The status of that is ignored: the graph is not used again.
            let instantiated = unsafe {
                let instantiated = graph::instantiate(recorded, CUgraphInstantiate_flags(0));
                let _ = graph::destroy(recorded);
                instantiated
            };
            let handle = driver.checked("cuGraphInstantiate", instantiated)?;
            Ok(Graph { context: context.clone(), handle })
        })
    }
}

impl Graph {
    /// Submits the recorded work to the stream; the host does not wait.
    ///
    /// # Safety
    /// What was promised for each piece of work when it was recorded holds again, until the stream has done it.
    ///
    /// # Errors
    /// [`CudaError::DifferentDevices`], or errors of the driver, including those of earlier kernels.
    pub unsafe fn launch(&self, stream: &Stream) -> Result<(), CudaError> {
        same_device("cuGraphLaunch", stream.context(), &self.context)?;
        // SAFETY: both handles are alive, since their owners are borrowed; the rest is the caller's promise.
        self.context.driver().checked("cuGraphLaunch", unsafe { graph::launch(self.handle, stream.handle()) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: created by cuGraphInstantiate and destroyed once; the driver finishes launches that are under way first. The status is
        // ignored: it is an error only if the driver is already shutting down with the process.
        let _ = unsafe { graph::exec_destroy(self.handle) };
    }
}
