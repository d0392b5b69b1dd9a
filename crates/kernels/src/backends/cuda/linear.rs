//! Linear layers on CUDA: groups of projections as one product each way, adapters merged into the weights they adapt.
//!
//! The group's outputs are column ranges of one buffer, and so are the gradients that come back where the ops before them
//! made them so: forward is one product, the gradient of the input is one product, and only LoRA's own gradients take one
//! thin product a projection. Groups that cannot be merged (dense bases with adapters, trained bases) go one by one, each
//! product adding to the last.

use burn_tensor::{DType, Tensor};

use super::Cuda;
use super::engine::{Engine, engine};
use super::gemm::{Block, Product};
use super::scratch::Purpose;
use super::tensor::{Matrix, float, tensor};
use super::weights::Pairs;
use crate::{Heads, LoraPair, Projection, ProjectionGradients, RotaryTables, SwigluProjectGradients};

/// Widths of a group's outputs.
fn widths(projections: &[Projection<Cuda>]) -> Vec<usize> {
    projections.iter().map(|projection| projection.weight.shape()[0]).collect()
}

/// Where each output begins among the columns of all.
fn starts(widths: &[usize]) -> Vec<usize> {
    widths.iter().scan(0, |end, width| Some(std::mem::replace(end, *end + width))).collect()
}

/// See [`crate::Kernels::project`].
pub(super) fn project(x_ni: Tensor<Cuda, 2>, projections: &[Projection<Cuda>]) -> Vec<Tensor<Cuda, 2>> {
    let engine = engine(&x_ni.device());
    engine.section(|| {
        let y = project_group(&engine, &engine.matrix(x_ni), projections, None);
        split(&engine, &y, &widths(projections))
    })
}

/// Column ranges of a buffer.
fn split(engine: &Engine, y: &Matrix, widths: &[usize]) -> Vec<Tensor<Cuda, 2>> {
    let parts = widths.iter().zip(starts(widths));
    parts.map(|(&width, start)| tensor(engine.columns(y, start, &[y.rows, width]))).collect()
}

/// All outputs of a group side by side, plus a residual.
fn project_group(engine: &Engine, x: &Matrix, projections: &[Projection<Cuda>], residual: Option<&Matrix>) -> Matrix {
    let widths = widths(projections);
    let y = engine.empty_matrix(x.rows, widths.iter().sum(), x.dtype);
    let out = Block::from(&y);
    let added = residual.map(Block::from);
    if let Some(weights) = engine.merged_weights(projections, x.dtype) {
        engine.gemm(forward_product("linear", x, weights, y.width, added), out);
        return y;
    }
    for ((projection, start), &width) in projections.iter().zip(starts(&widths)).zip(&widths) {
        let out = out.at_column(start);
        let weight = engine.base_weight(&projection.weight, x.dtype);
        engine.gemm(forward_product("linear", x, weight, width, added.map(|added| added.at_column(start))), out);
        if let Some(pair) = &projection.lora {
            add_low_rank(engine, x, pair, width, out);
        }
    }
    y
}

fn forward_product(name: &'static str, x: &Matrix, weight: Block, width: usize, c: Option<Block>) -> Product {
    Product {
        name,
        m: x.rows,
        n: width,
        k: x.width,
        a: Block::from(x),
        a_transposed: false,
        b: weight,
        b_transposed: true,
        c,
        alpha: 1.0,
    }
}

/// `out += scale (x Aᵀ) Bᵀ`.
fn add_low_rank(engine: &Engine, x: &Matrix, pair: &LoraPair<Cuda>, width: usize, out: Block) {
    let rank = pair.a.dims()[0];
    let low = low_rank_block(engine, Purpose::LowRank, x.rows, rank, x.dtype);
    let a = engine.a_of(pair, x.dtype);
    engine.gemm(forward_product("lora", x, a, rank, None), low);
    let b = engine.b_of(pair, x.dtype);
    let product = Product {
        name: "lora",
        m: x.rows,
        n: width,
        k: rank,
        a: low,
        a_transposed: false,
        b,
        b_transposed: true,
        c: Some(out),
        alpha: pair.scale,
    };
    engine.gemm(product, out);
}

