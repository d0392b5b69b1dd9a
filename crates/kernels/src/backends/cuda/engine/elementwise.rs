//! Kernels over flat values and rows: sums, casts, fills, gathers, layout copies, and sums over rows in a fixed order,
//! as gradients of biases and norm weights need. Kernels: `elementwise.cu`, `columns.cu`.
//! Trade-off: copies of strided tensors are not tuned, because no training step needs one. A sum over rows takes two
//! launches instead of atomic additions, whose order would change from run to run.

use burn_tensor::{DType, TensorMetadata};
use firebrick_cuda::LaunchShape;

use super::Engine;
use super::constants::{NARROW_BYTES, SUMMED_COLUMNS};
use super::launch::{BlockArguments, arguments, grid, grid_of};
use super::matrix::{DeviceBlock, Primitive};
use super::program::Source;
use super::scratch::ScratchSlot;

fn flat_grid(count: usize) -> LaunchShape {
    grid(count.div_ceil(4096), 256)
}

const BLOCK_ROWS: usize = 64;

impl Engine {
    /// Converts dense values between f32 and a half format (or copies values within a format). Only f32 can be scaled.
    pub(crate) fn cast(&self, from: DeviceBlock, to: DeviceBlock, scale: f32) {
        assert!(from.is_dense() && to.is_dense() && from.count() == to.count(), "values are cast as they lie");
        if from.dtype == to.dtype && from.dtype != DType::F32 {
            self.copy_rows(from, to);
            return;
        }
        let (name, dtype) = match (from.dtype, to.dtype) {
            (DType::F32, _) => ("cast_f32_to_t", to.dtype),
            (_, DType::F32) => ("cast_t_to_f32", from.dtype),
            (from, to) => unreachable!("no operation converts {from:?} to {to:?}"),
        };
        assert!(scale == 1.0 || name == "cast_f32_to_t", "only f32 values are scaled while they are converted");
        let pointers = arguments! { y: rows(&to), x: rows(&from) };
        let scaled = match name {
            "cast_f32_to_t" => arguments! { pointers => scale: f32(scale) },
            _ => pointers,
        };
        let launch = Source::Elementwise.launch(dtype, name, flat_grid(from.count()), from.bytes() + to.bytes());
        // SAFETY: both blocks are dense and hold the same number of values of their formats.
        unsafe { self.launch(launch, &arguments! { scaled => n: long(from.count()) }) };
    }

    /// Computes `to = from * factor`, in one format.
    pub(crate) fn scale(&self, from: DeviceBlock, to: DeviceBlock, factor: f32) {
        assert!(from.is_dense() && to.is_dense() && from.count() == to.count(), "values are scaled as they lie");
        assert_eq!(from.dtype, to.dtype, "values are scaled in their format");
        let arguments = arguments! { y: rows(&to), x: rows(&from), scale: f32(factor), n: long(from.count()) };
        let launch = Source::Elementwise.launch(to.dtype, "scaled", flat_grid(from.count()), 2 * from.bytes());
        // SAFETY: both blocks are dense and hold the same number of values of this format.
        unsafe { self.launch(launch, &arguments) };
    }

    /// Computes `sum += values`: f32, or bf16 with values in either format.
    pub(crate) fn add_to(&self, sum: DeviceBlock, values: DeviceBlock) {
        assert!(sum.is_dense() && values.is_dense() && sum.count() == values.count(), "values are added as they lie");
        let name = match (sum.dtype, values.dtype) {
            (DType::F32, DType::F32) => "accumulate_f32",
            (DType::BF16, DType::F32) => "accumulate_f32_to_t",
            (DType::BF16, DType::BF16) => "accumulate_t",
            (sum, values) => unreachable!("no gradient in {values:?} is added to a sum in {sum:?}"),
        };
        let arguments = arguments! { y: rows(&sum), x: rows(&values), n: long(sum.count()) };
        let bytes = 2 * sum.bytes() + values.bytes();
        // SAFETY: both are dense and hold as many values, of their formats.
        unsafe { self.launch(Source::Elementwise.launch(sum.dtype, name, flat_grid(sum.count()), bytes), &arguments) };
    }

    pub(crate) fn fill(&self, to: DeviceBlock, value: f32) {
        assert!(to.is_dense() && to.dtype == DType::F32, "fills are of dense f32");
        let arguments = arguments! { y: rows(&to), value: f32(value), n: long(to.count()) };
        // SAFETY: the block is dense and of f32.
        unsafe {
            self.launch(
                Source::Elementwise.launch(DType::F32, "fill_f32", flat_grid(to.count()), to.bytes()),
                &arguments,
            )
        };
    }

    pub(crate) fn fill_zero(&self, to: DeviceBlock) {
        assert!(to.is_dense(), "fills are of dense values");
        let arguments = arguments! { y: rows(&to), n: long(to.bytes()) };
        let shape = grid(to.bytes().div_ceil(16_384), 256);
        // SAFETY: the block is dense and has that many bytes.
        unsafe { self.launch(Source::Elementwise.launch(DType::F32, "fill_zero", shape, to.bytes()), &arguments) };
    }

    /// Copies the rows of `x` that `rows` names (i32, one per row of `to`) to `to`.
    pub(crate) fn gather_rows(&self, x: DeviceBlock, rows: u64, to: DeviceBlock) {
        self.move_rows("gather_rows", x, rows, to, to.rows);
    }

