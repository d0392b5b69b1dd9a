//! The gated short convolution as a mixer: its filters, the operation forward and backward, and its state in generation.

use burn_tensor::Tensor;
use firebrick_arch::ShortConvSpec;
use firebrick_kernels::linear::into_parts;
use firebrick_kernels::{ConvInputs, GradientSink, Kernels, Parameter};

use super::{Attend, Cache, Mixed};
use crate::tile::Tile;

/// A gated short convolution between its two projections.
#[derive(Clone, Debug)]
pub struct ShortConv<B: Kernels> {
    /// Its sizes.
    pub spec: ShortConvSpec,
    /// The filters, f32.
    pub filters: Parameter<B>,
    /// Full fine-tuning trains them, LoRA does not.
    pub trains: bool,
}

impl<B: Kernels> ShortConv<B> {
    pub(super) fn forward(&self, parts: &[Tensor<B, 2>], attend: Attend<'_, B>) -> (Tensor<B, 2>, Option<Mixed<B>>) {
        match attend {
            Attend::Documents(documents) => self.forward_tile(parts, &Tile::whole(documents)),
            Attend::Cached { tokens, cache: Cache::State(state), .. } => {
                (B::cached_causal_conv(&inputs(parts.to_vec()), self.filters_dk(), state, tokens), None)
            }
            Attend::Cached { cache: Cache::Rows(_) | Cache::States(..), .. } => {
                unreachable!("a convolution has one state")
            }
        }
    }

    pub(super) fn forward_tile(&self, parts: &[Tensor<B, 2>], tile: &Tile<B>) -> (Tensor<B, 2>, Option<Mixed<B>>) {
        let values_nm = tile.own(&B::causal_conv(&inputs(parts.to_vec()), self.filters_dk(), &tile.with_lead));
        (values_nm.clone(), Some(Mixed { values_nm, kept: None }))
    }

    pub(super) fn backward(
        &self,
        parts: Vec<Tensor<B, 2>>,
        dy_nd: Tensor<B, 2>,
        tile: &Tile<B>,
        sink: &mut dyn GradientSink<B>,
    ) -> Vec<Tensor<B, 2>> {
        let (gradients, d_filters) =
            B::causal_conv_backward(inputs(parts), self.filters_dk(), tile.padded(dy_nd), &tile.with_lead, self.trains);
        if let Some(d_filters) = d_filters {
            sink.add(&self.filters, d_filters.reshape([self.spec.channels * self.spec.width]));
        }
        gradients.gates.into_iter().flatten().chain([gradients.x]).collect()
    }

    fn filters_dk(&self) -> Tensor<B, 2> {
        self.filters.value.clone().reshape([self.spec.channels, self.spec.width])
    }
}

fn inputs<B: Kernels>(parts: Vec<Tensor<B, 2>>) -> ConvInputs<B> {
    let [b, c, x] = into_parts(parts);
    ConvInputs { gates: Some([b, c]), x }
}