fn low_rank_block(engine: &Engine, purpose: Purpose, rows: usize, ranks: usize, dtype: DType) -> Block {
    Block { address: engine.scratch.take(purpose, rows * ranks * dtype.size()), stride: ranks, dtype }
}

/// See [`crate::Kernels::project_add`].
pub(super) fn project_add(
    x_ni: Tensor<Cuda, 2>,
    projection: &Projection<Cuda>,
    residual_no: Tensor<Cuda, 2>,
) -> Tensor<Cuda, 2> {
    let engine = engine(&x_ni.device());
    engine.section(|| {
        let residual = engine.flat_rows(residual_no);
        let y = project_group(&engine, &engine.matrix(x_ni), std::slice::from_ref(projection), Some(&residual));
        tensor(y.tensor)
    })
}

/// See [`crate::Kernels::project_heads`].
pub(super) fn project_heads(
    x_nd: Tensor<Cuda, 2>,
    projections: &[Projection<Cuda>; 3],
    tables: &RotaryTables<Cuda>,
    head_dim: usize,
) -> Heads<Cuda> {
    let engine = engine(&x_nd.device());
    engine.section(|| {
        let y = project_group(&engine, &engine.matrix(x_nd), projections, None);
        let widths = widths(projections);
        // Queries and keys are neighbours: one launch rotates both, in place.
        let rotated = (widths[0] + widths[1]) / head_dim;
        engine.rotate(&y, &y, tables, rotated, head_dim, false);
        let [q, k, v] = [0, widths[0], widths[0] + widths[1]];
        let part = |start, width: usize| tensor(engine.columns(&y, start, &[y.rows, width / head_dim, head_dim]));
        Heads { q_nhk: part(q, widths[0]), k_ngk: part(k, widths[1]), v_ngk: part(v, widths[2]) }
    })
}

/// See [`crate::Kernels::project_heads_backward`].
pub(super) fn project_heads_backward(
    x_nd: Tensor<Cuda, 2>,
    projections: &[Projection<Cuda>; 3],
    tables: &RotaryTables<Cuda>,
    d_heads: Heads<Cuda>,
) -> (Tensor<Cuda, 2>, Vec<ProjectionGradients<Cuda>>) {
    let engine = engine(&x_nd.device());
    engine.section(|| {
        let head_dim = d_heads.q_nhk.dims()[2];
        let heads = vec![engine.matrix(d_heads.q_nhk), engine.matrix(d_heads.k_ngk), engine.matrix(d_heads.v_ngk)];
        let rotated = (heads[0].width + heads[1].width) / head_dim;
        // Turned back in place: the gradients came here by value.
        let joined = engine.owned_columns(heads);
        engine.rotate(&joined, &joined, tables, rotated, head_dim, true);
        backward_of_group(&engine, &engine.matrix(x_nd), projections, joined)
    })
}

/// See [`crate::Kernels::project_backward`].
pub(super) fn project_backward(
    x_ni: Tensor<Cuda, 2>,
    projections: &[Projection<Cuda>],
    dys_no: Vec<Tensor<Cuda, 2>>,
) -> (Tensor<Cuda, 2>, Vec<ProjectionGradients<Cuda>>) {
    let engine = engine(&x_ni.device());
    engine.section(|| {
        let dys = dys_no.into_iter().map(|dy| engine.matrix(dy)).collect();
        let dy = engine.adjacent_columns(dys);
        backward_of_group(&engine, &engine.matrix(x_ni), projections, dy)
    })
}

/// Gradients of a group whose outputs' gradients lie side by side.
fn backward_of_group(
    engine: &Engine,
    x: &Matrix,
    projections: &[Projection<Cuda>],
    dy: Matrix,
) -> (Tensor<Cuda, 2>, Vec<ProjectionGradients<Cuda>>) {
    let dx = input_gradient(engine, projections, &dy, x.width);
    let gradients = parameter_gradients(engine, x, projections, &dy);
    (tensor(dx.tensor), gradients)
}

