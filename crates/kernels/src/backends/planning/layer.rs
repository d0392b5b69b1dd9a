//! Row widths of the buffers that a layer's forward and backward allocate on CUDA, which determine the engine's peak
//! besides saved values, as host arithmetic that is compiled without the cargo feature `cuda` too.
//!
//! CubeCL's pools keep exact sizes here, so freed memory serves only later buffers of the same row width. The peak is therefore not that of the
//! widest moment: each width counts with the maximum number of its buffers that are alive at once, at whichever moment that is.
//! Trade-off: the moments are listed by hand, and only measurements check them (docs/roofline.md).

use std::collections::BTreeMap;

use firebrick_arch::{AttentionSpec, GroupKind, GroupSpec, ModelSpec, QkNorm};
use firebrick_precision::FloatType;

use super::flash::{FlashTiles, flash_takes_f32};
use super::route::Route;
use super::rows::{ROW_MULTIPLE, row_stride};
use crate::memory::training_shape::{Recompute, TrainingShape};

/// Counts values per token in all buffers of the widest layer that do not count as saved.
pub(super) fn buffers_per_token(model: &ModelSpec, training: &TrainingShape) -> u64 {
    (0..model.layers.len()).map(|layer| Layer::new(model, training, layer).buffers()).max().unwrap_or(0)
}

/// Upper bound of the memory of rows, as a factor: 1, or 2 for experts that run one after the other, whose row counts change
/// from pass to pass and are rounded up to powers of two.
const VARYING_SIZES: [usize; 2] = [1, 2];

/// Row widths of a layer's buffers.
struct Layer {
    recompute: Recompute,
    hidden: usize,
    /// What the mixer reads: outputs of its first group; and its result.
    parts: Vec<usize>,
    mixed: usize,
    /// Inputs of the query and key norms, which the backward reads again: joined with values, or dense copies of both.
    raw: Vec<usize>,
    /// Buffers that attention's backward converts to f32 if only the f32 kernels support the heads, as widths in the 16-bit format:
    /// queries, keys and values, the output and its gradient, and the results. cuDNN may run the call instead.
    in_f32: Vec<usize>,
    /// Number of outputs that are normalized after their GEMM.
    normed_outputs: usize,
    /// Widths with room for adapters: inputs of the GEMMs after norms, gate and up together, and the gated activation.
    normed: [usize; 2],
    gate_up: usize,
    activated: usize,
    /// Rows of a mixture's experts that are not saved: dispatched, separate outputs, and joined outputs; or their gradients. Then the buffers of a
    /// shared expert.
    routed: Vec<usize>,
    /// Gradient of a layer's or of attention's output, with room for the next group's adapters.
    gradient: usize,
}

impl Layer {
    fn new(model: &ModelSpec, training: &TrainingShape, layer: usize) -> Self {
        let groups = model.layer_groups(layer);
        let (inputs, [gate_up, down]) = (&groups.mixer.input, groups.mlp_shapes());
        let (mixer, mlp) = (&model.layers[layer].mixer, &model.layers[layer].mlp);
        let is_loop = mlp.is_mixture() && !Route::planned(model, gate_up, training).is_grouped;
        let rows = mlp.rows_per_token() * VARYING_SIZES[usize::from(is_loop)];
        let appended = |group: &GroupSpec| Route::planned(model, group, training).room();
        let input = |group: &GroupSpec| row_stride(group.in_features, appended(group));
        let has_room = appended(inputs) + appended(gate_up) > 0;
        // Gate and up, the gated activation, the sum with the output or its gradient, and a gated output.
        let shared = groups.mlp.shared().flat_map(|group| match group.kind {
            GroupKind::SharedGateUp => vec![row_stride(group.out_features(), appended(group))],
            GroupKind::SharedDown => vec![input(group), model.hidden_size],
            _ => vec![model.hidden_size],
        });
        let shared = shared.collect();
        let [raw, in_f32] =
            mixer.attention().map_or_else(Default::default, |attention| of_attention(attention, inputs, training));
        Self {
            recompute: training.recompute,
            hidden: model.hidden_size,
            parts: inputs.parts.clone(),
            mixed: mixer.values().mixed,
            raw,
            in_f32,
            normed_outputs: model.layers[layer].norms.names().outputs(),
            normed: [input(inputs), input(gate_up)],
            gate_up: rows * row_stride(gate_up.out_features(), appended(gate_up)),
            activated: rows * input(down),
            routed: match (mlp.is_mixture(), training.recompute.repeats_gemms()) {
                (false, _) => Vec::new(),
                (true, true) => {
                    let wide = rows * row_stride(model.hidden_size, ROW_MULTIPLE);
                    [vec![wide; 2], vec![rows * model.hidden_size], shared].concat()
                }
                // Dispatched rows and outputs are saved: their gradient is left.
                (true, false) => [vec![rows * row_stride(model.hidden_size, ROW_MULTIPLE)], shared].concat(),
            },
            gradient: row_stride(model.hidden_size, if has_room { ROW_MULTIPLE } else { 0 }),
        }
    }

