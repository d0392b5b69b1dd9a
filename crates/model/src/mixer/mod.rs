//! What mixes the tokens of a layer: a group of linear modules, an operation over tokens, and a group that leads back to the residual stream.
//!
//! The groups run alike whatever the operation is (`layer.rs`); a kind is one file here: what it does to the outputs of the first group, forward and
//! backward, its further parameters, and its cache.

mod attention;
mod delta_net;
mod parts;
mod short_conv;

use std::collections::BTreeMap;

use burn_tensor::{DType, Tensor};
use firebrick_arch as arch;
use firebrick_kernels::{
    CachedTokens, ConvState, DeltaState, Documents, Epilogue, GradientSink, Hint, InputGradient, Kernels, KvCache,
    ProjectSaved, Prologue, RotaryTables, SoftmaxStatistics,
};

pub use attention::{Attention, AttentionSinks};
pub use delta_net::DeltaNet;
pub use short_conv::ShortConv;

use crate::linear::LinearGroup;
use crate::tile::{Passing, Tile};

/// The mixer of a layer.
#[derive(Clone, Debug)]
pub struct Mixer<B: Kernels> {
    /// From the layer's input to what the operation reads, e.g. queries, keys and values.
    pub input: LinearGroup<B>,
    /// Attention, or a short convolution.
    pub kind: MixerKind<B>,
    /// From what it computes to the residual stream.
    pub output: LinearGroup<B>,
}

/// The operation of a mixer over tokens.
#[derive(Clone, Debug)]
pub enum MixerKind<B: Kernels> {
    /// Causal self attention.
    Attention(Box<Attention<B>>),
    /// A gated short convolution.
    ShortConv(ShortConv<B>),
    /// Gated DeltaNet.
    DeltaNet(Box<DeltaNet<B>>),
}

/// The result of a mixer's operation.
#[derive(Clone, Debug)]
pub(crate) struct Mixed<B: Kernels> {
    /// `[n, m]`, the input of the output projection.
    pub(crate) values_nm: Tensor<B, 2>,
    /// What the backward reads besides.
    pub(crate) kept: Option<Kept<B>>,
}

/// What a mixer's backward reads besides its inputs and its result.
#[derive(Clone, Debug)]
pub(crate) enum Kept<B: Kernels> {
    Statistics(SoftmaxStatistics<B>),
    /// The states of a delta rule at the starts of its chunks.
    States(Tensor<B, 4>),
}

#[derive(Clone, Debug)]
pub(crate) struct SavedMixer<B: Kernels> {
    pub(crate) input: Box<ProjectSaved<B>>,
    pub(crate) parts: Vec<Tensor<B, 2>>,
    pub(crate) mixed: Mixed<B>,
    /// Its prologue is built again from the result, unless the prologue's output is saved.
    pub(crate) output: Box<ProjectSaved<B>>,
}

/// What passes between layers besides the residual stream: keys and values that layers publish, by the number of the layer, and in the backward the
/// sums of their gradients, until the publisher's own; and the layers' own inputs.
#[derive(Clone, Debug)]
pub(crate) struct Published<B: Kernels> {
    pub(crate) values: BTreeMap<usize, [Tensor<B, 2>; 2]>,
    pub(crate) gradients: BTreeMap<usize, [Tensor<B, 2>; 2]>,
    /// The input `[n, p]` of each layer; none if layers have none of their own.
    pub(crate) inputs: Vec<Tensor<B, 2>>,
    /// The gradients of these, by the number of the layer; `None` if nothing that trains needs them.
    pub(crate) input_gradients: Option<BTreeMap<usize, Tensor<B, 2>>>,
}

impl<B: Kernels> Default for Published<B> {
    fn default() -> Self {
        Self { values: BTreeMap::new(), gradients: BTreeMap::new(), inputs: Vec::new(), input_gradients: None }
    }
}

/// What a mixer keeps of earlier tokens in generation.
#[derive(Debug)]
pub(crate) enum Cache<B: Kernels> {
    /// Keys and values of every token.
    Rows(KvCache<B>),
    /// A state per sequence, whatever its length.
    State(ConvState<B>),
    /// Those of a convolution and of the delta rule after it.
    States(ConvState<B>, DeltaState<B>),
}

