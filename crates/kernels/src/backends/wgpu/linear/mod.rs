//! Groups of linear modules on wgpu. Kernels: `gemm.wgsl`, `rows.wgsl`.
//!
//! A module's weight and adapter are two segments of one product; q, k and v of a group are products of their own.
//! Not supported, and left to the reference bodies: stacks of experts, magnitudes, 8-bit floats, activations that are not f32, queries with
//! gates.

mod dropout;
mod gemm;
mod matrix;
mod rows;

use std::ops::Range;

use burn_tensor::{DType, Tensor};

use super::engine::{Engine, Matrix, Wgpu, in_section, tensor};
use crate::linear::{
    self, Epilogue, GemmFormat, Group, HeadsEpilogue, InputGradient, Keep, LinearOps, ModuleGradients,
    ProjectGradients, ProjectSaved, Prologue, SavedHeads, SavedOutputNorm, WeightGradient, into_single,
};
pub(super) use gemm::{Segment, Turned, Values, WeightOperand};

/// The outputs, and the values that the backward of heads or of a norm needs.
type AfterEpilogue = (Vec<Tensor<Wgpu, 2>>, Option<SavedHeads<Wgpu>>, Option<SavedOutputNorm<Wgpu>>);

type Outputs = (Vec<Tensor<Wgpu, 2>>, Option<Box<ProjectSaved<Wgpu>>>);

impl LinearOps for Wgpu {
    fn project(prologue: Prologue<Self>, group: &Group<Self>, epilogue: Epilogue<Self>, keep: Keep) -> Outputs {
        let has_gates = matches!(epilogue, Epilogue::Heads(HeadsEpilogue { gates_in_queries: true, .. }));
        in_section(|engine| match Parts::of(engine, group, prologue.first_input().dtype()) {
            Some(parts) if !has_gates => engine.in_half(group.gemms == GemmFormat::F16, || {
                let x = engine.prologue_output(&prologue);
                let u = engine.low_rank(&engine.adapter_input(&x, group), group, &parts);
                let (add, epilogue) = match epilogue {
                    Epilogue::Residual(residual_no) => (Some(engine.matrix(residual_no)), Epilogue::None),
                    epilogue => (None, epilogue),
                };
                let outputs = engine.outputs(&x, u.as_ref(), group, &parts, add.as_ref());
                let (outputs, heads, output_norm) = engine.apply_epilogue(outputs, epilogue, keep);
                let saved = (keep != Keep::Nothing).then(|| {
                    let is_computed = !matches!(prologue, Prologue::None { .. });
                    let prologue_output = (keep == Keep::Everything && is_computed).then(|| tensor(x.tensor));
                    let low_rank = u.map(|u| tensor(u.tensor));
                    Box::new(ProjectSaved { prologue, prologue_output, low_rank, unscaled: None, heads, output_norm })
                });
                (outputs, saved)
            }),
            _ => engine.pause(|| linear::project(prologue, group, epilogue, keep)),
        })
    }

