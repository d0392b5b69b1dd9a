//! Buffers that a layer's forward and backward have on CUDA besides saved values, which determine the engine's peak, as host
//! arithmetic that is compiled without the cargo feature `cuda` too.
//!
//! A layer's values ([`ModelSpec::values`]) say when they are alive; here they get the engine's rows, and buffers that it alone has are
//! added. CubeCL's pools keep exact sizes here, so freed memory serves only later buffers of the same row width. The peak is therefore not
//! that of the widest moment: each width counts with the maximum number of its buffers that are alive at once, at whichever moment of
//! whichever layer that is, less those that later layers saved, which are free by then.
//! Trade-off: only measurements check the moments (docs/roofline.md).

use std::collections::BTreeMap;

use firebrick_arch::{
    AttentionSpec, DeltaNetSpec, GroupKind, LayerSpec, Mixer, ModelSpec, Moment, QkNorm, Value, ValueKind,
};
use firebrick_precision::FloatType;

use super::flash::{FlashTiles, flash_takes_f32};
use super::route::{Planned, planned_groups};
use super::rows::{ROW_MULTIPLE, row_stride};
use crate::memory::training_shape::{Recompute, TrainingShape};

/// Counts values per token in all buffers of layers that do not count as saved. Those of a tile count with its share of the tokens.
pub(super) fn buffers_per_token(model: &ModelSpec, training: &TrainingShape) -> u64 {
    // The loss: the last layer's output, its normalized copy, and its gradient.
    let mut most = BTreeMap::from([(Buffer { of_tile: false, width: model.hidden_size }, 3)]);
    let mut free = BTreeMap::new();
    for layer in (0..model.layers.len()).rev().map(|layer| Layer::new(model, training, layer)) {
        for (buffer, count) in layer.most() {
            let more = count.saturating_sub(free.get(&buffer).copied().unwrap_or(0));
            let entry = most.entry(buffer).or_default();
            *entry = more.max(*entry);
        }
        let saved = layer.saved().map(|width| Buffer { of_tile: false, width });
        saved.for_each(|buffer| *free.entry(buffer).or_default() += 1);
    }
    let sum = |of_tile: bool| {
        let buffers = most.iter().filter(|(buffer, _)| buffer.of_tile == of_tile);
        buffers.map(|(buffer, count)| (buffer.width * count) as u64).sum::<u64>()
    };
    let of_tile = training.tile_rows().map_or(0, |rows| (sum(true) * rows as u64).div_ceil(training.tokens()));
    sum(false) + of_tile
}

/// A buffer of a layer: values per row, and whether it has the rows of a tile or all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Buffer {
    of_tile: bool,
    width: usize,
}

/// Upper bound of the memory of rows, as a factor, for experts that run one after the other: their row counts change from pass to
/// pass and are rounded up to powers of two.
const VARYING_SIZES: usize = 2;
/// The groups of an MLP, or of all experts.
const GATE_UP: &[GroupKind] = &[GroupKind::GateUp, GroupKind::ExpertGateUp];
const DOWN: &[GroupKind] = &[GroupKind::Down, GroupKind::ExpertDown];

struct Layer<'a> {
    training: &'a TrainingShape,
    hidden: usize,
    spec: &'a LayerSpec,
    values: Vec<Value>,
    groups: Vec<Planned>,
}

impl<'a> Layer<'a> {
    fn new(model: &'a ModelSpec, training: &'a TrainingShape, layer: usize) -> Self {
        let (groups, values) = (planned_groups(model, training, layer), training.values(model, layer));
        let (hidden, spec) = (model.hidden_size, &model.layers[layer]);
        Self { training, hidden, spec, values, groups }
    }

    /// Returns the maximum number of buffers of each width that are alive at once.
    fn most(&self) -> BTreeMap<Buffer, usize> {
        let (has_tiles, is_whole) = (self.training.tile_rows().is_some(), self.training.runs_in_tiles(self.spec));
        let mut most: BTreeMap<Buffer, usize> = BTreeMap::new();
        for moment in Moment::ALL {
            let mut now: BTreeMap<Buffer, usize> = BTreeMap::new();
            let in_tile = has_tiles && moment.is_of_mlp() && !self.spec.mlp.is_mixture();
            let of_values = self.values.iter().flat_map(|value| {
                let of_mlp = matches!(value.kind, ValueKind::GateUp | ValueKind::Activated);
                let of_tile = is_whole || in_tile && of_mlp;
                self.of_value(value, moment).map(move |width| Buffer { of_tile, width })
            });
            let own = self.own(moment).into_iter().map(|width| Buffer { of_tile: is_whole, width });
            // Inputs and outputs, of tiles and joined.
            // The tiles of an input's gradient may have room.
            let is_backward = matches!(moment, Moment::DownBackward | Moment::GateUpBackward);
            let last = if is_backward { self.gradient_stride() } else { self.hidden };
            let hidden = if is_whole { 3 } else { 1 };
            let joined = [vec![self.hidden; hidden], vec![last]].concat();
            let joined = joined.into_iter().filter(|_| is_whole || in_tile);
            let joined = joined.map(|width| Buffer { of_tile: false, width });
            of_values.chain(own).chain(joined).for_each(|buffer| *now.entry(buffer).or_default() += 1);
            for (buffer, count) in now {
                let entry = most.entry(buffer).or_default();
                *entry = count.max(*entry);
            }
        }
        most
    }

