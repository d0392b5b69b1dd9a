//! Groups of linear modules on CUDA, backward of their prologues: norms and gated activations.
//!
//! The gradient of a norm's input overwrites the gradient of its output. A gated activation that was not saved is
//! recomputed by the pass that reads gate and up anyway, after the GEMM for the input gradient. If only adapters train,
//! the group's input is not recomputed: `dA` is a sum over the norm's input, or comes from the pass over gate and up.

use burn_tensor::Tensor;
use firebrick_arch::Activation;

use super::adapters::GateUp;
use super::adapters::gated_low_rank::GatedFactors;
use super::backward::OutputGradient;
use super::modules::Routed;
use crate::backends::cuda::device::Device;
use crate::backends::cuda::engine::{Cuda, DeviceBlock, MatrixView, Primitive, ScratchSlot};
use crate::backends::cuda::norm::ScaledRows;
use crate::backends::planning::rows::ROW_MULTIPLE;
use crate::{ModuleGradients, NormWeight};

impl Device {
    /// Backward of a group after a norm: returns the gradients of the norm's input, of its weight, and of the group's parameters.
    pub(super) fn norm_backward(
        &self,
        (x, norm): (&MatrixView, &NormWeight<Cuda>),
        normed: Option<MatrixView>,
        low: Option<MatrixView>,
        group: &Routed<'_>,
        gradient: &mut OutputGradient,
        d_residual: Option<Tensor<Cuda, 2>>,
    ) -> (MatrixView, Option<Primitive>, Vec<ModuleGradients<Cuda>>) {
        let scaled = self.scaled_rows(group, gradient, normed.is_some());
        let of_normed = scaled.is_none().then(|| {
            let normed = normed.unwrap_or_else(|| self.rms_norm(x, norm, 0));
            self.parameter_gradients(Some(normed.block), low.clone(), group, gradient)
        });
        // The result is the next group's output gradient, and needs room for that group's adapters.
        let room = if group.route.room() > 0 { ROW_MULTIPLE } else { 0 };
        let dx = self.input_gradient(group, gradient, room, None);
        let residual = d_residual.map(|residual| self.matrix_as(residual, dx.dtype));
        let d_norm = self.rms_norm_backward(dx.block, x, norm, dx.block, residual.as_ref(), scaled);
        if let (Some(scaled), Some(adapters)) = (scaled, &mut gradient.adapters) {
            adapters.d_a = Some(self.sum_over_normed_tokens(scaled.to, x, norm));
        }
        let modules = of_normed.unwrap_or_else(|| self.parameter_gradients(None, low, group, gradient));
        (dx, d_norm, modules)
    }

    /// Backward of a group after a gated activation: returns the gradients of gate and up side by side, and the gated
    /// activation, unless the adapter that read it already has its gradient.
    pub(super) fn gated_input_backward(
        &self,
        gate: Tensor<Cuda, 2>,
        up: Tensor<Cuda, 2>,
        activation: Activation,
        activated: Option<MatrixView>,
        group: &Routed<'_>,
        gradient: &mut OutputGradient,
        next: Option<&mut GateUp<'_>>,
    ) -> (MatrixView, Option<MatrixView>) {
        let codes = next.as_ref().and_then(|next| self.fp8_gradient_layout(next.group, gradient.dy.dtype));
        // Rows of the same layout as the forward's gated activation may get its memory.
        let d_activated = self.input_gradient(group, gradient, group.route.room(), None);
        // Overwrites the gradient that it reads with the gated activation, if that was not saved.
        let recompute = activated.is_none();
        let both = if let Some(codes) = codes {
            self.gated_backward_in_codes(gate, up, activation, &d_activated, recompute, codes)
        } else {
            let operands = self.gated_operands(gate, up, &d_activated);
            if let (Some(next), Some(adapters)) = (next, &mut gradient.adapters)
                && let Some(found) = self.gated_adapters(&operands, &d_activated, group, adapters, next)
            {
                let GatedFactors { both, d_a, of_gate_up } =
                    self.gated_backward_low_rank(operands, activation, &d_activated, found);
                (adapters.d_a, next.prepared) = (Some(d_a), Some(of_gate_up));
                return (both, None);
            }
            self.gated_backward_of(operands, activation, &d_activated, recompute)
        };
        (both, Some(activated.unwrap_or(d_activated)))
    }

    /// Returns the low-rank gradients of a group after a norm, and room for them times `1 / rms(x)`, if `dA` can be computed from the
    /// norm's input: only adapters train, their other operands are available, and the norm's result was not saved.
    fn scaled_rows(&self, group: &Routed<'_>, gradient: &OutputGradient, is_saved: bool) -> Option<ScaledRows> {
        let adapters = gradient.adapters.as_ref().filter(|adapters| adapters.has_b_gradients())?;
        if is_saved || !group.route.scales_low_rank {
            return None;
        }
        let low = adapters.d_low;
        let address = self.scratch.take(ScratchSlot::ScaledLowRank, low.bytes());
        Some(ScaledRows { low, to: DeviceBlock::dense(address, [low.rows, low.width], low.dtype) })
    }
}