    fn project_backward(
        saved: ProjectSaved<Self>,
        group: Group<Self>,
        d_outputs: Vec<Tensor<Self, 2>>,
        d_residual_ni: Option<Tensor<Self, 2>>,
    ) -> ProjectGradients<Self> {
        let has_gates = saved.heads.as_ref().is_some_and(|heads| heads.epilogue.gates_in_queries);
        in_section(|engine| match Parts::of(engine, &group, saved.prologue.first_input().dtype()) {
            Some(parts) if !has_gates => engine.in_half(group.gemms == GemmFormat::F16, || {
                let ProjectSaved { prologue, prologue_output, low_rank, heads, output_norm, .. } = saved;
                let outputs = heads.as_ref().map_or(group.parts.len(), |heads| heads.epilogue.parts.len());
                assert_eq!(outputs, d_outputs.len(), "each output has one gradient");
                let d_parts: Vec<Matrix> = d_outputs.into_iter().map(|d_output| engine.matrix(d_output)).collect();
                let (d_parts, head_norms) = match heads {
                    Some(heads) => engine.heads_backward(heads, d_parts),
                    None => (d_parts, Vec::new()),
                };
                let (d_parts, output_norm) = match output_norm {
                    Some(SavedOutputNorm { norm, raw }) => {
                        let (d_raw, d_weight) =
                            engine.rms_norm_backward(&engine.matrix(raw), &norm, &into_single(d_parts), None);
                        (vec![d_raw], d_weight.map(Matrix::into_vector))
                    }
                    None => (d_parts, None),
                };
                let x =
                    prologue_output.map_or_else(|| engine.prologue_output(&prologue), |output| engine.matrix(output));
                let adapters_x = engine.adapter_input(&x, &group);
                let u = low_rank.map(|u| engine.matrix(u)).or_else(|| engine.low_rank(&adapters_x, &group, &parts));
                let t = engine.d_low_rank(&d_parts, &group, &parts);
                let residual = d_residual_ni.map(|residual| engine.matrix(residual));
                let is_plain = matches!(prologue, Prologue::None { .. });
                let add = residual.as_ref().filter(|_| is_plain);
                let d_x = match group.dropout.as_ref().zip(t.as_ref()) {
                    Some((mask, t)) => {
                        let of_weights = engine.d_input(&d_parts, None, &group, &parts, add);
                        engine.dropped(&engine.through_adapters(t, &group, &parts), mask, Some(of_weights))
                    }
                    None => engine.d_input(&d_parts, t.as_ref(), &group, &parts, add),
                };
                let modules =
                    engine.parameter_gradients([&x, &adapters_x], [u.as_ref(), t.as_ref()], &d_parts, group, &parts);
                let (input, norm) = match prologue {
                    Prologue::None { .. } => (InputGradient::Plain(tensor(d_x.tensor)), None),
                    Prologue::Norm { x, norm } => {
                        let (dx, d_weight) =
                            engine.rms_norm_backward(&engine.matrix(x), &norm, &d_x, residual.as_ref());
                        (InputGradient::Plain(tensor(dx.tensor)), d_weight.map(Matrix::into_vector))
                    }
                    Prologue::Gated { gate, up, activation } => {
                        assert!(residual.is_none(), "a gated prologue has no residual path around it");
                        let [d_gate, d_up] = engine
                            .gated_backward(&engine.matrix(gate), &engine.matrix(up), activation, &d_x)
                            .map(|d| tensor(d.tensor));
                        (InputGradient::Gated { d_gate, d_up }, None)
                    }
                };
                ProjectGradients { input, norm, output_norm, head_norms, modules }
            }),
            _ => engine.pause(|| linear::project_backward(saved, group, d_outputs, d_residual_ni)),
        })
    }
}

/// Weights of a group as operands, and which columns of each module are in which part.
struct Parts {
    weights: Vec<WeightOperand>,
    /// Columns of the low-rank intermediate, by module.
    ranks: Vec<Range<usize>>,
    shared: Vec<Shared>,
}

/// Columns that a module and a part have in common.
struct Shared {
    module: usize,
    part: usize,
    /// Of the module's weight, its rows.
    rows: Range<usize>,
    /// First column of the part.
    column: usize,
}

