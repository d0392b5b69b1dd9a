//! Peak memory of a training run, line by line, as host arithmetic that needs no device.
//!
//! The lines for weights, gradients, optimizer state and saved activations follow from the model and how it is trained. The working
//! set of a layer's backward, of the loss and of libraries depends on the backend: `backends/planning/` states it (`reference.rs`,
//! `cuda.rs`), and is compiled even if the backend is not. `training_shape.rs` describes how the model is trained.
//! Trade-off: effects of the machine rather than the run, such as an allocator's rounding, are left out.

use firebrick_arch::{GroupSpec, LoraConfig, MlpSpec, ModelSpec, Role};
use firebrick_hwprofile::memory::MemoryLine;
use firebrick_precision::Format;

pub use super::training_shape::{DividedBytes, PairPasses, Recompute, TRAINED_BYTES, TrainingShape};
pub use crate::weights::BaseStorage;
pub use firebrick_hwprofile::memory::MemoryEstimate;

/// Values per target of a pair: log-probabilities, the document, weights, and whether it belongs to the answer.
const PAIR_VALUES: u64 = 4;

/// Offloaded layer inputs on the device at the same time in the backward: the one in use, and one being restored.
const INPUTS_ON_DEVICE: usize = 2;

impl TrainingShape {
    /// Returns the lines that follow from the model, then those of a backend's working set.
    pub(crate) fn with_working_set(&self, model: &ModelSpec, working_set: Vec<MemoryLine>) -> MemoryEstimate {
        let mut lines = Vec::from(parameter_lines(model, self));
        lines.push(adapted_norms(model, self));
        lines.push(saved_activations(model, self));
        lines.push(pair_values(self));
        lines.extend(working_set);
        let mut host_lines = vec![offloaded_activations(model, self), paged_state(self)];
        for lines in [&mut lines, &mut host_lines] {
            lines.retain(|line| line.bytes > 0);
        }
        MemoryEstimate { peak: "at the peak of a step", lines, host_lines }
    }

    /// Returns the bytes of parameters, gradients and optimizer state.
    pub(crate) fn parameter_bytes(&self, model: &ModelSpec) -> u64 {
        sum(&parameter_lines(model, self))
    }

    /// Returns the lines for memory that persists between steps: parameters and optimizer state.
    pub(crate) fn resident_lines(&self, model: &ModelSpec) -> Vec<MemoryLine> {
        let [base, trained, _, state, _, borrowed, _] = parameter_lines(model, self);
        vec![base, trained, adapted_norms(model, self), state, borrowed]
    }
}

/// Returns the line for the norms in DoRA's denominator: those of adapted rows, and the squared norms of base rows.
fn adapted_norms(model: &ModelSpec, training: &TrainingShape) -> MemoryLine {
    let lora = training.lora.as_ref().filter(|lora| lora.use_dora);
    let of_lora = |lora: &LoraConfig| {
        let magnitudes = model.tensors_of(lora).into_iter().filter(|tensor| tensor.role == Role::LoraMagnitude);
        2 * TRAINED_BYTES * magnitudes.map(|tensor| tensor.elements() as u64).sum::<u64>()
    };
    line("norms of adapted rows", lora.map_or(0, of_lora), "two f32 values per magnitude".to_owned())
}

/// Values per token that a layer's forward computes and its backward reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LayerValues {
    /// The layer's input; the sum after the mixer has the same width.
    input: u64,
    /// The mixer's result.
    mixed: u64,
    /// Outputs of GEMMs and attention: queries, keys and values (also those before their norm), attention output,
    /// outputs before a norm, the sum after attention, gate and up.
    computed: u64,
    /// Both normalized inputs, and the gated activation.
    elementwise: u64,
    /// What later layers read of this one.
    published: u64,
    /// f32 values that belong to the mixer's result.
    statistics: u64,
}

