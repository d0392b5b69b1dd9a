//! Shared parts of both passes' graphs: tensors and masks.
//!
//! cuDNN finds its attention kernels by matching a whole graph of elementary operations. So every step here has the order and
//! the types of cudnn-frontend 1.23 (`attn_score_modifiers.h`, `diagonal_band_mask.h`), in the form that all versions since 9.1
//! recognize.
//!
//! Trade-off: a graph that computes the same in another way is not recognized, so this code cannot be simplified.

use super::graph::{Form, Four, Graph, Node, Overrides, Source};
use super::limits::Version;
use super::shape::{AttentionShape, Element};
use super::sys::{Data, Pointwise, Symbols};
use crate::error::CudaError;

/// A graph under construction, with the sizes and the tensors that its steps need.
pub(super) struct Attention {
    pub(super) graph: Graph,
    pub(super) shape: AttentionShape,
    pub(super) version: Version,
    /// Lengths of the documents in queries and in keys, unless all have the full length.
    lengths: Option<(Node, Node)>,
    masked: Node,
    scale: Node,
}

/// Sizes as cuDNN counts them: documents, heads, tokens of a document, width of a head.
pub(super) struct Sizes {
    pub(super) documents: i64,
    pub(super) query_heads: i64,
    pub(super) key_value_heads: i64,
    pub(super) length: i64,
    pub(super) width: i64,
}

impl Attention {
    /// Starts a graph; `lengths` is the source of the documents' lengths, if the graph needs them.
    pub(super) fn new(
        symbols: Symbols,
        version: Version,
        shape: AttentionShape,
        lengths: Option<Source>,
    ) -> Result<Self, CudaError> {
        let mut graph = Graph::new(symbols);
        let masked = graph.scalar("masked", Source::Masked)?;
        let scale = graph.scalar("scale", Source::Scale)?;
        let form = Form::new(Data::Int32, [shape.documents() as i64, 1, 1, 1], [1; 4]);
        let lengths = match lengths {
            None => None,
            Some(source) => {
                Some((graph.device("query lengths", form, source)?, graph.device("key lengths", form, source)?))
            }
        };
        Ok(Self { graph, shape, version, lengths, masked, scale })
    }

    pub(super) fn sizes(&self) -> Sizes {
        Sizes {
            documents: self.shape.documents() as i64,
            query_heads: self.shape.query_heads as i64,
            key_value_heads: self.shape.key_value_heads as i64,
            length: self.shape.longest() as i64,
            width: self.shape.head_dim as i64,
        }
    }

    pub(super) fn element(&self) -> Data {
        match self.shape.element {
            Element::Bf16 => Data::Bfloat16,
            Element::F16 => Data::Half,
        }
    }

    /// Adds a buffer of dense rows of `heads` heads.
    pub(super) fn buffer(&mut self, name: &str, heads: i64, source: Source) -> Result<Node, CudaError> {
        let form = self.rows(name, heads)?;
        self.graph.device(name, form, source)
    }

    /// Adds such a buffer, with tokens and the width of a head exchanged.
    pub(super) fn transposed_buffer(&mut self, name: &str, heads: i64, source: Source) -> Result<Node, CudaError> {
        let form = self.rows(name, heads)?.transposed();
        self.graph.device(name, form, source)
    }

    fn rows(&mut self, name: &str, heads: i64) -> Result<Form, CudaError> {
        let Sizes { documents, length, width, .. } = self.sizes();
        let row = heads * width;
        let form = Form::new(self.element(), [documents, heads, length, width], [length * row, width, row, 1]);
        Ok(form.ragged(self.offsets(name, row as usize)?))
    }

    pub(super) fn statistics(&mut self) -> Result<Form, CudaError> {
        let (Sizes { query_heads: heads, length, .. }, form) = (self.sizes(), self.row_form());
        if !self.shape.is_packed() {
            return Ok(form);
        }
        let by_token = Form { strides: [heads * length, 1, heads, 1], ..form };
        Ok(by_token.ragged(self.offsets("statistics", self.shape.query_heads)?))
    }

