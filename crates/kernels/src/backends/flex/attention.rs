//! Causal grouped-query attention on the CPU: one task a document and key/value head, blocks of queries inside.
//!
//! Heads are read where they lie, with strides, so nothing is transposed; scores exist for one block of queries at a time, so
//! memory grows with the document, not with its square. Each block multiplies with the keys up to its last query only.

use std::ops::Range;

use burn_flex::Flex;
use burn_tensor::Tensor;
use pulp::Arch;
use rayon::prelude::*;

use super::host::{Floats, tensor};
use super::lanes;
use super::launch_gemm::{Matrix, product};
use crate::{AttentionOutput, Documents};

/// Queries whose scores exist at a time.
const QUERY_BLOCK: usize = 64;

/// Sizes that every task needs: heads that share a key/value head, key/value heads, head width.
#[derive(Clone, Copy)]
struct Sizes {
    shared: usize,
    groups: usize,
    width: usize,
}

impl Sizes {
    fn heads(self) -> usize {
        self.shared * self.groups
    }

    /// Distance of one head's values of consecutive tokens.
    fn query_stride(self) -> usize {
        self.heads() * self.width
    }

    fn key_stride(self) -> usize {
        self.groups * self.width
    }

    fn scale(self) -> f32 {
        1.0 / (self.width as f32).sqrt()
    }
}

/// One document and one key/value head.
#[derive(Clone)]
struct Task {
    tokens: Range<usize>,
    group: usize,
}

fn tasks(documents: &Documents<Flex>, groups: usize) -> Vec<Task> {
    documents.ranges().flat_map(|tokens| (0..groups).map(move |group| Task { tokens: tokens.clone(), group })).collect()
}

fn sizes(q: &Tensor<Flex, 3>, k: &Tensor<Flex, 3>) -> Sizes {
    let ([_, heads, width], [_, groups, _]) = (q.dims(), k.dims());
    Sizes { shared: heads / groups, groups, width }
}

pub(super) fn forward(
    q_nhk: Tensor<Flex, 3>,
    k_ngk: Tensor<Flex, 3>,
    v_ngk: Tensor<Flex, 3>,
    documents: &Documents<Flex>,
) -> AttentionOutput<Flex> {
    let (sizes, tokens) = (sizes(&q_nhk, &k_ngk), documents.tokens());
    let (q, k, v) = (Floats::of(q_nhk), Floats::of(k_ngk), Floats::of(v_ngk));
    let tasks = tasks(documents, sizes.groups);
    let results: Vec<(Vec<f32>, Vec<f32>)> =
        tasks.par_iter().map(|task| forward_task(task, sizes, q.values(), k.values(), v.values())).collect();

    let mut o = vec![0.0; tokens * sizes.query_stride()];
    let mut log_sums = vec![0.0; sizes.heads() * tokens];
    for (task, (task_o, task_log_sums)) in tasks.iter().zip(&results) {
        place(&mut o, task_o, task, sizes.shared * sizes.width, sizes.query_stride());
        for shared in 0..sizes.shared {
            let head = task.group * sizes.shared + shared;
            let length = task.tokens.len();
            log_sums[head * tokens + task.tokens.start..][..length]
                .copy_from_slice(&task_log_sums[shared * length..][..length]);
        }
    }
    AttentionOutput {
        o_nhk: tensor(o, [tokens, sizes.heads(), sizes.width]),
        log_sum_exp_hn: tensor(log_sums, [sizes.heads(), tokens]),
    }
}

