//! LoRA on CUDA: the adapters of a group as operands of GEMMs, and their gradients.
//!
//! The ranks are appended to the GEMM's inner dimension, `y = [x | x Aᵀ] [W | s B]ᵀ` and `dx = [dy | dy s B] [W ; A]`: one GEMM per direction, and
//! the adapter's contribution is as exact as the compute format, however small it is relative to the base. All A are in rows below the weight, all
//! `s B` in columns next to it. If that would make the inner dimension much longer (`AdapterRoute`), the low-rank GEMMs are separate.
//! Trade-off: appended, B is stored with zeros for the group's other modules, and inputs need rows with room. Separate, the adapter's output is added
//! to one already rounded to the compute format, as in other trainers, so the part below half a rounding step is lost (docs/decisions.md, 21).

mod adapter_passes;
mod dropout;
pub(super) mod gated_low_rank;
pub(super) mod low_rank;
mod low_rank_rows;
pub(super) mod magnitude;

use burn_tensor::{DType, Tensor};

use crate::backends::cuda::device::{Device, LowRankChunk};
use crate::backends::cuda::engine::{
    Cuda, DeviceBlock, Gemm, MatrixView, OfExperts, Primitive, ScratchSlot, tensor, view,
};
use crate::backends::cuda::linear::modules::{Routed, rank};
use crate::backends::cuda::linear::operands::GroupWeight;
use crate::backends::planning::route::AdapterRoute;
use crate::backends::planning::rows::SAVED_RANKS;

/// The adapters of a group in the compute format.
pub(crate) struct Adapters {
    /// One per adapted module, in column order.
    pub places: Vec<AdapterSlot>,
    /// All A, concatenated along rows, `[ranks, i]`.
    pub a: DeviceBlock,
    /// All `s B` as one matrix `[all o, ranks]` with zeros elsewhere, if the ranks are appended.
    pub appended_b: Option<DeviceBlock>,
    /// The rows of experts, if all these are the first expert's.
    pub experts: Option<OfExperts>,
}

pub(crate) struct AdapterSlot {
    /// Index of its module.
    pub module: usize,
    /// First column in the group's output, and number of columns.
    pub columns: [usize; 2],
    /// First rank in the group, and number of ranks.
    pub ranks: [usize; 2],
    pub scale: f64,
    /// `s B`, `[o, r]`.
    pub b: DeviceBlock,
}

/// Adapter gradients computed from a group's output gradient.
pub(crate) struct LowRankGradient {
    pub adapters: Adapters,
    /// `dy s B`, `[n, ranks]`.
    pub d_low: DeviceBlock,
    /// `dB` of each place, if the same pass computed it.
    d_b: Option<Vec<MatrixView>>,
    /// `dA` of all places, concatenated along rows, if a pass over their input computed it.
    pub d_a: Option<MatrixView>,
}

/// An output gradient of a group with its low-rank gradients already in the columns after it, and `dB` of each adapter.
pub(crate) struct PreparedFactors {
    pub dy: DeviceBlock,
    pub d_b: Vec<MatrixView>,
}

/// The gate/up group, during the backward of the group that reads the gated activation; its own backward is next.
pub(crate) struct GateUp<'a> {
    pub group: &'a Routed<'a>,
    /// `x Aᵀ` of its adapters, if its forward saved it.
    pub low_rank: Option<&'a Tensor<Cuda, 2>>,
    /// Results of the first backward for the second.
    pub prepared: Option<PreparedFactors>,
}

/// `dA` and `dB` of one adapter, in f32.
pub(super) type FactorGradients = (Tensor<Cuda, 2>, Tensor<Cuda, 2>);

impl Adapters {
    /// Returns the ranks of all places, including padding.
    pub(crate) fn ranks(&self) -> usize {
        self.a.rows
    }
}

