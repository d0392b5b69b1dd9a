//! Groups of linear modules on CUDA, backward.
//!
//! One GEMM computes the input gradient if the group is one weight, and GEMMs over all tokens compute the gradients of trained weights
//! (added to the running sum, in place if it is not shared), adapters and biases. If adapters are appended, `dy s B` is written to the
//! columns after `dy`, in place if there is room. Under dropout, the adapters' part of the input gradient is a separate GEMM, because
//! it goes through the mask. `prologue_backward` computes the backward of the prologue.

use burn_tensor::{DType, Tensor};

use super::adapters::magnitude::{Unscaled, as_gradients};
use super::adapters::{GateUp, LowRankGradient, PreparedFactors};
use super::forward::halves;
use super::modules::Routed;
use super::operands::GroupWeight;
use crate::backends::cuda::device::Device;
use crate::backends::cuda::engine::{Cuda, DeviceBlock, Gemm, MatrixView, OfExperts, Primitive, float, tensor};
use crate::backends::planning::route::{AdapterRoute, WeightRoute};
use crate::linear::{SavedHeads, SavedOutputNorm, into_single};
use crate::{Group, InputGradient, ModuleGradients, ProjectGradients, ProjectSaved, Prologue, WeightGradient};

/// The gradient of a group's outputs, with the values that all GEMMs reading it share.
pub(crate) struct OutputGradient {
    /// All parts side by side, in rows with room for `d_low` if adapters are appended.
    pub dy: DeviceBlock,
    /// The owner of its memory, if that is not scratch.
    _owner: Option<MatrixView>,
    head_norms: Vec<Option<Primitive>>,
    output_norm: Option<Primitive>,
    weight: Option<GroupWeight>,
    /// Destinations of the weight gradients, in the order of the modules.
    sums: Vec<WeightGradient<Cuda>>,
    /// Set if the group has magnitudes: `dy` then is the gradient of the unscaled outputs.
    magnitudes: Option<BehindMagnitudes>,
    /// The rows of experts, if the group is a stack.
    pub experts: Option<OfExperts>,
    /// The adapters with `dy s B`.
    pub adapters: Option<LowRankGradient>,
}

/// Additional values in the backward of a group with magnitudes.
struct BehindMagnitudes {
    dy: DeviceBlock,
    _owner: Option<MatrixView>,
    gradients: Vec<Option<Primitive>>,
}

impl Device {
    pub(super) fn mlp_backward(
        &self,
        [(saved_gate_up, gate_up), (saved_down, down)]: [(ProjectSaved<Cuda>, Group<Cuda>); 2],
        dy: Tensor<Cuda, 2>,
        d_residual: Option<Tensor<Cuda, 2>>,
        after_down: impl FnOnce(Vec<ModuleGradients<Cuda>>, Option<Tensor<Cuda, 1>>),
    ) -> ProjectGradients<Cuda> {
        let routed = self.routed(&gate_up, dy.dtype());
        let mut next = GateUp { group: &routed, low_rank: saved_gate_up.low_rank.as_ref(), prepared: None };
        let of_down = self.group_backward(saved_down, down, vec![dy], None, Some(&mut next), None);
        let prepared = next.prepared;
        after_down(of_down.modules, of_down.output_norm);
        let (d_gate, d_up) = of_down.input.gated();
        self.group_backward(saved_gate_up, gate_up, vec![d_gate, d_up], d_residual, None, prepared)
    }

