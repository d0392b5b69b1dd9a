//! Causal grouped-query attention on the CPU: one task per document and key/value head, blocks of queries inside.
//!
//! Heads are read in place, with strides, so nothing is transposed. Scores exist for one block of queries at a time, so memory grows linearly with
//! the document. Each block is multiplied only with the keys from the start of its first query's window to its last query.

use std::ops::Range;

use burn_flex::Flex;
use burn_tensor::Tensor;
use pulp::Arch;
use rayon::prelude::*;

use firebrick_arch::AttentionSpec;

use super::gemm::{Matrix, product};
use super::host::{Floats, in_place, is_f32, tensor};
use super::lanes;
use crate::attention::{
    AttentionOps, AttentionOutput, CachedTokens, Documents, KvCache, Qkv, Sinks, SoftmaxStatistics, StatisticsLayout,
    reference,
};

/// Number of queries whose scores exist at a time.
const QUERY_BLOCK: usize = 64;

impl AttentionOps for Flex {
    fn packed_attention(
        qkv: &Qkv<Self>,
        sinks: Option<&Sinks<Self>>,
        spec: &AttentionSpec,
        documents: &Documents<Self>,
    ) -> AttentionOutput<Self> {
        let forward = if is_f32(&qkv.q) { forward } else { reference::forward };
        forward(qkv, sinks, spec, documents)
    }

    fn packed_attention_backward(
        qkv: Qkv<Self>,
        sinks: Option<&Sinks<Self>>,
        spec: &AttentionSpec,
        output: AttentionOutput<Self>,
        d_o: Tensor<Self, 2>,
        documents: &Documents<Self>,
    ) -> (Qkv<Self>, Option<Tensor<Self, 1>>) {
        if !is_f32(&qkv.q) {
            return reference::backward(qkv, sinks, spec, output, d_o, documents);
        }
        let d_sinks = reference::trained(sinks).map(|sinks| reference::sinks_gradient(sinks, &output, &d_o));
        (backward(qkv, spec, output, d_o, documents), d_sinks)
    }

    fn cached_attention(
        qkv: &Qkv<Self>,
        sinks: Option<&Sinks<Self>>,
        cache: &mut KvCache<Self>,
        tokens: &CachedTokens<Self>,
        prompts: Option<&Documents<Self>>,
        spec: &AttentionSpec,
    ) -> Tensor<Self, 2> {
        let (k, v) = (qkv.k.clone(), qkv.v.clone());
        if is_f32(&k) {
            // Burn's own assignment would copy the whole tensor.
            cache.replace(|[keys, values]| [store(keys, k, tokens), store(values, v, tokens)]);
        } else {
            reference::store(cache, k, v, tokens);
        }
        match prompts {
            Some(documents) => Self::packed_attention(qkv, sinks, spec, documents).o,
            None => reference::cached(Tensor::matmul, qkv.q.clone(), sinks, cache, tokens, spec),
        }
    }
}

fn store(stored: Tensor<Flex, 2>, new: Tensor<Flex, 2>, tokens: &CachedTokens<Flex>) -> Tensor<Flex, 2> {
    let (width, new) = (new.dims()[1], Floats::of(new));
    in_place(stored, |stored| {
        for (sequence, in_pass) in tokens.in_pass() {
            let mut from = in_pass.start * width;
            for rows in sequence.new_rows() {
                let to = rows.start * width..rows.end * width;
                let own = from..from + to.len();
                from = own.end;
                stored[to].copy_from_slice(&new.values()[own]);
            }
        }
    })
}

/// Parameters of every task: query heads per key/value head, key/value heads, head width, window, scale, soft cap.
#[derive(Clone, Copy)]
struct Sizes {
    shared: usize,
    groups: usize,
    width: usize,
    window: usize,
    scale: f32,
    soft_cap: Option<f32>,
}

impl Sizes {
    fn of(spec: &AttentionSpec) -> Self {
        Self {
            shared: spec.heads / spec.kv_heads,
            groups: spec.kv_heads,
            width: spec.head_dim,
            window: spec.window.unwrap_or(usize::MAX),
            scale: spec.scale as f32,
            soft_cap: spec.soft_cap.map(|cap| cap as f32),
        }
    }

