//! Head and cross entropy on wgpu over chunks of targets, and the embedding. Kernels: `cross_entropy.wgsl`, `rows.wgsl`.
//!
//! The gradient of a chunk's logits replaces them, so a chunk has its logits once.
//! Trade-off: the gradient of the embedding is left to the reference body: WGSL has no atomic sums of floats.

use std::ops::Range;

use burn_tensor::{DType, Int, Tensor};

use super::engine::{Cost, Engine, Kernel, Matrix, Operand, Wgpu, in_a_row, in_section, int_primitive, tensor};
use super::is_in_half;
use super::linear::{Segment, Turned, Values};
use crate::embedding::reference as embedding;
use crate::linear::WeightGradient;
use crate::loss::{CrossEntropy, CrossEntropyOptions, LossTargets, reference};
use crate::weights::Weight;
use crate::{EmbeddingOps, LossOps};

impl EmbeddingOps for Wgpu {
    fn embed(table_vd: Tensor<Self, 2>, ids_n: Tensor<Self, 1, Int>, scale: f32, dtype: DType) -> Tensor<Self, 2> {
        in_section(|engine| {
            if dtype != DType::F32 || !matches!(table_vd.dtype(), DType::F32 | DType::F16) {
                return engine.pause(|| embedding::forward(table_vd, ids_n, scale, dtype));
            }
            let ids = engine.matrix_of(int_primitive(ids_n));
            tensor(engine.gather("embed", &engine.matrix(table_vd), &ids, scale).tensor)
        })
    }
}

impl LossOps for Wgpu {
    fn linear_cross_entropy(
        hidden_nd: Tensor<Self, 2>,
        head: &Weight<Self>,
        targets: &LossTargets<Self>,
        options: CrossEntropyOptions<Self>,
    ) -> CrossEntropy<Self> {
        in_section(|engine| {
            let operand = engine.weight(head).filter(|_| hidden_nd.dtype() == DType::F32 && targets.count > 0);
            let Some(operand) = operand else {
                return engine.pause(|| reference::linear_cross_entropy(hidden_nd, head, targets, options));
            };
            let hidden = engine.matrix(hidden_nd);
            let [vocabulary, width] = operand.shape();
            let given = Targets {
                positions: engine.matrix_of(int_primitive(targets.positions_m.clone())),
                ids: engine.matrix_of(int_primitive(targets.targets_m.clone())),
                weights: targets.weights_m.as_ref().map(|weights| engine.matrix(weights.clone())),
            };
            let [log_probs, correct] = [(); 2].map(|()| engine.empty_matrix(1, targets.count));
            let d_hidden = options.gradient_scale.map(|_| engine.zeros(hidden.rows, width));
            let runs = options.weight_rows.clone().unwrap_or_else(|| std::iter::once(0..vocabulary).collect());
            let wants_weight = options.weight_gradient.is_needed() && options.gradient_scale.is_some();
            let (mut d_weight, mut has_sum) = match options.weight_gradient.clone() {
                WeightGradient::AddTo(sum) => (Some(engine.writable(sum)), true),
                _ => (wants_weight.then(|| engine.empty_matrix(runs.iter().map(Range::len).sum(), width)), false),
            };
            // A chunk's logits are one binding.
            let chunk = options.chunk_tokens.min(engine.most_values() / vocabulary).max(1);
            // Every chunk has room for the most rows, so that the next one has the same memory.
            let room = chunk.min(hidden.rows);
            // Copies in float16 live as long as a chunk.
            let mut of_chunk = |start: usize| {
                let rows = chunk.min(targets.count - start);
                let positions = given.positions.columns(start, rows);
                let logits = engine.empty_matrix(room, vocabulary).rows(0, rows);
                let hidden = engine.gather("gather", &hidden, &positions, 1.0);
                let weight = |is_turned| Values::Weight { operand: &operand, rows: 0..vocabulary, is_turned };
                let product = Segment { a: Turned::Rows(&hidden), b: weight(false), scale: 1.0 };
                engine.gemm("head", &logits, &[product], None, None);
                engine.cross_entropy(&logits, start, &given, &options, [&log_probs, &correct]);
                let Some(d_hidden) = &d_hidden else { return };
                let d_rows = engine.empty_matrix(room, width).rows(0, rows);
                let product = Segment { a: Turned::Rows(&logits), b: weight(true), scale: 1.0 };
                engine.gemm("head_input", &d_rows, &[product], None, None);
                engine.scatter(&d_rows, &positions, d_hidden);
                if let Some(d_weight) = d_weight.as_ref().filter(|_| wants_weight) {
                    let mut row = 0;
                    for run in &runs {
                        let d_logits = logits.columns(run.start, run.len());
                        let product = Segment::of(Turned::Columns(&d_logits), Turned::Columns(&hidden), 1.0);
                        let to = d_weight.rows(row, run.len());
                        engine.gemm("head_gradient", &to, &[product], None, has_sum.then_some(&to));
                        row += run.len();
                    }
                    has_sum = true;
                }
            };
            for start in (0..targets.count).step_by(chunk) {
                engine.with_room(room, || engine.in_half(is_in_half(), || of_chunk(start)));
            }
            let loss_sum = engine.sum(&log_probs, given.weights.as_ref(), -1.0);
            CrossEntropy {
                loss_sum: loss_sum.into_vector(),
                log_probs_m: options.log_probs.then(|| log_probs.into_vector()),
                correct: options.correct.then(|| engine.sum(&correct, None, 1.0).into_vector()),
                d_hidden_nd: d_hidden.map(|d_hidden| tensor(d_hidden.tensor)),
                d_weight_vd: d_weight.take().map(|d_weight| tensor(d_weight.tensor)),
            }
        })
    }
}

