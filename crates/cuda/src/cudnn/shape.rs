//! What a plan is built for: the sizes of an attention call, how its documents lie in memory, and what follows from both.

use super::version::Version;
use crate::CudaError;

/// Element type of queries, keys, values, outputs and all their gradients. Softmax and sums are computed in 32-bit floats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// `bfloat16`
    Bf16,
    /// IEEE half
    F16,
}

/// How documents lie on the token axis. Attention is causal within a document and never crosses into another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layout {
    /// `documents` documents of `length` tokens each, back to back: `documents * length` tokens.
    Uniform {
        /// Number of documents.
        documents: usize,
        /// Tokens of each.
        length: usize,
    },
    /// Documents of different lengths, back to back. The numbers are upper bounds, so that one plan serves many batches:
    /// documents that are not there have length 0 and come last, as [`AttentionShape::packed_index`] sees to.
    Packed {
        /// The most documents.
        documents: usize,
        /// Tokens of the longest.
        longest: usize,
        /// The most tokens, all documents together; the rows that the buffers have.
        tokens: usize,
    },
}

/// Distance in elements from one token's row to the next, for each buffer. Within a row, heads lie side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RowStrides {
    /// Of the queries.
    pub query: usize,
    /// Of the keys.
    pub key: usize,
    /// Of the values.
    pub value: usize,
    /// Of the output.
    pub output: usize,
    /// Of the output's gradient.
    pub output_gradient: usize,
    /// Of the queries' gradient.
    pub query_gradient: usize,
    /// Of the keys' gradient. With grouped heads and packed documents, the workspace grows with this stride: best unshared.
    pub key_gradient: usize,
    /// Of the values' gradient; see the keys'.
    pub value_gradient: usize,
}

/// An attention call: what a plan depends on. The scale and the pointers come with each call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionShape {
    /// Element type.
    pub element: Element,
    /// Documents.
    pub layout: Layout,
    /// Heads of the queries; a multiple of `key_value_heads`.
    pub query_heads: usize,
    /// Heads of keys and values, each of which serves a group of query heads.
    pub key_value_heads: usize,
    /// Width of a head; a multiple of 8.
    pub head_dim: usize,
    /// Row strides, each a multiple of 8.
    pub strides: RowStrides,
    /// Whether the backward pass must give the same bits every time. Costs time: sums are not made by atomic adds.
    pub deterministic: bool,
}

/// Forward or backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pass {
    /// Output and statistics.
    Forward,
    /// Gradients.
    Backward,
}

impl RowStrides {
    /// Every buffer with its rows back to back.
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

    /// All, with what each belongs to and whether it has the queries' heads. Those of the forward pass come first.
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

/// Integers at the head of each part of the index start on a multiple of this, which is 16 bytes.
const INDEX_ALIGNMENT: usize = 4;

impl AttentionShape {
    /// The most documents.
    pub fn documents(&self) -> usize {
        match self.layout {
            Layout::Uniform { documents, .. } | Layout::Packed { documents, .. } => documents,
        }
    }

    /// Tokens of the longest document.
    pub fn longest(&self) -> usize {
        match self.layout {
            Layout::Uniform { length, .. } => length,
            Layout::Packed { longest, .. } => longest,
        }
    }

    /// Rows of the buffers.
    pub fn tokens(&self) -> usize {
        match self.layout {
            Layout::Uniform { documents, length } => documents * length,
            Layout::Packed { tokens, .. } => tokens,
        }
    }

    /// 32-bit floats that the softmax statistics need: the logarithm of the sum of exponentials of each row of scores, as
    /// `[document, head, token]` for uniform documents and `[token, head]` for packed ones.
    pub fn statistics_len(&self) -> usize {
        self.tokens() * self.query_heads
    }

    /// Whether calls need the index that [`Self::packed_index`] makes.
    pub fn is_packed(&self) -> bool {
        matches!(self.layout, Layout::Packed { .. })
    }