/// Output `[t, shared, k]` and log-sum-exp `[shared, t]` of one task.
fn forward_task(task: &Task, sizes: Sizes, q: &[f32], k: &[f32], v: &[f32]) -> (Vec<f32>, Vec<f32>) {
    let (length, width, stride) = (task.tokens.len(), sizes.width, sizes.shared * sizes.width);
    let (keys, values) = (key_rows(k, task, sizes), key_rows(v, task, sizes));
    let mut o = vec![0.0; length * stride];
    let mut log_sums = vec![0.0; sizes.shared * length];
    let mut scores = vec![0.0; QUERY_BLOCK.min(length) * length];
    for shared in 0..sizes.shared {
        for start in (0..length).step_by(QUERY_BLOCK) {
            let (rows, seen) = (QUERY_BLOCK.min(length - start), length.min(start + QUERY_BLOCK));
            let queries = query_rows(q, task, sizes, shared, start);
            product([rows, seen, width], &mut scores, seen, false, queries, keys.transposed());
            let log_sums = &mut log_sums[shared * length + start..][..rows];
            Arch::new().dispatch(|| {
                for (row, log_sum) in log_sums.iter_mut().enumerate() {
                    *log_sum = softmax(&mut scores[row * seen..][..seen], start + row + 1, sizes.scale());
                }
            });
            let out = &mut o[start * stride + shared * width..];
            product([rows, width, seen], out, stride, false, Matrix::rows(&scores, seen), values);
        }
    }
    (o, log_sums)
}

/// Softmax of the first `visible` scores times `scale`, zeros behind them; returns the log of the sum of exponentials.
#[inline(always)]
fn softmax(scores: &mut [f32], visible: usize, scale: f32) -> f32 {
    let (visible, hidden) = scores.split_at_mut(visible);
    let largest = lanes::max(visible) * scale;
    for score in visible.iter_mut() {
        *score = lanes::exp(*score * scale - largest);
    }
    let sum = lanes::sum(visible);
    let factor = 1.0 / sum;
    visible.iter_mut().for_each(|score| *score *= factor);
    hidden.fill(0.0);
    largest + sum.ln()
}

pub(super) fn backward(
    q_nhk: Tensor<Flex, 3>,
    k_ngk: Tensor<Flex, 3>,
    v_ngk: Tensor<Flex, 3>,
    output: &AttentionOutput<Flex>,
    do_nhk: Tensor<Flex, 3>,
    documents: &Documents<Flex>,
) -> (Tensor<Flex, 3>, Tensor<Flex, 3>, Tensor<Flex, 3>) {
    let (sizes, tokens) = (sizes(&q_nhk, &k_ngk), documents.tokens());
    let inputs = Inputs {
        q: Floats::of(q_nhk),
        k: Floats::of(k_ngk),
        v: Floats::of(v_ngk),
        o: Floats::of(output.o_nhk.clone()),
        log_sums: Floats::of(output.log_sum_exp_hn.clone()),
        d_o: Floats::of(do_nhk),
    };
    let tasks = tasks(documents, sizes.groups);
    let results: Vec<Gradients> = tasks.par_iter().map(|task| backward_task(task, sizes, &inputs, tokens)).collect();

    let mut dq = vec![0.0; tokens * sizes.query_stride()];
    let (mut dk, mut dv) = (vec![0.0; tokens * sizes.key_stride()], vec![0.0; tokens * sizes.key_stride()]);
    for (task, result) in tasks.iter().zip(&results) {
        place(&mut dq, &result.dq, task, sizes.shared * sizes.width, sizes.query_stride());
        place(&mut dk, &result.dk, task, sizes.width, sizes.key_stride());
        place(&mut dv, &result.dv, task, sizes.width, sizes.key_stride());
    }
    let key_shape = [tokens, sizes.groups, sizes.width];
    (tensor(dq, [tokens, sizes.heads(), sizes.width]), tensor(dk, key_shape), tensor(dv, key_shape))
}

struct Inputs {
    q: Floats,
    k: Floats,
    v: Floats,
    o: Floats,
    log_sums: Floats,
    d_o: Floats,
}

/// Gradients of one task: `dq [t, shared, k]`, `dk [t, k]`, `dv [t, k]`.
struct Gradients {
    dq: Vec<f32>,
    dk: Vec<f32>,
    dv: Vec<f32>,
}