/// What of the targets launches read.
struct Targets {
    positions: Matrix,
    ids: Matrix,
    weights: Option<Matrix>,
}

impl Engine {
    /// Computes the log probabilities of a chunk's targets and whether they are the most probable, and replaces its logits by their gradient.
    fn cross_entropy(
        &self,
        logits: &Matrix,
        start: usize,
        targets: &Targets,
        options: &CrossEntropyOptions<Wgpu>,
        [log_probs, correct]: [&Matrix; 2],
    ) {
        let constants = vec![
            ("WEIGHTS", u32::from(targets.weights.is_some())),
            ("CAP", u32::from(options.soft_cap.is_some())),
            ("GRADIENT", u32::from(options.gradient_scale.is_some())),
        ];
        let kernel = Kernel { name: "cross_entropy", template: include_str!("cross_entropy.wgsl"), constants };
        let mut operands = vec![Operand::Read(&targets.ids)];
        operands.extend(targets.weights.as_ref().map(Operand::Read));
        operands.extend([logits, log_probs, correct].map(Operand::Write));
        let weights_at = targets.weights.as_ref().map_or(0, |weights| weights.offset);
        let sizes = [logits.rows, logits.width, start, targets.ids.offset, weights_at];
        let gradient = options.gradient_scale.unwrap_or(0.0) * options.logit_scale;
        let factors = [options.logit_scale, options.soft_cap.unwrap_or(0.0), gradient];
        let mut parameters: Vec<u32> = sizes.map(|size| size as u32).into();
        parameters.extend(factors.map(|factor| (factor as f32).to_bits()));
        let cost = Cost { bytes: 4.0 * logits.bytes(), flops: 0.0 };
        self.launch(&kernel, &operands, &parameters, in_a_row(logits.rows), cost);
    }

    fn gather(&self, name: &'static str, x: &Matrix, indices: &Matrix, scale: f32) -> Matrix {
        let rows = indices.count();
        let y = self.empty_matrix(self.room(rows), x.width).rows(0, rows);
        let half = u32::from(x.dtype() == DType::F16);
        let operands = [Operand::Read(x), Operand::Read(indices), Operand::Write(&y)];
        self.by_index(name, vec![("GATHER", 1), ("HALF", half)], &operands, [&y, x, indices], scale);
        y
    }

    fn scatter(&self, x: &Matrix, indices: &Matrix, y: &Matrix) {
        let operands = [Operand::Read(x), Operand::Read(indices), Operand::Write(y)];
        self.by_index("scatter", vec![("SCATTER", 1)], &operands, [x, x, indices], 1.0);
    }

    fn by_index(
        &self,
        name: &'static str,
        constants: Vec<(&'static str, u32)>,
        operands: &[Operand<'_>],
        [of_shape, x, indices]: [&Matrix; 3],
        scale: f32,
    ) {
        let kernel = Kernel { name, template: include_str!("rows.wgsl"), constants };
        let sizes = [of_shape.rows, of_shape.width, x.stride, x.offset, indices.offset];
        let mut parameters: Vec<u32> = sizes.map(|size| size as u32).into();
        parameters.push(scale.to_bits());
        let cost = Cost { bytes: 2.0 * of_shape.bytes(), flops: 0.0 };
        self.launch(&kernel, operands, &parameters, in_a_row(of_shape.count().div_ceil(256)), cost);
    }
}
