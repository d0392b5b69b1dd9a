//! Weights in the form that a GEMM reads: dense, in the compute format, `[o, i]`.
//!
//! A quantized base is dequantized once per pass into scratch memory, and its adapter is merged in the same launch: in f32, before
//! the one rounding to the compute format. `x W'ᵀ` and `dy W'` are then single GEMMs, with no further pass over their results, and
//! the modules that share an input are one GEMM.
//! Trade-off: the adapter is rounded together with the weight, and the scratch memory of the largest group.

use burn_tensor::{DType, Tensor};
use firebrick_precision::QuantFormat;

use super::engine::{Cuda, Engine, engine};
use super::scratch::{Contents, ScratchSlot};
use super::tensor::{DeviceBlock, MatrixView, float, tensor};
use crate::{Adapter, Bias, Group, Module, QuantizedWeight, Weight, WeightOps};

/// Largest rank that is merged while a base is dequantized; above it the merge would be bound by arithmetic.
const MAX_MERGED_RANK: usize = 128;

impl WeightOps for Cuda {
    fn quantizes_on_device() -> bool {
        true
    }

    fn quantize_weight(values_oi: Tensor<Self, 2>, format: QuantFormat) -> QuantizedWeight<Self> {
        let engine = engine(&values_oi.device());
        let (map, table) = (engine.tables.signed(), engine.tables.pairs(format));
        engine.section(|| engine.quantize(values_oi, format, map, table))
    }

    fn dequantize_weight(weight: &QuantizedWeight<Self>) -> Tensor<Self, 2> {
        let engine = engine(&weight.codes.device());
        engine.section(|| tensor(engine.dequantize(weight).tensor))
    }
}

/// A weight that a GEMM can read, and the owner of its memory where it is not scratch.
pub(super) struct ReadyWeight {
    pub block: DeviceBlock,
    _owner: Option<MatrixView>,
}

impl From<MatrixView> for ReadyWeight {
    fn from(matrix: MatrixView) -> Self {
        Self { block: matrix.block(), _owner: Some(matrix) }
    }
}

impl From<DeviceBlock> for ReadyWeight {
    fn from(block: DeviceBlock) -> Self {
        Self { block, _owner: None }
    }
}

/// The adapters of a group, with all A in the compute format.
pub(super) struct Adapters<'a> {
    /// Index of the module, and its adapter.
    pub pairs: Vec<(usize, &'a Adapter<Cuda>)>,
    /// All A, one below the other, `[ranks, i]`.
    pub a: DeviceBlock,
}

impl Engine {
    /// One matrix `[all o, i]` for a whole group, adapters included; `None` where modules have to be taken one by one.
    pub(super) fn merged_weights(&self, group: &Group<Cuda>, dtype: DType) -> Option<ReadyWeight> {
        let modules = group.modules.as_slice();
        if let [Module { weight: Weight::Dense(values), adapter: None, .. }] = modules
            && values.dtype() == dtype
        {
            return Some(self.matrix(values.clone()).into());
        }
        let quantized: Vec<_> = modules.iter().map(mergeable).collect::<Option<_>>()?;
        let (rows, columns) = (group.out_features(), group.in_features());
        let sources = modules.iter().zip(&quantized).flat_map(|(module, weight)| self.merge_sources(module, weight));
        let contents = Contents { section: self.section_number(), dtype, sources: sources.collect() };
        let slot = ScratchSlot::Weights { rows, columns };
        let (address, is_held) = self.scratch.holding(slot, rows * columns * dtype.size(), contents);
        let whole = DeviceBlock::dense(address, [rows, columns], dtype);
        if !is_held {
            for (module, weight) in modules.iter().zip(quantized) {
                self.merge(weight, module.adapter.as_ref(), whole.rows(module.columns.start, module.columns.len()));
            }
        }
        Some(whole.into())
    }

    /// What a module's merged weight is computed from.
    fn merge_sources(&self, module: &Module<Cuda>, weight: &QuantizedWeight<Cuda>) -> Vec<u64> {
        let codes = self.source(&weight.codes.clone().into_primitive());
        let pair = module.adapter.iter().flat_map(|adapter| [&adapter.a, &adapter.b]);
        codes.into_iter().chain(pair.flat_map(|values| self.source(&float(values.clone())))).collect()
    }