    fn buffers(&self) -> u64 {
        let mut most: BTreeMap<usize, usize> = BTreeMap::new();
        for moment in self.moments() {
            let mut now: BTreeMap<usize, usize> = BTreeMap::new();
            for width in moment {
                *now.entry(width).or_default() += 1;
            }
            for (width, count) in now {
                let entry = most.entry(width).or_default();
                *entry = count.max(*entry);
            }
        }
        most.iter().map(|(width, count)| (width * count) as u64).sum()
    }

    /// Lists the buffers that are alive at each moment: first in the forward, then in the backward.
    fn moments(&self) -> Vec<Vec<usize>> {
        let Self { hidden, mixed, gate_up, activated, gradient, .. } = *self;
        let [normed_input, normed_gate] = self.normed;
        let (parts, raw) = (&self.parts[..], &self.raw[..]);
        let normed_outputs = vec![hidden; self.normed_outputs];
        // Values that each half keeps from its (recomputed) forward to its backward; other policies save them, and count them there.
        // Where halves are recomputed one at a time, the MLP's values are alive together with the restored inputs of the next half.
        let [in_mixer, in_mlp]: [Vec<usize>; 2] = match self.recompute {
            Recompute::Full => {
                let both = [parts, raw, &[mixed, hidden], &normed_outputs].concat();
                [both.clone(), both]
            }
            Recompute::Projections => {
                [[parts, raw, &normed_outputs].concat(), [&[hidden], &normed_outputs[..]].concat()]
            }
            Recompute::Selective | Recompute::None => [Vec::new(), Vec::new()],
        };
        let gate_up: &[usize] = if self.recompute.repeats_gemms() { &[gate_up] } else { &[] };
        // Norms and gated activations that the backward recomputes.
        let recomputed = |width: usize| if self.recompute == Recompute::None { vec![] } else { vec![width] };
        vec![
            [&in_mixer[..], &[normed_input]].concat(),
            [&in_mlp[..], gate_up, &[normed_gate]].concat(),
            [&in_mlp[..], gate_up, &self.routed, &[activated, hidden], &normed_outputs[..self.normed_outputs.min(1)]]
                .concat(),
            // The loss: the last layer's output, its normalized copy, and its gradient.
            vec![hidden; 3],
            [&in_mlp[..], gate_up, &self.routed, &[gradient, activated], &normed_outputs[..self.normed_outputs.min(1)]]
                .concat(),
            [&in_mlp[..], gate_up, &[gradient, gradient], &recomputed(hidden)].concat(),
            [&in_mixer[..], &[gradient, mixed], parts, &self.in_f32].concat(),
            [&[gradient, gradient][..], &recomputed(hidden), raw].concat(),
        ]
    }
}

/// Returns the inputs of the query and key norms, and the copies in f32 of attention's backward, as widths.
fn of_attention(attention: &AttentionSpec, qkv: &GroupSpec, training: &TrainingShape) -> [Vec<usize>; 2] {
    let [query, key_value] = [attention.query_size(), attention.kv_size()];
    let raw = match attention.qk_norm {
        QkNorm::None => Vec::new(),
        QkNorm::PerHead => vec![qkv.out_features()],
        QkNorm::WholeProjection => vec![query, key_value],
    };
    let only_in_f32 =
        flash_takes_f32(attention.head_dim) && FlashTiles::of(attention.head_dim, training.shared_bytes).is_none();
    let is_converted = training.compute != FloatType::F32 && only_in_f32;
    [raw, if is_converted { [[2 * query; 4], [2 * key_value; 4]].concat() } else { Vec::new() }]
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