fn backward_task(task: &Task, sizes: Sizes, inputs: &Inputs, tokens: usize) -> Gradients {
    let (length, width, stride) = (task.tokens.len(), sizes.width, sizes.shared * sizes.width);
    let (keys, values) = (key_rows(inputs.k.values(), task, sizes), key_rows(inputs.v.values(), task, sizes));
    let mut found =
        Gradients { dq: vec![0.0; length * stride], dk: vec![0.0; length * width], dv: vec![0.0; length * width] };
    let block = QUERY_BLOCK.min(length);
    let (mut p, mut ds) = (vec![0.0; block * length], vec![0.0; block * length]);
    for shared in 0..sizes.shared {
        let head = task.group * sizes.shared + shared;
        let log_sums = &inputs.log_sums.values()[head * tokens + task.tokens.start..][..length];
        for start in (0..length).step_by(QUERY_BLOCK) {
            let (rows, seen) = (QUERY_BLOCK.min(length - start), length.min(start + QUERY_BLOCK));
            let part = |values| query_rows(values, task, sizes, shared, start);
            let (queries, d_o, o) = (part(inputs.q.values()), part(inputs.d_o.values()), part(inputs.o.values()));
            product([rows, seen, width], &mut p, seen, false, queries, keys.transposed());
            product([rows, seen, width], &mut ds, seen, false, d_o, values.transposed());
            Arch::new().dispatch(|| {
                for row in 0..rows {
                    let at = |matrix: Matrix<'_>| row * matrix.row_stride..row * matrix.row_stride + width;
                    let delta = lanes::dot(&o.values[at(o)], &d_o.values[at(d_o)]);
                    let (p, ds) = (&mut p[row * seen..][..seen], &mut ds[row * seen..][..seen]);
                    score_gradient(p, ds, start + row + 1, log_sums[start + row], delta, sizes.scale());
                }
            });
            let (p, ds) = (Matrix::rows(&p, seen), Matrix::rows(&ds, seen));
            product([seen, width, rows], &mut found.dv, width, true, p.transposed(), d_o);
            product([seen, width, rows], &mut found.dk, width, true, ds.transposed(), queries);
            let dq = &mut found.dq[start * stride + shared * width..];
            product([rows, width, seen], dq, stride, false, ds, keys);
        }
    }
    found
}

/// Turns a row of scores into probabilities and a row of their gradients into gradients of the unscaled scores.
#[inline(always)]
fn score_gradient(p: &mut [f32], ds: &mut [f32], visible: usize, log_sum: f32, delta: f32, scale: f32) {
    for (p, ds) in p[..visible].iter_mut().zip(&mut ds[..visible]) {
        *p = lanes::exp(*p * scale - log_sum);
        *ds = *p * (*ds - delta) * scale;
    }
    p[visible..].fill(0.0);
    ds[visible..].fill(0.0);
}

/// One key/value head of the task's document, `[t, k]`.
fn key_rows<'a>(values: &'a [f32], task: &Task, sizes: Sizes) -> Matrix<'a> {
    let start = task.tokens.start * sizes.key_stride() + task.group * sizes.width;
    Matrix::rows(&values[start..], sizes.key_stride())
}

/// One query head of the task's document from its token `first` on.
fn query_rows<'a>(values: &'a [f32], task: &Task, sizes: Sizes, shared: usize, first: usize) -> Matrix<'a> {
    let head = task.group * sizes.shared + shared;
    let start = (task.tokens.start + first) * sizes.query_stride() + head * sizes.width;
    Matrix::rows(&values[start..], sizes.query_stride())
}

/// Copies a task's rows of `width` values to their place among the heads.
fn place(out: &mut [f32], rows: &[f32], task: &Task, width: usize, stride: usize) {
    for (token, row) in task.tokens.clone().zip(rows.chunks_exact(width)) {
        out[token * stride + task.group * width..][..width].copy_from_slice(row);
    }
}
