//! The graph of the backward pass, as in cudnn-frontend 1.23 (`CompositeSDPABackwardNode`).
//!
//! Probabilities are recomputed from queries, keys and statistics. With `p` the probabilities and `g` the gradient of the output:
//! `dv = p^T g`, `ds = p * (g v^T - rowsum(g * output))`, `dk = scale * ds^T q`, `dq = scale * ds k`. Row sums and an
//! f32 accumulator of `dq`, to which blocks are added in any order, are in the workspace. With grouped heads, `dk` and `dv` of all query heads
//! are computed first and then summed over each group. Where the order of sums is to be fixed (`AttentionShape::in_order`) there is no accumulator:
//! cuDNN then takes kernels that keep `ds` in its workspace and multiply it with `k` afterwards, as for cudnn-frontend's deterministic algorithm before
//! Blackwell.
//!
//! Trade-off: the accumulators make the workspace several times as large as the gradients; `ds` of long documents is larger still.

use super::attention::{Attention, Side, Sizes};
use super::graph::{Form, Graph, Node, Source};
use super::limits::Version;
use super::shape::AttentionShape;
use super::sys::{Data, Pointwise, Reduction, Symbols};
use crate::error::CudaError;

/// The graph, and the contents of our part of the workspace.
pub(super) struct Backward {
    pub(super) graph: Graph,
    /// Bytes of our part of the workspace.
    pub(super) workspace: usize,
    /// Lengths to write before the call: byte offset, and the length of every document.
    pub(super) lengths: Option<(usize, u32)>,
    /// Bytes to clear before the call: byte offset and count.
    pub(super) cleared: Option<(usize, usize)>,
}

/// Allocates aligned pieces of the workspace; the field is the number of bytes so far.
#[derive(Default)]
struct Workspace(usize);

impl Workspace {
    fn take(&mut self, bytes: usize) -> usize {
        let at = self.0;
        self.0 += bytes.next_multiple_of(256);
        at
    }
}

/// The call's inputs: keys and values are transposed.
struct Inputs {
    query: Node,
    key: Node,
    value: Node,
    output: Node,
    output_gradient: Node,
    statistics: Node,
}

/// Builds the graph that computes the gradients of `shape`.
pub(super) fn graph(symbols: Symbols, version: Version, shape: AttentionShape) -> Result<Backward, CudaError> {
    let mut workspace = Workspace::default();
    let needs_lengths = !shape.is_packed() && version.needs_lengths_for(shape.longest());
    let lengths_at = needs_lengths.then(|| workspace.take(shape.documents() * size_of::<i32>()));
    let source = if shape.is_packed() { Some(Source::Index(0)) } else { lengths_at.map(Source::Workspace) };
    let mut attention = Attention::new(symbols, version, shape, source)?;
    let inputs = inputs(&mut attention)?;

    let row_sums = row_sums(&mut attention, &inputs, &mut workspace)?;
    let probabilities = probabilities(&mut attention, &inputs)?;
    let transposed = transpose_scores(&mut attention, "transposed probabilities", probabilities)?;
    let (name, rows) = ("value gradient", inputs.output_gradient);
    key_side(&mut attention, name, Source::ValueGradient, [transposed, rows], &mut workspace)?;

    let scores = score_gradient(&mut attention, &inputs, probabilities, row_sums)?;
    let transposed = transpose_scores(&mut attention, "transposed score gradient", scores)?;
    let (name, rows) = ("key gradient", inputs.query);
    key_side(&mut attention, name, Source::KeyGradient, [transposed, rows], &mut workspace)?;
    let accumulator = query_side(&mut attention, scores, inputs.key, &mut workspace)?;

    Ok(Backward {
        graph: attention.graph,
        workspace: workspace.0,
        lengths: lengths_at.map(|at| (at, shape.longest() as u32)),
        cleared: accumulator.filter(|_| version.needs_cleared_accumulator()),
    })
}