impl Parts {
    /// Returns `None` if the group needs a reference body.
    fn of(engine: &Engine, group: &Group<Wgpu>, dtype: DType) -> Option<Self> {
        let is_plain = group.rows.is_none()
            && !group.has_magnitudes()
            && group.dropout.as_ref().is_none_or(dropout::has_kernel)
            && group.gemms != GemmFormat::Fp8
            && dtype == DType::F32;
        if !is_plain {
            return None;
        }
        let weights = group.modules.iter().map(|module| engine.weight(&module.weight)).collect::<Option<_>>()?;
        let mut rank = 0;
        let mut ranks = Vec::new();
        let mut shared = Vec::new();
        for (index, module) in group.modules.iter().enumerate() {
            let start = rank;
            rank += module.adapter.as_ref().map_or(0, |pair| pair.a.dims()[0]);
            ranks.push(start..rank);
            let mut part_start = 0;
            for (part, width) in group.parts.iter().enumerate() {
                let columns = module.columns.start.max(part_start)..module.columns.end.min(part_start + width);
                if !columns.is_empty() {
                    let rows = columns.start - module.columns.start..columns.end - module.columns.start;
                    shared.push(Shared { module: index, part, rows, column: columns.start - part_start });
                }
                part_start += width;
            }
        }
        Some(Self { weights, ranks, shared })
    }

    fn rank(&self) -> usize {
        self.ranks.last().map_or(0, |last| last.end)
    }
}

impl Engine {
    fn prologue_output(&self, prologue: &Prologue<Wgpu>) -> Matrix {
        match prologue {
            Prologue::None { x } => self.matrix(x.clone()),
            Prologue::Norm { x, norm } => self.rms_norm_for_products(&self.matrix(x.clone()), norm),
            Prologue::Gated { gate, up, activation } => {
                self.gated(&self.matrix(gate.clone()), &self.matrix(up.clone()), *activation)
            }
        }
    }

    /// Returns the adapters' input: the group's input after dropout.
    fn adapter_input(&self, x: &Matrix, group: &Group<Wgpu>) -> Matrix {
        let has_adapter = group.modules.iter().any(|module| module.adapter.is_some());
        match group.dropout.as_ref().filter(|_| has_adapter) {
            Some(mask) => self.dropped(x, mask, None),
            None => x.clone(),
        }
    }

    /// Computes `x Aᵀ` of all adapters, `[n, ranks]`.
    fn low_rank(&self, x: &Matrix, group: &Group<Wgpu>, parts: &Parts) -> Option<Matrix> {
        let u = (parts.rank() > 0).then(|| self.empty_matrix(x.rows, parts.rank()))?;
        for (module, ranks) in group.modules.iter().zip(&parts.ranks) {
            if let Some(pair) = &module.adapter {
                let a = self.matrix(pair.a.clone());
                let product = Segment::of(Turned::Rows(x), Turned::Rows(&a), 1.0);
                let to = u.columns(ranks.start, ranks.len());
                // After dropout, x is not the A that the outputs' products have.
                match group.dropout {
                    None => self.low_rank_gemm("low_rank", &to, product, pair.scale),
                    Some(_) => self.gemm("low_rank", &to, &[product], None, None),
                }
            }
        }
        Some(u)
    }

    /// Computes each part, `[n, part]`, without the epilogue.
    fn outputs(
        &self,
        x: &Matrix,
        u: Option<&Matrix>,
        group: &Group<Wgpu>,
        parts: &Parts,
        add: Option<&Matrix>,
    ) -> Vec<Matrix> {
        let outputs: Vec<_> = group.parts.iter().map(|&width| self.empty_matrix(x.rows, width)).collect();
        for Shared { module: index, part, rows, column } in &parts.shared {
            let module = &group.modules[*index];
            let columns = |matrix: &Matrix| matrix.columns(*column, rows.len());
            let operand = &parts.weights[*index];
            let weight = Values::Weight { operand, rows: rows.clone(), is_turned: false };
            let pair = module.adapter.as_ref().zip(u).map(|(pair, u)| {
                let ranks = &parts.ranks[*index];
                (
                    u.columns(ranks.start, ranks.len()),
                    self.matrix(pair.b.clone()).rows(rows.start, rows.len()),
                    pair.scale,
                )
            });
            let mut segments = vec![Segment { a: Turned::Rows(x), b: weight, scale: 1.0 }];
            segments.extend(pair.as_ref().map(|(u, b, scale)| Segment::of(Turned::Rows(u), Turned::Rows(b), *scale)));
            let bias =
                module.bias.as_ref().map(|bias| self.f32_matrix(bias.value.clone()).columns(rows.start, rows.len()));
            let add = add.map(columns);
            self.gemm("linear", &columns(&outputs[*part]), &segments, bias.as_ref(), add.as_ref());
        }
        outputs
    }