/// Returns the values of layer `layer`, from the parts of its groups.
pub(crate) fn layer_values(model: &ModelSpec, layer: usize) -> LayerValues {
    let groups = model.layer_groups(layer);
    let (inputs, [gate_up, down]) = (&groups.mixer.input, groups.mlp_shapes());
    let (mixer, mlp) = (model.layers[layer].mixer.values(), &model.layers[layer].mlp);
    let norms = model.layers[layer].norms.names();
    let before_norm = mixer.before_norm + norms.outputs() * model.hidden_size;
    let (rows, routed) = match mlp {
        MlpSpec::Gated { .. } => (1, 0),
        // The router's input; dispatched and returned rows; two f32 per expert, in 2-byte values.
        MlpSpec::Experts { count, top_k, .. } => (*top_k, (1 + 2 * top_k) * model.hidden_size + 4 * count),
    };
    // Of a shared expert gate and up, its output if that is gated, and the gated activation.
    let [shared, activated] = mlp.shared().map_or([0; 2], |shared| {
        let output = if shared.gated { model.hidden_size } else { 0 };
        [2 * shared.intermediate_size + output, shared.intermediate_size]
    });
    let computed = inputs.out_features()
        + before_norm
        + mixer.mixed
        + gate_up.in_features
        + rows * gate_up.out_features()
        + routed
        + shared;
    let normed = |name: Option<&str>, group: &GroupSpec| if name.is_some() { group.in_features } else { 0 };
    LayerValues {
        input: inputs.in_features as u64,
        mixed: mixer.mixed as u64,
        published: mixer.published as u64,
        computed: computed as u64,
        elementwise: (normed(norms.before_mixer, inputs)
            + normed(norms.before_mlp, gate_up)
            + rows * down.in_features
            + activated) as u64,
        statistics: mixer.statistics as u64,
    }
}

impl LayerValues {
    /// Returns the bytes per token that the forward saves until the backward, with `value` bytes per value.
    pub(crate) fn saved(&self, recompute: Recompute, value: u64) -> u64 {
        match recompute {
            Recompute::Full => (self.input + self.published) * value,
            Recompute::Projections => (self.half_inputs() + self.published) * value + 4 * self.statistics,
            Recompute::Selective => self.selective(value),
            Recompute::None => self.everything(value),
        }
    }

    /// Returns the values of the inputs of both halves (attention and MLP) and of attention's output.
    fn half_inputs(&self) -> u64 {
        2 * self.input + self.mixed
    }

    /// Returns the bytes per token of the input and of the outputs of GEMMs and attention.
    pub(crate) fn selective(&self, value: u64) -> u64 {
        (self.input + self.computed) * value + 4 * self.statistics
    }

    /// Returns the bytes per token of everything that the backward reads.
    pub(crate) fn everything(&self, value: u64) -> u64 {
        self.selective(value) + self.elementwise * value
    }
}

pub(crate) fn line(what: &'static str, bytes: u64, why: String) -> MemoryLine {
    MemoryLine { what, bytes, why }
}

pub(crate) fn sum(lines: &[MemoryLine]) -> u64 {
    lines.iter().map(|line| line.bytes).sum()
}