fn inputs(attention: &mut Attention) -> Result<Inputs, CudaError> {
    let Sizes { query_heads, key_value_heads, .. } = attention.sizes();
    let query = attention.buffer("query", query_heads, Source::Query)?;
    let key = attention.transposed_buffer("key", key_value_heads, Source::Key)?;
    let value = attention.transposed_buffer("value", key_value_heads, Source::Value)?;
    let output = attention.buffer("output", query_heads, Source::Output)?;
    let output_gradient = attention.buffer("output gradient", query_heads, Source::OutputGradient)?;
    let form = attention.statistics()?;
    let statistics = attention.graph.device("statistics", form, Source::Statistics)?;
    Ok(Inputs { query, key, value, output, output_gradient, statistics })
}

/// Computes `rowsum(output gradient * output)`, in the workspace.
fn row_sums(attention: &mut Attention, inputs: &Inputs, workspace: &mut Workspace) -> Result<Node, CudaError> {
    let sizes = attention.sizes();
    let [heads, length, width] = [sizes.query_heads, sizes.length, sizes.width];
    let whole = [sizes.documents, heads, length, width];
    let product = Form::new(Data::Float, whole, [heads * length * width, length * width, heads * width, 1]);
    // Packed like the statistics if possible: as many values as tokens, not as padded documents.
    let (form, count) = if accumulates_by_token(attention) {
        (attention.graph.form(inputs.statistics), whole_tiles(&attention.shape) * heads as usize)
    } else {
        (attention.row_form(), (sizes.documents * heads * length) as usize)
    };
    let row = attention.row_form();
    let at = workspace.take(count * size_of::<f32>());
    let graph = &mut attention.graph;
    let one = graph.scalar("one", Source::One)?;
    let each = graph.inner("gradient times output", product)?;
    let pair = [inputs.output_gradient, inputs.output];
    graph.pointwise("gradient times output", Pointwise::Multiply, Data::Float, &pair, each)?;
    let sums = graph.inner("row sums", row)?;
    graph.reduce("row sums", Reduction::Add, each, sums)?;
    let stored = graph.device("stored row sums", form, Source::Workspace(at))?;
    graph.pointwise("store row sums", Pointwise::Multiply, Data::Float, &[sums, one], stored)?;
    Ok(stored)
}

/// Recomputes the softmax: `exp(scores - statistics)`.
fn probabilities(attention: &mut Attention, inputs: &Inputs) -> Result<Node, CudaError> {
    let scores = attention.scaled_scores(inputs.query, inputs.key)?;
    let mut shifted =
        attention.graph.binary("scores minus statistics", Pointwise::Subtract, scores, inputs.statistics)?;
    if attention.version.masks_padding_twice() {
        shifted = attention.mask_padding("padding again", shifted)?;
    }
    let causal = attention.mask_future(shifted)?;
    attention.graph.unary("probabilities", Pointwise::Exponential, causal)
}

/// Computes `scale * probabilities * (output gradient . value^T - row sums)`.
fn score_gradient(
    attention: &mut Attention,
    inputs: &Inputs,
    probabilities: Node,
    row_sums: Node,
) -> Result<Node, CudaError> {
    let product = attention.graph.inner("gradient . value", attention.scores_form(Data::Float))?;
    let overrides = attention.overrides(Side::Query, Side::Key, Side::Width);
    attention.graph.matmul("gradient . value", inputs.output_gradient, inputs.value, product, overrides)?;
    let centered = attention.graph.binary("minus row sums", Pointwise::Subtract, product, row_sums)?;
    let gradient = attention.graph.binary("score gradient", Pointwise::Multiply, centered, probabilities)?;
    attention.scaled("scaled score gradient", gradient)
}

/// Views `[document, head, query, key]` as `[document, head, key, query]`, in the element type.
fn transpose_scores(attention: &mut Attention, name: &str, scores: Node) -> Result<Node, CudaError> {
    let form = attention.scores_form(attention.element()).transposed();
    attention.graph.view(name, scores, form)
}

/// Computes the gradient of the keys or the values: `transposed . rows`, summed over each group of query heads.
fn key_side(
    attention: &mut Attention,
    name: &str,
    gradient: Source,
    [transposed, rows]: [Node; 2],
    workspace: &mut Workspace,
) -> Result<(), CudaError> {
    let sizes = attention.sizes();
    let overrides = attention.overrides(Side::Key, Side::Width, Side::Query);
    let gradient = attention.buffer(name, sizes.key_value_heads, gradient)?;
    if sizes.query_heads == sizes.key_value_heads {
        return attention.graph.matmul(name, transposed, rows, gradient, overrides);
    }
    let name_of_all = format!("{name} of all heads");
    let all_heads = all_heads(attention, &name_of_all, gradient, workspace)?;
    attention.graph.matmul(&name_of_all, transposed, rows, all_heads, overrides)?;
    attention.graph.reduce(name, Reduction::Add, all_heads, gradient)
}

