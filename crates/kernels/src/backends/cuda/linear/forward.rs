//! Groups of linear modules on CUDA, forward: prologue, GEMM, epilogue.
//!
//! If all modules of a group are quantized, their weights are dequantized side by side and the whole group is one GEMM, including its adapters
//! (`adapters`) if their ranks are appended to the inner dimension. The input then needs rows with room for `x Aᵀ`: norms and gated activations write
//! such rows, and so does attention of new tokens; other outputs of attention are copied. Other groups run module by module. The GEMM itself adds
//! biases and a residual.
//! Trade-off: outputs of a group are column ranges of one buffer, which lives until the last of them is dropped.

use burn_tensor::{DType, Tensor};
use firebrick_arch::Activation;

use super::heads::saves_joined;
use super::modules::Routed;
use super::operands::GroupWeight;
use super::operands::fp8::codes::RowLayout;
use crate::backends::cuda::device::{Device, in_section};
use crate::backends::cuda::engine::{Cuda, DeviceBlock, Gemm, MatrixView, OfExperts, tensor};
use crate::backends::planning::route::{AdapterRoute, WeightRoute};
use crate::linear::{SavedHeads, SavedOutputNorm, into_parts, reference, stacked};
use crate::{
    Adapter, Epilogue, Group, HeadsEpilogue, Keep, LinearOps, Mask, ModuleGradients, ProjectGradients, ProjectSaved,
    Prologue, RotaryTables, Weight,
};

/// A group's output after its epilogue.
struct Projected {
    parts: Vec<Tensor<Cuda, 2>>,
    /// Values that the backward of the epilogue needs.
    heads: Option<SavedHeads<Cuda>>,
    output_norm: Option<SavedOutputNorm<Cuda>>,
    kept: GroupKept,
}

#[derive(Clone, Copy)]
pub(super) struct Input {
    pub rows: DeviceBlock,
    /// Whether `x Aᵀ` of the adapters is already in the columns after it.
    has_low_rank: bool,
}

impl From<DeviceBlock> for Input {
    fn from(rows: DeviceBlock) -> Self {
        Self { rows, has_low_rank: false }
    }
}

/// Values of a group's GEMMs that the backward needs.
#[derive(Default)]
pub(super) struct GroupKept {
    /// `x Aᵀ` of the adapters.
    low: Option<DeviceBlock>,
    unscaled: Option<MatrixView>,
}

impl LinearOps for Cuda {
    fn project(
        prologue: Prologue<Self>,
        group: &Group<Self>,
        epilogue: Epilogue<Self>,
        keep: Keep,
    ) -> (Vec<Tensor<Self, 2>>, Option<Box<ProjectSaved<Self>>>) {
        in_section(&prologue.first_input().device(), |device| {
            if device.is_loop(group, prologue.first_input(), keep) {
                return stacked::project(prologue, group, epilogue, keep);
            }
            let input = prologue.first_input();
            let forward_rows = if keep == Keep::Nothing { input.dims()[0] } else { 0 };
            let group = &Routed { group, route: device.route_of(group, input.dtype(), forward_rows) };
            let codes = device.fp8_input_layout(group);
            let (x, owner) = device.input_rows(&prologue, group, codes, matches!(epilogue, Epilogue::Heads(_)));
            let Projected { parts, heads, output_norm, kept } = match epilogue {
                Epilogue::None => device.split_group(x, group, None),
                Epilogue::Residual(residual) => {
                    let residual = device.flat_as(residual, x.rows.dtype);
                    device.split_group(x, group, Some(residual.block))
                }
                Epilogue::NormResidual { norm, residual } => {
                    assert_eq!(group.parts.len(), 1, "a residual is added to a group of one part");
                    let raw = device.empty_matrix(x.rows.rows, group.out_features(), x.rows.dtype);
                    let kept = device.group_forward(x, group, None, raw.block);
                    let y = device.rms_norm_add(&raw, &norm, residual);
                    let output_norm = Some(SavedOutputNorm { norm, raw: tensor(raw.tensor) });
                    Projected { parts: vec![tensor(y.tensor)], heads: None, output_norm, kept }
                }
                Epilogue::Heads(epilogue) => device.project_heads(x, group, epilogue, keep != Keep::Nothing),
            };
            let saved = (keep != Keep::Nothing).then(|| {
                let low_rank = kept.low.map(|low| tensor(device.saved_low_rank(low, group.rows.is_some())));
                let unscaled = kept.unscaled.map(|unscaled| tensor(unscaled.tensor));
                let is_computed = !matches!(prologue, Prologue::None { .. });
                let prologue_output =
                    owner.filter(|_| keep == Keep::Everything && is_computed).map(|x| tensor(x.tensor));
                Box::new(ProjectSaved { prologue, prologue_output, low_rank, unscaled, heads, output_norm })
            });
            (parts, saved)
        })
    }