    /// Computes [`crate::LinearOps::project_backward`]. `next` computed a gated prologue's inputs; `prepared` was computed for this call.
    pub(super) fn group_backward(
        &self,
        saved: ProjectSaved<Cuda>,
        mut group: Group<Cuda>,
        d_outputs: Vec<Tensor<Cuda, 2>>,
        d_residual: Option<Tensor<Cuda, 2>>,
        next: Option<&mut GateUp<'_>>,
        prepared: Option<PreparedFactors>,
    ) -> ProjectGradients<Cuda> {
        let route = self.route_of(&group, d_outputs[0].dtype(), 0);
        // Move the gradients out of the group, so that it does not share them.
        let take = |gradient: &mut WeightGradient<Cuda>| std::mem::replace(gradient, WeightGradient::Frozen);
        let sums = group.modules.iter_mut().map(|module| take(&mut module.weight_gradient)).collect();
        let group = &Routed { group: &group, route };
        let ProjectSaved { prologue, prologue_output, low_rank, unscaled, heads, output_norm } = saved;
        let mut prologue_output = prologue_output.map(|output| self.matrix(output));
        let mut unscaled = unscaled.map(|unscaled| self.matrix(unscaled));
        if unscaled.is_none() && group.route.has_magnitudes {
            let (outputs, input) = self.recompute_unscaled(&prologue, prologue_output, group);
            (unscaled, prologue_output) = (Some(outputs), input);
        }
        let low = low_rank.map(|low| self.flat(low));
        let mut gradient =
            self.output_gradient(group, sums, heads, output_norm, d_outputs, low.as_ref(), unscaled, prepared);
        let dy = gradient.dy;
        let (input, norm, modules) = match prologue {
            Prologue::None { x } => {
                let x = self.matrix(x);
                let modules = self.parameter_gradients(Some(x.block), low, group, &mut gradient);
                let residual = d_residual.map(|residual| self.flat_as(residual, dy.dtype));
                let dx = self.input_gradient(group, &gradient, 0, residual.as_ref());
                (InputGradient::Plain(tensor(dx.tensor)), None, modules)
            }
            Prologue::Norm { x, norm } => {
                let x = self.flat(x);
                let (dx, d_norm, modules) =
                    self.norm_backward((&x, &norm), prologue_output, low, group, &mut gradient, d_residual);
                (InputGradient::Plain(tensor(dx.tensor)), d_norm, modules)
            }
            Prologue::Gated { gate, up, activation } => {
                assert!(d_residual.is_none(), "a gated prologue is not on the residual path");
                let width = gate.dims()[1];
                let (both, activated) =
                    self.gated_input_backward(gate, up, activation, prologue_output, group, &mut gradient, next);
                let activated = activated.as_ref().map(|activated| activated.block);
                let modules = self.parameter_gradients(activated, low, group, &mut gradient);
                let (d_gate, d_up) = halves(self, &both, width);
                (InputGradient::Gated { d_gate, d_up }, None, modules)
            }
        };
        let head_norms = gradient.head_norms.into_iter().map(|gradient| gradient.map(tensor)).collect();
        let output_norm = gradient.output_norm.map(tensor);
        ProjectGradients { input, norm: norm.map(tensor), output_norm, head_norms, modules }
    }

