//! Weights in the form that a GEMM reads: dense, in the compute format, `[o, i]`.
//!
//! The quantized weights of a group are dequantized side by side, so that the modules that share an input are one GEMM
//! per direction; the same launches write their adapters around them (`adapters`). Dense weights with adapters are
//! copied for the same reason. The destination is scratch memory, written once per pass, or separate memory that is
//! kept from step to step (`memory/planned.rs`), where only the adapters are written again, once per step.

pub(super) mod dequantize;
pub(crate) mod fp8;
mod quantize;

use burn_tensor::{DType, Tensor};
use firebrick_precision::{HostScales, QuantFormat};

use crate::backends::cuda::device::{Device, in_section};
use crate::backends::cuda::engine::{
    BlockArguments, Cuda, DeviceBlock, MatrixView, ScratchSlot, Source, arguments, float, grid, tensor,
};
use crate::backends::cuda::linear::modules::{Routed, rank};
use crate::backends::cuda::memory::planned::{Held, Pass};
use crate::backends::planning::route::WeightRoute;
use crate::backends::planning::rows::row_stride;
use crate::{ExpertRows, Group, HostBuffer, Module, QuantizedWeight, Weight, WeightOps};
use dequantize::{Around, Stack};

impl WeightOps for Cuda {
    const QUANTIZES_ON_DEVICE: bool = true;

    fn upload_codes(
        codes: HostBuffer,
        scales: &HostScales,
        format: QuantFormat,
        shape: [usize; 2],
        device: &Self::Device,
    ) -> QuantizedWeight<Self> {
        in_section(device, |device| device.upload_codes(codes, scales, format, shape))
    }

    fn quantize_weight(values_oi: Tensor<Self, 2>, format: QuantFormat) -> QuantizedWeight<Self> {
        let device = Device::of(&values_oi.device());
        let table = device.tables.byte_table(format);
        device.section(|| device.quantize(values_oi, format, table))
    }

    fn dequantize_weight(weight: &QuantizedWeight<Self>) -> Tensor<Self, 2> {
        in_section(&weight.codes.device(), |device| tensor(device.dequantize(weight).tensor))
    }
}

/// A weight that a GEMM can read, and the owner of its memory if that is not scratch.
pub(crate) struct ReadyWeight {
    pub block: DeviceBlock,
    _owner: Option<MatrixView>,
}

impl From<MatrixView> for ReadyWeight {
    fn from(matrix: MatrixView) -> Self {
        Self { block: matrix.block, _owner: Some(matrix) }
    }
}

impl From<DeviceBlock> for ReadyWeight {
    fn from(block: DeviceBlock) -> Self {
        Self { block, _owner: None }
    }
}

/// The weights of a whole group, with its adapters if they are appended; of a stack, those of the first expert:
///
/// ```text
///              in_features   ranks
/// out_features  W            scale B
///        ranks  A
/// ```
pub(crate) struct GroupWeight {
    whole: DeviceBlock,
    out_features: usize,
    in_features: usize,
    stack: Stack,
    _owner: Option<MatrixView>,
}

impl GroupWeight {
    /// Returns the appended ranks, including padding; 0 if there are none.
    pub(crate) fn ranks(&self) -> usize {
        self.whole.width - self.in_features
    }

    /// Returns the values from one expert's matrix to the next.
    pub(crate) fn matrix_stride(&self) -> usize {
        self.stack.stride
    }

    /// Returns the operand of the forward: `[W | s B]`.
    pub(crate) fn forward(&self) -> DeviceBlock {
        self.whole.rows(0, self.out_features)
    }

    /// Returns the operand of the backward: `[W ; A]`.
    pub(crate) fn backward(&self) -> DeviceBlock {
        self.whole.columns(0, self.in_features)
    }

    /// Returns `W` alone.
    pub(super) fn base(&self) -> DeviceBlock {
        self.backward().rows(0, self.out_features)
    }

    /// Returns all A, `[ranks, i]`.
    pub(crate) fn a(&self) -> DeviceBlock {
        self.backward().rows(self.out_features, self.ranks())
    }

