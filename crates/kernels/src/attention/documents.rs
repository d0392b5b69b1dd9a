//! Where documents begin and end in a micro-batch.

use std::ops::Range;

use burn_tensor::{Int, Tensor, backend::Backend};

/// Boundaries of the documents in a micro-batch, on the host and on the device.
///
/// Tokens are one flat axis of `n = sequences * sequence length`. Attention never crosses a document boundary, so sequences need no
/// batch dimension and no mask. Padding at the end of a sequence is a document like any other, and is computed.
#[derive(Clone, Debug)]
pub struct Documents<B: Backend> {
    boundaries: Vec<usize>,
    /// The same boundaries as an integer tensor of shape `[documents + 1]`, for kernels that read them on the device.
    pub cu_seqlens: Tensor<B, 1, Int>,
    /// Whether the first document has tokens before these, whose states pass on to it.
    pub begins_before: bool,
    /// Whether the last document has tokens after these.
    pub goes_on: bool,
}

impl<B: Backend> Documents<B> {
    /// Takes the boundaries `0, .., tokens` in strictly ascending order.
    ///
    /// # Panics
    /// If the boundaries do not begin at 0 or do not ascend, which is a bug in the packer.
    pub fn new(cu_seqlens: &[u32], device: &B::Device) -> Self {
        assert!(cu_seqlens.len() >= 2 && cu_seqlens[0] == 0, "cu_seqlens must begin at 0, got {cu_seqlens:?}");
        assert!(cu_seqlens.windows(2).all(|pair| pair[0] < pair[1]), "cu_seqlens must ascend, got {cu_seqlens:?}");
        let on_device: Vec<i32> = cu_seqlens.iter().map(|&boundary| boundary as i32).collect();
        Self {
            boundaries: cu_seqlens.iter().map(|&boundary| boundary as usize).collect(),
            cu_seqlens: Tensor::from_ints(on_device.as_slice(), device),
            begins_before: false,
            goes_on: false,
        }
    }

    /// Says whether the first document began before these tokens, and whether the last one goes on after them.
    #[must_use]
    pub fn of_tile(self, begins_before: bool, goes_on: bool) -> Self {
        Self { begins_before, goes_on, ..self }
    }

    /// Returns one document of `tokens` tokens.
    pub fn single(tokens: usize, device: &B::Device) -> Self {
        Self::new(&[0, tokens as u32], device)
    }

    /// Iterates over the token range of each document, in order.
    pub fn ranges(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        self.boundaries.windows(2).map(|pair| pair[0]..pair[1])
    }

    /// Returns the number of documents.
    pub fn count(&self) -> usize {
        self.boundaries.len() - 1
    }

    /// Returns the number of tokens over all documents, including padding.
    pub fn tokens(&self) -> usize {
        self.boundaries[self.count()]
    }

    /// Returns the length of the longest document.
    pub fn longest(&self) -> usize {
        self.ranges().map(|range| range.len()).max().unwrap_or(0)
    }
}