    /// Computes the gradient of the GEMM's output from the gradients of the epilogue's outputs.
    fn output_gradient(
        &self,
        group: &Routed<'_>,
        sums: Vec<WeightGradient<Cuda>>,
        heads: Option<SavedHeads<Cuda>>,
        output_norm: Option<SavedOutputNorm<Cuda>>,
        d_outputs: Vec<Tensor<Cuda, 2>>,
        low: Option<&MatrixView>,
        unscaled: Option<MatrixView>,
        prepared: Option<PreparedFactors>,
    ) -> OutputGradient {
        let room = group.route.room();
        let mut d_output_norm = None;
        let (dy, owner, head_norms) = if let Some(SavedHeads { epilogue, raw }) = heads {
            let gradients: Vec<_> = d_outputs.into_iter().map(|d_output| self.flat(d_output)).collect();
            let raw: Vec<_> = raw.into_iter().map(|raw| raw.map(|raw| self.matrix(raw))).collect();
            let (joined, head_norms) = self.heads_backward(&gradients, &group.parts, &epilogue, &raw, room);
            (joined, None, head_norms)
        } else if let Some(SavedOutputNorm { norm, raw }) = output_norm {
            let (dy, raw) = (self.matrix(into_single(d_outputs)), self.flat(raw));
            let d_raw = self.empty_with_room([raw.rows, raw.width], room, raw.dtype);
            d_output_norm = self.rms_norm_backward(d_raw.block, &raw, &norm, dy.block, None, None);
            (d_raw.block, Some(d_raw), Vec::new())
        } else {
            let whole = self.adjacent_columns(d_outputs.into_iter().map(|d_output| self.matrix(d_output)).collect());
            let (dy, owner) = self.with_room(whole, room);
            (dy, owner, Vec::new())
        };
        let (dy, owner, magnitudes) = match unscaled {
            None => (dy, owner, None),
            Some(unscaled) => {
                let Unscaled { dy: before, d_magnitudes } = self.magnitude_backward(dy, unscaled.block, group);
                let magnitudes = BehindMagnitudes { dy, _owner: owner, gradients: d_magnitudes };
                (before.block, Some(before), Some(magnitudes))
            }
        };
        let (weight, experts, adapters) = if group.route.weight == WeightRoute::Codes {
            let experts = self.rows_of_experts(group, dy);
            (None, experts, self.fp8_backward_adapters(group, dy.dtype, experts))
        } else {
            let weight = self.group_weight(group, dy.dtype);
            let experts = self.experts_of(group, weight.as_ref(), dy);
            let adapters = self.adapters(group, dy.dtype, weight.as_ref(), experts);
            (weight, experts, adapters)
        };
        let low = low.map(|low| low.block);
        let adapters = adapters.map(|adapters| self.low_rank_gradient(dy, low, adapters, group, prepared));
        OutputGradient {
            dy,
            _owner: owner,
            head_norms,
            output_norm: d_output_norm,
            weight,
            sums,
            magnitudes,
            experts,
            adapters,
        }
    }

    /// Computes `dy W + dy s B A`, summed over the group, plus the given addend, in rows with `room` more columns.
    pub(crate) fn input_gradient(
        &self,
        group: &Routed<'_>,
        gradient: &OutputGradient,
        room: usize,
        plus: Option<&MatrixView>,
    ) -> MatrixView {
        let dy = gradient.dy;
        let dx = self.empty_with_room([dy.rows, group.in_features()], room, dy.dtype);
        let out = dx.block;
        let so_far = plus.map(|plus| plus.block);
        if let (Some(behind), Some(mask)) = (&gradient.magnitudes, &group.dropout) {
            // `dy W`, and under the mask `(c - 1) dy W + c dy s B A`.
            let weight = gradient.weight.as_ref();
            self.base_gradient(group, weight, None, behind.dy, so_far, out);
            let difference = self.empty_matrix(dy.rows, dy.width, dy.dtype);
            self.subtract(dy, behind.dy, difference.block);
            let through = self.masked_block(out);
            self.base_gradient(group, weight, None, difference.block, None, through);
            if let Some(LowRankGradient { adapters, d_low, .. }) = &gradient.adapters {
                self.gemm(Gemm { c: Some(through), ..Gemm::input_gradient("lora", *d_low, adapters.a) }, through);
            }
            self.drop_values(through, mask, out, true);
            return dx;
        }
        let is_masked = group.route.is_masked;
        match &gradient.weight {
            _ if group.route.weight == WeightRoute::Codes => {
                let d_low = gradient.adapters.as_ref().filter(|_| !is_masked).map(|adapters| adapters.d_low);
                self.fp8_input_gradient(group, dy, d_low, so_far, out);
            }
            Some(weight) if !is_masked => {
                let dy = dy.widened(weight.ranks());
                let experts = gradient.experts;
                self.gemm(Gemm { c: so_far, experts, ..Gemm::input_gradient("linear", dy, weight.backward()) }, out);
            }
            weight => self.base_gradient(group, weight.as_ref(), gradient.experts, dy, so_far, out),
        }
        // Otherwise the weights' GEMM already includes the adapters' part.
        if (is_masked || group.route.adapters == AdapterRoute::Separate)
            && let Some(LowRankGradient { adapters, d_low, .. }) = &gradient.adapters
        {
            let gemm = Gemm { experts: adapters.experts, ..Gemm::input_gradient("lora", *d_low, adapters.a) };
            match &group.dropout {
                None => self.gemm(Gemm { c: Some(out), ..gemm }, out),
                Some(mask) => {
                    let through = self.masked_block(out);
                    self.gemm(gemm, through);
                    self.drop_values(through, mask, out, true);
                }
            }
        }
        dx
    }