impl Device {
    /// Returns the adapters of a group; `None` if it has none. `weight` is that of the whole group, if there is one.
    pub(crate) fn adapters(
        &self,
        group: &Routed<'_>,
        dtype: DType,
        weight: Option<&GroupWeight>,
        experts: Option<OfExperts>,
    ) -> Option<Adapters> {
        match group.route.adapters {
            AdapterRoute::None => None,
            AdapterRoute::Appended { .. } => {
                Some(appended(group, weight.expect("written out around its adapters"), experts))
            }
            AdapterRoute::Separate => Some(self.separate(group, dtype)),
            AdapterRoute::InCodes | AdapterRoute::FewRows => unreachable!("these come with the weights"),
        }
    }

    /// Converts A and `s B` of all modules into scratch memory.
    fn separate(&self, group: &Routed<'_>, dtype: DType) -> Adapters {
        let pairs: Vec<_> = group
            .modules
            .iter()
            .filter_map(|module| module.adapter.as_ref())
            .map(|adapter| (self.flat(adapter.a.clone()), self.flat(adapter.b.clone()), adapter.scale))
            .collect();
        let all_a = self.side_by_side(ScratchSlot::LoraA, dtype, pairs.iter().map(|(a, _, _)| (a, 1.0)).collect());
        let all_b = self.side_by_side(ScratchSlot::LoraB, dtype, pairs.iter().map(|(_, b, s)| (b, *s)).collect());
        self.adapters_at(group, [all_a, all_b], dtype)
    }

    /// Returns the adapters of a group from all A and all `s B` in the compute format, one module after the other.
    pub(super) fn adapters_at(&self, group: &Routed<'_>, [all_a, all_b]: [u64; 2], dtype: DType) -> Adapters {
        let a = DeviceBlock::dense(all_a, [group.route.ranks, group.in_features()], dtype);
        let mut before = 0;
        let places = places(group, |module, [_, rank]| {
            let rows = group.modules[module].columns.len();
            let b = DeviceBlock::dense(all_b + (before * dtype.size()) as u64, [rows, rank], dtype);
            before += b.count();
            b
        });
        Adapters { places, a, appended_b: None, experts: None }
    }

    /// Concatenates matrices in the compute format, each times its factor.
    fn side_by_side(&self, slot: ScratchSlot, dtype: DType, matrices: Vec<(&MatrixView, f64)>) -> u64 {
        let count: usize = matrices.iter().map(|(matrix, _)| matrix.count()).sum();
        let sources: Vec<u64> = matrices.iter().flat_map(|(matrix, _)| self.source(&matrix.tensor)).collect();
        let contents = self.contents(dtype, sources);
        let (address, is_held) = self.scratch.holding(slot, count * dtype.size(), contents);
        let mut to = address;
        for (matrix, factor) in matrices.into_iter().filter(|_| !is_held) {
            self.cast(matrix.block, DeviceBlock::dense(to, [matrix.rows, matrix.width], dtype), factor as f32);
            to += (matrix.count() * dtype.size()) as u64;
        }
        address
    }

    /// Computes `x Aᵀ` of all adapters, `[n, ranks]`, in scratch memory.
    pub(crate) fn low_rank(&self, x: DeviceBlock, adapters: &Adapters) -> DeviceBlock {
        let low = self.low_rank_block(ScratchSlot::LowRank, [x.rows, adapters.ranks()], x.dtype);
        self.gemm(Gemm { experts: adapters.experts, ..Gemm::forward("lora", x, adapters.a) }, low);
        low
    }

    /// Computes `out += low (s B)ᵀ` for each adapter.
    pub(super) fn add_low_rank(&self, low: DeviceBlock, adapters: &Adapters, out: DeviceBlock) {
        for place in &adapters.places {
            let out = place.columns_of(out);
            self.gemm(Gemm { c: Some(out), ..Gemm::forward("lora", place.ranks_of(low), place.b) }, out);
        }
    }

