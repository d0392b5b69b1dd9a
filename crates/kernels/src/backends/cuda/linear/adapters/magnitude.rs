//! DoRA on CUDA: outputs of a group times `m / norm`, their backward, and the norms. Kernels: `magnitude.cu`.
//!
//! A group's GEMMs run as without magnitudes, into separate memory; one pass per module then scales the columns and adds bias and residual, which
//! otherwise the GEMMs add. In the backward, one pass per module computes the gradients of the unscaled outputs and of the magnitudes, and the rest
//! continues from there. Under dropout `y = c (W + s B A) x̃ + W (x - x̃) + bias` with `c = m / norm`: PEFT's formula in two GEMMs.
//! Trade-off: two more passes over the outputs, which are saved once more; under dropout, two GEMMs with the weight.

use burn_tensor::{DType, Tensor};

use crate::backends::cuda::device::Device;
use crate::backends::cuda::engine::{
    BlockArguments, Cuda, DeviceBlock, Gemm, MatrixView, Primitive, ScratchSlot, Source, arguments, grid, grid_of,
    rows_and_columns, tensor,
};
use crate::backends::cuda::linear::modules::Routed;
use crate::backends::planning::route::WeightRoute;
use crate::{Adapter, Group, Magnitude, Module, Prologue, Weight};

/// Columns per block of `scale_columns_backward`.
const BLOCK_COLUMNS: usize = 256;
/// Minimum number of rows that one of its blocks sums.
const BLOCK_ROWS: usize = 64;

/// Returns the group for its GEMMs: without magnitudes, biases and dropout, and optionally without adapters.
fn bare(group: &Group<Cuda>, with_adapters: bool) -> Group<Cuda> {
    let adapter = |adapter: Adapter<Cuda>| Adapter { magnitude: None, ..adapter };
    let module = |module: &Module<Cuda>| Module {
        bias: None,
        adapter: module.adapter.clone().filter(|_| with_adapters).map(adapter),
        ..module.clone()
    };
    Group { modules: group.modules.iter().map(module).collect(), dropout: None, ..group.clone() }
}

/// The gradients of a group's unscaled outputs and of its magnitudes.
pub(crate) struct Unscaled {
    /// `c dy`, in rows with room for the adapters.
    pub dy: MatrixView,
    /// Gradients of the magnitudes, one per module.
    pub d_magnitudes: Vec<Option<Primitive>>,
}

impl Device {
    /// Writes all outputs of a group with magnitudes, plus a residual, to `out`. Returns the unscaled outputs.
    pub(crate) fn magnitude_forward(
        &self,
        x: DeviceBlock,
        group: &Routed<'_>,
        residual: Option<DeviceBlock>,
        out: DeviceBlock,
    ) -> MatrixView {
        assert!(group.route.weight != WeightRoute::Codes, "the plan refuses fp8 with DoRA");
        let unscaled = self.unscaled(x, group);
        let mut plus = residual;
        if group.dropout.is_some() {
            let rest = self.empty_matrix(x.rows, x.width, x.dtype);
            self.subtract(x, self.adapter_input(x, group), rest.block);
            self.bare_forward(rest.block, group, false, residual, out);
            plus = Some(out);
        }
        let biases = self.biases(group, x.dtype);
        for module in &group.modules {
            let part = |whole: DeviceBlock| whole.column_range(&module.columns);
            self.scale_columns(
                part(unscaled.block),
                module.magnitude(),
                biases.filter(|_| module.bias.is_some()).map(part),
                plus.map(part),
                part(out),
            );
        }
        unscaled
    }

    /// Computes `(W + s B A) x̃` of all modules. Without dropout `x` has room for the appended columns.
    pub(crate) fn unscaled(&self, x: DeviceBlock, group: &Routed<'_>) -> MatrixView {
        let unscaled = self.empty_matrix(x.rows, group.out_features(), x.dtype);
        match &group.dropout {
            None => self.bare_forward(x, group, true, None, unscaled.block),
            Some(mask) => {
                let dropped = self.empty_with_room([x.rows, x.width], group.route.room(), x.dtype);
                self.drop_values(x, mask, dropped.block, false);
                self.bare_forward(dropped.block, group, true, None, unscaled.block);
            }
        }
        unscaled
    }

    /// Writes all outputs of the [`bare`] group, plus a residual, to `out`.
    fn bare_forward(
        &self,
        x: DeviceBlock,
        group: &Routed<'_>,
        with_adapters: bool,
        residual: Option<DeviceBlock>,
        out: DeviceBlock,
    ) {
        let bare = bare(group, with_adapters);
        self.group_forward(x.into(), &self.routed(&bare, x.dtype), residual, out);
    }