    /// Returns all `s B`, `[all o, ranks]`.
    pub(crate) fn b(&self) -> DeviceBlock {
        self.forward().columns(self.in_features, self.ranks())
    }
}

/// Source numbers of the tensors from which a group's weights are computed.
pub(super) struct GroupSources {
    pub weights: Vec<u64>,
    adapters: Vec<u64>,
}

impl GroupSources {
    pub(super) fn all(&self) -> Vec<u64> {
        [self.weights.as_slice(), &self.adapters].concat()
    }

    /// Returns the sources of the weights with their row stride, which differs if adapters are left out, and the number of matrices: the first of
    /// a stack has the same sources.
    pub(super) fn laid_out(&self, stride: usize, matrices: usize) -> Vec<u64> {
        [self.weights.as_slice(), &[stride as u64, matrices as u64]].concat()
    }
}

impl Device {
    /// Returns the weights of a whole group; `None` if modules must run one by one.
    pub(super) fn group_weight(&self, group: &Routed<'_>, dtype: DType) -> Option<GroupWeight> {
        let (out_features, in_features, ranks) = (group.out_features(), group.in_features(), group.route.room());
        let count = group.rows.as_ref().map_or(1, ExpertRows::experts);
        match (group.route.weight, group.modules.as_slice()) {
            (WeightRoute::WrittenOut, _) => {}
            (WeightRoute::Stored, [Module { weight: Weight::Dense(values), .. }]) => {
                let values = self.matrix(values.clone());
                let stack = Stack { count, stride: out_features * values.stride };
                let whole = values.block.rows(0, out_features);
                return Some(GroupWeight { whole, out_features, in_features, stack, _owner: Some(values) });
            }
            _ => return None,
        }
        let sources = self.group_sources(group, ranks > 0);
        let contents = self.contents(dtype, sources.all());
        let (rows, width) = (out_features + ranks, in_features + ranks);
        let stride = row_stride(in_features, ranks);
        let stack = Stack { count, stride: rows * stride };
        let bytes = count * stack.stride * dtype.size();
        let kept = group
            .route
            .is_quantized
            .then(|| self.kept.of(Pass::Forward, sources.laid_out(stride, count), bytes, contents.clone()));
        let (address, held) = kept.flatten().unwrap_or_else(|| {
            let slot = ScratchSlot::Weights([rows, width]);
            let (address, is_held) = self.scratch.holding(slot, bytes, contents);
            (address, Held { weight: is_held, adapter: is_held })
        });
        let whole = DeviceBlock { address, rows, width, stride, dtype };
        let weight = GroupWeight { whole, out_features, in_features, stack, _owner: None };
        if !held.weight {
            self.write_group(group, &weight);
        } else if !held.adapter && ranks > 0 {
            self.write_adapters(group, &weight);
        }
        Some(weight)
    }

    fn write_adapters(&self, group: &Group<Cuda>, to: &GroupWeight) {
        let (modules, _held) = self.modules_argument(group);
        let bytes = modules.bytes(to.in_features);
        let (whole, mut shape) = (to.whole, grid(bytes.div_ceil(4 * 1024).min(1024), 256));
        shape.grid[1] = to.stack.count as u32;
        let launch = Source::WriteOut.launch(whole.dtype, "write_adapters", shape, bytes);
        let arguments = arguments! {
            out: rows(&whole), modules: value(&modules), o: int(to.out_features), i: int(to.in_features),
            stride: long(whole.stride), matrix: long(to.stack.stride),
        };
        // SAFETY: the modules name f32 pairs [rank, inputs] and [rows, rank] per expert that are held here; `whole` has a row for each rank below
        // those of the weight, and a column for each rank after its inputs.
        unsafe { self.launch(launch, &arguments) };
    }

    fn write_group(&self, group: &Group<Cuda>, to: &GroupWeight) {
        let mut first = 0;
        let last = group.modules.len() - 1;
        for (index, module) in group.modules.iter().enumerate() {
            // The last module also writes zeros after its A.
            let a_rows = if to.ranks() == 0 {
                0
            } else if index == last {
                to.ranks() - first
            } else {
                rank(module)
            };
            let around = Around {
                adapter: module.adapter.as_ref().filter(|_| to.ranks() > 0),
                first,
                ranks: to.ranks(),
                a: (a_rows > 0).then(|| to.a().rows(first, a_rows)),
                stack: to.stack,
            };
            self.write_out(&module.weight, to.forward().rows(module.columns.start, module.columns.len()), &around);
            first += rank(module);
        }
    }

