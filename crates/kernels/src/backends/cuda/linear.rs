//! Groups of linear modules on CUDA, forward: prologue, GEMM, epilogue.
//!
//! Where all modules of a group are quantized, their weights are dequantized side by side with their adapters merged, and the whole
//! group is one GEMM. Other groups go module by module: base GEMM, then the adapter's two GEMMs. Biases and a residual are added by
//! the GEMM itself.
//! Trade-off: outputs of a group are column ranges of one buffer, which lives until the last of them is dropped.

use burn_tensor::{DType, Tensor};
use firebrick_arch::Activation;

use super::engine::{Cuda, Engine, engine};
use super::gemm::Gemm;
use super::scratch::ScratchSlot;
use super::tensor::{DeviceBlock, MatrixView, tensor};
use crate::{
    Adapter, Epilogue, Group, HeadsEpilogue, Keep, LinearOps, ProjectGradients, ProjectSaved, Prologue, RotaryTables,
};

impl LinearOps for Cuda {
    fn project(
        prologue: Prologue<Self>,
        group: &Group<Self>,
        epilogue: Epilogue<Self>,
        keep: Keep,
    ) -> (Vec<Tensor<Self, 2>>, Option<ProjectSaved<Self>>) {
        let engine = engine(&device_of(&prologue));
        engine.section(|| engine.project(prologue, group, epilogue, keep))
    }

    fn project_backward(
        saved: ProjectSaved<Self>,
        group: Group<Self>,
        d_outputs: Vec<Tensor<Self, 2>>,
        d_residual_ni: Option<Tensor<Self, 2>>,
    ) -> ProjectGradients<Self> {
        let engine = engine(&device_of(&saved.prologue));
        engine.section(|| engine.project_backward(saved, group, d_outputs, d_residual_ni))
    }

    fn gated(gate_nf: Tensor<Self, 2>, up_nf: Tensor<Self, 2>, activation: Activation) -> Tensor<Self, 2> {
        let engine = engine(&gate_nf.device());
        engine.section(|| tensor(engine.gated(&engine.matrix(gate_nf), &engine.matrix(up_nf), activation).tensor))
    }

    fn gated_backward(
        gate_nf: Tensor<Self, 2>,
        up_nf: Tensor<Self, 2>,
        activation: Activation,
        dy_nf: Tensor<Self, 2>,
    ) -> (Tensor<Self, 2>, Tensor<Self, 2>) {
        let engine = engine(&gate_nf.device());
        engine.section(|| {
            let width = gate_nf.dims()[1];
            let dy = engine.flat(dy_nf);
            let both = engine.gated_backward(gate_nf, up_nf, activation, &dy, false);
            halves(&engine, &both, width)
        })
    }

    fn rotary(x: Tensor<Self, 2>, tables: &RotaryTables<Self>, head_dim: usize) -> Tensor<Self, 2> {
        let engine = engine(&x.device());
        engine.section(|| tensor(engine.rotate(&engine.matrix(x), tables, head_dim, false).tensor))
    }

    fn rotary_backward(dy: Tensor<Self, 2>, tables: &RotaryTables<Self>, head_dim: usize) -> Tensor<Self, 2> {
        let engine = engine(&dy.device());
        engine.section(|| tensor(engine.rotate(&engine.matrix(dy), tables, head_dim, true).tensor))
    }
}

/// The two halves of a buffer as tensors.
pub(super) fn halves(engine: &Engine, both: &MatrixView, width: usize) -> (Tensor<Cuda, 2>, Tensor<Cuda, 2>) {
    let mut parts = engine.split(both, &[width, width]).into_iter();
    let half = || unreachable!("two widths give two parts");
    (parts.next().unwrap_or_else(half), parts.next().unwrap_or_else(half))
}

fn device_of(prologue: &Prologue<Cuda>) -> cubecl::cuda::CudaDevice {
    match prologue {
        Prologue::None { x } | Prologue::Norm { x, .. } => x.device(),
        Prologue::Gated { gate, .. } => gate.device(),
    }
}