/// `dy W'`, summed over the group.
fn input_gradient(engine: &Engine, projections: &[Projection<Cuda>], dy: &Matrix, inputs: usize) -> Matrix {
    let dx = engine.empty_matrix(dy.rows, inputs, dy.dtype);
    let out = Block::from(&dx);
    let product = |dy: Block, width: usize, weight: Block, c: Option<Block>| Product {
        name: "linear",
        m: dx.rows,
        n: inputs,
        k: width,
        a: dy,
        a_transposed: false,
        b: weight,
        b_transposed: false,
        c,
        alpha: 1.0,
    };
    let whole = Block::from(dy);
    if let Some(weights) = engine.merged_weights(projections, dy.dtype) {
        engine.gemm(product(whole, dy.width, weights, None), out);
        return dx;
    }
    let widths = widths(projections);
    let mut so_far = None;
    for ((projection, start), &width) in projections.iter().zip(starts(&widths)).zip(&widths) {
        let dy_part = whole.at_column(start);
        let weight = engine.base_weight(&projection.weight, dy.dtype);
        engine.gemm(product(dy_part, width, weight, so_far), out);
        so_far = Some(out);
        if let Some(pair) = &projection.lora {
            let rank = pair.a.dims()[0];
            let low = low_rank_gradient(engine, pair, dy.rows, width, dy_part);
            let added = Product { name: "lora", alpha: 1.0, ..product(low, rank, engine.a_of(pair, dy.dtype), so_far) };
            engine.gemm(added, out);
        }
    }
    dx
}

/// `scale dy B`, `[n, r]`, in scratch memory.
fn low_rank_gradient(engine: &Engine, pair: &LoraPair<Cuda>, rows: usize, width: usize, dy: Block) -> Block {
    let rank = pair.a.dims()[0];
    let low = low_rank_block(engine, Purpose::LowRankGradient, rows, rank, dy.dtype);
    engine.gemm(low_rank_gradient_product(pair, rows, width, dy, engine.b_of(pair, dy.dtype)), low);
    low
}

fn low_rank_gradient_product(pair: &LoraPair<Cuda>, rows: usize, width: usize, dy: Block, b: Block) -> Product {
    Product {
        name: "lora gradient",
        m: rows,
        n: pair.a.dims()[0],
        k: width,
        a: dy,
        a_transposed: false,
        b,
        b_transposed: false,
        c: None,
        alpha: pair.scale,
    }
}

/// Gradients of all that trains in a group.
fn parameter_gradients(
    engine: &Engine,
    x: &Matrix,
    projections: &[Projection<Cuda>],
    dy: &Matrix,
) -> Vec<ProjectionGradients<Cuda>> {
    let widths = widths(projections);
    let starts = starts(&widths);
    let weight_gradient = |index: usize| {
        let gradient = engine.empty_matrix(widths[index], x.width, DType::F32);
        let dy = Block::from(dy).at_column(starts[index]);
        engine.gemm(
            token_sum("weight gradient", dy, widths[index], Block::from(x), x.width, x.rows, 1.0),
            (&gradient).into(),
        );
        tensor(gradient.tensor)
    };
    let mut gradients: Vec<_> = projections
        .iter()
        .enumerate()
        .map(|(index, projection)| ProjectionGradients {
            lora: None,
            weight_oi: projection.weight_gradient.then(|| weight_gradient(index)),
        })
        .collect();
    if let Some(pairs) = engine.pairs(projections, x.dtype) {
        for (index, gradient) in pair_gradients(engine, x, &pairs, dy, &widths, &starts) {
            gradients[index].lora = Some(gradient);
        }
    }
    gradients
}

/// `alpha leftᵀ right`, summed over tokens: `[left width, right width]`.
fn token_sum(
    name: &'static str,
    left: Block,
    left_width: usize,
    right: Block,
    right_width: usize,
    tokens: usize,
    alpha: f64,
) -> Product {
    Product {
        name,
        m: left_width,
        n: right_width,
        k: tokens,
        a: left,
        a_transposed: true,
        b: right,
        b_transposed: false,
        c: None,
        alpha,
    }
}

type PairGradient = (Tensor<Cuda, 2>, Tensor<Cuda, 2>);

