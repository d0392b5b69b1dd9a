//! CUDA graphs: work that a stream recorded once, and that one call submits again.
//!
//! Trade-off: a graph repeats its work with the recorded addresses, so it may be launched only when all of them are
//! valid again. `repeats.rs` determines when.

use cudarc::driver::result::{graph, stream};
use cudarc::driver::sys::{CUgraph, CUgraphExec, CUgraphInstantiate_flags, CUstreamCaptureMode};

use crate::context::Context;
use crate::error::CudaError;
use crate::stream::{Stream, same_device};

/// Recorded work of a stream, ready to be launched.
pub(crate) struct Graph {
    context: Context,
    handle: CUgraphExec,
}

impl Stream {
    /// Records the work that `work` submits to this stream, without running it. The same work must have run before, so
    /// that libraries have loaded their kernels and nothing is allocated.
    ///
    /// Calls of other threads are not affected, except for those on all streams of the context (`cuCtxSynchronize`, and
    /// [`crate::StreamHandoff`]): they fail during recording.
    ///
    /// # Errors
    /// Those of `work`, or errors of the driver: not everything can be recorded. The stream is usable afterwards.
    pub(crate) fn record_graph(&self, work: impl FnOnce() -> Result<(), CudaError>) -> Result<Graph, CudaError> {
        let context = self.context();
        let driver = context.driver();
        context.with_current(|| {
            let recording = Recording::begin(self)?;
            work()?;
            let recorded = recording.end()?;
            // SAFETY: the graph was recorded just now.
            let instantiated = unsafe { graph::instantiate(recorded.0, CUgraphInstantiate_flags(0)) };
            let handle = driver.checked("cuGraphInstantiate", instantiated)?;
            let graph = Graph { context: context.clone(), handle };
            // The upload allocates the device memory that the graph needs.
            // SAFETY: both handles are alive.
            driver.checked("cuGraphUpload", unsafe { graph::upload(graph.handle, self.handle()) })?;
            Ok(graph)
        })
    }
}

/// A stream in recording mode, which ends with this value, even after errors.
struct Recording<'a> {
    stream: &'a Stream,
    is_ended: bool,
}

struct Recorded(CUgraph);

impl<'a> Recording<'a> {
    /// Starts recording. The context must be current.
    fn begin(stream: &'a Stream) -> Result<Self, CudaError> {
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream is alive.
        let begun = unsafe { stream::begin_capture(stream.handle(), mode) };
        stream.context().driver().checked("cuStreamBeginCapture", begun)?;
        Ok(Self { stream, is_ended: false })
    }

    fn end(mut self) -> Result<Recorded, CudaError> {
        self.is_ended = true;
        // SAFETY: the stream is alive, and records.
        let ended = unsafe { stream::end_capture(self.stream.handle()) };
        self.stream.context().driver().checked("cuStreamEndCapture", ended).map(Recorded)
    }
}

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        if !self.is_ended {
            // SAFETY: the stream is alive, and records. What it recorded is not needed, and a failure of this is not the first one.
            let _ = unsafe { stream::end_capture(self.stream.handle()) }.map(Recorded);
        }
    }
}

impl Drop for Recorded {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: made by cuStreamEndCapture and destroyed once. The status is ignored: the graph is not used again.
            let _ = unsafe { graph::destroy(self.0) };
        }
    }
}

impl Graph {
    /// Submits the recorded work to the stream; the host does not wait.
    ///
    /// # Safety
    /// The caller's promises for each recorded piece of work must hold again, until the stream has done it.
    pub(crate) unsafe fn launch(&self, stream: &Stream) -> Result<(), CudaError> {
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