    /// One base weight without its adapter.
    pub(super) fn base_weight(&self, weight: &Weight<Cuda>, dtype: DType) -> ReadyWeight {
        let [rows, columns] = weight.shape();
        let slot = ScratchSlot::Weights { rows, columns };
        match weight {
            Weight::Dense(values) => self.converted(slot, values.clone(), dtype),
            Weight::Quantized(quantized) => {
                let sources = self.source(&quantized.codes.clone().into_primitive()).into();
                let contents = Contents { section: self.section_number(), dtype, sources };
                let (address, is_held) = self.scratch.holding(slot, rows * columns * dtype.size(), contents);
                let block = DeviceBlock::dense(address, [rows, columns], dtype);
                if !is_held {
                    self.merge(quantized, None, block);
                }
                block.into()
            }
        }
    }

    /// The adapters of a group; `None` where it has none.
    pub(super) fn adapters<'a>(&self, group: &'a Group<Cuda>, dtype: DType) -> Option<Adapters<'a>> {
        let pairs: Vec<_> = group
            .modules
            .iter()
            .enumerate()
            .filter_map(|(index, module)| Some((index, module.adapter.as_ref()?)))
            .collect();
        let ranks: usize = pairs.iter().map(|(_, adapter)| adapter.a.dims()[0]).sum();
        if ranks == 0 {
            return None;
        }
        let columns = group.in_features();
        let values: Vec<_> = pairs.iter().map(|(_, adapter)| self.flat(adapter.a.clone())).collect();
        let sources = values.iter().flat_map(|a| self.source(&a.tensor)).collect();
        let contents = Contents { section: self.section_number(), dtype, sources };
        let (address, is_held) = self.scratch.holding(ScratchSlot::LoraA, ranks * columns * dtype.size(), contents);
        let a = DeviceBlock::dense(address, [ranks, columns], dtype);
        let mut first = 0;
        for values in values.iter().filter(|_| !is_held) {
            self.cast(values.block(), a.rows(first, values.rows), 1.0);
            first += values.rows;
        }
        Some(Adapters { pairs, a })
    }

    /// A of an adapter `[r, i]` in the compute format.
    pub(super) fn a_of(&self, adapter: &Adapter<Cuda>, dtype: DType) -> ReadyWeight {
        self.converted(ScratchSlot::LoraA, adapter.a.clone(), dtype)
    }

    /// B of an adapter `[o, r]` in the compute format.
    pub(super) fn b_of(&self, adapter: &Adapter<Cuda>, dtype: DType) -> ReadyWeight {
        self.converted(ScratchSlot::LoraB, adapter.b.clone(), dtype)
    }

    /// The biases of a group side by side in the compute format, `[1, all o]`, zero where a module has none; `None` where none
    /// has one.
    pub(super) fn biases(&self, group: &Group<Cuda>, dtype: DType) -> Option<DeviceBlock> {
        let with_bias = |module: &Module<Cuda>| Some((module.columns.clone(), self.bias_values(module.bias.as_ref()?)));
        let values: Vec<_> = group.modules.iter().filter_map(with_bias).collect();
        if values.is_empty() {
            return None;
        }
        let width = group.out_features();
        let sources = values.iter().flat_map(|(_, values)| self.source(&values.tensor)).collect();
        let contents = Contents { section: self.section_number(), dtype, sources };
        let (address, is_held) = self.scratch.holding(ScratchSlot::Bias { width }, width * dtype.size(), contents);
        let whole = DeviceBlock::dense(address, [1, width], dtype);
        if !is_held {
            if values.len() < group.modules.len() {
                self.fill_zero(whole);
            }
            for (columns, values) in &values {
                self.cast(values.block(), whole.columns(columns.start, columns.len()), 1.0);
            }
        }
        Some(whole)
    }

    fn bias_values(&self, bias: &Bias<Cuda>) -> MatrixView {
        self.flat(bias.value.clone())
    }

    /// A matrix as it is, or its copy in another format.
    fn converted(&self, slot: ScratchSlot, values: Tensor<Cuda, 2>, dtype: DType) -> ReadyWeight {
        let values = self.flat(values);
        if values.dtype == dtype {
            return values.into();
        }
        let contents = Contents { section: self.section_number(), dtype, sources: self.source(&values.tensor).into() };
        let (address, is_held) = self.scratch.holding(slot, values.count() * dtype.size(), contents);
        let block = DeviceBlock::dense(address, [values.rows, values.width], dtype);
        if !is_held {
            self.cast(values.block(), block, 1.0);
        }
        block.into()
    }
}

/// The quantized weight of a module whose adapter, if any, can be merged into it.
fn mergeable(module: &Module<Cuda>) -> Option<&QuantizedWeight<Cuda>> {
    let rank = module.adapter.as_ref().map_or(0, |adapter| adapter.a.dims()[0]);
    match &module.weight {
        Weight::Quantized(weight) if rank <= MAX_MERGED_RANK => Some(weight),
        _ => None,
    }
}
