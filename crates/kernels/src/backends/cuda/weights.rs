//! Weights in the form that a product reads: dense, in the compute format, `[o, i]`.
//!
//! A 4-bit base is written out once a pass into scratch memory, and its adapter is added there and then: in f32, before the
//! one rounding to the compute format. `x W'ᵀ` and `dy W'` are then single products, with no further pass over their
//! results, and the projections that share an input are one product. What that gives up: nothing in accuracy (the base alone
//! would be rounded the same way, and the sum is rounded once instead of twice), and the memory of the largest group.

use burn_tensor::{DType, Tensor};

use super::engine::Engine;
use super::gemm::Block;
use super::scratch::{Contents, Purpose};
use super::tensor::{address, float};
use super::{Cuda, launch_nf4};
use crate::{LoraPair, Projection, Weight};

/// Largest rank that is merged while a base is written out; above it the merge would be bound by arithmetic.
const MERGED_RANK: usize = 128;

/// The adapted projections of a group, with what is read of their pairs.
pub(super) struct Pairs<'a> {
    /// Index in the group, and the pair.
    pub pairs: Vec<(usize, &'a LoraPair<Cuda>)>,
    /// All A below each other, `[ranks, i]`, in the compute format.
    pub a: Block,
    /// Rank of all together.
    pub ranks: usize,
}

impl Engine {
    /// One matrix `[all o, i]` for a whole group, adapters included; `None` where the group has to be taken one by one.
    pub(super) fn merged_weights(&self, projections: &[Projection<Cuda>], dtype: DType) -> Option<Block> {
        if let [Projection { weight: Weight::Dense(values), lora: None, .. }] = projections
            && values.dtype() == dtype
        {
            let matrix = self.matrix(values.clone());
            return Some(Block::from(&matrix));
        }
        let mergeable = |projection: &Projection<Cuda>| {
            matches!(projection.weight, Weight::Nf4(_))
                && projection.lora.as_ref().is_none_or(|pair| pair.a.dims()[0] <= MERGED_RANK)
        };
        if !projections.iter().all(mergeable) {
            return None;
        }
        let inputs = projections[0].weight.shape()[1];
        let rows: usize = projections.iter().map(|projection| projection.weight.shape()[0]).sum();
        let contents = Contents { section: self.section_number(), sources: sources(projections) };
        let (start, held) = self.scratch.holding(Purpose::Weights, rows * inputs * dtype.size(), contents);
        let whole = Block { address: start, stride: inputs, dtype };
        let mut first = 0;
        for projection in projections.iter().filter(|_| !held) {
            let Weight::Nf4(weight) = &projection.weight else { unreachable!("only 4-bit weights are merged") };
            launch_nf4::merge(self, weight, projection.lora.as_ref(), whole.at_row(first));
            first += weight.shape[0];
        }
        Some(whole)
    }

    /// One base weight without its adapter.
    pub(super) fn base_weight(&self, weight: &Weight<Cuda>, dtype: DType) -> Block {
        let [rows, inputs] = weight.shape();
        match weight {
            Weight::Dense(values) => self.converted(Purpose::Weights, values.clone(), dtype),
            Weight::Nf4(packed) => {
                let to = self.scratch.take(Purpose::Weights, rows * inputs * dtype.size());
                let block = Block { address: to, stride: inputs, dtype };
                launch_nf4::merge(self, packed, None, block);
                block
            }
        }
    }

    /// The adapters of a group; `None` where it has none.
    pub(super) fn pairs<'a>(&self, projections: &'a [Projection<Cuda>], dtype: DType) -> Option<Pairs<'a>> {
        let pairs: Vec<_> =
            projections.iter().enumerate().filter_map(|(index, p)| Some((index, p.lora.as_ref()?))).collect();
        let inputs = projections[0].weight.shape()[1];
        let ranks: usize = pairs.iter().map(|(_, pair)| pair.a.dims()[0]).sum();
        if ranks == 0 {
            return None;
        }
        let sources = pairs.iter().map(|(_, pair)| address(&float(pair.a.clone()))).collect();
        let contents = Contents { section: self.section_number(), sources };
        let (to, held) = self.scratch.holding(Purpose::LoraA, ranks * inputs * dtype.size(), contents);
        let a = Block { address: to, stride: inputs, dtype };
        let mut first = 0;
        for (_, pair) in pairs.iter().filter(|_| !held) {
            let values = self.flat(pair.a.clone());
            let count = values.rows * values.width;
            self.cast(values.address, values.dtype, a.at_row(first).address, dtype, count, 1.0);
            first += values.rows;
        }
        Some(Pairs { pairs, a, ranks })
    }

    /// A of a pair `[r, i]` in the compute format.
    pub(super) fn a_of(&self, pair: &LoraPair<Cuda>, dtype: DType) -> Block {
        self.converted(Purpose::LoraA, pair.a.clone(), dtype)
    }

    /// B of a pair `[o, r]` in the compute format.
    pub(super) fn b_of(&self, pair: &LoraPair<Cuda>, dtype: DType) -> Block {
        self.converted(Purpose::LoraB, pair.b.clone(), dtype)
    }

    /// A matrix as it is, or its copy in another format.
    fn converted(&self, purpose: Purpose, values: Tensor<Cuda, 2>, dtype: DType) -> Block {
        let values = self.flat(values);
        if values.dtype == dtype {
            return Block::from(&values);
        }
        let count = values.rows * values.width;
        let contents = Contents { section: self.section_number(), sources: vec![values.address] };
        let (to, held) = self.scratch.holding(purpose, count * dtype.size(), contents);
        if !held {
            self.cast(values.address, values.dtype, to, dtype, count, 1.0);
        }
        Block { address: to, stride: values.width, dtype }
    }
}

/// Addresses of all that a merged group is made from.
fn sources(projections: &[Projection<Cuda>]) -> Vec<u64> {
    let of_one = |projection: &Projection<Cuda>| {
        let Weight::Nf4(weight) = &projection.weight else { unreachable!("only 4-bit weights are merged") };
        let codes = address(&weight.codes.clone().into_primitive());
        let pair = projection.lora.iter().flat_map(|pair| [&pair.a, &pair.b]);
        std::iter::once(codes).chain(pair.map(|values| address(&float(values.clone())))).collect::<Vec<_>>()
    };
    projections.iter().flat_map(of_one).collect()
}