    /// 32-bit integers of the index; 0 for uniform documents.
    pub fn packed_index_len(&self) -> usize {
        if self.is_packed() { self.offsets_at_part(self.index_strides().len(), 1) } else { 0 }
    }

    /// The index of packed documents of these lengths, in their order: upload it once and give it to every call of the batch,
    /// forward and backward. Rows past the last document are neither read nor written.
    ///
    /// # Errors
    /// [`CudaError::AttentionShape`] if these documents do not fit the shape, or the shape is not packed.
    pub fn packed_index(&self, lengths: &[usize]) -> Result<Vec<i32>, CudaError> {
        self.index(lengths, 1)
    }

    /// The index for [`super::Workarounds::wide_offsets`]: each offset takes two of the integers, the low half first.
    ///
    /// # Errors
    /// As for [`Self::packed_index`].
    pub fn wide_packed_index(&self, lengths: &[usize]) -> Result<Vec<i32>, CudaError> {
        self.index(lengths, 2)
    }

    /// The index with offsets of so many 32-bit words.
    fn index(&self, lengths: &[usize], words: usize) -> Result<Vec<i32>, CudaError> {
        self.check()?;
        let Layout::Packed { documents, longest, tokens } = self.layout else {
            return Err(refused("uniform documents have no index: give the layout as packed"));
        };
        if lengths.len() > documents || lengths.iter().any(|&length| length > longest) {
            let most = lengths.iter().max().copied().unwrap_or(0);
            let found = format!("{} documents of up to {most} tokens", lengths.len());
            return Err(refused(format!(
                "the plan holds {documents} documents of up to {longest} tokens, got {found}"
            )));
        }
        let total: usize = lengths.iter().sum();
        if total > tokens {
            return Err(refused(format!("the plan holds {tokens} tokens, the documents have {total}")));
        }
        let strides = self.index_strides();
        let mut index = vec![0_i32; self.offsets_at_part(strides.len(), words)];
        for (slot, &length) in index.iter_mut().zip(lengths) {
            *slot = small(length);
        }
        for (part, stride) in strides.into_iter().enumerate() {
            let mut start = 0;
            let slots = index[self.offsets_at_part(part, words)..].chunks_exact_mut(words);
            for (document, slot) in slots.take(documents + 1).enumerate() {
                // The high word, if any, stays 0.
                slot[0] = small(start * stride);
                start += lengths.get(document).copied().unwrap_or(0);
            }
        }
        Ok(index)
    }

    /// Byte offset, in the index, of the offsets of a buffer with this row stride; each has so many 32-bit words.
    pub(super) fn offsets_at(&self, row_stride: usize, words: usize) -> usize {
        let part = self.index_strides().iter().position(|&stride| stride == row_stride);
        let part = part.expect("every row stride of the shape is in its own list");
        self.offsets_at_part(part, words) * size_of::<i32>()
    }

    /// Where the offsets for the stride of this place in the list begin, in 32-bit words.
    fn offsets_at_part(&self, part: usize, words: usize) -> usize {
        self.lengths_len() + part * self.offsets_len() * words
    }

    /// Distinct row strides in a fixed order, the statistics' first: for each of them the index holds the offset of every
    /// document and of the end, times that stride. Those of the forward pass come before the rest, so that both passes share
    /// an index.
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

    /// The part of the shape that the forward plan depends on.
    pub(super) fn without_gradients(mut self) -> Self {
        let query = self.strides.query;
        self.strides.output_gradient = query;
        self.strides.query_gradient = query;
        self.strides.key_gradient = self.strides.key;
        self.strides.value_gradient = self.strides.value;
        self.deterministic = false;
        self
    }

