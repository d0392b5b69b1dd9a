//! Whether cuDNN is installed, and which of its passes count as refused.
//! Trade-off: it is looked for once, when the engine starts.

use std::cell::Cell;
use std::sync::Arc;

use firebrick_cuda::{Context, CudaError, Cudnn};

/// cuDNN, if it is installed.
pub(crate) struct Library {
    pub(crate) cudnn: Option<Arc<Cudnn>>,
    /// Set by tests: passes that count as refused.
    pub(super) refuses_forward: Cell<bool>,
    pub(super) refuses_backward: Cell<bool>,
}

impl Library {
    pub(crate) fn new(context: &Context) -> Result<Self, CudaError> {
        let cudnn = match Cudnn::load(context) {
            Ok(cudnn) => Some(Arc::new(cudnn)),
            // The plan of a run reports that attention is slower without it, and what to install.
            Err(CudaError::CudnnNotFound { .. } | CudaError::BrokenCudnn { .. }) => None,
            Err(error) => return Err(error),
        };
        Ok(Self { cudnn, refuses_forward: Cell::new(false), refuses_backward: Cell::new(false) })
    }

    /// Waits for plans that were begun and not requested.
    pub(crate) fn finish(&self) {
        if let Some(cudnn) = &self.cudnn {
            cudnn.finish();
        }
    }

    /// Treats passes as refused by the library, or not.
    pub(crate) fn refuse(&self, forward: bool, backward: bool) {
        self.refuses_forward.set(forward);
        self.refuses_backward.set(backward);
    }
}