    fn offsets(&mut self, of: &str, row_stride: usize) -> Result<Option<Node>, CudaError> {
        if !self.shape.is_packed() {
            return Ok(None);
        }
        let form = Form::new(Data::Int32, [self.shape.documents() as i64 + 1, 1, 1, 1], [1; 4]);
        let source = Source::Index(self.shape.offsets_at(row_stride));
        self.graph.device(&format!("offsets of {of}"), form, source).map(Some)
    }

    /// Returns a form with the sizes of the scores, `[document, query head, query, key]`.
    pub(super) fn scores_form(&self, element: Data) -> Form {
        let Sizes { documents, query_heads, length, .. } = self.sizes();
        let row: Four = [query_heads * length * length, length * length, length, 1];
        Form::new(element, [documents, query_heads, length, length], row)
    }

    /// Returns a form with one number per row of the scores.
    pub(super) fn row_form(&self) -> Form {
        let Sizes { documents, query_heads, length, .. } = self.sizes();
        Form::new(Data::Float, [documents, query_heads, length, 1], [query_heads * length, length, 1, 1])
    }

    /// Returns which sizes of a matmul are replaced by the lengths of the documents.
    pub(super) fn overrides(&self, rows: Side, columns: Side, inner: Side) -> Overrides {
        let pick = |side| match (side, self.lengths) {
            (Side::Query, Some((query, _))) => Some(query),
            (Side::Key, Some((_, key))) => Some(key),
            _ => None,
        };
        Overrides { rows: pick(rows), columns: pick(columns), inner: pick(inner) }
    }

    /// Computes `scale * query . key`, with rows and columns after the end of a document masked. `key` is transposed.
    pub(super) fn scaled_scores(&mut self, query: Node, key: Node) -> Result<Node, CudaError> {
        let scores = self.graph.inner("scores", self.scores_form(Data::Float))?;
        let overrides = self.overrides(Side::Query, Side::Key, Side::Width);
        self.graph.matmul("query . key", query, key, scores, overrides)?;
        let scaled = self.scaled("scaled scores", scores)?;
        self.mask_padding("padding", scaled)
    }

    /// Computes `scale * x`.
    pub(super) fn scaled(&mut self, name: &str, x: Node) -> Result<Node, CudaError> {
        self.graph.binary(name, Pointwise::Multiply, x, self.scale)
    }

    /// Masks rows and columns after the end of a document, if documents have lengths.
    pub(super) fn mask_padding(&mut self, name: &str, scores: Node) -> Result<Node, CudaError> {
        let Some((queries, keys)) = self.lengths else { return Ok(scores) };
        let graph = &mut self.graph;
        let row = graph.position(&format!("{name} row"), scores, 2, Data::Int32)?;
        let column = graph.position(&format!("{name} column"), scores, 3, Data::Int32)?;
        let row = graph.compare(&format!("{name} row inside"), Pointwise::Less, row, queries)?;
        let column = graph.compare(&format!("{name} column inside"), Pointwise::Less, column, keys)?;
        let inside = graph.compare(&format!("{name} inside"), Pointwise::And, row, column)?;
        graph.select(&format!("{name} masked"), scores, self.masked, inside)
    }

    /// Masks keys after the query; positions count from the first token of each document.
    pub(super) fn mask_future(&mut self, scores: Node) -> Result<Node, CudaError> {
        let row = self.graph.position("causal row", scores, 2, Data::Float)?;
        let column = self.graph.position("causal column", scores, 3, Data::Float)?;
        let past = self.graph.compare("past or present", Pointwise::GreaterOrEqual, row, column)?;
        self.graph.select("causal scores", scores, self.masked, past)
    }
}

/// The meaning of a matmul's dimension.
#[derive(Clone, Copy)]
pub(super) enum Side {
    Query,
    Key,
    Width,
}
