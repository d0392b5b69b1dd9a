//! Groups of linear modules on CUDA, backward.
//!
//! One GEMM for the gradient of the input where the group's weights are merged, and GEMMs over all tokens for the gradients of what
//! trains: weights (added to the running sum in place where nothing else holds it), adapters, biases. The gradient of a norm's input
//! takes the place of the gradient of its output.
//! Trade-off: under a gated prologue whose result was not saved, it is computed again by the pass that needs gate and up anyway,
//! which puts it after the GEMM for the gradient of the input.

use burn_tensor::{DType, Tensor};

use super::engine::{Cuda, Engine};
use super::gemm::Gemm;
use super::linear::halves;
use super::scratch::ScratchSlot;
use super::tensor::{DeviceBlock, MatrixView, Primitive, float, tensor};
use super::weights::Adapters;
use crate::linear::SavedHeads;
use crate::{
    Adapter, Group, InputGradient, Module, ModuleGradients, ProjectGradients, ProjectSaved, Prologue, WeightGradient,
};

/// The gradient of a group's outputs side by side, and the owner of its memory where it is not scratch.
struct OutputGradient {
    block: DeviceBlock,
    _owner: Option<MatrixView>,
    qk_norm: [Option<Primitive>; 2],
}

/// `dA` and `dB` of one adapter, in f32.
type FactorGradients = (Tensor<Cuda, 2>, Tensor<Cuda, 2>);

impl Engine {
    pub(super) fn project_backward(
        &self,
        saved: ProjectSaved<Cuda>,
        mut group: Group<Cuda>,
        d_outputs: Vec<Tensor<Cuda, 2>>,
        d_residual: Option<Tensor<Cuda, 2>>,
    ) -> ProjectGradients<Cuda> {
        let ProjectSaved { prologue, prologue_output, heads } = saved;
        let output_gradient = self.output_gradient(heads, d_outputs);
        let dy = output_gradient.block;
        let prologue_output = prologue_output.map(|output| self.flat(output));
        let (input, norm, modules) = match prologue {
            Prologue::None { x } => {
                let modules = self.parameter_gradients(self.matrix(x).block(), &mut group, dy);
                let residual = d_residual.map(|residual| self.flat_as(residual, dy.dtype));
                let dx = self.input_gradient(&group, dy, residual.as_ref());
                (InputGradient::Plain(tensor(dx.tensor)), None, modules)
            }
            Prologue::Norm { x, norm } => {
                let x = self.flat(x);
                let normed = prologue_output.unwrap_or_else(|| self.rms_norm(&x, &norm));
                let modules = self.parameter_gradients(normed.block(), &mut group, dy);
                drop(normed);
                let dx = self.input_gradient(&group, dy, None);
                let residual = d_residual.map(|residual| self.flat_as(residual, dy.dtype));
                let d_norm = self.rms_norm_backward(dx.block(), &x, &norm, dx.block(), residual.as_ref());
                (InputGradient::Plain(tensor(dx.tensor)), d_norm, modules)
            }
            Prologue::Gated { gate, up, activation } => {
                assert!(d_residual.is_none(), "a gated prologue is not on the residual path");
                let width = gate.dims()[1];
                let d_activated = self.input_gradient(&group, dy, None);
                // Overwrites the gradient that it reads with the activated values, where those were not saved.
                let recompute = prologue_output.is_none();
                let both = self.gated_backward(gate, up, activation, &d_activated, recompute);
                let activated = prologue_output.unwrap_or(d_activated);
                let modules = self.parameter_gradients(activated.block(), &mut group, dy);
                let (d_gate, d_up) = halves(self, &both, width);
                (InputGradient::Gated { d_gate, d_up }, None, modules)
            }
        };
        let qk_norm = output_gradient.qk_norm.map(|gradient| gradient.map(tensor));
        ProjectGradients { input, norm: norm.map(tensor), qk_norm, modules }
    }

    /// The gradient of the GEMM's output from the gradients of what the epilogue made of it.
    fn output_gradient(&self, heads: Option<SavedHeads<Cuda>>, d_outputs: Vec<Tensor<Cuda, 2>>) -> OutputGradient {
        let Some(SavedHeads { epilogue, raw }) = heads else {
            let whole = self.adjacent_columns(d_outputs.into_iter().map(|d_output| self.matrix(d_output)).collect());
            return OutputGradient { block: whole.block(), _owner: Some(whole), qk_norm: [None, None] };
        };
        let gradients: Vec<_> = d_outputs.into_iter().map(|d_output| self.flat(d_output)).collect();
        let gradients: [MatrixView; 3] = gradients
            .try_into()
            .unwrap_or_else(|_| panic!("a heads epilogue has gradients of queries, keys and values"));
        let raw = raw.map(|(q, k)| [self.matrix(q), self.matrix(k)]);
        let (block, qk_norm) = self.heads_backward(&gradients, &epilogue, raw.as_ref());
        OutputGradient { block, _owner: None, qk_norm }
    }

