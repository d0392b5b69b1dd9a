//! Dropout on the adapters' input on CUDA. Kernel: `dropout` in `elementwise.cu`.
//!
//! The mask is never stored: each pass over the input recomputes it from its key. The gradient of a group's input is
//! then not one GEMM: the adapters' part goes through the mask and is added afterwards.
//! Trade-off: two more passes over the input of a group forward, and seven backward.

use burn_tensor::Tensor;

use crate::backends::cuda::device::Device;
use crate::backends::cuda::engine::{
    BlockArguments, Cuda, DeviceBlock, ScratchSlot, Source, arguments, rows_and_columns, tensor,
};
use crate::{Group, Mask};

impl Device {
    /// Returns the adapters' input: `x` itself, or under dropout its masked copy in scratch memory.
    pub(crate) fn adapter_input(&self, x: DeviceBlock, group: &Group<Cuda>) -> DeviceBlock {
        let Some(mask) = &group.dropout else { return x };
        let dropped = self.masked_block(x);
        self.drop_values(x, mask, dropped, false);
        dropped
    }

    /// Returns `x` with dropped values set to zero and the others scaled, as a tensor.
    pub(crate) fn dropped(&self, x: Tensor<Cuda, 2>, mask: &Mask<Cuda>) -> Tensor<Cuda, 2> {
        let x = self.matrix(x);
        let y = self.empty_matrix(x.rows, x.width, x.dtype);
        self.drop_values(x.block, mask, y.block, false);
        tensor(y.tensor)
    }

    /// Returns scratch memory for masked values of this shape.
    pub(crate) fn masked_block(&self, like: DeviceBlock) -> DeviceBlock {
        let address = self.scratch.take(ScratchSlot::Masked, like.rows * like.width * like.dtype.size());
        DeviceBlock::dense(address, [like.rows, like.width], like.dtype)
    }

    /// Writes `x` with dropped values set to zero and the others scaled to `to`, or adds it.
    pub(crate) fn drop_values(&self, x: DeviceBlock, mask: &Mask<Cuda>, to: DeviceBlock, adds: bool) {
        assert!((x.rows, x.width, x.dtype) == (to.rows, to.width, to.dtype), "values are dropped where they lie");
        let bytes = (2 + usize::from(adds)) * x.bytes();
        let launch = Source::Elementwise.launch(x.dtype, "dropout", rows_and_columns(x.rows, x.width), bytes);
        let Mask { dropout, choices } = mask;
        let [first_token, first_row, row_len] = dropout.place();
        let (choices, per_token) = choices
            .as_ref()
            .map_or((0, 1), |choices| (self.address(&choices.rows.clone().into_primitive()), choices.per_token));
        let arguments = arguments! {
            y: rows(&to), y_stride: long(to.stride), x: rows(&x), x_stride: long(x.stride),
            key: i64(dropout.key() as i64), first_token: i64(first_token as i64), first_row: i64(first_row as i64), row_len: i64(row_len as i64),
            choices: address(choices), per_token: int(per_token),
            scale: f32(dropout.scale()), threshold: i32(dropout.threshold() as i32), adds: i32(i32::from(adds)), n: long(x.rows), d: int(x.width),
        };
        // SAFETY: both blocks are [rows, width] of this dtype at the strides given; there is a choice for each row, or none at all.
        unsafe { self.launch(launch, &arguments) };
    }
}