    fn apply_epilogue(&self, parts: Vec<Matrix>, epilogue: Epilogue<Wgpu>, keep: Keep) -> AfterEpilogue {
        let is_saved = keep != Keep::Nothing;
        let tensors = |parts: Vec<Matrix>| parts.into_iter().map(|part| tensor(part.tensor)).collect();
        match epilogue {
            Epilogue::None => (tensors(parts), None, None),
            Epilogue::Residual(_) => unreachable!("the product has added it"),
            Epilogue::NormResidual { norm, residual } => {
                let raw = into_single(parts);
                let output = self.rms_norm(&raw, &norm, Some(&self.matrix(residual)));
                let saved = is_saved.then(|| SavedOutputNorm { norm, raw: tensor(raw.tensor) });
                (vec![tensor(output.tensor)], None, saved)
            }
            Epilogue::Heads(heads) => {
                assert_eq!(heads.parts.len(), parts.len(), "each part of the group is one of the epilogue");
                let raw = parts.iter().zip(&heads.parts);
                let raw =
                    raw.map(|(x, part)| part.norm.as_ref().filter(|_| is_saved).map(|_| tensor(x.tensor.clone())));
                let raw = raw.collect();
                let each = parts.into_iter().zip(&heads.parts);
                let outputs = each.map(|(x, part)| tensor(self.head_part(x, part, &heads).tensor)).collect();
                (outputs, Some(SavedHeads { epilogue: heads, raw }), None)
            }
        }
    }

    /// Computes `s dy B` of all adapters, `[n, ranks]`.
    fn d_low_rank(&self, d_parts: &[Matrix], group: &Group<Wgpu>, parts: &Parts) -> Option<Matrix> {
        let t = (parts.rank() > 0).then(|| self.empty_matrix(d_parts[0].rows, parts.rank()))?;
        let mut written = vec![false; group.modules.len()];
        for Shared { module, part, rows, column } in &parts.shared {
            let Some(pair) = &group.modules[*module].adapter else { continue };
            let ranks = &parts.ranks[*module];
            let to = t.columns(ranks.start, ranks.len());
            let b = self.matrix(pair.b.clone()).rows(rows.start, rows.len());
            let dy = d_parts[*part].columns(*column, rows.len());
            let product = Segment::of(Turned::Rows(&dy), Turned::Columns(&b), pair.scale);
            if rows.len() == group.modules[*module].columns.len() {
                self.low_rank_gemm("d_low_rank", &to, product, 1.0);
                continue;
            }
            let is_first = !std::mem::replace(&mut written[*module], true);
            self.gemm("d_low_rank", &to, &[product], None, (!is_first).then_some(&to));
        }
        Some(t)
    }

    /// Computes the gradient of the group's input, plus `add`.
    fn d_input(
        &self,
        d_parts: &[Matrix],
        t: Option<&Matrix>,
        group: &Group<Wgpu>,
        parts: &Parts,
        add: Option<&Matrix>,
    ) -> Matrix {
        let d_x = self.empty_matrix(d_parts[0].rows, group.in_features());
        let mut add = add;
        let mut used = vec![false; group.modules.len()];
        for Shared { module, part, rows, column } in &parts.shared {
            let dy = d_parts[*part].columns(*column, rows.len());
            let operand = &parts.weights[*module];
            let weight = Values::Weight { operand, rows: rows.clone(), is_turned: true };
            let mut segments = vec![Segment { a: Turned::Rows(&dy), b: weight, scale: 1.0 }];
            let is_first = !std::mem::replace(&mut used[*module], true);
            let pair = group.modules[*module].adapter.as_ref().filter(|_| is_first).zip(t).map(|(pair, t)| {
                let ranks = &parts.ranks[*module];
                (t.columns(ranks.start, ranks.len()), self.matrix(pair.a.clone()))
            });
            segments.extend(pair.as_ref().map(|(t, a)| Segment::of(Turned::Rows(t), Turned::Columns(a), 1.0)));
            self.gemm("d_input", &d_x, &segments, None, add);
            add = Some(&d_x);
        }
        d_x
    }