impl Engine {
    fn project(
        &self,
        prologue: Prologue<Cuda>,
        group: &Group<Cuda>,
        epilogue: Epilogue<Cuda>,
        keep: Keep,
    ) -> (Vec<Tensor<Cuda, 2>>, Option<ProjectSaved<Cuda>>) {
        let x = self.prologue_output(&prologue);
        let (outputs, heads) = match epilogue {
            Epilogue::None => (self.split_group(&x, group, None), None),
            Epilogue::Residual(residual) => {
                let residual = self.flat_as(residual, x.dtype);
                (self.split_group(&x, group, Some(residual.block())), None)
            }
            Epilogue::Heads(epilogue) => {
                let (outputs, saved) = self.project_heads(&x, group, epilogue, keep != Keep::Nothing);
                (outputs, Some(saved))
            }
        };
        let is_computed = !matches!(prologue, Prologue::None { .. });
        let prologue_output = (keep == Keep::Everything && is_computed).then(|| tensor(x.tensor));
        let saved = (keep != Keep::Nothing).then_some(ProjectSaved { prologue, prologue_output, heads });
        (outputs, saved)
    }

    /// What the GEMM of a prologue reads.
    pub(super) fn prologue_output(&self, prologue: &Prologue<Cuda>) -> MatrixView {
        match prologue {
            Prologue::None { x } => self.matrix(x.clone()),
            Prologue::Norm { x, norm } => self.rms_norm(&self.flat(x.clone()), norm),
            Prologue::Gated { gate, up, activation } => {
                self.gated(&self.matrix(gate.clone()), &self.matrix(up.clone()), *activation)
            }
        }
    }

    /// All outputs of a group side by side, plus a residual, as one tensor per part.
    fn split_group(&self, x: &MatrixView, group: &Group<Cuda>, residual: Option<DeviceBlock>) -> Vec<Tensor<Cuda, 2>> {
        let y = self.empty_matrix(x.rows, group.out_features(), x.dtype);
        self.group_forward(x.block(), group, residual, y.block());
        if group.parts.len() == 1 { vec![tensor(y.tensor)] } else { self.split(&y, &group.parts) }
    }

    fn project_heads(
        &self,
        x: &MatrixView,
        group: &Group<Cuda>,
        epilogue: HeadsEpilogue<Cuda>,
        is_saved: bool,
    ) -> (Vec<Tensor<Cuda, 2>>, crate::linear::SavedHeads<Cuda>) {
        let saves_raw = is_saved && epilogue.qk_norm.is_some();
        let (joined, owner) = self.joined_rows([x.rows, group.out_features()], x.dtype, saves_raw);
        self.group_forward(x.block(), group, None, joined);
        let outputs = self.heads_forward(joined, &group.parts, &epilogue);
        let raw = owner.map(|joined| {
            let mut parts = self.split(&joined, &group.parts[..2]).into_iter();
            let part = || unreachable!("two widths give two parts");
            (parts.next().unwrap_or_else(part), parts.next().unwrap_or_else(part))
        });
        (outputs, crate::linear::SavedHeads { epilogue, raw })
    }

    /// All outputs of a group side by side to `out`, plus a residual.
    fn group_forward(&self, x: DeviceBlock, group: &Group<Cuda>, residual: Option<DeviceBlock>, out: DeviceBlock) {
        let biases = self.biases(group, x.dtype);
        if let Some(weights) = self.merged_weights(group, x.dtype) {
            let bias = biases.map(|biases| biases.address);
            self.gemm(Gemm { c: residual, bias, ..Gemm::forward("linear", x, weights.block) }, out);
            return;
        }
        for module in &group.modules {
            let part = |whole: DeviceBlock| whole.columns(module.columns.start, module.columns.len());
            let weight = self.base_weight(&module.weight, x.dtype);
            let bias = biases.filter(|_| module.bias.is_some()).map(|biases| part(biases).address);
            self.gemm(Gemm { c: residual.map(part), bias, ..Gemm::forward("linear", x, weight.block) }, part(out));
            if let Some(adapter) = &module.adapter {
                self.add_low_rank(x, adapter, part(out));
            }
        }
    }

    /// `out += scale (x Aᵀ) Bᵀ`.
    fn add_low_rank(&self, x: DeviceBlock, adapter: &Adapter<Cuda>, out: DeviceBlock) {
        let low = self.low_rank_block(ScratchSlot::LowRank, [x.rows, adapter.a.dims()[0]], x.dtype);
        let a = self.a_of(adapter, x.dtype);
        self.gemm(Gemm::forward("lora", x, a.block), low);
        let b = self.b_of(adapter, x.dtype);
        self.gemm(Gemm { c: Some(out), alpha: adapter.scale, ..Gemm::forward("lora", low, b.block) }, out);
    }

    /// Room for low-rank intermediates.
    pub(super) fn low_rank_block(&self, slot: ScratchSlot, [rows, ranks]: [usize; 2], dtype: DType) -> DeviceBlock {
        let address = self.scratch.take(slot, rows * ranks * dtype.size());
        DeviceBlock::dense(address, [rows, ranks], dtype)
    }
}