    /// Copies each row of `from` to the row of `y` that `rows` names, the inverse of `gather_rows`. Other rows of `y` do not change.
    pub(crate) fn scatter_rows(&self, from: DeviceBlock, rows: u64, y: DeviceBlock) {
        self.move_rows("scatter_rows", from, rows, y, from.rows);
    }

    fn move_rows(&self, name: &'static str, from: DeviceBlock, rows: u64, to: DeviceBlock, count: usize) {
        assert!(from.is_dense() && to.is_dense() && from.dtype == to.dtype && from.width == to.width, "{name}: layout");
        let arguments = arguments! {
            y: rows(&to), x: rows(&from), rows: address(rows), m: int(count), d: int(to.width),
        };
        let bytes = 2 * count * to.width * to.dtype.size();
        // Eight values per thread.
        let shape = grid(count, to.width.div_ceil(8).next_multiple_of(32).clamp(32, 256) as u32);
        // SAFETY: both are dense; the row numbers, `count` of them, lie in the side that has more rows.
        unsafe { self.launch(Source::Elementwise.launch(to.dtype, name, shape, bytes), &arguments) };
    }

    pub(crate) fn copy_rows(&self, from: DeviceBlock, to: DeviceBlock) {
        assert!(
            from.dtype == to.dtype && from.rows == to.rows && from.width == to.width,
            "rows are copied as they are"
        );
        let element = from.dtype.size();
        let arguments = arguments! {
            y: rows(&to), y_stride: long(to.stride * element), x: rows(&from), x_stride: long(from.stride * element),
            rows: long(from.rows), bytes: long(from.width * element),
        };
        // Each block copies several narrow rows.
        let bytes = [from.width, from.stride, to.stride].map(|values| values * element);
        let is_in_vectors =
            bytes.iter().all(|bytes| bytes.is_multiple_of(16)) && (from.address | to.address).is_multiple_of(16);
        let blocks = if is_in_vectors && bytes[0] < NARROW_BYTES { from.bytes().div_ceil(16_384) } else { from.rows };
        let launch = Source::Elementwise.launch(DType::F32, "copy_rows", grid(blocks, 256), 2 * from.bytes());
        // SAFETY: both blocks have the same rows and width, at the strides given.
        unsafe { self.launch(launch, &arguments) };
    }

    /// Returns a contiguous copy of any tensor with up to four axes.
    pub(crate) fn contiguous(&self, primitive: &Primitive) -> Primitive {
        let copy = self.empty(primitive.shape(), primitive.dtype);
        let shape: Vec<usize> = primitive.shape().to_vec();
        assert!(shape.len() <= 4, "tensors of ours have at most four axes, got {shape:?}");
        let count: usize = shape.iter().product();
        let padded = |values: &[usize], fill: usize| {
            let mut four = [fill; 4];
            four[4 - values.len()..].copy_from_slice(values);
            four
        };
        let element = primitive.dtype.size();
        let (to, from) = (self.address(&copy), self.address(primitive));
        let (size, stride) = (padded(&shape, 1), padded(primitive.meta.strides(), 0));
        let arguments = arguments! {
            y: address(to), x: address(from), element_bytes: int(element), size0: long(size[0]), size1: long(size[1]),
            size2: long(size[2]), size3: long(size[3]), stride0: long(stride[0]), stride1: long(stride[1]),
            stride2: long(stride[2]), stride3: long(stride[3]),
        };
        let launch = Source::Elementwise.launch(
            DType::F32,
            "copy_strided",
            grid(count.div_ceil(1024), 256),
            2 * count * element,
        );
        // SAFETY: source strides are the tensor's own; the copy is contiguous and of the same shape and element size.
        unsafe { self.launch(launch, &arguments) };
        copy
    }

    /// Returns a tensor that may be written in place: the same one if its memory is not shared, else a copy.
    pub(crate) fn owned(&self, primitive: Primitive) -> Primitive {
        let is_owned = primitive.is_contiguous() && self.is_unshared(&primitive);
        if is_owned { primitive } else { self.contiguous(&primitive) }
    }

    /// Sums the columns of `x`, `[width]` f32.
    pub(crate) fn column_sums(&self, x: DeviceBlock) -> Primitive {
        let across = x.width.div_ceil(SUMMED_COLUMNS);
        let parts = x.rows.div_ceil(BLOCK_ROWS).clamp(1, (4 * self.multiprocessors).div_ceil(across));
        let partial = self.scratch.take(ScratchSlot::Partial, parts * x.width * 4);
        let shape = grid_of([across, parts, 1], 256);
        let launch = Source::Columns.launch(x.dtype, "column_sums", shape, x.bytes());
        let arguments = arguments! {
            partial: address(partial), x: rows(&x), stride: long(x.stride), n: long(x.rows), d: int(x.width),
        };
        // SAFETY: x has the rows, width and stride given; the partial sums are [parts, width] f32.
        unsafe { self.launch(launch, &arguments) };
        self.sum_partial_rows(partial, parts, x.width)
    }

    /// Sums the columns of `[rows, width]` f32 partial sums.
    pub(crate) fn sum_partial_rows(&self, partial: u64, rows: usize, width: usize) -> Primitive {
        let out = self.empty([width], DType::F32);
        let bytes = rows * width * 4;
        let launch = Source::Columns.launch(DType::F32, "sum_partial_rows", grid(width.div_ceil(32), 256), bytes);
        let arguments = arguments! {
            out: address(self.address(&out)), partial: address(partial), rows: int(rows), d: int(width),
        };
        // SAFETY: out is [width] and the partial sums are [rows, width], both f32.
        unsafe { self.launch(launch, &arguments) };
        out
    }
}
