//! The shape of an attention call for which a plan is built: its sizes, the layout of its documents in memory, and derived values.

use crate::error::CudaError;

/// Element type of queries, keys, values, outputs and all their gradients. Softmax and sums are computed in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// `bfloat16`
    Bf16,
    /// IEEE half
    F16,
}

/// The layout of documents on the token axis. Attention is causal within a document and never crosses into another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layout {
    /// `documents` documents of `length` tokens each, back to back: `documents * length` tokens.
    Uniform {
        /// The number of documents.
        documents: usize,
        /// Tokens of each document.
        length: usize,
    },
    /// Documents of different lengths, back to back. The numbers are upper bounds, so that one plan serves many batches:
    /// missing documents have length 0 and come last (see [`AttentionShape::packed_index_len`]).
    Packed {
        /// Maximum number of documents.
        documents: usize,
        /// Maximum tokens of a document.
        longest: usize,
        /// Maximum tokens of all documents together: the rows of the buffers.
        tokens: usize,
    },
}

/// The properties of an attention call on which a plan depends. Each call gives its own scale and pointers. Rows of all buffers are dense: with others,
/// gradients of packed documents were wrong in cuDNN 9.14 and 9.19.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionShape {
    /// Element type.
    pub element: Element,
    /// Layout of the documents.
    pub layout: Layout,
    /// Heads of the queries; a multiple of `key_value_heads`.
    pub query_heads: usize,
    /// Heads of keys and values, each of which serves a group of query heads.
    pub key_value_heads: usize,
    /// Width of a head; a multiple of 8.
    pub head_dim: usize,
    /// Whether gradients are added in a fixed order, so that a call repeats bit by bit. Then there is no accumulator to which blocks add as they end;
    /// instead the gradients of all scores are in cuDNN's workspace: documents x query heads x length² values of the element type. The forward
    /// pass always repeats.
    pub in_order: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Pass {
    Forward,
    Backward,
}

/// Each part of the index starts at a multiple of this many 32-bit integers, that is, 16 bytes.
const INDEX_ALIGNMENT: usize = 4;

impl AttentionShape {
    /// Returns the maximum number of documents.
    pub fn documents(&self) -> usize {
        match self.layout {
            Layout::Uniform { documents, .. } | Layout::Packed { documents, .. } => documents,
        }
    }

    /// Returns the maximum tokens of a document.
    pub fn longest(&self) -> usize {
        match self.layout {
            Layout::Uniform { length, .. } => length,
            Layout::Packed { longest, .. } => longest,
        }
    }

    /// Returns the rows of the buffers.
    pub fn tokens(&self) -> usize {
        match self.layout {
            Layout::Uniform { documents, length } => documents * length,
            Layout::Packed { tokens, .. } => tokens,
        }
    }

    /// Returns the elements of a row of queries, of the output, and of their gradients.
    pub(super) fn query_width(&self) -> usize {
        self.query_heads * self.head_dim
    }

    /// Returns the elements of a row of keys, of values, and of their gradients.
    pub(super) fn key_width(&self) -> usize {
        self.key_value_heads * self.head_dim
    }

    /// Returns whether calls need an index. The softmax statistics are then `[tokens, query_heads]`, of all documents one after the other, else
    /// `[documents, query_heads, length]`. Other kernels may use other orders, so keep the order with the statistics.
    pub fn is_packed(&self) -> bool {
        matches!(self.layout, Layout::Packed { .. })
    }

    /// Returns the number of 32-bit integers in the index; 0 for uniform documents. The index has the lengths of the documents, in their order, then
    /// for each of [`Self::index_strides`] their offsets in elements, each part filled up to 16 bytes. Every call of the batch gets it, forward and
    /// backward. Rows after the last document are neither read nor written.
    pub fn packed_index_len(&self) -> usize {
        if self.is_packed() { self.part_start(self.index_strides().len()) } else { 0 }
    }