    /// Scales and caps scores in place if there is a cap; returns the factor that they still need.
    #[inline(always)]
    fn cap(self, scores: &mut [f32]) -> f32 {
        let Some(cap) = self.soft_cap else { return self.scale };
        let factor = self.scale / cap;
        scores.iter_mut().for_each(|score| *score = cap * (*score * factor).tanh());
        1.0
    }

    /// Returns the derivative of a capped score with respect to the scaled score.
    #[inline(always)]
    fn slope(self, capped: f32) -> f32 {
        match self.soft_cap {
            Some(cap) => 1.0 - (capped / cap) * (capped / cap),
            None => 1.0,
        }
    }

    fn heads(self) -> usize {
        self.shared * self.groups
    }

    /// Returns the stride between one head's values of consecutive tokens.
    fn query_stride(self) -> usize {
        self.heads() * self.width
    }

    fn key_stride(self) -> usize {
        self.groups * self.width
    }

    fn first_key(self, query: usize) -> usize {
        (query + 1).saturating_sub(self.window)
    }
}

/// A block of consecutive queries of a document, and the keys that any of them attends to.
struct QueryBlock {
    start: usize,
    rows: usize,
    keys: Range<usize>,
}

impl QueryBlock {
    /// Returns the columns of a row of scores that its query attends to.
    fn visible(&self, row: usize, sizes: Sizes) -> Range<usize> {
        let query = self.start + row;
        sizes.first_key(query) - self.keys.start..query + 1 - self.keys.start
    }
}