    /// Computes `dy s B` of all adapters, `[n, ranks]`, in the columns after `dy` if the ranks are appended, else in scratch memory.
    /// If `low`, which is `x Aᵀ`, is available, the same pass over `dy` computes `dB` where possible; `prepared` contains both.
    pub(super) fn low_rank_gradient(
        &self,
        dy: DeviceBlock,
        low: Option<DeviceBlock>,
        adapters: Adapters,
        group: &Routed<'_>,
        prepared: Option<PreparedFactors>,
    ) -> LowRankGradient {
        let d_low = if adapters.appended_b.is_some() {
            dy.columns_after(adapters.ranks())
        } else {
            self.low_rank_block(ScratchSlot::LowRankGradient, [dy.rows, adapters.ranks()], dy.dtype)
        };
        let prepared = prepared.map(|prepared| {
            assert_eq!(prepared.dy, dy, "gradients of gate and up go from one group to the other in place");
            prepared.d_b
        });
        let d_b = prepared.or_else(|| {
            let tile = group.route.output_pass?;
            self.output_gradient_pass(dy, low?, d_low, &adapters, tile)
        });
        match adapters.appended_b {
            _ if d_b.is_some() => {}
            Some(b) => {
                let gemm = Gemm::input_gradient("lora gradient", dy, b);
                self.gemm(Gemm { experts: adapters.experts, ..gemm }, d_low);
            }
            None => {
                for place in &adapters.places {
                    let gemm = Gemm::input_gradient("lora gradient", place.columns_of(dy), place.b);
                    self.gemm(Gemm { experts: adapters.experts, ..gemm }, place.ranks_of(d_low));
                }
            }
        }
        LowRankGradient { adapters, d_low, d_b, d_a: None }
    }

    /// Computes `dA` and `dB` of each adapter, with the index of its module. All share the GEMM of `dA`. `x` is the
    /// adapters' input; it may be missing if both gradients are available.
    pub(super) fn factor_gradients(
        &self,
        x: Option<DeviceBlock>,
        low: Option<DeviceBlock>,
        dy: DeviceBlock,
        gradient: &LowRankGradient,
    ) -> Vec<(usize, FactorGradients)> {
        let LowRankGradient { adapters, d_low, d_b, d_a } = gradient;
        let x = || x.expect("what adapters read is there unless their gradients are");
        if let Some(experts) = adapters.experts {
            let (x, low) = (x(), low.unwrap_or_else(|| self.low_rank(x(), adapters)));
            // One launch for all A, and one for all B.
            let sums = |operands: Vec<(DeviceBlock, DeviceBlock, f64)>| {
                let of = |(left, right, alpha): (DeviceBlock, DeviceBlock, f64)| {
                    let sum = self.empty_matrix(experts.count * left.width, right.width, DType::F32);
                    (Gemm { alpha, ..Gemm::token_sum("lora gradient", left, right) }, sum)
                };
                let sums: Vec<_> = operands.into_iter().map(of).collect();
                let blocks: Vec<_> = sums.iter().map(|(gemm, sum)| (*gemm, sum.block)).collect();
                self.expert_sums(&blocks, experts);
                sums.into_iter().map(|(_, sum)| tensor(sum.tensor))
            };
            let places = &adapters.places;
            let d_a = sums(places.iter().map(|place| (place.ranks_of(*d_low), x, 1.0)).collect());
            let of_b = |place: &AdapterSlot| (place.columns_of(dy), place.ranks_of(low), place.scale);
            let d_b = sums(places.iter().map(of_b).collect());
            return places.iter().zip(d_a.zip(d_b)).map(|(place, factors)| (place.module, factors)).collect();
        }
        let da = d_a.clone().unwrap_or_else(|| self.sum_over_tokens(*d_low, x()));
        let d_b = d_b.clone().unwrap_or_else(|| {
            let low = low.unwrap_or_else(|| self.low_rank(x(), adapters));
            let of_place = |place: &AdapterSlot| {
                let d_b = self.empty_matrix(place.columns[1], place.ranks[1], DType::F32);
                let sum = Gemm::token_sum("lora gradient", place.columns_of(dy), place.ranks_of(low));
                self.gemm(Gemm { alpha: place.scale, ..sum }, d_b.block);
                d_b
            };
            adapters.places.iter().map(of_place).collect()
        });
        let factors = |(place, d_b): (&AdapterSlot, MatrixView)| {
            let [first, rank] = place.ranks;
            (place.module, (tensor(self.row_range(&da, first, rank)), tensor(d_b.tensor)))
        };
        adapters.places.iter().zip(d_b).map(factors).collect()
    }

