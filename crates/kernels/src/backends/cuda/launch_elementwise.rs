//! Launches over flat values: sums, casts, fills, and copies that lay tensors out anew.

#![allow(unsafe_code, reason = "launching device work is unsafe; the launch files are where it is answered for")]

use burn_tensor::{DType, TensorMetadata};
use firebrick_cuda::{Arguments, LaunchShape};

use super::engine::Engine;
use super::launch::Launch;
use super::launch_rows::{at, grid};
use super::program::Source;
use super::tensor::{Matrix, Primitive, address};

/// A grid that walks `count` values fast.
fn flat_grid(count: usize) -> LaunchShape {
    grid(count.div_ceil(4096), 256)
}

/// A block for rows of `width` values, eight a thread.
fn row_grid(rows: usize, width: usize) -> LaunchShape {
    grid(rows, width.div_ceil(8).next_multiple_of(32).clamp(32, 256) as u32)
}

fn elementwise(name: &'static str, dtype: DType, shape: LaunchShape, bytes: usize) -> Launch {
    Launch { source: Source::Elementwise, dtype, name, shape, bytes }
}

impl Engine {
    /// Converts `count` values between f32 and a half format (or copies f32), times a scale.
    pub(super) fn cast(&self, from: u64, from_dtype: DType, to: u64, to_dtype: DType, count: usize, scale: f32) {
        let (name, dtype) = match (from_dtype, to_dtype) {
            (DType::F32, _) => ("cast_f32_to_t", to_dtype),
            (_, DType::F32) => ("cast_t_to_f32", from_dtype),
            (from, to) => unreachable!("no conversion from {from:?} to {to:?} is asked for"),
        };
        assert!(scale == 1.0 || name == "cast_f32_to_t", "only values in f32 are scaled while they are converted");
        let pointers = Arguments::new().pointer(at(to)).pointer(at(from));
        let pointers = if name == "cast_f32_to_t" { pointers.f32(scale) } else { pointers };
        let bytes = count * (from_dtype.size() + to_dtype.size());
        // SAFETY: both addresses hold `count` values of their formats.
        unsafe { self.launch(elementwise(name, dtype, flat_grid(count), bytes), &pointers.i64(count as i64)) };
    }

    /// `sum += values`, f32.
    pub(super) fn accumulate(&self, sum: u64, values: u64, count: usize) {
        let arguments = Arguments::new().pointer(at(sum)).pointer(at(values)).i64(count as i64);
        // SAFETY: both hold `count` f32.
        unsafe { self.launch(elementwise("accumulate_f32", DType::F32, flat_grid(count), 12 * count), &arguments) };
    }

    /// Sets `count` f32.
    pub(super) fn fill(&self, to: u64, count: usize, value: f32) {
        let arguments = Arguments::new().pointer(at(to)).f32(value).i64(count as i64);
        // SAFETY: the address holds `count` f32.
        unsafe { self.launch(elementwise("fill_f32", DType::F32, flat_grid(count), 4 * count), &arguments) };
    }

    /// Sets bytes to zero.
    pub(super) fn fill_zero(&self, to: u64, bytes: usize) {
        let arguments = Arguments::new().pointer(at(to)).i64(bytes as i64);
        let shape = grid(bytes.div_ceil(16_384), 256);
        // SAFETY: the address holds that many bytes.
        unsafe { self.launch(elementwise("fill_zero", DType::F32, shape, bytes), &arguments) };
    }

    /// Rows of `x` in the order of `rows` (`count` i32), to `to`.
    pub(super) fn gather_rows(&self, x: &Matrix, rows: u64, count: usize, to: u64) {
        let arguments = Arguments::new()
            .pointer(at(to))
            .pointer(at(x.address))
            .pointer(at(rows))
            .i32(count as i32)
            .i32(x.width as i32);
        let bytes = 2 * count * x.width * x.element_bytes();
        // SAFETY: x is dense, the row numbers lie in it, and the target holds `count` rows.
        unsafe { self.launch(elementwise("gather_rows", x.dtype, row_grid(count, x.width), bytes), &arguments) };
    }

    /// The inverse: rows of `from` to their places in `y`, zeros elsewhere.
    pub(super) fn scatter_rows(&self, y: &Matrix, from: u64, rows: u64, count: usize) {
        let arguments = Arguments::new()
            .pointer(at(y.address))
            .pointer(at(from))
            .pointer(at(rows))
            .i32(count as i32)
            .i64(y.rows as i64)
            .i32(y.width as i32);
        let bytes = (count + y.rows) * y.width * y.element_bytes();
        // SAFETY: y is dense; the row numbers rise and lie in it; the source holds `count` rows.
        unsafe { self.launch(elementwise("scatter_rows", y.dtype, row_grid(y.rows, y.width), bytes), &arguments) };
    }

    /// Copies rows of a matrix to rows at `to` that are `stride` values apart.
    pub(super) fn copy_rows(&self, from: &Matrix, to: u64, stride: usize) {
        let element = from.element_bytes();
        let arguments = Arguments::new()
            .pointer(at(to))
            .i64((stride * element) as i64)
            .pointer(at(from.address))
            .i64((from.stride * element) as i64)
            .i64(from.rows as i64)
            .i64((from.width * element) as i64);
        let launch = Launch {
            source: Source::Copy,
            dtype: DType::F32,
            name: "copy_rows",
            shape: grid(from.rows, 256),
            bytes: 2 * from.rows * from.width * element,
        };
        // SAFETY: the matrix has the stride given; the target has as many rows of at least its width.
        unsafe { self.launch(launch, &arguments) };
    }

    /// A contiguous copy of any tensor of up to four axes, kept until the section ends.
    pub(super) fn contiguous(&self, primitive: Primitive) -> Primitive {
        let copy = self.copied(primitive);
        self.keep(&copy);
        copy
    }

    /// A contiguous copy that the caller owns.
    fn copied(&self, primitive: Primitive) -> Primitive {
        let copy = self.empty(primitive.shape(), primitive.dtype);
        let shape: Vec<usize> = primitive.shape().to_vec();
        assert!(shape.len() <= 4, "tensors of ours have at most four axes, got {shape:?}");
        let count: usize = shape.iter().product();
        let padded = |values: &[usize], fill: usize| {
            let mut four = [fill; 4];
            four[4 - values.len()..].copy_from_slice(values);
            four.map(|value| value as i64)
        };
        let element = primitive.dtype.size();
        let mut arguments =
            Arguments::new().pointer(at(address(&copy))).pointer(at(address(&primitive))).i32(element as i32);
        for value in padded(&shape, 1).into_iter().chain(padded(primitive.meta.strides(), 0)) {
            arguments = arguments.i64(value);
        }
        let launch = elementwise("copy_strided", DType::F32, grid(count.div_ceil(1024), 256), 2 * count * element);
        // SAFETY: source strides are the tensor's own; the copy is contiguous and of the same shape and element size.
        unsafe { self.launch(launch, &arguments) };
        copy
    }

    /// A tensor that may be written in place: itself where nobody else holds it, a copy otherwise.
    pub(super) fn owned(&self, primitive: Primitive) -> Primitive {
        if primitive.is_contiguous() && primitive.handle.can_mut() { primitive } else { self.copied(primitive) }
    }
}
