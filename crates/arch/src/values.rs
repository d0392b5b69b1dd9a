//! What a value of a layer is: something that its forward computes of a token and its backward reads, with the policies that save it and the moments at
//! which it is alive.
//!
//! Trade-off: buffers that only one backend has (operands with adapters next to them, copies in f32) are stated where its memory is planned.

use serde::{Deserialize, Serialize};

// In ascending order: each policy saves what those before it save, and more.
/// The values that a layer's forward pass saves for its backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Recompute {
    /// Only the layer's input; the layer runs forward again, without its last GEMM unless a norm follows it.
    Full,
    /// The layer's input, attention's output, and the sum after attention. The first projections of attention and of
    /// the MLP are recomputed; attention and its output projection are not (unless a norm follows the latter).
    Projections,
    /// Outputs of GEMMs and of attention; norms and activation functions are recomputed.
    Selective,
    /// Everything the backward reads.
    None,
}

impl Recompute {
    /// Returns whether GEMMs run forward a second time: gradient checkpointing.
    pub fn repeats_gemms(self) -> bool {
        self <= Self::Projections
    }

    /// Returns whether a layer's saved values may wait in host memory: the inputs of its halves and attention's output are small enough.
    pub fn may_offload(self) -> bool {
        self.repeats_gemms()
    }

    /// Returns whether a value is saved until the backward; if not, the backward computes it again.
    pub fn saves(self, value: &Value) -> bool {
        value.saved_from.is_some_and(|from| from <= self)
    }
}

/// A moment in the forward or the backward of a layer, named for what runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// The mixer.
    Mixer,
    /// Gate and up.
    GateUp,
    /// The gated activation, and the MLP's output.
    Down,
    /// The backward of the MLP's output.
    DownBackward,
    /// The backward of gate and up.
    GateUpBackward,
    /// The backward of the mixer.
    MixerBackward,
    /// The backward of the mixer's first group.
    MixerInputBackward,
}

impl Moment {
    /// All of them, in order.
    pub const ALL: [Self; 7] = [
        Self::Mixer,
        Self::GateUp,
        Self::Down,
        Self::DownBackward,
        Self::GateUpBackward,
        Self::MixerBackward,
        Self::MixerInputBackward,
    ];
    pub(crate) const OF_MIXER: &[Self] = &[Self::Mixer, Self::MixerBackward];
    pub(crate) const OF_MLP: &[Self] = &[Self::GateUp, Self::Down, Self::DownBackward, Self::GateUpBackward];
    pub(crate) const OF_BOTH: &[Self] = Self::ALL.split_at(6).0;
    pub(crate) const OF_DOWN: &[Self] = &[Self::Down, Self::DownBackward];

    /// Returns whether the MLP, or its backward, runs.
    pub fn is_of_mlp(self) -> bool {
        Self::OF_MLP.contains(&self)
    }
}

/// What a value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ValueKind {
    /// The layer's input.
    Input,
    /// The sum after the mixer, which the MLP reads; or that after the MLP, where the layer's own input follows.
    Sum,
    /// The mixer's result, which its output projection reads.
    Mixed,
    /// Outputs of the mixer's first group, in one buffer.
    Part,
    /// Such an output as it was before its norm.
    PartBeforeNorm,
    /// The mixer's result times gates, which its output projection reads then.
    Gated,
    /// What a mixer computes on the way to it, e.g. the result normalized.
    BeforeGates,
    /// What else the mixer's backward needs.
    Statistics,
    /// States at the starts of chunks, per token of a document of whole chunks.
    States,
    /// A normalized input of the mixer or the MLP.
    Normed,
    /// The output of the mixer or the MLP as it was before its norm.
    OutputBeforeNorm,
    /// Gate and up.
    GateUp,
    /// The gated activation.
    Activated,
    /// The router's input, logits and weights.
    Router,
    /// The rows that experts read.
    Dispatched,
    /// The rows that experts return.
    Returned,
    /// Gate and up of the shared expert.
    SharedGateUp,
    /// Its gated activation.
    SharedActivated,
    /// Its output.
    SharedOutput,
    /// What multiplies the layer's own input.
    PerLayerGate,
    /// The product.
    PerLayerProduct,
}

/// A value of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Value {
    /// What it is.
    pub kind: ValueKind,
    /// Rows per token.
    pub rows: usize,
    /// Values of a row.
    pub width: usize,
    /// Whether it is in f32, whatever the compute format is.
    pub is_f32: bool,
    /// The first policy that saves it until the backward, as all later ones do; `None`: the backward does not read it.
    pub saved_from: Option<Recompute>,
    /// Whether it may wait in host memory where GEMMs run twice ([`Recompute::may_offload`]).
    pub may_wait: bool,
    /// When it is alive if it is not saved. A layer that is recomputed as a whole has all values of its mixer until that goes back.
    pub alive: &'static [Moment],
    /// When a buffer of its size is alive even if it is saved: as it is computed, or of its gradient.
    pub passing: &'static [Moment],
    /// Buffers of its size that are alive in a forward that saves nothing.
    pub forward: usize,
}

impl Value {
    /// Describes what one row per token has, and a backward alone needs.
    pub(crate) const fn new(kind: ValueKind, width: usize, saved_from: Recompute) -> Self {
        let saved_from = Some(saved_from);
        Self { kind, rows: 1, width, is_f32: false, saved_from, may_wait: false, alive: &[], passing: &[], forward: 0 }
    }

    /// Describes outputs of a mixer's first group in one buffer, e.g. before and after their rotation.
    pub(crate) const fn part(width: usize) -> Self {
        let passing = &[Moment::MixerBackward];
        let part = Self::new(ValueKind::Part, width, Recompute::Selective);
        Self { alive: Moment::OF_MIXER, passing, forward: 2, ..part }
    }

    /// Describes such an output as it was before its norm.
    pub(crate) const fn part_before_norm(width: usize) -> Self {
        let passing = &[Moment::MixerInputBackward];
        let before = Self::new(ValueKind::PartBeforeNorm, width, Recompute::Selective);
        Self { alive: Moment::OF_MIXER, passing, ..before }
    }

    pub(crate) const fn mixed(width: usize) -> Self {
        let passing = &[Moment::MixerBackward];
        let mixed = Self::new(ValueKind::Mixed, width, Recompute::Projections);
        Self { may_wait: true, alive: Moment::OF_MIXER, passing, forward: 1, ..mixed }
    }

    /// Describes a mixer's result times its gates, or what is computed on the way to it.
    pub(crate) const fn gated(kind: ValueKind, width: usize) -> Self {
        Self { alive: Moment::OF_MIXER, forward: 1, ..Self::new(kind, width, Recompute::None) }
    }

    /// Describes values in f32 that belong to a mixer's result, so few that no plan counts them where they are not saved.
    pub(crate) const fn statistics(width: usize) -> Self {
        Self { is_f32: true, ..Self::new(ValueKind::Statistics, width, Recompute::Projections) }
    }

    /// Describes the states at the starts of chunks, and their gradients.
    pub(crate) const fn states(width: usize) -> Self {
        Self { kind: ValueKind::States, ..Self::mixed(width) }
    }

    /// Describes a value that later layers read: it is never computed again.
    pub(crate) const fn published(self) -> Self {
        Self { saved_from: Some(Recompute::Full), ..self }
    }

    /// Returns the bytes per token, with `value` bytes per value in the compute format.
    pub fn bytes(&self, value: u64) -> u64 {
        (self.rows * self.width) as u64 * if self.is_f32 { 4 } else { value }
    }
}