    /// Writes `dy W` of all modules, plus the given addend, to `out`.
    fn base_gradient(
        &self,
        group: &Group<Cuda>,
        weight: Option<&GroupWeight>,
        experts: Option<OfExperts>,
        dy: DeviceBlock,
        plus: Option<DeviceBlock>,
        out: DeviceBlock,
    ) {
        if let Some(weight) = weight {
            self.gemm(Gemm { c: plus, experts, ..Gemm::input_gradient("linear", dy, weight.base()) }, out);
            return;
        }
        let mut so_far = plus;
        for module in &group.modules {
            let dy_part = dy.column_range(&module.columns);
            let weight = self.base_weight(&module.weight, dy.dtype);
            self.gemm(Gemm { c: so_far, ..Gemm::input_gradient("linear", dy_part, weight.block) }, out);
            so_far = Some(out);
        }
    }

    /// Computes a group's parameter gradients, in module order. `low` is `x Aᵀ`, if saved. `x` may be missing if the adapters' are available.
    pub(super) fn parameter_gradients(
        &self,
        x: Option<DeviceBlock>,
        low: Option<MatrixView>,
        group: &Routed<'_>,
        gradient: &mut OutputGradient,
    ) -> Vec<ModuleGradients<Cuda>> {
        let dy = gradient.dy;
        let mut gradients = Vec::with_capacity(group.modules.len());
        for (module, sum) in group.modules.iter().zip(std::mem::take(&mut gradient.sums)) {
            let dy_part = dy.column_range(&module.columns);
            let bias = module.bias.as_ref().filter(|bias| bias.trains);
            let outputs = gradient.magnitudes.as_ref().map_or(dy, |behind| behind.dy);
            let outputs = outputs.column_range(&module.columns);
            let bias = bias.map(|_| {
                tensor(match gradient.experts {
                    None => self.column_sums(outputs),
                    Some(experts) => self.expert_column_sums(outputs, experts),
                })
            });
            let weight = self.weight_gradient(sum, x, dy_part, gradient.experts);
            gradients.push(ModuleGradients { weight, bias, adapter: None, magnitude: None });
        }
        if let Some(behind) = &gradient.magnitudes {
            for (gradients, magnitude) in gradients.iter_mut().zip(as_gradients(&behind.gradients)) {
                gradients.magnitude = magnitude;
            }
        }
        if let Some(adapters) = &gradient.adapters {
            let x = x.map(|x| self.adapter_input(x, group));
            for (module, factors) in self.factor_gradients(x, low.as_ref().map(|low| low.block), dy, adapters) {
                gradients[module].adapter = Some(factors);
            }
        }
        gradients
    }

    /// Computes `dyᵀ x`, f32: in a new tensor, or added to the running sum.
    fn weight_gradient(
        &self,
        sum: WeightGradient<Cuda>,
        x: Option<DeviceBlock>,
        dy: DeviceBlock,
        experts: Option<OfExperts>,
    ) -> Option<Tensor<Cuda, 2>> {
        let x = || x.expect("what a trained weight reads is there");
        let gemm = || Gemm { experts, ..Gemm::token_sum("weight gradient", dy, x()) };
        let rows = experts.map_or(1, |experts| experts.count) * dy.width;
        match sum {
            WeightGradient::Frozen => None,
            WeightGradient::New => {
                let gradient = self.empty_matrix(rows, x().width, DType::F32);
                self.gemm(gemm(), gradient.block);
                Some(tensor(gradient.tensor))
            }
            WeightGradient::AddTo(sum) => {
                let sum = self.view_of(self.owned(float(sum)));
                self.gemm(Gemm { c: Some(sum.block), ..gemm() }, sum.block);
                Some(tensor(sum.tensor))
            }
        }
    }
}