    fn project_backward(
        saved: ProjectSaved<Self>,
        group: Group<Self>,
        d_outputs: Vec<Tensor<Self, 2>>,
        d_residual_ni: Option<Tensor<Self, 2>>,
    ) -> ProjectGradients<Self> {
        let device = Device::of(&saved.prologue.first_input().device());
        device.section(|| match device.is_loop(&group, &d_outputs[0], Keep::Everything) {
            false => device.group_backward(saved, group, d_outputs, d_residual_ni, None, None),
            true => stacked::project_backward(saved, group, d_outputs, d_residual_ni),
        })
    }

    fn mlp_backward(
        groups: [(ProjectSaved<Self>, Group<Self>); 2],
        dy_no: Tensor<Self, 2>,
        d_residual_ni: Option<Tensor<Self, 2>>,
        after_down: impl FnOnce(Vec<ModuleGradients<Self>>, Option<Tensor<Self, 1>>),
    ) -> ProjectGradients<Self> {
        let device = Device::of(&dy_no.device());
        let is_loop = groups.iter().any(|(_, group)| device.is_loop(group, &dy_no, Keep::Everything));
        device.section(|| match is_loop {
            false => device.mlp_backward(groups, dy_no, d_residual_ni, after_down),
            true => reference::mlp_backward(groups, dy_no, d_residual_ni, after_down),
        })
    }

    fn row_squares(weight: &Weight<Self>, dtype: DType) -> Tensor<Self, 1> {
        in_section(&weight.device(), |device| tensor(device.row_squares(weight, dtype)))
    }

    fn adapted_norms(
        weight: &Weight<Self>,
        row_squares_o: &Tensor<Self, 1>,
        adapter: &Adapter<Self>,
        dtype: DType,
    ) -> Tensor<Self, 1> {
        in_section(&row_squares_o.device(), |device| {
            tensor(device.adapted_norms(weight, row_squares_o, adapter, dtype))
        })
    }

    fn dropped(x: Tensor<Self, 2>, mask: &Mask<Self>) -> Tensor<Self, 2> {
        in_section(&x.device(), |device| device.dropped(x, mask))
    }

    fn scaled(x: Tensor<Self, 2>, factor: f32) -> Tensor<Self, 2> {
        in_section(&x.device(), |device| {
            let x = device.flat(x);
            let y = device.empty_matrix(x.rows, x.width, x.dtype);
            device.scale(x.block, y.block, factor);
            tensor(y.tensor)
        })
    }

    fn gated(gate_nf: Tensor<Self, 2>, up_nf: Tensor<Self, 2>, activation: Activation) -> Tensor<Self, 2> {
        in_section(&gate_nf.device(), |device| {
            tensor(device.gated(&device.matrix(gate_nf), &device.matrix(up_nf), activation, 0).tensor)
        })
    }

    fn gated_backward(
        gate_nf: Tensor<Self, 2>,
        up_nf: Tensor<Self, 2>,
        activation: Activation,
        dy_nf: Tensor<Self, 2>,
    ) -> (Tensor<Self, 2>, Tensor<Self, 2>) {
        in_section(&gate_nf.device(), |device| {
            let width = gate_nf.dims()[1];
            let dy = device.matrix(dy_nf);
            let both = device.gated_backward(gate_nf, up_nf, activation, &dy, false);
            halves(device, &both, width)
        })
    }

