//! Where documents begin and end inside packed sequences: `cu_seqlens`, on the host and on the device.
//!
//! Tokens of a micro-batch are one flat axis of `n = sequences * sequence length`; attention never crosses a document boundary, so
//! sequences need no batch dimension and no mask.
//! Trade-off: padding at the end of a sequence is a document like any other, and is computed.

use std::ops::Range;

use burn_tensor::{Int, Tensor, backend::Backend};

/// Document boundaries of one micro-batch.
#[derive(Clone, Debug)]
pub struct Documents<B: Backend> {
    boundaries: Vec<usize>,
    /// The same boundaries as an integer tensor of shape `[documents + 1]`, for kernels that read them on the device.
    pub cu_seqlens: Tensor<B, 1, Int>,
}

impl<B: Backend> Documents<B> {
    /// Takes the boundaries `0, .., tokens` in strictly ascending order.
    ///
    /// # Panics
    /// If the boundaries do not begin at 0 or do not ascend: the packer made them, so that is our bug.
    pub fn new(cu_seqlens: &[u32], device: &B::Device) -> Self {
        assert!(cu_seqlens.len() >= 2 && cu_seqlens[0] == 0, "cu_seqlens must begin at 0, got {cu_seqlens:?}");
        assert!(cu_seqlens.windows(2).all(|pair| pair[0] < pair[1]), "cu_seqlens must ascend, got {cu_seqlens:?}");
        let on_device: Vec<i32> = cu_seqlens.iter().map(|&boundary| boundary as i32).collect();
        Self {
            boundaries: cu_seqlens.iter().map(|&boundary| boundary as usize).collect(),
            cu_seqlens: Tensor::from_ints(on_device.as_slice(), device),
        }
    }

    /// One document of `tokens` tokens.
    pub fn single(tokens: usize, device: &B::Device) -> Self {
        Self::new(&[0, tokens as u32], device)
    }

    /// The token range of each document, in order.
    pub fn ranges(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        self.boundaries.windows(2).map(|pair| pair[0]..pair[1])
    }

    /// Number of documents.
    pub fn count(&self) -> usize {
        self.boundaries.len() - 1
    }

    /// Number of tokens over all documents, padding included.
    pub fn tokens(&self) -> usize {
        self.boundaries[self.count()]
    }

    /// Length of the longest document.
    pub fn longest(&self) -> usize {
        self.ranges().map(|range| range.len()).max().unwrap_or(0)
    }
}
