//! Attention on wgpu, with memory linear in the tokens. Kernels: `attention.wgsl`, `matrices.wgsl`, `delta.wgsl`.
//!
//! Trade-off: documents are looked up by each row, so packing needs no table of its own.

mod matrices;

use std::sync::atomic::{AtomicBool, Ordering};

use burn_tensor::{DType, Tensor};
use firebrick_arch::AttentionSpec;

use super::engine::{
    Cost, DividedBy, Engine, Kernel, Matrices, Matrix, Operand, Wgpu, in_a_row, in_section, int_primitive, tensor,
};
use super::is_in_half;
use crate::attention::{
    AttentionOps, AttentionOutput, Documents, Qkv, Sinks, SoftmaxStatistics, StatisticsLayout, reference,
};

use matrices::Sides;

/// Whether attention uses matrix units where products do.
pub(super) static BY_MATRICES: AtomicBool = AtomicBool::new(true);

/// Rows of a tile.
const TILE: usize = 32;
/// The widest head that kernels have registers for.
const MAX_HEAD_DIM: usize = 256;

impl AttentionOps for Wgpu {
    fn packed_attention(
        qkv: &Qkv<Self>,
        sinks: Option<&Sinks<Self>>,
        spec: &AttentionSpec,
        documents: &Documents<Self>,
    ) -> AttentionOutput<Self> {
        in_section(|engine| {
            if !has_kernel(qkv, spec) {
                return engine.pause(|| reference::forward(qkv, sinks, spec, documents));
            }
            let case = Attention::new(engine, qkv, spec, documents);
            let o = engine.empty_matrix(case.tokens(), spec.heads * spec.head_dim);
            let log_sums = engine.empty_matrix(spec.heads, case.tokens());
            let sinks = sinks.map(|sinks| engine.matrix(sinks.logits_h.clone()));
            if let Some(matrices) = case.matrices(engine) {
                let [q, k, v] = case.halves(engine);
                let sides = Sides { rows: [Some(&q), None], others: [&k, &v] };
                let given = [sinks.as_ref(), None, None];
                case.launch_by_matrices(engine, matrices, ("attention", "FORWARD"), &sides, given, &[&o, &log_sums]);
            } else {
                let results = [Operand::Write(&o), Operand::Write(&log_sums)];
                let operands = sinks.as_ref().map(Operand::Read).into_iter().chain(results).collect();
                case.launch(engine, "attention", "FORWARD", sinks.is_some(), operands, None);
            }
            let layout = StatisticsLayout::HeadsTokens;
            let statistics = SoftmaxStatistics { log_sum_exp: tensor(log_sums.tensor), layout };
            AttentionOutput { o: tensor(o.tensor), statistics }
        })
    }

    fn packed_attention_backward(
        qkv: Qkv<Self>,
        sinks: Option<&Sinks<Self>>,
        spec: &AttentionSpec,
        output: AttentionOutput<Self>,
        d_o: Tensor<Self, 2>,
        documents: &Documents<Self>,
    ) -> (Qkv<Self>, Option<Tensor<Self, 1>>) {
        in_section(|engine| {
            if !has_kernel(&qkv, spec) {
                return engine.pause(|| reference::backward(qkv, sinks, spec, output, d_o, documents));
            }
            assert_eq!(output.statistics.layout, StatisticsLayout::HeadsTokens, "the statistics of this forward");
            let d_sinks =
                reference::trained(sinks).map(|sinks| engine.pause(|| reference::sinks_gradient(sinks, &output, &d_o)));
            let case = Attention::new(engine, &qkv, spec, documents);
            let d_o = engine.matrix(d_o);
            let log_sums = engine.matrix(output.statistics.log_sum_exp);
            let deltas = engine.deltas(&engine.matrix(output.o), &d_o, spec);
            let empty = |heads: usize| engine.empty_matrix(case.tokens(), heads * spec.head_dim);
            let [d_q, d_k, d_v] = [spec.heads, spec.kv_heads, spec.kv_heads].map(empty);
            let (keys, queries) = (("attention_keys", "KEYS"), ("attention_queries", "QUERIES"));
            if let Some(matrices) = case.matrices(engine) {
                let [q, k, v] = case.halves(engine);
                let d = engine.half(&d_o, DividedBy::Measured);
                let given = [None, Some(&log_sums), Some(&deltas)];
                let sides = Sides { rows: [Some(&k), Some(&v)], others: [&q, &d] };
                case.launch_by_matrices(engine, matrices, keys, &sides, given, &[&d_k, &d_v]);
                let sides = Sides { rows: [Some(&q), Some(&d)], others: [&k, &v] };
                case.launch_by_matrices(engine, matrices, queries, &sides, given, &[&d_q]);
            } else {
                let given = || [&d_o, &log_sums, &deltas].map(Operand::Read).into_iter();
                let results = [&d_k, &d_v].map(Operand::Write);
                case.launch(engine, keys.0, keys.1, false, given().chain(results).collect(), Some(&d_o));
                let results = [Operand::Write(&d_q)];
                case.launch(engine, queries.0, queries.1, false, given().chain(results).collect(), Some(&d_o));
            }
            let [q, k, v] = [d_q, d_k, d_v].map(|d| tensor(d.tensor));
            (Qkv { q, k, v }, d_sinks)
        })
    }
}

