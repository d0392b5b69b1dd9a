//! How much cuDNN is given: which packed documents, and how many of them in one backward call.
//! Trade-off: measured on Llama-3.1-8B's heads alone.

use crate::backends::planning::cuda::MAX_BACKWARD_TOKENS;

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