/// The earlier tokens that a token is mixed with.
pub(crate) enum Attend<'a, B: Kernels> {
    /// Those of the same document.
    Documents(&'a Documents<B>),
    /// All of the same sequence, from the cache, which also stores the new ones. In a pass over prompts, each document begins a sequence.
    Cached { tokens: &'a CachedTokens<B>, cache: &'a mut Cache<B>, prompts: Option<&'a Documents<B>> },
}

impl<B: Kernels> Mixer<B> {
    /// Returns what is done to the outputs of the first group.
    pub(crate) fn epilogue(&self, rotary: &[RotaryTables<B>]) -> Epilogue<B> {
        match &self.kind {
            MixerKind::Attention(attention) => attention.epilogue(rotary),
            MixerKind::ShortConv(_) | MixerKind::DeltaNet(_) => Epilogue::None,
        }
    }

    /// Mixes the tokens of the outputs of the first group; the result `[n, m]` is also what the backward needs, which has none over a cache.
    pub(crate) fn forward(
        &self,
        parts: &[Tensor<B, 2>],
        rotary: &[RotaryTables<B>],
        attend: Attend<'_, B>,
        published: &mut Published<B>,
    ) -> (Tensor<B, 2>, Option<Mixed<B>>) {
        match &self.kind {
            MixerKind::Attention(attention) => attention.forward(parts, rotary, attend, published),
            MixerKind::ShortConv(conv) => conv.forward(parts, attend),
            MixerKind::DeltaNet(delta) => delta.forward(parts, attend),
        }
    }

    /// Does the same for the outputs of the first group for a tile and its lead. The state before the tile becomes that after it.
    ///
    /// # Panics
    /// If the mixer is attention.
    pub(crate) fn forward_tile(
        &self,
        parts: &[Tensor<B, 2>],
        tile: &Tile<B>,
        state: &mut Passing<B>,
    ) -> (Tensor<B, 2>, Option<Mixed<B>>) {
        match &self.kind {
            MixerKind::Attention(_) => unreachable!("attention needs all tokens"),
            MixerKind::ShortConv(conv) => conv.forward_tile(parts, tile),
            MixerKind::DeltaNet(delta) => delta.forward_tile(parts, tile, state),
        }
    }

    /// Builds the input of the output projection from the operation's result, which has the last rows of the parts.
    pub(crate) fn prologue(&self, parts: &[Tensor<B, 2>], x: Tensor<B, 2>) -> Prologue<B> {
        match &self.kind {
            MixerKind::Attention(attention) => attention.gated(parts, x),
            MixerKind::ShortConv(_) => Prologue::None { x },
            MixerKind::DeltaNet(delta) => delta.gated(parts, x),
        }
    }

    /// Computes the gradients of the outputs of the first group for a tile and its lead from that of the output projection's input; gradients of parameters
    /// go to the sink. The gradient of the state after the tile becomes that of the state before it. Attention needs all tokens in one tile.
    pub(crate) fn backward(
        &self,
        parts: Vec<Tensor<B, 2>>,
        mixed: Mixed<B>,
        d_input: InputGradient<B>,
        tile: &Tile<B>,
        d_state: &mut Passing<B>,
        rotary: &[RotaryTables<B>],
        published: &mut Published<B>,
        sink: &mut dyn GradientSink<B>,
    ) -> Vec<Tensor<B, 2>> {
        match &self.kind {
            MixerKind::Attention(attention) => {
                attention.backward(parts, mixed, d_input, &tile.documents, rotary, published, sink)
            }
            MixerKind::ShortConv(conv) => conv.backward(parts, d_input.plain(), tile, sink),
            MixerKind::DeltaNet(delta) => delta.backward(parts, mixed, d_input, tile, d_state, sink),
        }
    }
}

impl<B: Kernels> Mixer<B> {
    /// Hands the gradients of the norms in the epilogue of the first group to the sink.
    pub(crate) fn add_gradients(&self, of_norms: Vec<Option<Tensor<B, 1>>>, sink: &mut dyn GradientSink<B>) {
        match &self.kind {
            MixerKind::Attention(attention) => {
                for (norm, gradient) in attention.qk_norm.iter().zip(of_norms) {
                    norm.add_gradient(gradient, sink);
                }
            }
            MixerKind::ShortConv(_) | MixerKind::DeltaNet(_) => {}
        }
    }
}

impl<B: Kernels> Cache<B> {
    pub(crate) fn states(&self) -> Option<Self> {
        match self {
            Self::Rows(_) => None,
            Self::State(state) => Some(Self::State(state.clone())),
            Self::States(convolved, states) => Some(Self::States(convolved.clone(), states.clone())),
        }
    }

    /// Allocates the cache of a mixer for this many tokens.
    pub(crate) fn new(mixer: &arch::Mixer, rows: usize, dtype: DType, device: &B::Device) -> Self {
        match mixer {
            arch::Mixer::Attention(attention) => {
                let rows = if attention.reads_another() { 0 } else { rows };
                Self::Rows(KvCache::new([rows, attention.kv_size()], dtype, device))
            }
            arch::Mixer::ShortConv(_) => Self::State(ConvState::new()),
            arch::Mixer::DeltaNet(_) => Self::States(ConvState::new(), DeltaState::new()),
        }
    }
}

/// Starts the slow preparations for the passes of a mixer over these documents.
pub(crate) fn prepare<B: Kernels>(mixer: &arch::Mixer, dtype: DType, documents: &Documents<B>, device: &B::Device) {
    match mixer {
        arch::Mixer::Attention(spec) => B::hint(device, Hint::Attention { spec, dtype, documents }),
        arch::Mixer::ShortConv(_) | arch::Mixer::DeltaNet(_) => {}
    }
}

#[cfg(test)]
pub(crate) mod tests;