    /// Refuses what no version of cuDNN could mean.
    pub(super) fn check(&self) -> Result<(), CudaError> {
        let (queries, keys, width) = (self.query_heads, self.key_value_heads, self.head_dim);
        if self.documents() == 0 || self.longest() == 0 || self.tokens() == 0 {
            return Err(refused(format!("there is no token in {:?}", self.layout)));
        }
        if keys == 0 || queries == 0 || !queries.is_multiple_of(keys) {
            return Err(refused(format!("{queries} query heads are no multiple of {keys} key and value heads")));
        }
        if width == 0 || !width.is_multiple_of(8) {
            return Err(refused(format!("a head is {width} wide, not a multiple of 8")));
        }
        for (name, stride, of_queries) in self.strides.all() {
            let row = if of_queries { queries } else { keys } * width;
            if stride < row || !stride.is_multiple_of(8) {
                let needed = format!("at least {row} and a multiple of 8");
                return Err(refused(format!("the row stride of the {name} is {stride}, and must be {needed}")));
            }
        }
        let widest = self.strides.all().iter().map(|&(_, stride, _)| stride).max().unwrap_or(0);
        if self.is_packed() && self.tokens() * widest > i32::MAX as usize {
            let what = format!("{} tokens in rows of {widest} elements", self.tokens());
            return Err(refused(format!("{what} overflow the 32-bit offsets of packed documents")));
        }
        Ok(())
    }

    /// Refuses what this version on this device is known not to do, or to do wrongly; the rest is for cuDNN to say. The rules
    /// are those of NVIDIA's cudnn-frontend 1.23 (`sdpa_support_surface.h` and `scaled_dot_product_flash_attention.h`).
    pub(super) fn check_known_limits(&self, pass: Pass, version: Version, major: u32) -> Result<(), CudaError> {
        let no = |reason: String| Err(CudaError::CudnnUnsupported { case: self.describe(pass), reason });
        if version < Version(9, 1, 0) || [Version(9, 10, 0), Version(9, 10, 1)].contains(&version) {
            return no(format!("cuDNN {version} is too old or known to be faulty: 9.14 or newer is best"));
        }
        if major < 8 {
            return no("it needs an Ampere GPU or newer".to_string());
        }
        if self.is_packed() && (version < Version(9, 6, 0) || !(9..=10).contains(&major)) {
            return no("packed documents need cuDNN 9.6 or newer and a Hopper or Blackwell data center GPU".to_string());
        }
        if self.is_packed() && pass == Pass::Backward {
            // Not in NVIDIA's rules, but seen on Hopper: 9.14 and 9.19 give wrong gradients or an illegal instruction.
            let strides = &self.strides;
            let inputs = [strides.query, strides.key, strides.value];
            if inputs != [strides.query_gradient, strides.key_gradient, strides.value_gradient] {
                return no(
                    "gradients of packed documents need the row strides of their queries, keys and values".to_string()
                );
            }
            // Seen on Hopper with 9.14, and right with 9.19.
            if version < Version(9, 18, 0) && (self.head_dim > 128 || self.deterministic) {
                return no(format!(
                    "cuDNN {version} is wrong on packed documents with wide heads or deterministic sums"
                ));
            }
        }
        let widest = if major == 9 || (pass == Pass::Forward && version > Version(9, 9, 0)) { 256 } else { 128 };
        if self.head_dim > widest {
            return no(format!("heads are at most {widest} wide here"));
        }
        if pass == Pass::Backward && self.longest() == 1 {
            return no("documents of a single token have no backward pass: round the longest up".to_string());
        }
        if pass == Pass::Backward && self.deterministic && major >= 10 {
            return no("the deterministic backward pass is not chosen by cuDNN's heuristics on this GPU".to_string());
        }
        Ok(())
    }