/// Returns the gradients of all query heads. For packed documents there are two layouts: padded to the longest document, which cuDNN adds to its own
/// workspace, or by token, in rows that are wider than those of the gradient by the size of a group. The smaller one is used.
fn all_heads(
    attention: &mut Attention,
    name: &str,
    gradient: Node,
    workspace: &mut Workspace,
) -> Result<Node, CudaError> {
    let (sizes, gradient) = (attention.sizes(), attention.graph.form(gradient));
    let group = sizes.query_heads / sizes.key_value_heads;
    let whole = [sizes.documents, sizes.query_heads, sizes.length, sizes.width];
    // Four bytes per element although elements have two: cudnn-frontend reserves as much.
    let by_token = whole_tiles(&attention.shape) * attention.shape.key_width() * group as usize * size_of::<f32>();
    let padded = whole.iter().product::<i64>() as usize * size_of::<u16>();
    if accumulates_by_token(attention) && by_token <= padded {
        let [document, head, token, one] = gradient.strides;
        let form = Form::new(attention.element(), whole, [document * group, head, token * group, one]);
        let at = workspace.take(by_token);
        return attention.graph.device(name, form.ragged(gradient.ragged), Source::Workspace(at));
    }
    let strides = [whole[1] * whole[2] * whole[3], whole[2] * whole[3], whole[3], 1];
    attention.graph.inner(name, Form::new(attention.element(), whole, strides))
}

/// Computes `scores . key`. Returns the byte offset and size of the accumulator; `None` if sums have a fixed order.
fn query_side(
    attention: &mut Attention,
    scores: Node,
    key: Node,
    workspace: &mut Workspace,
) -> Result<Option<(usize, usize)>, CudaError> {
    let untransposed = Form { element: Data::Float, ..attention.graph.form(key).transposed() };
    let key = attention.graph.view("untransposed key", key, untransposed)?;
    let overrides = attention.overrides(Side::Query, Side::Width, Side::Key);
    let gradient = attention.buffer("query gradient", attention.sizes().query_heads, Source::QueryGradient)?;
    if attention.shape.in_order {
        attention.graph.matmul("query gradient", scores, key, gradient, overrides)?;
        return Ok(None);
    }
    let form = attention.graph.form(gradient);
    let (accumulator, count) = if accumulates_by_token(attention) {
        (Form { element: Data::Float, ..form }, whole_tiles(&attention.shape) * attention.shape.query_width())
    } else {
        let [documents, heads, length, width] = form.sizes;
        let strides = [heads * length * width, length * width, width, 1];
        let count = documents * heads * length * width;
        (Form::new(Data::Float, form.sizes, strides), count as usize)
    };
    let bytes = count * size_of::<f32>();
    let at = workspace.take(bytes);
    let accumulator = attention.graph.device("accumulated query gradient", accumulator, Source::Workspace(at))?;
    attention.graph.matmul("accumulated query gradient", scores, key, accumulator, overrides)?;
    attention.graph.pointwise("query gradient", Pointwise::Identity, Data::Float, &[accumulator], gradient)?;
    Ok(Some((at, bytes)))
}

/// Returns whether accumulators of packed documents are laid out by token. This is known to be wrong for head widths
/// that are not a multiple of 16; those are padded to the longest document.
fn accumulates_by_token(attention: &Attention) -> bool {
    let shape = &attention.shape;
    shape.is_packed() && shape.head_dim.is_multiple_of(16)
}

/// Returns the tokens of an accumulator that is laid out by token. Kernels work on tiles of tokens, and NVIDIA's own
/// code always allocates whole tiles, so that the tile of the last document does not reach into other memory.
fn whole_tiles(shape: &AttentionShape) -> usize {
    shape.tokens().next_multiple_of(128)
}