    /// Returns the byte offset, in the index, of the offsets for buffers with this row stride.
    pub(super) fn offsets_at(&self, row_stride: usize) -> usize {
        let part = self.index_strides().iter().position(|&stride| stride == row_stride);
        let part = part.expect("index_strides has every row stride of the shape");
        self.part_start(part) * size_of::<i32>()
    }

    /// Returns the first integer of the offsets for stride number `part` of [`Self::index_strides`].
    fn part_start(&self, part: usize) -> usize {
        let [lengths, offsets] = [0, 1].map(|end| (self.documents() + end).next_multiple_of(INDEX_ALIGNMENT));
        lengths + part * offsets
    }

    /// Returns the distinct row strides, in the order of their parts in the index. The first is that of the statistics.
    /// For each stride, the index contains the first token of every document, and the end, times the stride.
    pub fn index_strides(&self) -> Vec<usize> {
        let mut strides = vec![self.query_heads];
        for stride in [self.query_width(), self.key_width()] {
            if !strides.contains(&stride) {
                strides.push(stride);
            }
        }
        strides
    }

    /// Returns the part of the shape on which the forward plan depends.
    pub(super) fn without_gradients(self) -> Self {
        Self { in_order: false, ..self }
    }

    /// Rejects shapes that are invalid for every version of cuDNN.
    pub(super) fn check(&self) -> Result<(), CudaError> {
        let (queries, keys, width) = (self.query_heads, self.key_value_heads, self.head_dim);
        if self.documents() == 0 || self.longest() == 0 || self.tokens() == 0 {
            return Err(refused(format!("{:?} has no tokens", self.layout)));
        }
        if keys == 0 || queries == 0 || !queries.is_multiple_of(keys) {
            return Err(refused(format!("{queries} query heads are not a multiple of {keys} key and value heads")));
        }
        if width == 0 || !width.is_multiple_of(8) {
            return Err(refused(format!("a head is {width} wide, expected a multiple of 8")));
        }
        let widest = self.query_width();
        if self.is_packed() && self.tokens() * widest > i32::MAX as usize {
            let what = format!("{} tokens in rows of {widest} elements", self.tokens());
            return Err(refused(format!("{what} exceed the 32-bit offsets of packed documents")));
        }
        Ok(())
    }

    pub(super) fn describe(&self, pass: Pass) -> String {
        let Self { element, layout, query_heads, key_value_heads, head_dim, in_order } = self;
        let order = if *in_order { ", in a fixed order" } else { "" };
        format!("{pass:?} {element:?} {query_heads}/{key_value_heads} heads of {head_dim}, {layout:?}{order}")
    }
}

fn refused(reason: impl Into<String>) -> CudaError {
    CudaError::AttentionShape { reason: reason.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packed(documents: usize, longest: usize, tokens: usize) -> AttentionShape {
        let layout = Layout::Packed { documents, longest, tokens };
        let (query_heads, key_value_heads, head_dim) = (4, 2, 8);
        AttentionShape { element: Element::Bf16, layout, query_heads, key_value_heads, head_dim, in_order: false }
    }

    #[test]
    fn offsets_are_listed_once_for_each_width_of_rows() {
        let grouped = packed(5, 8, 16);
        assert_eq!(grouped.index_strides(), [4, 32, 16]);
        assert_eq!([4, 32, 16].map(|stride| grouped.offsets_at(stride)), [32, 64, 96]);
        assert_eq!(AttentionShape { key_value_heads: 4, ..grouped }.index_strides(), [4, 32]);
    }

    #[test]
    fn impossible_shapes_are_refused_by_name() {
        let good = packed(2, 8, 10);
        good.check().expect("good");
        let mut heads = good;
        heads.key_value_heads = 3;
        let mut odd = good;
        odd.head_dim = 12;
        let huge = packed(2, 8, 1 << 26);
        for (shape, part) in [(heads, "multiple of 3"), (odd, "12 wide"), (huge, "32-bit")] {
            let message = shape.check().expect_err(part).to_string();
            assert!(message.contains(part), "{part} is missing in: {message}");
        }
    }
}
