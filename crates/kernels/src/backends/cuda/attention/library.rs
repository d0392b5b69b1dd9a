//! Whether cuDNN is installed, which of its passes count as refused, and how much it is given: which packed documents, and how many of
//! them in one backward call.
//! Trade-off: it is looked for once, when the engine starts; the limits are measured on Llama-3.1-8B's heads alone.

use std::cell::Cell;
use std::sync::Arc;

use firebrick_cuda::{Context, CudaError, Cudnn};

use crate::backends::planning::cuda::MAX_BACKWARD_TOKENS;

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

/// Packed documents of fewer tokens on average are not given to cuDNN. With 124 tokens the flash kernels take three quarters of its time, with
/// 372 as much (Llama-3.1-8B, cuDNN 9.19), and with more they are slower.
const MIN_MEAN_TOKENS: usize = 384;

/// What cuDNN is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CudnnLimits {
    /// Packed documents of fewer tokens on average are left to the flash kernels.
    pub min_mean_tokens: usize,
    /// Tokens that one backward call takes, unless a single document has more.
    pub max_backward_tokens: usize,
}

impl Default for CudnnLimits {
    fn default() -> Self {
        Self { min_mean_tokens: MIN_MEAN_TOKENS, max_backward_tokens: MAX_BACKWARD_TOKENS }
    }
}

/// First document, first token and lengths of each part of documents.
pub(super) fn parts_of(lengths: &[usize], most: usize) -> Vec<(usize, usize, &[usize])> {
    let (mut parts, mut first, mut start) = (Vec::new(), 0, 0);
    while first < lengths.len() {
        let (mut end, mut tokens) = (first, 0);
        while end < lengths.len() && (end == first || tokens + lengths[end] <= most) {
            tokens += lengths[end];
            end += 1;
        }
        parts.push((first, start, &lengths[first..end]));
        (first, start) = (end, start + tokens);
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_go_back_in_parts_of_bounded_size_unless_one_is_longer() {
        let parts = |lengths: &[usize]| -> Vec<(usize, usize, usize)> {
            parts_of(lengths, 16_384).into_iter().map(|(first, start, part)| (first, start, part.len())).collect()
        };
        assert_eq!(parts(&[4096; 8]), [(0, 0, 4), (4, 16_384, 4)]);
        assert_eq!(parts(&[100, 20_000, 300, 16_000, 84]), [(0, 0, 1), (1, 100, 1), (2, 20_100, 3)]);
        assert_eq!(parts(&[7]), [(0, 0, 1)]);
    }
}