    /// Returns the widths of the values that are saved on the device.
    fn saved(&self) -> impl Iterator<Item = usize> {
        let recompute = self.training.recompute;
        let stays = move |value: &&Value| recompute.saves(value) && !(self.training.is_offloaded() && value.may_wait);
        self.values.iter().filter(stays).map(|value| self.width_of(value))
    }

    fn of_value(&self, value: &Value, moment: Moment) -> impl Iterator<Item = usize> {
        let recompute = self.training.recompute;
        // The first group runs again as a whole, whatever is published of its outputs.
        let is_recomputed = !recompute.saves(value) || value.kind == ValueKind::Part && recompute.repeats_gemms();
        let waits = recompute == Recompute::Full && moment.is_of_mlp() && value.alive.contains(&Moment::Mixer);
        let is_alive = is_recomputed && (waits || value.alive.contains(&moment));
        // The gradients of gate and up, and of what experts return, take the place of the values.
        let in_place = matches!(value.kind, ValueKind::GateUp | ValueKind::Returned);
        let is_passing = !in_place && value.passing.contains(&moment);
        std::iter::repeat_n(self.width_of(value), usize::from(is_alive) + usize::from(is_passing))
    }

    /// Returns the width of a value's buffer: its rows, with columns for adapters.
    fn width_of(&self, value: &Value) -> usize {
        let columns = match value.kind {
            ValueKind::GateUp => self.room(GATE_UP),
            ValueKind::Activated => self.room(DOWN),
            ValueKind::SharedGateUp => self.room(&[GroupKind::SharedGateUp]),
            ValueKind::SharedActivated => self.room(&[GroupKind::SharedDown]),
            ValueKind::Gated => self.room(&[GroupKind::MixerOutput]),
            ValueKind::PerLayerGate => self.room(&[GroupKind::PerLayerGate]),
            ValueKind::PerLayerProduct => self.room(&[GroupKind::PerLayerProjection]),
            ValueKind::Dispatched => ROW_MULTIPLE,
            // Heads of attention are taken apart.
            ValueKind::Part if self.spec.mixer.attention().is_none() => self.room(&[GroupKind::MixerInput]),
            // One buffer has queries, keys and values as they were before.
            ValueKind::PartBeforeNorm if self.has_joined_norms() => {
                return self.group(&[GroupKind::MixerInput]).shape.out_features();
            }
            _ => 0,
        };
        let is_of_experts = matches!(
            value.kind,
            ValueKind::GateUp | ValueKind::Activated | ValueKind::Dispatched | ValueKind::Returned
        );
        let is_loop = self.spec.mlp.is_mixture() && !self.group(GATE_UP).route.is_grouped;
        let factor = if is_of_experts && is_loop { VARYING_SIZES } else { 1 };
        factor * value.rows * row_stride(value.width, columns)
    }

    /// Returns the widths of buffers that only this engine has at a moment: inputs of GEMMs with room for adapters, gradients of the residual
    /// stream, norms that run again, and outputs of the MLP.
    fn own(&self, moment: Moment) -> Vec<usize> {
        let (hidden, recompute) = (self.hidden, self.training.recompute);
        let [mixer, mlp] = [&[GroupKind::MixerInput], GATE_UP].map(|kinds| self.room(kinds));
        let gradient = self.gradient_stride();
        let normed = usize::from(recompute != Recompute::None);
        let own_input = self.groups.iter().filter(|planned| planned.group.kind == GroupKind::PerLayerGate);
        // The sum with the output of a shared expert, or its gradient; a gated output, or a normalized one of the experts; and an output before its norm.
        let outputs = self.spec.mlp.shared().map_or(0, |shared| 1 + usize::from(shared.gated || shared.normed))
            + usize::from(self.spec.norms.names().after_mlp.is_some());
        // Where halves are recomputed one at a time, the MLP's values are alive together with the restored input of the next half.
        let restored = usize::from(recompute == Recompute::Projections && moment.is_of_mlp());
        let ([gradients, hiddens], others) = match moment {
            Moment::Mixer => ([0, 0], [vec![row_stride(hidden, mixer)], self.of_delta_rule(false)].concat()),
            Moment::GateUp => ([0, 0], vec![row_stride(hidden, mlp)]),
            Moment::Down => ([0, 1 + outputs], Vec::new()),
            // The gradients of the layer's own input and its gate are side by side.
            Moment::DownBackward => ([1, outputs], own_input.map(|planned| 2 * planned.shape.out_features()).collect()),
            Moment::MixerBackward => {
                let of_attention = self.spec.mixer.attention().map(|attention| in_f32(attention, self.training));
                // Of what has gates, and of the gates.
                let gated = self.values.iter().filter(|value| value.kind == ValueKind::Gated);
                let gated = gated.map(|value| 2 * value.width).collect();
                ([1, 0], [of_attention.unwrap_or_else(|| self.of_delta_rule(true)), gated].concat())
            }
            Moment::GateUpBackward | Moment::MixerInputBackward => ([2, normed], Vec::new()),
        };
        [vec![gradient; gradients], vec![hidden; hiddens + restored], others].concat()
    }