    /// In words, for errors.
    pub(super) fn describe(&self, pass: Pass) -> String {
        let Self { element, layout, query_heads, key_value_heads, head_dim, .. } = self;
        let repeatable = if self.deterministic { ", deterministic" } else { "" };
        format!("{pass:?} {element:?} {query_heads}/{key_value_heads} heads of {head_dim}, {layout:?}{repeatable}")
    }
}

fn refused(reason: impl Into<String>) -> CudaError {
    CudaError::AttentionShape { reason: reason.into() }
}

/// Holds since `check` bounds every product by the 32-bit offsets.
fn small(value: usize) -> i32 {
    i32::try_from(value).expect("bounded by the check of the shape")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packed(documents: usize, longest: usize, tokens: usize) -> AttentionShape {
        let mut strides = RowStrides::contiguous(4, 2, 8);
        (strides.query, strides.key, strides.value) = (64, 64, 64);
        let layout = Layout::Packed { documents, longest, tokens };
        let (query_heads, key_value_heads, head_dim) = (4, 2, 8);
        AttentionShape {
            element: Element::Bf16,
            layout,
            query_heads,
            key_value_heads,
            head_dim,
            strides,
            deterministic: false,
        }
    }

    #[test]
    fn the_index_has_lengths_and_offsets_in_elements_and_missing_documents_are_empty_at_the_end() {
        let shape = packed(4, 8, 16);
        let index = shape.packed_index(&[3, 1, 5]).expect("fits");
        assert_eq!(index.len(), shape.packed_index_len());
        assert_eq!(index[..4], [3, 1, 5, 0]);
        for (row_stride, expected) in
            [(4, [0, 12, 16, 36, 36]), (64, [0, 192, 256, 576, 576]), (16, [0, 48, 64, 144, 144])]
        {
            let at = shape.offsets_at(row_stride, 1) / size_of::<i32>();
            assert_eq!(at % INDEX_ALIGNMENT, 0);
            assert_eq!(index[at..at + 5], expected, "row stride {row_stride}");
        }
    }

    #[test]
    fn the_wide_index_has_the_same_offsets_in_64_bits() {
        let shape = packed(4, 8, 16);
        let lengths = [3, 1, 5];
        let (narrow, wide) =
            (shape.packed_index(&lengths).expect("fits"), shape.wide_packed_index(&lengths).expect("fits"));
        assert_eq!(wide[..4], narrow[..4]);
        for row_stride in shape.index_strides() {
            let [narrow_at, wide_at] = [1, 2].map(|words| shape.offsets_at(row_stride, words) / size_of::<i32>());
            for document in 0..5 {
                let low = wide[wide_at + 2 * document];
                assert_eq!((low, wide[wide_at + 2 * document + 1]), (narrow[narrow_at + document], 0));
            }
        }
    }

    #[test]
    fn forward_and_backward_find_their_offsets_at_the_same_places() {
        let shape = packed(5, 8, 16);
        let forward = shape.without_gradients();
        for stride in [4, 64, 32] {
            assert_eq!(shape.offsets_at(stride, 2), forward.offsets_at(stride, 2));
        }
    }

    #[test]
    fn documents_that_do_not_fit_are_refused_with_the_numbers() {
        let shape = packed(2, 8, 10);
        for lengths in [&[1, 1, 1][..], &[9], &[8, 3]] {
            let message = shape.packed_index(lengths).expect_err("does not fit").to_string();
            assert!(message.contains("the plan holds"), "{message}");
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
    fn known_limits_are_reported_as_unsupported_so_that_the_caller_can_fall_back() {
        let mut shape = packed(2, 8, 10);
        shape.strides = RowStrides::contiguous(shape.query_heads, shape.key_value_heads, shape.head_dim);
        let unsupported = |version, major| {
            let error = shape.check_known_limits(Pass::Backward, version, major);
            matches!(error, Err(CudaError::CudnnUnsupported { .. }))
        };
        assert!(!unsupported(Version(9, 14, 0), 9) && !unsupported(Version(9, 14, 0), 10));
        assert!(unsupported(Version(9, 5, 0), 9) && unsupported(Version(9, 10, 0), 9));
        assert!(unsupported(Version(9, 14, 0), 8) && unsupported(Version(9, 14, 0), 12));
        let mut joined = shape;
        joined.strides.query *= 2;
        assert!(joined.check_known_limits(Pass::Backward, Version(9, 19, 0), 9).is_err());
        joined.strides.query_gradient *= 2;
        assert!(joined.check_known_limits(Pass::Backward, Version(9, 19, 0), 9).is_ok());
    }
}