    fn rotary(x: Tensor<Self, 2>, tables: &RotaryTables<Self>, head_dim: usize, backward: bool) -> Tensor<Self, 2> {
        in_section(&x.device(), |device| tensor(device.rotate(&device.matrix(x), tables, head_dim, backward).tensor))
    }
}

pub(super) fn halves(device: &Device, both: &MatrixView, width: usize) -> (Tensor<Cuda, 2>, Tensor<Cuda, 2>) {
    let [first, second] = into_parts(device.split(both, &[width, width]));
    (first, second)
}

impl Device {
    /// Returns whether a group is a stack whose experts run one after the other.
    fn is_loop(&self, group: &Group<Cuda>, rows: &Tensor<Cuda, 2>, keep: Keep) -> bool {
        let forward_rows = if keep == Keep::Nothing { rows.dims()[0] } else { 0 };
        group.rows.is_some() && !self.route_of(group, rows.dtype(), forward_rows).is_grouped
    }

    /// Returns the input of a group's GEMM, in rows with room for its adapters or prepared as codes, and the owner of
    /// its memory if that is not scratch.
    fn input_rows(
        &self,
        prologue: &Prologue<Cuda>,
        group: &Routed<'_>,
        codes: Option<RowLayout>,
        is_scratch_taken: bool,
    ) -> (Input, Option<MatrixView>) {
        let room = group.route.room();
        let matrix = match prologue {
            Prologue::None { x } if room > 0 && is_scratch_taken => {
                let x = self.matrix(x.clone());
                let copy = self.empty_with_room([x.rows, x.width], room, x.dtype);
                self.copy_rows(x.block, copy.block);
                copy
            }
            Prologue::None { x } => {
                let x = self.matrix(x.clone());
                if !self.has_room_in_place(&x, room)
                    && let Some(rows) = self.copy_low_rank(x.block, group)
                {
                    return (Input { rows, has_low_rank: true }, None);
                }
                let (rows, owner) = self.with_room(x, room);
                return (rows.into(), owner);
            }
            Prologue::Norm { x, norm } => {
                let x = self.flat(x.clone());
                if let Some(y) = self.norm_low_rank_rows(&x, norm, group) {
                    return (Input { rows: y.block, has_low_rank: true }, Some(y));
                }
                codes.map_or_else(|| self.rms_norm(&x, norm, room), |codes| self.rms_norm_in_codes(&x, norm, codes))
            }
            Prologue::Gated { gate, up, activation } => {
                let (gate, up) = (self.matrix(gate.clone()), self.matrix(up.clone()));
                match codes {
                    None => {
                        let with_low_rank = self
                            .gated_low_rank_rows([&gate, &up], *activation, group)
                            .or_else(|| self.gated_low_rank([&gate, &up], *activation, group));
                        let has_low_rank = with_low_rank.is_some();
                        let y = with_low_rank.unwrap_or_else(|| self.gated(&gate, &up, *activation, room));
                        return (Input { rows: y.block, has_low_rank }, Some(y));
                    }
                    Some(codes) => self.gated_in_codes(&gate, &up, *activation, codes),
                }
            }
        };
        (matrix.block.into(), Some(matrix))
    }

    /// Computes all outputs of a group, plus a residual, as one tensor per part. Gradients of several parts may later
    /// overwrite them, and then also need room for the adapters'.
    fn split_group(&self, x: Input, group: &Routed<'_>, residual: Option<DeviceBlock>) -> Projected {
        let room = if group.parts.len() == 1 { 0 } else { group.route.room() };
        let y = self.empty_with_room([x.rows.rows, group.out_features()], room, x.rows.dtype);
        let kept = self.group_forward(x, group, residual, y.block);
        let parts = if group.parts.len() == 1 { vec![tensor(y.tensor)] } else { self.split(&y, &group.parts) };
        Projected { parts, heads: None, output_norm: None, kept }
    }