    pub(super) fn source_of(&self, weight: &Weight<Cuda>) -> [u64; 2] {
        match weight {
            Weight::Dense(values) => self.source(&float(values.clone())),
            Weight::Quantized(weight) => self.source(&weight.codes.clone().into_primitive()),
        }
    }

    pub(super) fn group_sources(&self, group: &Group<Cuda>, with_adapters: bool) -> GroupSources {
        let weights = group.modules.iter().flat_map(|module| self.source_of(&module.weight)).collect();
        let adapters = group.modules.iter().filter_map(|module| module.adapter.as_ref()).filter(|_| with_adapters);
        let factors = adapters.flat_map(|adapter| [&adapter.a, &adapter.b]);
        GroupSources { weights, adapters: factors.flat_map(|values| self.source(&float(values.clone()))).collect() }
    }

    pub(crate) fn base_weight(&self, weight: &Weight<Cuda>, dtype: DType) -> ReadyWeight {
        let [rows, columns] = weight.shape();
        let slot = ScratchSlot::Weights([rows, columns]);
        match weight {
            Weight::Dense(values) => self.converted(slot, values.clone(), dtype),
            Weight::Quantized(_) => {
                let contents = self.contents(dtype, self.source_of(weight));
                let (address, is_held) = self.scratch.holding(slot, rows * columns * dtype.size(), contents);
                let block = DeviceBlock::dense(address, [rows, columns], dtype);
                if !is_held {
                    self.write_out(weight, block, &Around::default());
                }
                block.into()
            }
        }
    }

    /// Joins the biases of a group in the compute format, `[1, all o]` or a row per expert, zero for modules without one; `None` if no module has a
    /// bias.
    pub(crate) fn biases(&self, group: &Group<Cuda>, dtype: DType) -> Option<DeviceBlock> {
        let with_bias =
            |module: &Module<Cuda>| Some((module.columns.clone(), self.flat(module.bias.as_ref()?.value.clone())));
        let values: Vec<_> = group.modules.iter().filter_map(with_bias).collect();
        if values.is_empty() {
            return None;
        }
        let (width, count) = (group.out_features(), group.rows.as_ref().map_or(1, ExpertRows::experts));
        let sources: Vec<u64> = values.iter().flat_map(|(_, values)| self.source(&values.tensor)).collect();
        let contents = self.contents(dtype, sources);
        let (address, is_held) = self.scratch.holding(ScratchSlot::Bias(width), count * width * dtype.size(), contents);
        let whole = DeviceBlock::dense(address, [count, width], dtype);
        if !is_held {
            if values.len() < group.modules.len() {
                self.fill_zero(whole);
            }
            for (columns, values) in &values {
                let values = DeviceBlock::dense(values.address, [count, columns.len()], values.dtype);
                let to = whole.column_range(columns);
                if to.is_dense() {
                    self.cast(values, to, 1.0);
                } else {
                    let converted = self.empty_matrix(count, columns.len(), dtype);
                    self.cast(values, converted.block, 1.0);
                    self.copy_rows(converted.block, to);
                }
            }
        }
        Some(whole)
    }

    /// Returns a matrix itself, or a copy in another format.
    fn converted(&self, slot: ScratchSlot, values: Tensor<Cuda, 2>, dtype: DType) -> ReadyWeight {
        let values = self.flat(values);
        if values.dtype == dtype {
            return values.into();
        }
        let contents = self.contents(dtype, self.source(&values.tensor));
        let (address, is_held) = self.scratch.holding(slot, values.count() * dtype.size(), contents);
        let block = DeviceBlock::dense(address, [values.rows, values.width], dtype);
        if !is_held {
            self.cast(values.block, block, 1.0);
        }
        block.into()
    }
}