    /// Recomputes a group's unscaled outputs if the forward did not save them; also returns its GEMMs' input.
    pub(crate) fn recompute_unscaled(
        &self,
        prologue: &Prologue<Cuda>,
        prologue_output: Option<MatrixView>,
        group: &Routed<'_>,
    ) -> (MatrixView, Option<MatrixView>) {
        let room = group.route.room();
        let copied = |x: MatrixView| {
            let copy = self.empty_with_room([x.rows, x.width], room, x.dtype);
            self.copy_rows(x.block, copy.block);
            copy
        };
        let input = match (prologue, prologue_output) {
            (_, Some(output)) => copied(output),
            (Prologue::None { x }, None) => {
                let x = copied(self.matrix(x.clone()));
                return (self.unscaled(x.block, group), None);
            }
            (Prologue::Norm { x, norm }, None) => self.rms_norm(&self.flat(x.clone()), norm, room),
            (Prologue::Gated { gate, up, activation }, None) => {
                self.gated(&self.matrix(gate.clone()), &self.matrix(up.clone()), *activation, room)
            }
        };
        (self.unscaled(input.block, group), Some(input))
    }

    /// Computes the gradients of the unscaled outputs and of the magnitudes from that of a group's outputs.
    pub(crate) fn magnitude_backward(&self, dy: DeviceBlock, unscaled: DeviceBlock, group: &Routed<'_>) -> Unscaled {
        let scaled = self.empty_with_room([dy.rows, dy.width], group.route.room(), dy.dtype);
        let of_module = |module: &Module<Cuda>| {
            let part = |whole: DeviceBlock| whole.column_range(&module.columns);
            match module.magnitude() {
                Some(magnitude) => {
                    Some(self.scale_columns_backward(part(dy), part(unscaled), magnitude, part(scaled.block)))
                }
                None => {
                    self.copy_rows(part(dy), part(scaled.block));
                    None
                }
            }
        };
        let d_magnitudes = group.modules.iter().map(of_module).collect();
        Unscaled { dy: scaled, d_magnitudes }
    }

    /// Writes `m / norm z + bias + plus` to `out`; without magnitudes `z + bias + plus`.
    fn scale_columns(
        &self,
        z: DeviceBlock,
        magnitude: Option<&Magnitude<Cuda>>,
        bias: Option<DeviceBlock>,
        plus: Option<DeviceBlock>,
        out: DeviceBlock,
    ) {
        let vectors = magnitude.map(|m| [&m.value, &m.norm].map(|values| self.flat(values.clone())));
        let [m, norm] = vectors.as_ref().map_or([0; 2], |[m, norm]| [m.address, norm.address]);
        let arguments = arguments! {
            out: rows(&out), out_stride: long(out.stride), z: rows(&z), z_stride: long(z.stride), m: address(m),
            norm: address(norm), bias: address(bias.map_or(0, |bias| bias.address)),
            plus: address(plus.map_or(0, |plus| plus.address)), plus_stride: long(plus.map_or(0, |plus| plus.stride)),
            n: long(z.rows), d: int(z.width),
        };
        let bytes = (2 + usize::from(plus.is_some())) * z.bytes();
        let launch = Source::Magnitude.launch(z.dtype, "scale_columns", rows_and_columns(z.rows, z.width), bytes);
        // SAFETY: all blocks are [rows, width] of one dtype at the strides given, bias, magnitudes and norms [width]; absent ones are null.
        unsafe { self.launch(launch, &arguments) };
    }

    /// Writes `c dy` to `scaled`, and returns the gradient of the magnitudes.
    fn scale_columns_backward(
        &self,
        dy: DeviceBlock,
        unscaled: DeviceBlock,
        magnitude: &Magnitude<Cuda>,
        scaled: DeviceBlock,
    ) -> Primitive {
        let [m, norm] = [&magnitude.value, &magnitude.norm].map(|values| self.flat(values.clone()));
        let across = dy.width.div_ceil(BLOCK_COLUMNS);
        let parts = dy.rows.div_ceil(BLOCK_ROWS).clamp(1, (4 * self.multiprocessors).div_ceil(across));
        let partial = self.scratch.take(ScratchSlot::Partial, parts * dy.width * 4);
        let arguments = arguments! {
            partial: address(partial), dz: rows(&scaled), dz_stride: long(scaled.stride), dy: rows(&dy),
            dy_stride: long(dy.stride), z: rows(&unscaled), z_stride: long(unscaled.stride), m: rows(&m),
            norm: rows(&norm), n: long(dy.rows), d: int(dy.width),
        };
        let shape = grid_of([across, parts, 1], 256);
        let launch = Source::Magnitude.launch(dy.dtype, "scale_columns_backward", shape, 3 * dy.bytes());
        // SAFETY: the blocks are [rows, width] of one dtype at the strides given; the partial sums are [parts, width] f32.
        unsafe { self.launch(launch, &arguments) };
        self.sum_partial_rows(partial, parts, dy.width)
    }