fn query_blocks(length: usize, sizes: Sizes) -> impl Iterator<Item = QueryBlock> {
    (0..length).step_by(QUERY_BLOCK).map(move |start| {
        let rows = QUERY_BLOCK.min(length - start);
        QueryBlock { start, rows, keys: sizes.first_key(start)..start + rows }
    })
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

fn forward(
    qkv: &Qkv<Flex>,
    sinks: Option<&Sinks<Flex>>,
    spec: &AttentionSpec,
    documents: &Documents<Flex>,
) -> AttentionOutput<Flex> {
    let (sizes, tokens) = (Sizes::of(spec), documents.tokens());
    let [q, k, v] = [&qkv.q, &qkv.k, &qkv.v].map(|x| Floats::of(x.clone()));
    let sinks = sinks.map(|sinks| Floats::of(sinks.logits_h.clone()));
    let sinks = sinks.as_ref().map(Floats::values);
    let tasks = tasks(documents, sizes.groups);
    let results: Vec<(Vec<f32>, Vec<f32>)> =
        tasks.par_iter().map(|task| forward_task(task, sizes, [&q, &k, &v].map(Floats::values), sinks)).collect();

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
    let log_sum_exp = tensor(log_sums, [sizes.heads(), tokens]);
    AttentionOutput {
        o: tensor(o, [tokens, sizes.query_stride()]),
        statistics: SoftmaxStatistics { log_sum_exp, layout: StatisticsLayout::HeadsTokens },
    }
}

/// Computes output `[t, shared, k]` and log-sum-exp `[shared, t]` of one task.
fn forward_task(task: &Task, sizes: Sizes, [q, k, v]: [&[f32]; 3], sinks: Option<&[f32]>) -> (Vec<f32>, Vec<f32>) {
    let (length, width, stride) = (task.tokens.len(), sizes.width, sizes.shared * sizes.width);
    let (keys, values) = (key_rows(k, task, sizes), key_rows(v, task, sizes));
    let mut o = vec![0.0; length * stride];
    let mut log_sums = vec![0.0; sizes.shared * length];
    let mut scores = vec![0.0; QUERY_BLOCK.min(length) * length];
    for shared in 0..sizes.shared {
        let sink = sinks.map(|logits| logits[task.group * sizes.shared + shared]);
        for block in query_blocks(length, sizes) {
            let (rows, seen, start) = (block.rows, block.keys.len(), block.start);
            let queries = query_rows(q, task, sizes, shared, start);
            product(
                [rows, seen, width],
                &mut scores,
                seen,
                false,
                queries,
                keys.after_row(block.keys.start).transposed(),
            );
            let log_sums = &mut log_sums[shared * length + start..][..rows];
            Arch::new().dispatch(|| {
                for (row, log_sum) in log_sums.iter_mut().enumerate() {
                    let scores = &mut scores[row * seen..][..seen];
                    let visible = block.visible(row, sizes);
                    let scale = sizes.cap(&mut scores[visible.clone()]);
                    *log_sum = softmax(scores, visible, scale, sink);
                }
            });
            let out = &mut o[start * stride + shared * width..];
            let values = values.after_row(block.keys.start);
            product([rows, width, seen], out, stride, false, Matrix::rows(&scores, seen), values);
        }
    }
    (o, log_sums)
}

/// Computes the softmax of the visible scores times `scale` and of the sink, with zeros around them; returns the log-sum-exp.
#[inline(always)]
fn softmax(scores: &mut [f32], visible: Range<usize>, scale: f32, sink: Option<f32>) -> f32 {
    scores[..visible.start].fill(0.0);
    let (visible, hidden) = scores[visible.start..].split_at_mut(visible.len());
    let largest = (lanes::max(visible) * scale).max(sink.unwrap_or(f32::NEG_INFINITY));
    for score in visible.iter_mut() {
        *score = lanes::exp(*score * scale - largest);
    }
    let sum = lanes::sum(visible) + sink.map_or(0.0, |logit| lanes::exp(logit - largest));
    let factor = 1.0 / sum;
    visible.iter_mut().for_each(|score| *score *= factor);
    hidden.fill(0.0);
    largest + sum.ln()
}

fn backward(
    qkv: Qkv<Flex>,
    spec: &AttentionSpec,
    output: AttentionOutput<Flex>,
    d_o: Tensor<Flex, 2>,
    documents: &Documents<Flex>,
) -> Qkv<Flex> {
    let (sizes, tokens) = (Sizes::of(spec), documents.tokens());
    assert_eq!(output.statistics.layout, StatisticsLayout::HeadsTokens, "the layout that the forward writes");
    let inputs = Inputs {
        q: Floats::of(qkv.q),
        k: Floats::of(qkv.k),
        v: Floats::of(qkv.v),
        o: Floats::of(output.o),
        log_sums: Floats::of(output.statistics.log_sum_exp),
        d_o: Floats::of(d_o),
    };
    let tasks = tasks(documents, sizes.groups);
    let results: Vec<[Vec<f32>; 3]> =
        tasks.par_iter().map(|task| backward_task(task, sizes, &inputs, tokens)).collect();

    let mut dq = vec![0.0; tokens * sizes.query_stride()];
    let (mut dk, mut dv) = (vec![0.0; tokens * sizes.key_stride()], vec![0.0; tokens * sizes.key_stride()]);
    for (task, [of_q, of_k, of_v]) in tasks.iter().zip(&results) {
        place(&mut dq, of_q, task, sizes.shared * sizes.width, sizes.query_stride());
        place(&mut dk, of_k, task, sizes.width, sizes.key_stride());
        place(&mut dv, of_v, task, sizes.width, sizes.key_stride());
    }
    let key_shape = [tokens, sizes.key_stride()];
    Qkv { q: tensor(dq, [tokens, sizes.query_stride()]), k: tensor(dk, key_shape), v: tensor(dv, key_shape) }
}

struct Inputs {
    q: Floats,
    k: Floats,
    v: Floats,
    o: Floats,
    log_sums: Floats,
    d_o: Floats,
}

/// Computes the gradients of one task: `dq [t, shared, k]`, `dk [t, k]`, `dv [t, k]`.
fn backward_task(task: &Task, sizes: Sizes, inputs: &Inputs, tokens: usize) -> [Vec<f32>; 3] {
    let (length, width, stride) = (task.tokens.len(), sizes.width, sizes.shared * sizes.width);
    let (keys, values) = (key_rows(inputs.k.values(), task, sizes), key_rows(inputs.v.values(), task, sizes));
    let [mut dq, mut dk, mut dv] = [stride, width, width].map(|width| vec![0.0; length * width]);
    let block = QUERY_BLOCK.min(length);
    let (mut p, mut ds) = (vec![0.0; block * length], vec![0.0; block * length]);
    for shared in 0..sizes.shared {
        let head = task.group * sizes.shared + shared;
        let log_sums = &inputs.log_sums.values()[head * tokens + task.tokens.start..][..length];
        for block in query_blocks(length, sizes) {
            let (rows, seen, start, first) = (block.rows, block.keys.len(), block.start, block.keys.start);
            let (keys, values) = (keys.after_row(first), values.after_row(first));
            let part = |values| query_rows(values, task, sizes, shared, start);
            let (queries, d_o, o) = (part(inputs.q.values()), part(inputs.d_o.values()), part(inputs.o.values()));
            product([rows, seen, width], &mut p, seen, false, queries, keys.transposed());
            product([rows, seen, width], &mut ds, seen, false, d_o, values.transposed());
            Arch::new().dispatch(|| {
                for row in 0..rows {
                    let at = |matrix: Matrix<'_>| row * matrix.row_stride..row * matrix.row_stride + width;
                    let delta = lanes::dot(&o.values[at(o)], &d_o.values[at(d_o)]);
                    let (p, ds) = (&mut p[row * seen..][..seen], &mut ds[row * seen..][..seen]);
                    score_gradient(p, ds, block.visible(row, sizes), log_sums[start + row], delta, sizes);
                }
            });
            let (p, ds) = (Matrix::rows(&p, seen), Matrix::rows(&ds, seen));
            product([seen, width, rows], &mut dv[first * width..], width, true, p.transposed(), d_o);
            product([seen, width, rows], &mut dk[first * width..], width, true, ds.transposed(), queries);
            product([rows, width, seen], &mut dq[start * stride + shared * width..], stride, false, ds, keys);
        }
    }
    [dq, dk, dv]
}

/// Turns a row of scores into probabilities and a row of their gradients into gradients of the unscaled scores.
#[inline(always)]
fn score_gradient(p: &mut [f32], ds: &mut [f32], visible: Range<usize>, log_sum: f32, delta: f32, sizes: Sizes) {
    let scale = sizes.cap(&mut p[visible.clone()]);
    for (p, ds) in p[visible.clone()].iter_mut().zip(&mut ds[visible.clone()]) {
        let slope = sizes.slope(*p);
        *p = lanes::exp(*p * scale - log_sum);
        *ds = *p * (*ds - delta) * sizes.scale * slope;
    }
    for row in [p, ds] {
        row[..visible.start].fill(0.0);
        row[visible.end..].fill(0.0);
    }
}

/// Returns one key/value head of the task's document, `[t, k]`.
fn key_rows<'a>(values: &'a [f32], task: &Task, sizes: Sizes) -> Matrix<'a> {
    let start = task.tokens.start * sizes.key_stride() + task.group * sizes.width;
    Matrix::rows(&values[start..], sizes.key_stride())
}

/// Returns one query head of the task's document, from its token `first`.
fn query_rows<'a>(values: &'a [f32], task: &Task, sizes: Sizes, shared: usize, first: usize) -> Matrix<'a> {
    let head = task.group * sizes.shared + shared;
    let start = (task.tokens.start + first) * sizes.query_stride() + head * sizes.width;
    Matrix::rows(&values[start..], sizes.query_stride())
}

/// Copies a task's rows of `width` values to their heads in the output.
fn place(out: &mut [f32], rows: &[f32], task: &Task, width: usize, stride: usize) {
    for (token, row) in task.tokens.clone().zip(rows.chunks_exact(width)) {
        out[token * stride + task.group * width..][..width].copy_from_slice(row);
    }
}
