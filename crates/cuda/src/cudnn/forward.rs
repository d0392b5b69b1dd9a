//! The graph of the forward pass: scores, masks, softmax, values (FlashAttention-2, <https://arxiv.org/abs/2307.08691>).

use super::attention::{Attention, Side, Sizes};
use super::graph::{Graph, Node, Source};
use super::limits::Version;
use super::shape::AttentionShape;
use super::sys::{Data, Pointwise, Reduction, Symbols};
use crate::error::CudaError;

/// Builds the graph that computes output and statistics of `shape`.
pub(super) fn graph(symbols: Symbols, version: Version, shape: AttentionShape) -> Result<Graph, CudaError> {
    let lengths = shape.is_packed().then_some(Source::Index(0));
    let mut attention = Attention::new(symbols, version, shape, lengths)?;
    let Sizes { query_heads, key_value_heads, .. } = attention.sizes();

    let query = attention.buffer("query", query_heads, Source::Query)?;
    let key = attention.transposed_buffer("key", key_value_heads, Source::Key)?;
    let value = attention.buffer("value", key_value_heads, Source::Value)?;
    let output = attention.buffer("output", query_heads, Source::Output)?;

    let scores = attention.scaled_scores(query, key)?;
    let scores = attention.mask_future(scores)?;
    let probabilities = softmax(&mut attention, scores)?;
    let overrides = attention.overrides(Side::Query, Side::Width, Side::Key);
    attention.graph.matmul("probabilities . value", probabilities, value, output, overrides)?;
    Ok(attention.graph)
}

/// Computes the softmax of each row of scores, in the element type. The statistics are the logarithm of the sum of exponentials.
fn softmax(attention: &mut Attention, scores: Node) -> Result<Node, CudaError> {
    let (row, statistics) = (attention.row_form(), attention.statistics()?);
    let probabilities = attention.scores_form(attention.element());
    let graph = &mut attention.graph;
    let statistics = graph.device("statistics", statistics, Source::Statistics)?;
    let maximum = graph.inner("maximum", row)?;
    graph.reduce("row maximum", Reduction::Maximum, scores, maximum)?;
    let shifted = graph.binary("scores minus maximum", Pointwise::Subtract, scores, maximum)?;
    let exponentials = graph.unary("exponentials", Pointwise::Exponential, shifted)?;
    let sum = graph.inner("sum", row)?;
    graph.reduce("row sum", Reduction::Add, exponentials, sum)?;
    let logarithm = graph.unary("logarithm", Pointwise::Logarithm, sum)?;
    graph.pointwise("log sum exp", Pointwise::Add, Data::Float, &[maximum, logarithm], statistics)?;
    let probabilities = graph.inner("probabilities", probabilities)?;
    graph.pointwise("normalize", Pointwise::Divide, Data::Float, &[exponentials, sum], probabilities)?;
    Ok(probabilities)
}