fn parameter_lines(model: &ModelSpec, training: &TrainingShape) -> [MemoryLine; 7] {
    let trained = training.trained_parameters(model);
    let base = match training.base {
        BaseStorage::Frozen(Format::Quantized(format)) => format!(
            "projections in {format}, {:.3} bits per parameter; the rest in {}",
            format.bits_per_value(),
            training.compute
        ),
        BaseStorage::Frozen(format) => format!("every parameter in {format}"),
        BaseStorage::Trained => String::new(),
    };
    let per_parameter = training.optimizer_bytes as f64 / trained.max(1) as f64;
    let paged = if training.paged_bytes > 0 { ", without what is paged" } else { "" };
    let state = format!("{per_parameter:.2} bytes per trained parameter{paged}");
    let divided = &training.divided;
    let [frozen_elsewhere, trained_elsewhere] =
        if training.lora.is_some() { [divided.weights_elsewhere, 0] } else { [0, divided.weights_elsewhere] };
    let share = |bytes: u64| if bytes > 0 { ", without what other ranks have" } else { "" };
    [
        line(
            "base weights",
            training.base_bytes(model) - frozen_elsewhere,
            format!("{base}{}", share(frozen_elsewhere)),
        ),
        line(
            if training.lora.is_some() { "adapter weights" } else { "trained weights" },
            trained * TRAINED_BYTES - trained_elsewhere,
            format!("{trained} parameters in f32{}", share(trained_elsewhere)),
        ),
        line(
            "gradients",
            trained * TRAINED_BYTES - divided.gradients_elsewhere,
            format!("one f32 value per trained parameter{}", share(divided.gradients_elsewhere)),
        ),
        line("optimizer state", training.optimizer_bytes - training.paged_bytes, state),
        line(
            "paged state passing through",
            training.paging_bytes,
            "buckets that are updated, or on their way".to_owned(),
        ),
        line(
            "weights of other ranks",
            divided.weights_borrowed,
            "of the layer that computes, and of the next".to_owned(),
        ),
        line(
            "gradients for other ranks",
            divided.gradients_leaving,
            "a bucket that fills, and one on its way".to_owned(),
        ),
    ]
}

/// Returns the line for optimizer moments that are copied to the device for their update and back.
fn paged_state(training: &TrainingShape) -> MemoryLine {
    line("paged optimizer state", training.paged_bytes, "pinned; copied to the device and back in each step".to_owned())
}

/// Returns the line for the initial adapters in host memory.
pub(crate) fn adapter_starts(model: &ModelSpec, training: &TrainingShape) -> MemoryLine {
    line("starts of adapters", training.start_bytes(model), "f32; saved next to the trained pairs".to_owned())
}

fn saved_activations(model: &ModelSpec, training: &TrainingShape) -> MemoryLine {
    let (tokens, value) = (training.tokens(), training.activation_bytes());
    let values = || (0..model.layers.len()).map(|layer| layer_values(model, layer));
    let of_layers = |count| values().take(count).map(|layer| layer.saved(training.recompute, value)).sum::<u64>();
    let all = model.layers.len();
    let is_offloaded = training.is_offloaded();
    let (layers, per_token) = match training.recompute {
        Recompute::Projections if is_offloaded => {
            let widest = values().map(|layer| layer.half_inputs()).max().unwrap_or(0);
            let published = values().map(|layer| layer.published).sum::<u64>();
            (1, (widest + published) * value + 4 * values().map(|layer| layer.statistics).sum::<u64>())
        }
        _ if is_offloaded => (all.min(INPUTS_ON_DEVICE), of_layers(INPUTS_ON_DEVICE)),
        _ => (all, of_layers(all)),
    };
    let what_is_saved = match training.recompute {
        Recompute::Full => "the input",
        Recompute::Projections if is_offloaded => {
            "sums of the softmax of all layers, attention's output and the inputs of both halves"
        }
        Recompute::Projections => "attention's output and the inputs of both halves",
        Recompute::Selective => "outputs of GEMMs and attention",
        Recompute::None => "everything that the backward reads",
    };
    let layers = if layers == 1 { "one layer".to_owned() } else { format!("{layers} layers") };
    let why = format!("{what_is_saved} of {layers}, {per_token} bytes per token, {tokens} tokens");
    line("saved activations", tokens * per_token, why)
}

/// Returns the line for vectors over the targets of pairs. The reference pass ends before anything is saved for the backward, so it needs no line.
fn pair_values(training: &TrainingShape) -> MemoryLine {
    let bytes = training.pairs.map_or(0, |_| PAIR_VALUES * 4 * training.tokens());
    line("values of pairs", bytes, format!("{PAIR_VALUES} f32 values per token: log-probabilities, weights, marks"))
}