    fn project_heads(&self, x: Input, group: &Routed<'_>, epilogue: HeadsEpilogue<Cuda>, is_saved: bool) -> Projected {
        let saves_raw = is_saved && saves_joined(&epilogue);
        let (joined, owner) = self.joined_rows([x.rows.rows, group.out_features()], x.rows.dtype, saves_raw);
        let kept = self.group_forward(x, group, None, joined);
        let copies = self.normalize_projections(joined, &group.parts, &epilogue);
        let parts = self.heads_forward(joined, &group.parts, &epilogue);
        let raw = match owner {
            Some(joined) => {
                let raw = self.split(&joined, &group.parts).into_iter().zip(&epilogue.parts);
                raw.map(|(raw, part)| part.norm.is_some().then_some(raw)).collect()
            }
            None => copies.into_iter().map(|copy| copy.filter(|_| is_saved).map(|copy| tensor(copy.tensor))).collect(),
        };
        let heads = Some(SavedHeads { epilogue, raw });
        Projected { parts, heads, output_norm: None, kept }
    }

    /// Returns the rows of experts with the matrices of a stack; `None` if the group is none.
    pub(super) fn experts_of(
        &self,
        group: &Routed<'_>,
        weight: Option<&GroupWeight>,
        rows: DeviceBlock,
    ) -> Option<OfExperts> {
        let experts = self.rows_of_experts(group, rows)?;
        Some(experts.with_matrices(weight.expect("a stack is written out or stored as it is read").matrix_stride()))
    }

    /// Returns the rows of experts without matrices; `None` if the group is no stack.
    pub(super) fn rows_of_experts(&self, group: &Routed<'_>, rows: DeviceBlock) -> Option<OfExperts> {
        Some(self.of_experts(group.rows.as_ref()?, rows.rows, rows.dtype))
    }

    /// Writes all outputs of a group side by side to `out`, plus a residual. `x Aᵀ` of its adapters is in scratch memory or in the columns after `x`.
    pub(super) fn group_forward(
        &self,
        Input { rows: x, has_low_rank }: Input,
        group: &Routed<'_>,
        residual: Option<DeviceBlock>,
        out: DeviceBlock,
    ) -> GroupKept {
        if group.route.has_magnitudes {
            return GroupKept { low: None, unscaled: Some(self.magnitude_forward(x, group, residual, out)) };
        }
        match group.route.weight {
            WeightRoute::FewRows => {
                self.multiply_few_rows(x, group, residual, out);
                return GroupKept::default();
            }
            WeightRoute::Codes => return GroupKept { low: self.fp8_forward(x, group, residual, out), unscaled: None },
            WeightRoute::Stored | WeightRoute::WrittenOut | WeightRoute::OneByOne => {}
        }
        let weight = self.group_weight(group, x.dtype);
        let experts = self.experts_of(group, weight.as_ref(), x);
        let adapters = self.adapters(group, x.dtype, weight.as_ref(), experts);
        let biases = self.biases(group, x.dtype);
        let (mut input, mut low) = (x, None);
        if let (AdapterRoute::Appended { columns }, Some(adapters)) = (group.route.adapters, &adapters) {
            let after = x.columns_after(columns);
            let is_done = has_low_rank || group.route.takes_low_rank_rows && self.low_rank_rows(x, adapters.a, after);
            if !is_done {
                let gemm = Gemm::forward("lora", self.adapter_input(x, group), adapters.a);
                self.gemm(Gemm { experts, ..gemm }, after);
            }
            (input, low) = (x.widened(columns), Some(after));
        }
        if let Some(weight) = &weight {
            let bias = biases.map(|biases| biases.address);
            self.gemm(Gemm { c: residual, bias, experts, ..Gemm::forward("linear", input, weight.forward()) }, out);
        } else {
            for module in &group.modules {
                let part = |whole: DeviceBlock| whole.column_range(&module.columns);
                let weight = self.base_weight(&module.weight, x.dtype);
                let bias = biases.filter(|_| module.bias.is_some()).map(|biases| part(biases).address);
                let gemm = Gemm { c: residual.map(part), bias, ..Gemm::forward("linear", x, weight.block) };
                self.gemm(gemm, part(out));
            }
        }
        if let (AdapterRoute::Separate, Some(adapters)) = (group.route.adapters, &adapters) {
            let separate = self.low_rank(self.adapter_input(x, group), adapters);
            self.add_low_rank(separate, adapters, out);
            low = Some(separate);
        }
        GroupKept { low, unscaled: None }
    }
}
