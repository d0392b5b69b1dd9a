//! Access to cuDNN: whether it is installed, which of its passes tests treat as rejected, and its limits (which packed
//! documents it gets, and how many of them in one backward call).
//! Trade-off: cuDNN is looked for once, when the engine starts; the limits were measured only on Llama-3.1-8B's heads.

use std::cell::Cell;
use std::sync::Arc;

use firebrick_cuda::{Context, CudaError, Cudnn};

use crate::backends::planning::cuda::MAX_BACKWARD_TOKENS;

pub(crate) struct Library {
    pub(crate) cudnn: Option<Arc<Cudnn>>,
    /// Set by tests: passes that count as rejected.
    pub(super) refuses_forward: Cell<bool>,
    pub(super) refuses_backward: Cell<bool>,
    pub(crate) limits: Cell<CudnnLimits>,
    pub(crate) in_order: Cell<bool>,
}

impl Library {
    pub(crate) fn new(context: &Context) -> Result<Self, CudaError> {
        let cudnn = match Cudnn::load(context) {
            Ok(cudnn) => Some(Arc::new(cudnn)),
            // A run's plan reports that attention is slower without it, and what to install.
            Err(CudaError::CudnnNotFound { .. } | CudaError::BrokenLibrary { .. }) => None,
            Err(error) => return Err(error),
        };
        Ok(Self {
            cudnn,
            refuses_forward: Cell::new(false),
            refuses_backward: Cell::new(false),
            limits: Cell::default(),
            in_order: Cell::default(),
        })
    }

    /// Waits for plans that were started but not requested.
    pub(crate) fn finish(&self) {
        if let Some(cudnn) = &self.cudnn {
            cudnn.finish();
        }
    }

    /// Sets whether passes count as rejected by the library.
    pub(crate) fn refuse(&self, forward: bool, backward: bool) {
        self.refuses_forward.set(forward);
        self.refuses_backward.set(backward);
    }
}

/// Packed documents with a mean below this go to the flash kernels. With 124 tokens these take three quarters of
/// cuDNN's time, with 372 the same time (Llama-3.1-8B, cuDNN 9.19), and with more they are slower.
const MIN_MEAN_TOKENS: usize = 384;

/// Limits of cuDNN's calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CudnnLimits {
    /// Minimum mean tokens of packed documents; shorter ones go to the flash kernels.
    pub min_mean_tokens: usize,
    /// Maximum tokens of one backward call, unless a single document has more.
    pub max_backward_tokens: usize,
}

impl Default for CudnnLimits {
    fn default() -> Self {
        Self { min_mean_tokens: MIN_MEAN_TOKENS, max_backward_tokens: MAX_BACKWARD_TOKENS }
    }
}

/// Returns first document, first token and lengths of each part of the documents.
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