    /// Computes `d_lowᵀ x`, f32.
    pub(crate) fn sum_over_tokens(&self, d_low: DeviceBlock, x: DeviceBlock) -> MatrixView {
        let sum = self.empty_matrix(d_low.width, x.width, DType::F32);
        self.gemm(Gemm::token_sum("lora gradient", d_low, x), sum.block);
        sum
    }

    /// Copies `x Aᵀ` for the backward. Several copies share an allocation, but those of experts, which have more rows, have their own.
    pub(crate) fn saved_low_rank(&self, low: DeviceBlock, is_alone: bool) -> Primitive {
        if is_alone {
            let copy = self.empty_matrix(low.rows, low.width, low.dtype);
            self.copy_rows(low, copy.block);
            return copy.tensor;
        }
        let mut saved = self.saved_low_rank.borrow_mut();
        let fits = |chunk: &LowRankChunk| {
            chunk.memory.dtype == low.dtype && chunk.memory.rows == low.rows && chunk.used + low.width <= SAVED_RANKS
        };
        let mut chunk = match saved.take().filter(fits) {
            Some(chunk) => chunk,
            None => {
                let ranks = SAVED_RANKS.max(low.width);
                LowRankChunk { memory: self.empty_matrix(low.rows, ranks, low.dtype), used: 0 }
            }
        };
        let start = chunk.used * low.rows;
        let copy = view(&chunk.memory, start, &[low.rows, low.width], vec![low.width, 1]);
        let to = chunk.memory.address + (start * low.dtype.size()) as u64;
        self.copy_rows(low, DeviceBlock::dense(to, [low.rows, low.width], low.dtype));
        chunk.used += low.width;
        *saved = Some(chunk);
        copy
    }

    fn low_rank_block(&self, slot: ScratchSlot, [rows, ranks]: [usize; 2], dtype: DType) -> DeviceBlock {
        let address = self.scratch.take(slot, rows * ranks * dtype.size());
        DeviceBlock::dense(address, [rows, ranks], dtype)
    }
}

impl LowRankGradient {
    pub(super) fn has_b_gradients(&self) -> bool {
        self.d_b.is_some()
    }
}

impl AdapterSlot {
    /// Returns this module's columns of the group's output.
    fn columns_of(&self, all: DeviceBlock) -> DeviceBlock {
        all.columns(self.columns[0], self.columns[1])
    }

    /// Returns this adapter's columns of the low-rank intermediates.
    pub(super) fn ranks_of(&self, all: DeviceBlock) -> DeviceBlock {
        all.columns(self.ranks[0], self.ranks[1])
    }
}

fn appended(group: &Routed<'_>, weight: &GroupWeight, experts: Option<OfExperts>) -> Adapters {
    let all_b = weight.b();
    let b = |module: usize, [first, rank]: [usize; 2]| {
        let columns = &group.modules[module].columns;
        all_b.rows(columns.start, columns.len()).columns(first, rank)
    };
    Adapters { places: places(group, b), a: weight.a(), appended_b: Some(all_b), experts }
}

/// Builds one place per adapted module; `b` returns its matrix from the module's index, its first rank and its rank.
fn places(group: &Routed<'_>, mut b: impl FnMut(usize, [usize; 2]) -> DeviceBlock) -> Vec<AdapterSlot> {
    let mut first = 0;
    let mut places = Vec::with_capacity(group.modules.len());
    for (index, module) in group.modules.iter().enumerate() {
        let Some(adapter) = &module.adapter else { continue };
        let (columns, ranks) = ([module.columns.start, module.columns.len()], [first, rank(module)]);
        places.push(AdapterSlot { module: index, columns, ranks, scale: adapter.scale, b: b(index, ranks) });
        first += rank(module);
    }
    places
}