fn has_kernel(qkv: &Qkv<Wgpu>, spec: &AttentionSpec) -> bool {
    qkv.q.dtype() == DType::F32 && spec.head_dim <= MAX_HEAD_DIM
}

struct Attention<'a> {
    qkv: [Matrix; 3],
    boundaries: Matrix,
    spec: &'a AttentionSpec,
    documents: usize,
    /// Pairs of a query and a key that it may see.
    pairs: f64,
}

impl<'a> Attention<'a> {
    fn new(engine: &Engine, qkv: &Qkv<Wgpu>, spec: &'a AttentionSpec, documents: &Documents<Wgpu>) -> Self {
        let visible = |length: usize| {
            let (length, window) = (length as f64, spec.window.unwrap_or(length).min(length) as f64);
            window * length - window * (window - 1.0) / 2.0
        };
        Self {
            qkv: [&qkv.q, &qkv.k, &qkv.v].map(|x| engine.matrix(x.clone())),
            boundaries: engine.matrix_of(int_primitive(documents.cu_seqlens.clone())),
            spec,
            documents: documents.count(),
            pairs: documents.ranges().map(|range| visible(range.len())).sum(),
        }
    }

    const fn tokens(&self) -> usize {
        self.qkv[0].rows
    }

    fn launch<'b>(
        &'b self,
        engine: &Engine,
        name: &'static str,
        mode: &'static str,
        has_sinks: bool,
        more: Vec<Operand<'b>>,
        d_o: Option<&Matrix>,
    ) {
        let Self { qkv: [q, k, v], boundaries, spec, documents, .. } = self;
        let constants = vec![
            (mode, 1),
            ("SINKS", u32::from(has_sinks)),
            ("CAP", u32::from(spec.soft_cap.is_some())),
            ("CHUNKS", spec.head_dim.div_ceil(TILE) as u32),
        ];
        let kernel = Kernel { name, template: include_str!("attention.wgsl"), constants };
        let operands: Vec<_> = [q, k, v, boundaries].map(Operand::Read).into_iter().chain(more).collect();
        let sharing = spec.heads / spec.kv_heads;
        let window = spec.window.unwrap_or(0);
        let sizes = [self.tokens(), *documents, spec.heads, sharing, spec.head_dim, window];
        let [d_row, d_at] = d_o.map_or([0; 2], |d_o| [d_o.stride, d_o.offset]);
        let strides = [q.stride, q.offset, k.stride, k.offset, v.stride, v.offset, d_row, d_at];
        let mut parameters: Vec<u32> = sizes.into_iter().chain(strides).map(|size| size as u32).collect();
        parameters.extend([spec.scale, spec.soft_cap.unwrap_or(0.0)].map(|value| (value as f32).to_bits()));
        let (heads, cost) = self.work(mode);
        let groups = [self.tokens().div_ceil(TILE) as u32, heads as u32, 1];
        engine.launch(&kernel, &operands, &parameters, groups, cost);
    }

    /// Returns the heads of a launch, and its work.
    fn work(&self, mode: &'static str) -> (usize, Cost) {
        let spec = self.spec;
        let (heads, products) = match mode {
            "FORWARD" => (spec.heads, 2.0),
            "QUERIES" => (spec.heads, 3.0),
            _ => (spec.kv_heads, 4.0),
        };
        let flops = 2.0 * products * self.pairs * (spec.heads * spec.head_dim) as f64;
        (heads, Cost { flops, bytes: self.qkv[0].bytes() })
    }

    /// Returns how matrix units compute this; `None` if it is computed in registers.
    fn matrices(&self, engine: &Engine) -> Option<Matrices> {
        let is_asked = is_in_half() && BY_MATRICES.load(Ordering::Relaxed);
        engine.matrices().filter(|matrices| is_asked && matrices::has_kernel(*matrices, self.spec.head_dim))
    }
}

impl Engine {
    /// Computes the sum of `d_o * o` over each head, `[heads, tokens]`.
    fn deltas(&self, o: &Matrix, d_o: &Matrix, spec: &AttentionSpec) -> Matrix {
        let deltas = self.empty_matrix(spec.heads, o.rows);
        let kernel = Kernel { name: "attention_delta", template: include_str!("delta.wgsl"), constants: Vec::new() };
        let sizes = [o.rows, spec.heads, spec.head_dim, o.stride, o.offset, d_o.stride, d_o.offset];
        let operands = [Operand::Read(o), Operand::Read(d_o), Operand::Write(&deltas)];
        let cost = Cost { bytes: 2.0 * o.bytes(), flops: 0.0 };
        self.launch(&kernel, &operands, &sizes.map(|size| size as u32), in_a_row(deltas.count().div_ceil(64)), cost);
        deltas
    }
}
