//! The gated activation `activation(gate) * up` on CUDA. Kernels: `gated.cu`.

use burn_tensor::Tensor;
use firebrick_arch::Activation;
use firebrick_cuda::Arguments;

use crate::backends::cuda::device::Device;
use crate::backends::cuda::engine::{
    BlockArguments, Cuda, DeviceBlock, MatrixView, Source, arguments, float, rows_and_columns,
};

pub(crate) struct GatedOperands {
    /// Gate, up, and their gradients.
    pub blocks: [DeviceBlock; 4],
    /// The owner of the gradients' memory.
    pub target: MatrixView,
    /// The owners of gate and up until the launch, if they differ from `target`.
    _inputs: Vec<MatrixView>,
}

impl GatedOperands {
    /// Appends all of them, except for the sizes, to other arguments.
    pub(crate) fn arguments(&self, arguments: Arguments, dy: &MatrixView, recompute: bool) -> Arguments {
        let [gate, up, d_gate, d_up] = self.blocks;
        let gradients = arguments! {
            arguments => dgate: rows(&d_gate), dup: rows(&d_up), d_stride: long(self.target.stride),
        };
        arguments! {
            gate_and_up(gradients, [gate, up]) =>
            dy: rows(dy), y: address(if recompute { dy.address } else { 0 }), y_stride: long(dy.stride),
        }
    }
}

/// Appends gate and up to other arguments, as every gated kernel reads them: both addresses, then both strides.
pub(super) fn gate_and_up(arguments: Arguments, [gate, up]: [DeviceBlock; 2]) -> Arguments {
    arguments! {
        arguments =>
        gate: rows(&gate), up: rows(&up), gate_stride: long(gate.stride), up_stride: long(up.stride),
    }
}

impl Device {
    /// Computes `activation(gate) * up`, in rows with `room` columns after them.
    pub(crate) fn gated(&self, gate: &MatrixView, up: &MatrixView, activation: Activation, room: usize) -> MatrixView {
        assert!(gate.rows == up.rows && gate.width == up.width && gate.dtype == up.dtype, "gate and up have one shape");
        let y = self.empty_with_room([gate.rows, gate.width], room, gate.dtype);
        let shape = rows_and_columns(gate.rows, gate.width);
        let launch = Source::Gated(activation).launch(gate.dtype, "gated", shape, 3 * gate.bytes());
        let arguments = arguments! { y: rows(&y), y_stride: long(y.stride) };
        let arguments = gate_and_up(arguments, [gate.block, up.block]);
        let arguments = arguments! { arguments => n: long(gate.rows), f: int(gate.width) };
        // SAFETY: y, gate and up have the strides given and are [rows, width] of this dtype.
        unsafe { self.launch(launch, &arguments) };
        y
    }

    /// Computes the gradients of gate and up side by side, in place if their memory is not shared; with `recompute`,
    /// overwrites `dy` with `activation(gate) * up`.
    pub(super) fn gated_backward(
        &self,
        gate: Tensor<Cuda, 2>,
        up: Tensor<Cuda, 2>,
        activation: Activation,
        dy: &MatrixView,
        recompute: bool,
    ) -> MatrixView {
        self.gated_backward_of(self.gated_operands(gate, up, dy), activation, dy, recompute)
    }

    pub(super) fn gated_backward_of(
        &self,
        operands: GatedOperands,
        activation: Activation,
        dy: &MatrixView,
        recompute: bool,
    ) -> MatrixView {
        let [gate, ..] = operands.blocks;
        let shape = rows_and_columns(gate.rows, gate.width);
        let bytes = (5 + usize::from(recompute)) * gate.bytes();
        let launch = Source::Gated(activation).launch(gate.dtype, "gated_backward", shape, bytes);
        let arguments = operands.arguments(arguments! {}, dy, recompute);
        let arguments = arguments! { arguments => n: long(gate.rows), f: int(gate.width) };
        // SAFETY: the target has room for both gradients side by side; inputs have the strides given; dy has its stride.
        unsafe { self.launch(launch, &arguments) };
        operands.target
    }

    /// Lays out the operands and targets of a gated activation's backward.
    pub(super) fn gated_operands(&self, gate: Tensor<Cuda, 2>, up: Tensor<Cuda, 2>, dy: &MatrixView) -> GatedOperands {
        let inputs = [self.view_of(float(gate)), self.view_of(float(up))];
        let [gate, up] = [inputs[0].block, inputs[1].block];
        assert!(gate.count() == up.count() && dy.count() == gate.count(), "gate, up and dy: one shape");
        let (target, inputs) = self.gradient_target(inputs);
        let [d_gate, d_up] = [0, gate.width].map(|start| target.block.columns(start, gate.width));
        GatedOperands { blocks: [gate, up, d_gate, d_up], target, _inputs: inputs }
    }

    /// Returns the destination of both gradients, and the owners to hold until they are written. Overwriting the inputs halves the
    /// widest point of a layer's backward, but requires that these two views are the only users of their buffer.
    fn gradient_target(&self, inputs: [MatrixView; 2]) -> (MatrixView, Vec<MatrixView>) {
        let (rows, width, dtype) = (inputs[0].rows, inputs[0].width, inputs[0].dtype);
        if !self.are_adjacent(&inputs) {
            return (self.empty_matrix(rows, 2 * width, dtype), inputs.into());
        }
        // Joining drops the second view, so that one handle remains if the buffer is not shared.
        let whole = self.adjacent_columns(inputs.into());
        if self.is_unshared(&whole.tensor) {
            (whole, Vec::new())
        } else {
            (self.empty_matrix(rows, 2 * width, dtype), vec![whole])
        }
    }
}
