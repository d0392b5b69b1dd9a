//! The graph of the backward pass, as cudnn-frontend 1.23 spells it (`CompositeSDPABackwardNode`).
//!
//! Probabilities are computed anew from queries, keys and statistics. With `p` the probabilities and `g` the output's gradient:
//! `dv = p^T g`, `ds = p * (g v^T - rowsum(g * output))`, `dk = scale * ds^T q`, `dq = scale * ds k`. Row sums, and, unless the
//! pass is deterministic, a 32-bit accumulator of `dq`, live in the workspace. With grouped heads, `dk` and `dv` of all query
//! heads are made first and summed over each group.

use super::attention::{Attention, Side};
use super::graph::{Form, Graph, Node, Source};
use super::shape::AttentionShape;
use super::sys::{Data, Pointwise, Reduction, Symbols};
use super::version::{Version, Workarounds};
use crate::CudaError;

/// The graph with what lies in the part of the workspace that is ours.
pub(super) struct Backward {
    pub(super) graph: Graph,
    /// Bytes of our part.
    pub(super) workspace: usize,
    /// Lengths to write before the call: byte offset, and the value for each document.
    pub(super) lengths: Option<(usize, u32)>,
    /// Bytes to clear before the call: offset and count.
    pub(super) cleared: Option<(usize, usize)>,
}

/// Bytes handed out so far, each piece on a boundary that suits every kernel.
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

/// Gradients of `shape`.
pub(super) fn graph(
    symbols: Symbols,
    version: Version,
    workarounds: Workarounds,
    shape: AttentionShape,
) -> Result<Backward, CudaError> {
    let mut workspace = Workspace::default();
    let constant = !shape.is_packed() && version.needs_lengths_for(shape.longest());
    let lengths_at = constant.then(|| workspace.take(shape.documents() * size_of::<i32>()));
    let source = if shape.is_packed() { Some(Source::Index(0)) } else { lengths_at.map(Source::Workspace) };
    let mut attention = Attention::new(symbols, version, workarounds, shape, source)?;
    let inputs = inputs(&mut attention)?;

    let row_sums = row_sums(&mut attention, &inputs, &mut workspace)?;
    let probabilities = probabilities(&mut attention, &inputs)?;
    let transposed = transpose_scores(&mut attention, "transposed probabilities", probabilities)?;
    let value = KeySide { name: "value gradient", source: Source::ValueGradient, stride: shape.strides.value_gradient };
    key_side(&mut attention, value, transposed, inputs.output_gradient, &mut workspace)?;

    let scores = score_gradient(&mut attention, &inputs, probabilities, row_sums)?;
    let transposed = transpose_scores(&mut attention, "transposed score gradient", scores)?;
    let key = KeySide { name: "key gradient", source: Source::KeyGradient, stride: shape.strides.key_gradient };
    key_side(&mut attention, key, transposed, inputs.query, &mut workspace)?;
    let accumulator = query_side(&mut attention, scores, inputs.key, &mut workspace)?;

    Ok(Backward {
        graph: attention.graph,
        workspace: workspace.0,
        lengths: lengths_at.map(|at| (at, shape.longest() as u32)),
        cleared: accumulator.filter(|_| version.wants_cleared_accumulator()),
    })
}

fn inputs(attention: &mut Attention) -> Result<Inputs, CudaError> {
    let (sizes, strides) = (attention.sizes(), attention.shape.strides);
    let form = attention.rows("query", sizes.query_heads, strides.query)?;
    let query = attention.graph.device("query", form, Source::Query)?;
    let form = attention.rows("key", sizes.key_value_heads, strides.key)?.transposed();
    let key = attention.graph.device("key", form, Source::Key)?;
    let form = attention.rows("value", sizes.key_value_heads, strides.value)?.transposed();
    let value = attention.graph.device("value", form, Source::Value)?;
    let form = attention.rows("output", sizes.query_heads, strides.output)?;
    let output = attention.graph.device("output", form, Source::Output)?;
    let form = attention.rows("output gradient", sizes.query_heads, strides.output_gradient)?;
    let output_gradient = attention.graph.device("output gradient", form, Source::OutputGradient)?;
    let form = attention.statistics()?;
    let statistics = attention.graph.device("statistics", form, Source::Statistics)?;
    Ok(Inputs { query, key, value, output, output_gradient, statistics })
}

/// `rowsum(output gradient * output)`, in the workspace.
fn row_sums(attention: &mut Attention, inputs: &Inputs, workspace: &mut Workspace) -> Result<Node, CudaError> {
    let sizes = attention.sizes();
    let [heads, length, width] = [sizes.query_heads, sizes.length, sizes.width];
    let whole = [sizes.documents, heads, length, width];
    let product = Form::new(Data::Float, whole, [heads * length * width, length * width, heads * width, 1]);
    // Packed like the statistics where it may be: as many numbers as tokens, not as many as padded documents.
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
    let kept = graph.device("kept row sums", form, Source::Workspace(at))?;
    graph.pointwise("keep row sums", Pointwise::Multiply, Data::Float, &[sums, one], kept)?;
    Ok(kept)
}

/// The softmax again: `exp(scores - statistics)`.
fn probabilities(attention: &mut Attention, inputs: &Inputs) -> Result<Node, CudaError> {
    let scores = attention.scaled_scores(inputs.query, inputs.key)?;
    let mut shifted =
        attention.graph.binary("scores less statistics", Pointwise::Subtract, scores, inputs.statistics)?;
    if attention.version.masks_padding_twice() {
        shifted = attention.mask_padding("padding again", shifted)?;
    }
    let causal = attention.mask_future(shifted)?;
    attention.graph.unary("probabilities", Pointwise::Exponential, causal)
}