    /// `dy W'`, summed over the group, plus what is given.
    fn input_gradient(&self, group: &Group<Cuda>, dy: DeviceBlock, plus: Option<&MatrixView>) -> MatrixView {
        let dx = self.empty_matrix(dy.rows, group.in_features(), dy.dtype);
        let out = dx.block();
        let mut so_far = plus.map(|plus| plus.block());
        if let Some(weights) = self.merged_weights(group, dy.dtype) {
            self.gemm(Gemm { c: so_far, ..Gemm::input_gradient("linear", dy, weights.block) }, out);
            return dx;
        }
        for module in &group.modules {
            let dy_part = dy.columns(module.columns.start, module.columns.len());
            let weight = self.base_weight(&module.weight, dy.dtype);
            self.gemm(Gemm { c: so_far, ..Gemm::input_gradient("linear", dy_part, weight.block) }, out);
            so_far = Some(out);
            if let Some(adapter) = &module.adapter {
                let rank = adapter.a.dims()[0];
                let low = self.low_rank_block(ScratchSlot::LowRankGradient, [dy.rows, rank], dy.dtype);
                self.low_rank_gradient(adapter, dy_part, low);
                let a = self.a_of(adapter, dy.dtype);
                self.gemm(Gemm { c: so_far, ..Gemm::input_gradient("lora", low, a.block) }, out);
            }
        }
        dx
    }

    /// `scale dy B`, `[n, r]`.
    fn low_rank_gradient(&self, adapter: &Adapter<Cuda>, dy: DeviceBlock, low: DeviceBlock) {
        let b = self.b_of(adapter, dy.dtype);
        self.gemm(Gemm { alpha: adapter.scale, ..Gemm::input_gradient("lora gradient", dy, b.block) }, low);
    }

    /// Gradients of what trains in a group, in the order of its modules. Takes the running sums out of the group.
    fn parameter_gradients(
        &self,
        x: DeviceBlock,
        group: &mut Group<Cuda>,
        dy: DeviceBlock,
    ) -> Vec<ModuleGradients<Cuda>> {
        let mut gradients = Vec::with_capacity(group.modules.len());
        for module in &mut group.modules {
            let dy_part = dy.columns(module.columns.start, module.columns.len());
            let bias = module.bias.as_ref().filter(|bias| bias.trains);
            let bias = bias.map(|_| tensor(self.column_sums(dy_part)));
            gradients.push(ModuleGradients { weight: self.weight_gradient(module, x, dy_part), bias, adapter: None });
        }
        if let Some(adapters) = self.adapters(group, x.dtype) {
            for (index, gradient) in self.adapter_gradients(x, &adapters, group, dy) {
                gradients[index].adapter = Some(gradient);
            }
        }
        gradients
    }

    /// `dyᵀ x`, f32: new, or added to the running sum.
    fn weight_gradient(&self, module: &mut Module<Cuda>, x: DeviceBlock, dy: DeviceBlock) -> Option<Tensor<Cuda, 2>> {
        let gemm = Gemm::token_sum("weight gradient", dy, x);
        match std::mem::replace(&mut module.weight_gradient, WeightGradient::Frozen) {
            WeightGradient::Frozen => None,
            WeightGradient::New => {
                let gradient = self.empty_matrix(dy.width, x.width, DType::F32);
                self.gemm(gemm, gradient.block());
                Some(tensor(gradient.tensor))
            }
            WeightGradient::AddTo(sum) => {
                let sum = self.view_of(self.owned(float(sum)));
                self.gemm(Gemm { c: Some(sum.block()), ..gemm }, sum.block());
                Some(tensor(sum.tensor))
            }
        }
    }

    /// `dA` and `dB` of each adapter of a group. All of them share the GEMMs of `x Aᵀ` and `dA`.
    fn adapter_gradients(
        &self,
        x: DeviceBlock,
        adapters: &Adapters<'_>,
        group: &Group<Cuda>,
        dy: DeviceBlock,
    ) -> Vec<(usize, FactorGradients)> {
        let ranks = adapters.a.rows;
        let low = self.low_rank_block(ScratchSlot::LowRank, [x.rows, ranks], x.dtype);
        self.gemm(Gemm::forward("lora gradient", x, adapters.a), low);
        let d_low = self.low_rank_block(ScratchSlot::LowRankGradient, [x.rows, ranks], x.dtype);
        let mut first = 0;
        let mut b_gradients = Vec::with_capacity(adapters.pairs.len());
        for &(index, adapter) in &adapters.pairs {
            let columns = &group.modules[index].columns;
            let dy_part = dy.columns(columns.start, columns.len());
            let rank = adapter.a.dims()[0];
            self.low_rank_gradient(adapter, dy_part, d_low.columns(first, rank));
            let db = self.empty_matrix(columns.len(), rank, DType::F32);
            let sum = Gemm::token_sum("lora gradient", dy_part, low.columns(first, rank));
            self.gemm(Gemm { alpha: adapter.scale, ..sum }, db.block());
            b_gradients.push((index, first, rank, db));
            first += rank;
        }
        let da = self.empty_matrix(ranks, x.width, DType::F32);
        self.gemm(Gemm::token_sum("lora gradient", d_low, x), da.block());
        let gradient = |(index, first, rank, db): (usize, usize, usize, MatrixView)| {
            (index, (tensor(self.row_range(&da, first, rank)), tensor(db.tensor)))
        };
        b_gradients.into_iter().map(gradient).collect()
    }
}
