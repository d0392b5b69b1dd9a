//! Causal convolutions on CUDA. Kernels: `conv.cu`.
//!
//! Gradients are written as the column ranges that their inputs are, into rows with the same room after them, so that the backward of a projection
//! reads them where they are.
//! Trade-off: over a state, in generation, the reference body runs, and so it does for an odd number of channels.

use burn_tensor::{DType, Tensor};

use crate::backends::cuda::device::{Device, in_section};
use crate::backends::cuda::engine::{
    BlockArguments, Cuda, Launch, MatrixView, ScratchSlot, Source, arguments, grid_of, tensor,
};
use crate::conv::reference;
use crate::{ConvInputs, ConvOps, Documents, Session};

/// Channels of a block: two per thread.
const CHANNELS: usize = 256;
/// Tokens of a block in the forward.
const TOKENS: usize = 64;
/// The most blocks over tokens in the backward, whose sums are added up.
const MAX_SUMS: usize = 512;

/// Inputs of a launch; without gates the first two are null.
struct Operands {
    gates: Option<[MatrixView; 2]>,
    x: MatrixView,
    filters: MatrixView,
    boundaries: MatrixView,
}

impl ConvOps for Cuda {
    fn causal_conv(
        inputs: &ConvInputs<Self>,
        filters_dk: Tensor<Self, 2>,
        documents: &Documents<Self>,
    ) -> Tensor<Self, 2> {
        if !are_pairs(inputs) {
            return Self::pause(&inputs.x.device(), || reference::forward(inputs, filters_dk, documents));
        }
        in_section(&inputs.x.device(), |device| {
            let operands = device.conv_operands(inputs.clone(), filters_dk, documents);
            tensor(device.conv(&operands).tensor)
        })
    }

    fn causal_conv_backward(
        inputs: ConvInputs<Self>,
        filters_dk: Tensor<Self, 2>,
        dy_nd: Tensor<Self, 2>,
        documents: &Documents<Self>,
        filters_train: bool,
    ) -> (ConvInputs<Self>, Option<Tensor<Self, 2>>) {
        if !are_pairs(&inputs) {
            let work = || reference::backward(inputs, filters_dk, dy_nd.clone(), documents, filters_train);
            return Self::pause(&dy_nd.device(), work);
        }
        in_section(&dy_nd.device(), |device| {
            let operands = device.conv_operands(inputs, filters_dk, documents);
            device.conv_backward(&operands, &device.matrix(dy_nd), filters_train)
        })
    }
}

/// Returns whether channels come in pairs, as the kernels read them.
fn are_pairs(inputs: &ConvInputs<Cuda>) -> bool {
    inputs.x.dims()[1].is_multiple_of(2)
}

impl Operands {
    fn launch(&self, name: &'static str, tokens: usize, bytes: usize) -> Launch {
        let source = Source::Conv { width: self.filters.width, gated: self.gates.is_some() };
        let blocks = [self.x.width.div_ceil(CHANNELS), self.x.rows.div_ceil(tokens), 1];
        source.launch(self.x.dtype, name, grid_of(blocks, 128), bytes)
    }

    fn arguments(&self, before: firebrick_cuda::Arguments, tokens: usize) -> firebrick_cuda::Arguments {
        let address = |gate: usize| self.gates.as_ref().map_or(0, |gates| gates[gate].address);
        let stride = |gate: usize| self.gates.as_ref().map_or(0, |gates| gates[gate].stride);
        arguments! {
            before =>
            b: address(address(0)), c: address(address(1)), x: rows(&self.x), b_stride: long(stride(0)),
            c_stride: long(stride(1)), x_stride: long(self.x.stride), filters: rows(&self.filters),
            boundaries: rows(&self.boundaries), documents: int(self.boundaries.width - 1), n: int(self.x.rows),
            d: int(self.x.width), tokens: int(tokens),
        }
    }
}

impl Device {
    fn conv_operands(
        &self,
        inputs: ConvInputs<Cuda>,
        filters_dk: Tensor<Cuda, 2>,
        documents: &Documents<Cuda>,
    ) -> Operands {
        let x = self.matrix(inputs.x);
        let gates = inputs.gates.map(|gates| gates.map(|gate| self.matrix_as(gate, x.dtype)));
        let (filters, boundaries) = (self.flat(filters_dk), self.int_matrix(documents.cu_seqlens.clone()));
        assert_eq!((filters.rows, filters.dtype), (x.width, DType::F32), "a filter in f32 for each channel");
        let all = gates.iter().flatten().chain([&x]);
        for input in all {
            assert_eq!([input.rows, input.width], [x.rows, x.width], "inputs of a convolution have one shape");
            assert!(input.stride % 2 == 0, "rows of pairs of channels begin at pairs");
        }
        Operands { gates, x, filters, boundaries }
    }

    fn conv(&self, operands: &Operands) -> MatrixView {
        let x = &operands.x;
        let y = self.empty_matrix(x.rows, x.width, x.dtype);
        let bytes = (if operands.gates.is_some() { 4 } else { 2 }) * x.bytes();
        let launch = operands.launch("conv_forward", TOKENS, bytes);
        let arguments = operands.arguments(arguments! { y: rows(&y) }, TOKENS);
        // SAFETY: y is dense, the inputs are rows of its shape at even strides, filters are [d, width] f32, and boundaries ascend from 0 to n.
        unsafe { self.launch(launch, &arguments) };
        y
    }

    fn conv_backward(
        &self,
        operands: &Operands,
        dy: &MatrixView,
        filters_train: bool,
    ) -> (ConvInputs<Cuda>, Option<Tensor<Cuda, 2>>) {
        let Operands { gates, x, filters, .. } = operands;
        let parts = if gates.is_some() { 3 } else { 1 };
        let width = parts * x.width;
        let joined = self.empty_with_room([x.rows, width], x.stride.saturating_sub(width), x.dtype);
        let tokens = if filters_train { TOKENS.max(x.rows.div_ceil(MAX_SUMS)) } else { TOKENS };
        let blocks = x.rows.div_ceil(tokens);
        let count = filters.count();
        let partial = if filters_train { self.scratch.take(ScratchSlot::Partial, blocks * count * 4) } else { 0 };
        let [b, c] = [0, 1].map(|part| joined.columns(part * x.width * usize::from(parts == 3), x.width));
        let dx = joined.columns(width - x.width, x.width);
        let launch = operands.launch("conv_backward", tokens, (2 * parts + 1) * x.bytes());
        let arguments = arguments! {
            db: rows(&b), dc: rows(&c), dx: rows(&dx), d_stride: long(joined.stride), partial: address(partial),
            dy: rows(dy), dy_stride: long(dy.stride),
        };
        let arguments = operands.arguments(arguments, tokens);
        // SAFETY: as for the forward; gradients are columns of one buffer, dy has the shape of x at an even stride, and the partial sums are
        // [blocks, d, width] f32 or null.
        unsafe { self.launch(launch, &arguments) };
        let d_filters = filters_train.then(|| tensor(self.sum_partial_rows(partial, blocks, count)));
        let d_filters = d_filters.map(|sum: Tensor<Cuda, 1>| sum.reshape([filters.rows, filters.width]));
        let mut split = self.split(&joined, &vec![x.width; parts]);
        let x = split.pop().expect("the last part");
        (ConvInputs { gates: split.try_into().ok(), x }, d_filters)
    }
}