/// `scale * probabilities * (output gradient . value^T - row sums)`
fn score_gradient(
    attention: &mut Attention,
    inputs: &Inputs,
    probabilities: Node,
    row_sums: Node,
) -> Result<Node, CudaError> {
    let product = attention.graph.inner("gradient . value", attention.scores_form(Data::Float))?;
    let overrides = attention.overrides(Side::Query, Side::Key, Side::Width);
    attention.graph.matmul("gradient . value", inputs.output_gradient, inputs.value, product, overrides)?;
    let centred = attention.graph.binary("less row sums", Pointwise::Subtract, product, row_sums)?;
    let gradient = attention.graph.binary("score gradient", Pointwise::Multiply, centred, probabilities)?;
    attention.scaled("scaled score gradient", gradient)
}

/// `[document, head, query, key]` seen as `[document, head, key, query]`, in the element type.
fn transpose_scores(attention: &mut Attention, name: &str, scores: Node) -> Result<Node, CudaError> {
    let form = attention.scores_form(attention.element()).transposed();
    attention.graph.view(name, scores, form)
}

/// A gradient of keys or values.
struct KeySide {
    name: &'static str,
    source: Source,
    stride: usize,
}

/// `transposed . rows`, summed over each group of query heads.
fn key_side(
    attention: &mut Attention,
    into: KeySide,
    transposed: Node,
    rows: Node,
    workspace: &mut Workspace,
) -> Result<(), CudaError> {
    let sizes = attention.sizes();
    let form = attention.rows(into.name, sizes.key_value_heads, into.stride)?;
    let overrides = attention.overrides(Side::Key, Side::Width, Side::Query);
    let gradient = attention.graph.device(into.name, form, into.source)?;
    if sizes.query_heads == sizes.key_value_heads {
        return attention.graph.matmul(into.name, transposed, rows, gradient, overrides);
    }
    let all_heads = all_heads(attention, &into, form, workspace)?;
    let name = format!("{} of all heads", into.name);
    attention.graph.matmul(&name, transposed, rows, all_heads, overrides)?;
    attention.graph.reduce(into.name, Reduction::Add, all_heads, gradient)
}

/// A place for the gradient of every query head. Two are possible for packed documents: padded to the longest, which cuDNN
/// adds to its own workspace, or by token in rows a group's size as wide as the gradient's. The smaller one is taken.
fn all_heads(
    attention: &mut Attention,
    into: &KeySide,
    gradient: Form,
    workspace: &mut Workspace,
) -> Result<Node, CudaError> {
    let sizes = attention.sizes();
    let group = sizes.query_heads / sizes.key_value_heads;
    let whole = [sizes.documents, sizes.query_heads, sizes.length, sizes.width];
    let name = format!("{} of all heads", into.name);
    // Four bytes an element although the elements have two: what cudnn-frontend reserves.
    let by_token = whole_tiles(&attention.shape) * into.stride * group as usize * size_of::<f32>();
    let padded = whole.iter().product::<i64>() as usize * size_of::<u16>();
    if accumulates_by_token(attention) && by_token <= padded {
        let [document, head, token, one] = gradient.strides;
        let form = Form::new(attention.element(), whole, [document * group, head, token * group, one]);
        let at = workspace.take(by_token);
        return attention.graph.device(&name, form.ragged(gradient.ragged), Source::Workspace(at));
    }
    let strides = [whole[1] * whole[2] * whole[3], whole[2] * whole[3], whole[3], 1];
    attention.graph.inner(&name, Form::new(attention.element(), whole, strides))
}

/// `scores . key`. Says where the accumulator is, if there is one: byte offset and count.
fn query_side(
    attention: &mut Attention,
    scores: Node,
    key: Node,
    workspace: &mut Workspace,
) -> Result<Option<(usize, usize)>, CudaError> {
    let sizes = attention.sizes();
    let stride = attention.shape.strides.query_gradient;
    let untransposed = Form { element: Data::Float, ..attention.graph.form(key).transposed() };
    let key = attention.graph.view("untransposed key", key, untransposed)?;
    let form = attention.rows("query gradient", sizes.query_heads, stride)?;
    let overrides = attention.overrides(Side::Query, Side::Width, Side::Key);
    let gradient = attention.graph.device("query gradient", form, Source::QueryGradient)?;
    if attention.shape.deterministic {
        attention.graph.matmul("query gradient", scores, key, gradient, overrides)?;
        return Ok(None);
    }
    let (accumulator, count) = if accumulates_by_token(attention) {
        (Form { element: Data::Float, ..form }, whole_tiles(&attention.shape) * stride)
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

/// Whether what is accumulated for packed documents is laid out by token. Known to be wrong for heads whose width is no
/// multiple of 16; those are padded to the longest document.
fn accumulates_by_token(attention: &Attention) -> bool {
    let shape = &attention.shape;
    shape.is_packed() && shape.head_dim.is_multiple_of(16) && !attention.workarounds.padded_accumulators
}

/// Tokens of what is accumulated by token. Kernels work on tiles of tokens, and NVIDIA's own code never gives them less than
/// whole tiles: the last document's may not run over into what comes next.
fn whole_tiles(shape: &AttentionShape) -> usize {
    shape.tokens().next_multiple_of(128)
}