fn offloaded_activations(model: &ModelSpec, training: &TrainingShape) -> MemoryLine {
    let tensors = training.offloaded_tensors(model);
    let bytes = tensors.iter().map(|[count, width]| (count * width) as u64).sum::<u64>();
    let what = match training.recompute {
        Recompute::Projections => "the inputs of both halves of each layer, and attention's output",
        _ => "the input of each layer but the last",
    };
    let why = format!("{what}, {} tokens, pinned", training.tokens());
    line("offloaded activations", bytes * training.tokens() * training.activation_bytes(), why)
}

#[cfg(test)]
pub(crate) mod tests {
    use firebrick_arch::shapes::{llama_3_1_8b, qwen3_8b};
    use firebrick_arch::{LayerNorms, QkNorm};
    use firebrick_precision::FloatType;

    use super::*;
    use crate::memory::training_shape::tests::{full, qlora};

    pub(crate) fn bytes_of(estimate: &MemoryEstimate, what: &str) -> u64 {
        estimate.lines.iter().filter(|line| line.what == what).map(|line| line.bytes).sum()
    }

    #[test]
    fn what_other_ranks_have_is_not_counted_and_what_is_borrowed_is() {
        let model = llama_3_1_8b();
        let divided = DividedBytes {
            gradients_elsewhere: 1 << 20,
            gradients_leaving: 1 << 10,
            weights_elsewhere: 1 << 30,
            weights_borrowed: 1 << 25,
        };
        for (whole, weights) in [(qlora(1, Recompute::Full), "base weights"), (full(FloatType::F32), "trained weights")]
        {
            let part = TrainingShape { divided, ..whole.clone() };
            let [whole, part] = [whole, part].map(|shape| shape.with_working_set(&model, Vec::new()));
            assert_eq!(bytes_of(&whole, weights) - bytes_of(&part, weights), 1 << 30);
            assert_eq!(bytes_of(&whole, "gradients") - bytes_of(&part, "gradients"), 1 << 20);
            let more = (1 << 25) + (1 << 10);
            assert_eq!(whole.total_bytes() + more, part.total_bytes() + (1 << 30) + (1 << 20));
        }
    }

    #[test]
    fn paged_state_moves_from_the_device_to_the_host() {
        let resident = full(FloatType::Bf16);
        let paged = TrainingShape { paged_bytes: 1 << 30, paging_bytes: 1 << 20, ..resident.clone() };
        let estimate = |training: &TrainingShape| training.with_working_set(&llama_3_1_8b(), Vec::new());
        let (before, after) = (estimate(&resident), estimate(&paged));
        assert_eq!(before.total_bytes() - after.total_bytes(), (1 << 30) - (1 << 20));
        assert_eq!(after.host_bytes() - before.host_bytes(), 1 << 30);
    }

    #[test]
    fn selective_recomputation_saves_less_than_100_kb_per_token_and_layer_of_the_8b_shape() {
        assert_eq!(layer_values(&llama_3_1_8b(), 0).saved(Recompute::Selective, 2), 94_336);
    }

    #[test]
    fn normalized_queries_and_keys_are_saved_twice() {
        let mut plain = qwen3_8b();
        plain.attentions_mut().for_each(|attention| attention.qk_norm = QkNorm::None);
        let saved = |model: &ModelSpec| layer_values(model, 0).saved(Recompute::Selective, 2);
        assert_eq!(saved(&qwen3_8b()) - saved(&plain), 2 * (4096 + 1024));
    }

    #[test]
    fn outputs_that_are_normalized_are_saved_as_they_were_before() {
        let with = |norms| {
            let mut model = llama_3_1_8b();
            model.layers.iter_mut().for_each(|layer| layer.norms = norms);
            [Recompute::Selective, Recompute::None].map(|recompute| layer_values(&model, 0).saved(recompute, 2))
        };
        let ([before, all_before], [after, all_after]) = (with(LayerNorms::Pre), with(LayerNorms::Post));
        assert_eq!(after - before, 2 * 2 * 4096);
        // Without input norms there are no normalized inputs to save.
        assert_eq!(all_after, all_before);
        assert_eq!(with(LayerNorms::PreAndPost), [after, all_before + 2 * 2 * 4096]);
    }
}