/// `dA` and `dB` of each pair of a group. All pairs share `x Aᵀ` and `dA`: one product each.
fn pair_gradients(
    engine: &Engine,
    x: &Matrix,
    pairs: &Pairs<'_>,
    dy: &Matrix,
    widths: &[usize],
    starts: &[usize],
) -> Vec<(usize, PairGradient)> {
    let low = low_rank_block(engine, Purpose::LowRank, x.rows, pairs.ranks, x.dtype);
    engine.gemm(Product { name: "lora gradient", ..forward_product("", x, pairs.a, pairs.ranks, None) }, low);
    let d_low = low_rank_block(engine, Purpose::LowRankGradient, x.rows, pairs.ranks, x.dtype);
    let mut first = 0;
    let mut b_gradients = Vec::with_capacity(pairs.pairs.len());
    for &(index, pair) in &pairs.pairs {
        let (rank, width) = (pair.a.dims()[0], widths[index]);
        let dy_part = Block::from(dy).at_column(starts[index]);
        let b = engine.b_of(pair, x.dtype);
        engine.gemm(low_rank_gradient_product(pair, x.rows, width, dy_part, b), d_low.at_column(first));
        let db = engine.empty_matrix(width, rank, DType::F32);
        let sum = token_sum("lora gradient", dy_part, width, low.at_column(first), rank, x.rows, pair.scale);
        engine.gemm(sum, (&db).into());
        b_gradients.push((index, first, rank, db));
        first += rank;
    }
    let da = engine.empty_matrix(pairs.ranks, x.width, DType::F32);
    engine.gemm(token_sum("lora gradient", d_low, pairs.ranks, Block::from(x), x.width, x.rows, 1.0), (&da).into());
    let gradient = |(index, first, rank, db): (usize, usize, usize, Matrix)| {
        (index, (tensor(engine.rows(&da, first, rank)), tensor(db.tensor)))
    };
    b_gradients.into_iter().map(gradient).collect()
}

/// See [`crate::Kernels::swiglu_project_add`].
pub(super) fn swiglu_project_add(
    gate_nf: Tensor<Cuda, 2>,
    up_nf: Tensor<Cuda, 2>,
    projection: &Projection<Cuda>,
    residual_nd: Tensor<Cuda, 2>,
    keep: bool,
) -> (Tensor<Cuda, 2>, Option<Tensor<Cuda, 2>>) {
    let engine = engine(&gate_nf.device());
    engine.section(|| {
        let activated = engine.swiglu(&engine.matrix(gate_nf), &engine.matrix(up_nf));
        let residual = engine.flat_rows(residual_nd);
        let y = project_group(&engine, &activated, std::slice::from_ref(projection), Some(&residual));
        (tensor(y.tensor), keep.then(|| tensor(activated.tensor)))
    })
}

/// See [`crate::Kernels::swiglu_project_backward`].
pub(super) fn swiglu_project_backward(
    gate_nf: Tensor<Cuda, 2>,
    up_nf: Tensor<Cuda, 2>,
    activated_nf: Option<Tensor<Cuda, 2>>,
    projection: &Projection<Cuda>,
    dy_nd: Tensor<Cuda, 2>,
) -> SwigluProjectGradients<Cuda> {
    let engine = engine(&gate_nf.device());
    engine.section(|| {
        let group = std::slice::from_ref(projection);
        let dy = engine.matrix(dy_nd);
        let d_activated = input_gradient(&engine, group, &dy, projection.weight.shape()[1]);
        // Where the product of gate and up was not kept, it is made by the same pass, over the gradient that the pass reads.
        let again = activated_nf.is_none();
        let [d_gate, d_up] = engine.swiglu_backward(float(gate_nf), float(up_nf), &d_activated, again);
        let activated = activated_nf.map_or(d_activated, |kept| engine.matrix(kept));
        let projection = parameter_gradients(&engine, &activated, group, &dy).pop().expect("one projection");
        SwigluProjectGradients { d_gate_nf: tensor(d_gate), d_up_nf: tensor(d_up), projection }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outputs_of_a_group_begin_where_the_one_before_ends() {
        assert_eq!(starts(&[4096, 1024, 1024]), [0, 4096, 5120]);
        assert_eq!(starts(&[7]), [0]);
    }
}