    fn gradient_stride(&self) -> usize {
        let room = self.room(&[GroupKind::MixerInput]) + self.room(GATE_UP);
        row_stride(self.hidden, if room > 0 { ROW_MULTIPLE } else { 0 })
    }

    /// Returns the widths of what a delta rule computes besides its result: the convolved inputs, its queries and keys, two squares for each chunk, the
    /// corrections, and four f32 for each head; and in its backward the gradients of the convolved inputs.
    fn of_delta_rule(&self, is_backward: bool) -> Vec<usize> {
        let Mixer::DeltaNet(spec) = &self.spec.mixer else { return Vec::new() };
        let (channels, keys, values) = (spec.channels(), spec.key_size(), spec.value_size());
        let squares = self.training.of_chunks(DeltaNetSpec::CHUNK * spec.value_heads);
        // The backward has corrections when what has gates is gone.
        let of_tokens = if is_backward { channels } else { values };
        vec![channels, keys, keys, squares, squares, 8 * spec.value_heads, of_tokens]
    }

    fn group(&self, kinds: &[GroupKind]) -> &Planned {
        let mut groups = self.groups.iter();
        groups.find(|planned| kinds.contains(&planned.group.kind)).expect("the layer has such a group")
    }

    fn room(&self, kinds: &[GroupKind]) -> usize {
        self.group(kinds).route.room()
    }

    fn has_joined_norms(&self) -> bool {
        self.spec.mixer.attention().is_some_and(|attention| attention.qk_norm == QkNorm::PerHead)
    }
}

/// Returns the widths, in values of the compute format, of what attention's backward converts if only the f32 kernels support its heads: queries,
/// keys and values, the output and its gradient, and the results. cuDNN may run the call instead.
fn in_f32(attention: &AttentionSpec, training: &TrainingShape) -> Vec<usize> {
    let only_in_f32 =
        flash_takes_f32(attention.head_dim) && FlashTiles::of(attention.head_dim, training.shared_bytes).is_none();
    if training.compute == FloatType::F32 || !only_in_f32 {
        return Vec::new();
    }
    [[2 * attention.query_size(); 4], [2 * attention.kv_size(); 4]].concat()
}

#[cfg(test)]
mod tests {
    use firebrick_arch::shapes::llama_3_1_8b;

    use super::*;
    use crate::memory::training_shape::tests::qlora;

    #[test]
    fn a_width_counts_as_often_as_it_is_alive_at_once() {
        let buffers = |recompute| buffers_per_token(&llama_3_1_8b(), &qlora(1, recompute));
        // Three hidden states around the loss; two gradients; those of keys and values; the gated activation.
        assert_eq!(buffers(Recompute::Selective), 3 * 4096 + 2 * 4160 + 2 * 1024 + 14_400);
        assert_eq!(buffers(Recompute::None), buffers(Recompute::Selective));
        // Queries, attention's output, the sum after it, and one more; keys, values, and their gradients.
        assert_eq!(buffers(Recompute::Full), 5 * 4096 + 2 * 4160 + 4 * 1024 + 14_400 + 28_736);
        // Queries, and the gradients of attention's output and of queries; the output and the sum are saved.
        assert_eq!(buffers(Recompute::Projections), 3 * 4096 + 2 * 4160 + 4 * 1024 + 14_400 + 28_736);
    }

    #[test]
    fn heads_that_only_the_f32_kernels_take_count_in_both_formats() {
        let buffers = |head_dim, compute| {
            let mut model = llama_3_1_8b();
            model.attentions_mut().for_each(|attention| attention.head_dim = head_dim);
            buffers_per_token(&model, &TrainingShape { compute, ..qlora(1, Recompute::Full) })
        };
        for head_dim in [32, 64, 96, 128, 160, 192, 224, 256] {
            let [half, f32] = [FloatType::Bf16, FloatType::F32].map(|compute| buffers(head_dim, compute));
            // Four buffers of 32 query heads each, and four of 8 key or value heads each.
            let copies = if matches!(head_dim, 32 | 160 | 192 | 224) { 4 * (32 + 8) * head_dim } else { 0 };
            assert_eq!(half - f32, 2 * copies as u64, "heads of {head_dim}");
        }
    }
}