    /// Computes `t A` of all adapters, `[n, i]`.
    fn through_adapters(&self, t: &Matrix, group: &Group<Wgpu>, parts: &Parts) -> Matrix {
        let sum = self.empty_matrix(t.rows, group.in_features());
        let mut is_first = true;
        for (module, ranks) in group.modules.iter().zip(&parts.ranks) {
            if let Some(pair) = &module.adapter {
                let (t, a) = (t.columns(ranks.start, ranks.len()), self.matrix(pair.a.clone()));
                let product = Segment::of(Turned::Rows(&t), Turned::Columns(&a), 1.0);
                self.gemm("d_adapters", &sum, &[product], None, (!is_first).then_some(&sum));
                is_first = false;
            }
        }
        sum
    }

    fn parameter_gradients(
        &self,
        [x, adapters_x]: [&Matrix; 2],
        [u, t]: [Option<&Matrix>; 2],
        d_parts: &[Matrix],
        group: Group<Wgpu>,
        parts: &Parts,
    ) -> Vec<ModuleGradients<Wgpu>> {
        let of_module = |(index, module): (usize, crate::Module<Wgpu>)| {
            let width = module.columns.len();
            let shared = || parts.shared.iter().filter(|shared| shared.module == index);
            let dy = |shared: &Shared| d_parts[shared.part].columns(shared.column, shared.rows.len());
            let adapter = module.adapter.as_ref().zip(u.zip(t)).map(|(pair, (u, t))| {
                let ranks = &parts.ranks[index];
                let [u, t] = [u, t].map(|low| low.columns(ranks.start, ranks.len()));
                let [da, db] =
                    [[ranks.len(), x.width], [width, ranks.len()]].map(|[rows, width]| self.empty_matrix(rows, width));
                let product = Segment::of(Turned::Columns(&t), Turned::Columns(adapters_x), 1.0);
                self.gemm("adapter_gradient", &da, &[product], None, None);
                for shared in shared() {
                    let dy = dy(shared);
                    let product = Segment::of(Turned::Columns(&dy), Turned::Columns(&u), pair.scale);
                    let to = db.rows(shared.rows.start, shared.rows.len());
                    self.gemm("adapter_gradient", &to, &[product], None, None);
                }
                (tensor(da.tensor), tensor(db.tensor))
            });
            let weight = match module.weight_gradient {
                WeightGradient::Frozen => None,
                WeightGradient::New => Some((self.empty_matrix(width, x.width), false)),
                WeightGradient::AddTo(sum) => Some((self.writable(sum), true)),
            };
            let weight = weight.map(|(sum, adds)| {
                for shared in shared() {
                    let dy = dy(shared);
                    let product = Segment::of(Turned::Columns(&dy), Turned::Columns(x), 1.0);
                    let to = sum.rows(shared.rows.start, shared.rows.len());
                    self.gemm("weight_gradient", &to, &[product], None, adds.then_some(&to));
                }
                tensor(sum.tensor)
            });
            let bias = module.bias.filter(|bias| bias.trains).map(|_| {
                let sums: Vec<_> =
                    shared().map(|shared| tensor::<2>(self.column_sums(&dy(shared), None).tensor)).collect();
                let row = if sums.len() == 1 { sums[0].clone() } else { self.pause(|| Tensor::cat(sums, 1)) };
                row.reshape([width])
            });
            ModuleGradients { weight, bias, adapter, magnitude: None }
        };
        group.modules.into_iter().enumerate().map(of_module).collect()
    }
}
