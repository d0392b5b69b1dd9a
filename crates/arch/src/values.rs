//! The values of a layer: what its forward computes of a token and its backward reads.
//!
//! Each is stated once, with the policies that save it and the moments at which it is alive: those of a mixer in its file in `mixer/`, all others here.
//! What a layer saves, what is alive at once, and what waits in host memory are sums over this list, which each backend prices in its own rows.
//! Trade-off: buffers that only one backend has (operands with adapters beside them, copies in f32) are stated where its memory is planned.

use serde::{Deserialize, Serialize};

use crate::modules::GroupKind;
use crate::spec::{LayerSpec, MlpSpec, ModelSpec, NormNames};

/// The values that a layer's forward pass saves for its backward, in ascending order.
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
    #[must_use]
    pub fn repeats_gemms(self) -> bool {
        self <= Self::Projections
    }

    /// Returns whether a group of a layer with these norms runs forward again. A group that only the next half of the
    /// layer reads does not, unless a norm follows it.
    #[must_use]
    pub fn repeats(self, kind: GroupKind, norms: &NormNames) -> bool {
        match (self, kind) {
            (Self::Full | Self::Projections, GroupKind::Down) => norms.after_mlp.is_some(),
            (Self::Projections, GroupKind::MixerOutput) => norms.after_mixer.is_some(),
            _ => self.repeats_gemms(),
        }
    }

    /// Returns whether a layer's saved values may wait in host memory: the inputs of its halves and attention's output are small enough.
    #[must_use]
    pub fn may_offload(self) -> bool {
        self.repeats_gemms()
    }

    /// Returns whether a value is saved until the backward; if not, the backward computes it again.
    #[must_use]
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
    const OF_MIXER: &[Self] = &[Self::Mixer, Self::MixerBackward];
    const OF_MLP: &[Self] = &[Self::GateUp, Self::Down, Self::DownBackward, Self::GateUpBackward];
    const OF_BOTH: &[Self] = Self::ALL.split_at(6).0;
    const OF_DOWN: &[Self] = &[Self::Down, Self::DownBackward];

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
    /// The sum after the mixer, which the MLP reads.
    Sum,
    /// The mixer's result, which its output projection reads.
    Mixed,
    /// An output of the mixer's first group.
    Part,
    /// Such an output as it was before its norm.
    PartBeforeNorm,
    /// What else the mixer's backward needs.
    Statistics,
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
    const fn new(kind: ValueKind, width: usize, saved_from: Recompute) -> Self {
        let saved_from = Some(saved_from);
        Self { kind, rows: 1, width, is_f32: false, saved_from, may_wait: false, alive: &[], passing: &[], forward: 0 }
    }

    /// Describes an output of a mixer's first group, e.g. before and after its rotation.
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

    /// Describes a mixer's result.
    pub(crate) const fn mixed(width: usize) -> Self {
        let passing = &[Moment::MixerBackward];
        let mixed = Self::new(ValueKind::Mixed, width, Recompute::Projections);
        Self { may_wait: true, alive: Moment::OF_MIXER, passing, forward: 1, ..mixed }
    }

    /// Describes values in f32 that belong to a mixer's result, so few that no plan counts them where they are not saved.
    pub(crate) const fn statistics(width: usize) -> Self {
        Self { is_f32: true, ..Self::new(ValueKind::Statistics, width, Recompute::Projections) }
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

impl MlpSpec {
    fn values(&self, hidden: usize) -> Vec<Value> {
        use Recompute::{None as Everything, Selective};
        let (rows, width) = (self.rows_per_token(), self.intermediate_size());
        // As wide as gate and up, or as their product.
        let inner = |kind, width, from| Value { passing: Moment::OF_DOWN, forward: 1, ..Value::new(kind, width, from) };
        let gate_up = Value { rows, alive: Moment::OF_MLP, ..inner(ValueKind::GateUp, 2 * width, Selective) };
        let activated = Value { rows, ..inner(ValueKind::Activated, width, Everything) };
        let mut values = vec![gate_up, activated];
        if let Self::Experts { count, .. } = self {
            // Two f32 per expert, in values of 16 bits.
            values.push(Value::new(ValueKind::Router, hidden + 4 * count, Selective));
            // In the order of tokens and in that of experts.
            for (kind, forward) in [(ValueKind::Dispatched, 2), (ValueKind::Returned, 1)] {
                values.push(Value { rows, alive: Moment::OF_DOWN, forward, ..inner(kind, hidden, Selective) });
            }
        }
        if let Some(shared) = self.shared() {
            let width = shared.intermediate_size;
            values.push(inner(ValueKind::SharedGateUp, 2 * width, Selective));
            values.push(inner(ValueKind::SharedActivated, width, Everything));
            let output = Value { forward: 1, ..Value::new(ValueKind::SharedOutput, hidden, Selective) };
            values.push(Value { saved_from: shared.gated.then_some(Selective), ..output });
        }
        values
    }
}

impl ModelSpec {
    /// Lists the values of layer `layer`.
    pub fn values(&self, layer: usize) -> Vec<Value> {
        let (hidden, LayerSpec { mixer, mlp, norms }) = (self.hidden_size, &self.layers[layer]);
        let NormNames { before_mixer, after_mixer, before_mlp, after_mlp } = norms.names();
        let input = Value { may_wait: true, forward: 2, ..Value::new(ValueKind::Input, hidden, Recompute::Full) };
        let sum = Value::new(ValueKind::Sum, hidden, Recompute::Projections);
        let sum = Value { may_wait: true, alive: Moment::OF_BOTH, forward: 1, ..sum };
        let normed = Value::new(ValueKind::Normed, hidden, Recompute::None);
        let output = Value::new(ValueKind::OutputBeforeNorm, hidden, Recompute::Selective);
        let output = Value { alive: Moment::OF_BOTH, ..output };
        let mut values = [vec![input, sum], mixer.values(), mlp.values(hidden)].concat();
        values.extend([before_mixer, before_mlp].iter().flatten().map(|_| normed));
        values.extend([after_mixer, after_mlp].iter().flatten().map(|_| output));
        values
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mixer::QkNorm;
    use crate::shapes::{llama_3_1_8b, qwen3_8b};
    use crate::spec::LayerNorms;

    /// Returns the bytes per token of what the first layer saves, in a format of 16 bits.
    fn saved(model: &ModelSpec, recompute: Recompute) -> u64 {
        model.values(0).iter().filter(|value| recompute.saves(value)).map(|value| value.bytes(2)).sum()
    }

    #[test]
    fn norms_save_what_they_read() {
        let selective = saved(&llama_3_1_8b(), Recompute::Selective);
        assert_eq!(selective, 94_336);
        let mut plain = qwen3_8b();
        plain.attentions_mut().for_each(|attention| attention.qk_norm = QkNorm::None);
        let both = [qwen3_8b(), plain].map(|model| saved(&model, Recompute::Selective));
        assert_eq!(both[0] - both[1], 2 * (4096 + 1024));
        let everything = saved(&llama_3_1_8b(), Recompute::None);
        let outputs = 2 * 2 * 4096;
        // Without input norms there are no normalized inputs to save.
        for (norms, more) in [(LayerNorms::Post, 0), (LayerNorms::PreAndPost, outputs)] {
            let mut model = llama_3_1_8b();
            model.layers.iter_mut().for_each(|layer| layer.norms = norms);
            assert_eq!(saved(&model, Recompute::Selective), selective + outputs);
            assert_eq!(saved(&model, Recompute::None), everything + more);
        }
    }

    #[test]
    fn what_a_layer_publishes_is_always_saved() {
        let mut model = llama_3_1_8b();
        let full = saved(&model, Recompute::Full);
        let attention = model.layers[0].mixer.attention_mut().unwrap();
        attention.keys_and_values = crate::mixer::KeysAndValues::Published(0);
        assert_eq!(saved(&model, Recompute::Full) - full, 2 * 2 * 1024);
        assert_eq!(saved(&model, Recompute::Selective), saved(&llama_3_1_8b(), Recompute::Selective));
    }
}