    pub(crate) fn subtract(&self, a: DeviceBlock, b: DeviceBlock, to: DeviceBlock) {
        assert!((a.rows, a.width, a.dtype) == (b.rows, b.width, b.dtype), "differences are of equal shapes");
        assert!((a.rows, a.width, a.dtype) == (to.rows, to.width, to.dtype), "differences lie in equal shapes");
        let arguments = arguments! {
            y: rows(&to), y_stride: long(to.stride), a: rows(&a), a_stride: long(a.stride), b: rows(&b),
            b_stride: long(b.stride), n: long(a.rows), d: int(a.width),
        };
        let launch =
            Source::Magnitude.launch(a.dtype, "subtract_rows", rows_and_columns(a.rows, a.width), 3 * a.bytes());
        // SAFETY: all blocks are [rows, width] of one dtype at the strides given.
        unsafe { self.launch(launch, &arguments) };
    }

    /// Sums the squares of each row of a weight, `[o]` f32.
    pub(crate) fn row_squares(&self, weight: &Weight<Cuda>, dtype: DType) -> Primitive {
        let weight = self.base_weight(weight, dtype);
        let block = weight.block;
        let out = self.empty([block.rows], DType::F32);
        let arguments = arguments! {
            out: address(self.address(&out)), x: rows(&block), stride: long(block.stride), n: long(block.rows),
            d: int(block.width),
        };
        // SAFETY: the weight has these rows at its stride; `out` has a value for each.
        unsafe {
            self.launch(
                Source::Magnitude.launch(dtype, "row_squares", grid(block.rows, 256), block.bytes()),
                &arguments,
            )
        };
        out
    }

    /// Computes the norm of each row of `W + s B A`, `[o]` f32: one GEMM with A reads the weight, whatever its format.
    pub(crate) fn adapted_norms(
        &self,
        weight: &Weight<Cuda>,
        row_squares: &Tensor<Cuda, 1>,
        adapter: &Adapter<Cuda>,
        dtype: DType,
    ) -> Primitive {
        let [a, b] = [&adapter.a, &adapter.b].map(|values| self.flat(values.clone()));
        let squares = self.flat(row_squares.clone());
        let (rank, outputs) = (a.rows, b.rows);
        let rounded = if dtype == DType::F32 {
            a.block
        } else {
            let address = self.scratch.take(ScratchSlot::LoraA, a.count() * dtype.size());
            let rounded = DeviceBlock::dense(address, [rank, a.width], dtype);
            self.cast(a.block, rounded, 1.0);
            rounded
        };
        let of_weight = self.empty_matrix(outputs, rank, DType::F32);
        let weight = self.base_weight(weight, dtype);
        self.gemm(Gemm::forward("dora", weight.block, rounded), of_weight.block);
        let squares_of_a = self.empty_matrix(rank, rank, DType::F32);
        self.gemm(Gemm::forward("dora", a.block, a.block), squares_of_a.block);
        let of_pair = self.empty_matrix(outputs, rank, DType::F32);
        self.gemm(Gemm::forward("dora", b.block, squares_of_a.block), of_pair.block);
        let norm = self.empty([outputs], DType::F32);
        let arguments = arguments! {
            norm: address(self.address(&norm)), squares: rows(&squares), t: rows(&of_weight), u: rows(&of_pair),
            b: rows(&b), s: float(adapter.scale), n: long(outputs), r: int(rank),
        };
        let launch =
            Source::Magnitude.launch(DType::F32, "adapted_norms", grid(outputs.div_ceil(8), 256), 3 * b.bytes());
        // SAFETY: the three matrices are [outputs, rank] and dense, squares and norms [outputs], all f32.
        unsafe { self.launch(launch, &arguments) };
        norm
    }
}

pub(crate) fn as_gradients(d_magnitudes: &[Option<Primitive>]) -> impl Iterator<Item = Option<Tensor<Cuda, 1>>> {
    d_magnitudes.iter().cloned().map(|gradient| gradient.map(tensor))
}
