//! DoRA (Liu et al., 2024): an adapted module with a trained magnitude per output, `y = m / |W + s B A| (W x + s B A x) + bias`.
//!
//! The norms of the rows of `W + s B A` are constants in the forward and in the backward, as in PEFT. They depend on the parameters
//! alone, so they are computed once after each update and not in each micro-batch. With dropout on the adapter's input, PEFT's formula
//! is `y = W x + (c - 1) W x̃ + c s B A x̃ + bias` with `c = m / norm`: it multiplies by the weight twice.
//! Trade-off: the gradient of the magnitudes needs the outputs before scaling; the reference body recomputes them.

use burn_tensor::{DType, Tensor, backend::Backend};

use super::product::{self, Product, Side};
use super::{Adapter, Group, LinearOps, Module};
use crate::dtype::{to_dtype, to_f32};
use crate::weights::Weight;
use crate::weights::reference::dense;

/// The magnitudes of an adapted module.
#[derive(Clone, Debug)]
pub struct Magnitude<B: Backend> {
    /// The magnitudes, `[o]` f32. Their gradient is always computed.
    pub value: Tensor<B, 1>,
    /// Norms of the rows of `W + s B A`, `[o]` f32, from [`LinearOps::adapted_norms`]; a constant in the backward.
    pub norm: Tensor<B, 1>,
}

impl<B: Backend> Magnitude<B> {
    /// Returns `m / norm`, `[1, o]` f32.
    pub(super) fn factors(&self) -> Tensor<B, 2> {
        self.value.clone().div(self.norm.clone()).unsqueeze()
    }

    /// Multiplies each column by its factor; rounds once.
    pub(super) fn scaled(&self, x_no: Tensor<B, 2>) -> Tensor<B, 2> {
        let dtype = x_no.dtype();
        to_dtype(to_f32(x_no).mul(self.factors()), dtype)
    }

    /// Computes the gradient of the magnitudes `[o]` from the gradient of the output and the output before scaling.
    pub(super) fn gradient(&self, dy_no: Tensor<B, 2>, unscaled_no: Tensor<B, 2>) -> Tensor<B, 1> {
        let sums: Tensor<B, 1> = to_f32(dy_no).mul(to_f32(unscaled_no)).sum_dim(0).squeeze_dim(0);
        sums.div(self.norm.clone())
    }
}

/// Computes the outputs of a group with magnitudes, with biases, from the inputs of its weights and of its adapters.
pub(super) fn outputs<B: LinearOps>(
    x_ni: Tensor<B, 2>,
    adapters_ni: Tensor<B, 2>,
    group: &Group<B>,
    low_rank_nr: Option<Tensor<B, 2>>,
) -> Vec<Tensor<B, 2>> {
    let products = |x_ni, low_rank| B::product(Product::new(group, Side::Output, vec![x_ni], low_rank));
    let low_ranks = product::of_modules(low_rank_nr.clone(), group);
    let outputs = match &group.dropout {
        None => products(x_ni, low_rank_nr),
        Some(_) => products(x_ni, None),
    };
    let dropped = group.dropout.as_ref().map(|_| products(adapters_ni, None));
    let mut dropped = dropped.into_iter().flatten();
    let scaled = |pair: &Adapter<B>, z_no| match &pair.magnitude {
        Some(magnitude) => magnitude.scaled(z_no),
        None => z_no,
    };
    // From the sum of weight and adapter; under dropout from `x Wᵀ`, and `x̃ Wᵀ` of the dropped input.
    let modules = group.modules.iter().zip(outputs).zip(low_ranks);
    let of_modules = modules.map(|((module, y_no), low_nr)| {
        let y_no = match (module.adapter.as_ref().zip(low_nr), dropped.next()) {
            (None, _) => y_no,
            (Some((pair, _)), None) => scaled(pair, y_no),
            (Some((pair, low_nr)), Some(dropped_no)) => {
                let z_no = dropped_no.clone().add(product::update(low_nr, pair));
                y_no.add(scaled(pair, z_no).sub(dropped_no))
            }
        };
        product::biased(y_no, module)
    });
    of_modules.collect()
}

/// Computes the gradient of each module's sum of weight and adapter before its magnitudes, from that of its output; and of the magnitudes.
pub(super) fn backward<B: LinearOps>(
    dy: &[Tensor<B, 2>],
    adapters_ni: &Tensor<B, 2>,
    group: &Group<B>,
    low_rank_nr: Option<&Tensor<B, 2>>,
) -> (Vec<Tensor<B, 2>>, Vec<Option<Tensor<B, 1>>>) {
    if !group.has_magnitudes() {
        return (dy.to_vec(), vec![None; dy.len()]);
    }
    let product = Product::new(group, Side::Output, vec![adapters_ni.clone()], low_rank_nr.cloned());
    let of_module = |((module, dy_no), unscaled_no): ((&Module<B>, &Tensor<B, 2>), _)| match module.magnitude() {
        None => (dy_no.clone(), None),
        Some(magnitude) => (magnitude.scaled(dy_no.clone()), Some(magnitude.gradient(dy_no.clone(), unscaled_no))),
    };
    group.modules.iter().zip(dy).zip(B::product(product)).map(of_module).unzip()
}

/// Implements [`LinearOps::row_squares`].
pub fn row_squares<B: LinearOps>(weight: &Weight<B>) -> Tensor<B, 1> {
    dense(weight, DType::F32).square().sum_dim(1).squeeze_dim(1)
}

/// Implements [`LinearOps::adapted_norms`]: one pass over the whole weight with its adapter merged.
pub fn adapted_norms<B: LinearOps>(weight: &Weight<B>, adapter: &Adapter<B>) -> Tensor<B, 1> {
    let update_oi = adapter.b.clone().matmul(adapter.a.clone()).mul_scalar(adapter.scale);
    dense(weight, DType::F32).add(update_oi).square().sum_dim(1).squeeze_dim::<1>(1).sqrt()
}
