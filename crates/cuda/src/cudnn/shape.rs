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

/// Distance in elements between the rows of adjacent tokens, for each buffer. Within a row, heads are adjacent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RowStrides {
    /// Of the queries, `[tokens, query_heads, head_dim]`.
    pub query: usize,
    /// Of the keys, `[tokens, key_value_heads, head_dim]`.
    pub key: usize,
    /// Of the values, `[tokens, key_value_heads, head_dim]`.
    pub value: usize,
    /// Of the output, `[tokens, query_heads, head_dim]`.
    pub output: usize,
    /// Stride of the output's gradient.
    pub output_gradient: usize,
    /// Stride of the queries' gradient.
    pub query_gradient: usize,
    /// Stride of the keys' gradient. With grouped heads and packed documents, the workspace grows with this stride, so a separate buffer is best.
    pub key_gradient: usize,
    /// Stride of the values' gradient; a separate buffer is best, as for the keys'.
    pub value_gradient: usize,
}

/// The order of the softmax statistics (log-sum-exp) in memory, without gaps, as f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StatisticsLayout {
    /// `[documents, query_heads, length]`, for uniform documents: element
    /// `(document * query_heads + head) * length + position`. The statistics of a range of documents are contiguous.
    DocumentsHeadsTokens,
    /// `[tokens, query_heads]`, for packed documents: element `token * query_heads + head`, where `token` counts over all
    /// documents. Rows after the last document are not written.
    TokensHeads,
}

/// The properties of an attention call on which a plan depends. Each call gives its own scale and pointers.
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
    /// Row strides, each a multiple of 8.
    pub strides: RowStrides,
}

/// Forward or backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Pass {
    Forward,
    Backward,
}

impl RowStrides {
    /// Returns strides for buffers of adjacent rows.
    pub fn contiguous(query_heads: usize, key_value_heads: usize, head_dim: usize) -> Self {
        let (query, key) = (query_heads * head_dim, key_value_heads * head_dim);
        Self {
            query,
            key,
            value: key,
            output: query,
            output_gradient: query,
            query_gradient: query,
            key_gradient: key,
            value_gradient: key,
        }
    }

    /// Returns all strides with the name of their buffer and whether it has query heads. Those of the forward pass are first.
    fn all(&self) -> [(&'static str, usize, bool); 8] {
        [
            ("query", self.query, true),
            ("key", self.key, false),
            ("value", self.value, false),
            ("output", self.output, true),
            ("output gradient", self.output_gradient, true),
            ("query gradient", self.query_gradient, true),
            ("key gradient", self.key_gradient, false),
            ("value gradient", self.value_gradient, false),
        ]
    }
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

    /// Returns the order of the softmax statistics, of which there is one for each query head and token: the natural logarithm of the sum of
    /// exponentials of its scaled, masked scores (log-sum-exp), which the forward pass writes and the backward pass reads. Other
    /// kernels may use other orders, so keep the order with the statistics.
    pub fn statistics_layout(&self) -> StatisticsLayout {
        match self.layout {
            Layout::Uniform { .. } => StatisticsLayout::DocumentsHeadsTokens,
            Layout::Packed { .. } => StatisticsLayout::TokensHeads,
        }
    }

    /// Returns whether calls need an index.
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
        self.lengths_len() + part * self.offsets_len()
    }

    /// Returns the distinct row strides, in the order of their parts in the index. The first is that of the statistics.
    /// For each stride, the index contains the first token of every document, and the end, times the stride. The
    /// strides of the forward pass precede the others, so that both passes share an index.
    pub fn index_strides(&self) -> Vec<usize> {
        let mut strides = vec![self.query_heads];
        for (_, stride, _) in self.strides.all() {
            if !strides.contains(&stride) {
                strides.push(stride);
            }
        }
        strides
    }

    fn lengths_len(&self) -> usize {
        self.documents().next_multiple_of(INDEX_ALIGNMENT)
    }

    fn offsets_len(&self) -> usize {
        (self.documents() + 1).next_multiple_of(INDEX_ALIGNMENT)
    }

    /// Returns the part of the shape on which the forward plan depends.
    pub(super) fn without_gradients(mut self) -> Self {
        let query = self.strides.query;
        self.strides.output_gradient = query;
        self.strides.query_gradient = query;
        self.strides.key_gradient = self.strides.key;
        self.strides.value_gradient = self.strides.value;
        self
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
        for (name, stride, of_queries) in self.strides.all() {
            let row = if of_queries { queries } else { keys } * width;
            if stride < row || !stride.is_multiple_of(8) {
                let needed = format!("at least {row} and a multiple of 8");
                return Err(refused(format!("the row stride of the {name} is {stride}, expected {needed}")));
            }
        }
        let widest = self.strides.all().iter().map(|&(_, stride, _)| stride).max().unwrap_or(0);
        if self.is_packed() && self.tokens() * widest > i32::MAX as usize {
            let what = format!("{} tokens in rows of {widest} elements", self.tokens());
            return Err(refused(format!("{what} exceed the 32-bit offsets of packed documents")));
        }
        Ok(())
    }

    /// Describes the call, for errors.
    pub(super) fn describe(&self, pass: Pass) -> String {
        let Self { element, layout, query_heads, key_value_heads, head_dim, .. } = self;
        format!("{pass:?} {element:?} {query_heads}/{key_value_heads} heads of {head_dim}, {layout:?}")
    }
}

fn refused(reason: impl Into<String>) -> CudaError {
    CudaError::AttentionShape { reason: reason.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packed(documents: usize, longest: usize, tokens: usize) -> AttentionShape {
        let mut strides = RowStrides::contiguous(4, 2, 8);
        (strides.query, strides.key, strides.value) = (64, 64, 64);
        let layout = Layout::Packed { documents, longest, tokens };
        let (query_heads, key_value_heads, head_dim) = (4, 2, 8);
        AttentionShape { element: Element::Bf16, layout, query_heads, key_value_heads, head_dim, strides }
    }

    #[test]
    fn both_passes_find_their_offsets_at_the_same_places() {
        let shape = packed(5, 8, 16);
        let forward = shape.without_gradients();
        for stride in [4, 64, 32] {
            assert_eq!(shape.offsets_at(stride), forward.offsets_at(stride));
        }
    }

    #[test]
    fn impossible_shapes_are_refused_by_name() {
        let good = packed(2, 8, 10);
        good.check().expect("good");
        let mut narrow = good;
        narrow.strides.key_gradient = 8;
        let mut heads = good;
        heads.key_value_heads = 3;
        let mut odd = good;
        odd.head_dim = 12;
        let huge = packed(2, 8, 1 << 26);
        for (shape, part) in [(narrow, "key gradient"), (heads, "multiple of 3"), (odd, "12 wide"), (huge, "32-bit")] {
            let message = shape.check().expect_err(part).to_string();
            assert!(message.contains(part), "{part} is missing in: {message}");
        }
    }

    #[test]
    fn the_layout_decides_the_order_of_statistics() {
        let shape = packed(2, 8, 10);
        assert_eq!(shape.statistics_layout(), StatisticsLayout::TokensHeads);
        let uniform = AttentionShape { layout: Layout::Uniform { documents: 2, length: 5 }, ..shape };
        assert_eq!(uniform.statistics_layout(), StatisticsLayout::DocumentsHeadsTokens);
    }
}
