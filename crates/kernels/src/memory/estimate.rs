//! Peak memory of a training run, line by line, as host arithmetic that needs no device.
//!
//! The lines for weights, gradients, optimizer state and saved activations follow from the model and how it is trained. The working
//! set of a layer's backward, of the loss and of libraries depends on the backend: `backends/planning/` states it (`reference.rs`,
//! `cuda.rs`), and is compiled even if the backend is not. `training_shape.rs` describes how the model is trained.
//! Trade-off: effects of the machine rather than the run, such as an allocator's rounding, are left out.

use firebrick_arch::{LoraConfig, ModelSpec, Role, Value};
use firebrick_hwprofile::memory::MemoryLine;
use firebrick_precision::{FloatType, Format};

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
        lines.push(layer_inputs(model, self, true));
        // The reference pass of pairs ends before anything is saved for the backward, so it needs no line.
        let of_pairs = self.pairs.map_or(0, |_| PAIR_VALUES * 4 * self.tokens());
        let why = format!("{PAIR_VALUES} f32 values per token: log-probabilities, weights, marks");
        lines.push(line("values of pairs", of_pairs, why));
        lines.extend(working_set);
        let mut host_lines = vec![offloaded_activations(model, self), paged_state(self)];
        for lines in [&mut lines, &mut host_lines] {
            lines.retain(|line| line.bytes > 0);
        }
        MemoryEstimate { peak: "at the peak of a step", lines, host_lines }
    }

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
    line("norms of adapted rows", lora.map_or(0, of_lora), "two f32 values per magnitude")
}

pub(crate) fn line(what: &'static str, bytes: u64, why: impl Into<String>) -> MemoryLine {
    MemoryLine { what, bytes, why: why.into() }
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
            training.storage().compute
        ),
        BaseStorage::Frozen(format) => format!("every parameter in {format}"),
        BaseStorage::Trained | BaseStorage::TrainedBf16 => String::new(),
    };
    let per_parameter = training.optimizer_bytes as f64 / trained.max(1) as f64;
    let paged = if training.paged_bytes > 0 { ", without what is paged" } else { "" };
    let state = format!("{per_parameter:.2} bytes per trained parameter{paged}");
    let divided = &training.divided;
    let [frozen_elsewhere, trained_elsewhere] =
        if training.lora.is_some() { [divided.weights_elsewhere, 0] } else { [0, divided.weights_elsewhere] };
    let share = |bytes: u64| if bytes > 0 { ", without what other ranks have" } else { "" };
    let [weights, gradients] = training.trained_bytes(model);
    let (weight_format, gradient_format) = match (training.base, training.gradients) {
        (BaseStorage::TrainedBf16, FloatType::Bf16) => {
            (", matrices in bf16", "value per trained parameter, in its format")
        }
        (BaseStorage::TrainedBf16, _) => (", matrices in bf16", "f32 value per trained parameter"),
        _ => (" in f32", "f32 value per trained parameter"),
    };
    [
        line(
            "base weights",
            training.base_bytes(model) - frozen_elsewhere,
            format!("{base}{}", share(frozen_elsewhere)),
        ),
        line(
            if training.lora.is_some() { "adapter weights" } else { "trained weights" },
            weights - trained_elsewhere,
            format!("{trained} parameters{weight_format}{}", share(trained_elsewhere)),
        ),
        line(
            "gradients",
            gradients - divided.gradients_elsewhere,
            format!("one {gradient_format}{}", share(divided.gradients_elsewhere)),
        ),
        line("optimizer state", training.optimizer_bytes - training.paged_bytes, state),
        line("paged state passing through", training.paging_bytes, "buckets that are updated, or on their way"),
        line("weights of other ranks", divided.weights_borrowed, "of the layer that computes, and of the next"),
        line("gradients for other ranks", divided.gradients_leaving, "a bucket that fills, and one on its way"),
    ]
}

/// Returns the line for optimizer moments that are copied to the device for their update and back.
fn paged_state(training: &TrainingShape) -> MemoryLine {
    line("paged optimizer state", training.paged_bytes, "pinned; copied to the device and back in each step")
}

pub(crate) fn adapter_starts(model: &ModelSpec, training: &TrainingShape) -> MemoryLine {
    line("starts of adapters", training.start_bytes(model), "f32; saved next to the trained pairs")
}

fn saved_activations(model: &ModelSpec, training: &TrainingShape) -> MemoryLine {
    let (tokens, recompute, all) = (training.tokens(), training.recompute, model.layers.len());
    let of = |layer, counts: fn(&Value) -> bool| {
        training.bytes_of(model, layer, |value| recompute.saves(value) && counts(value))
    };
    let of_layers = |count| (0..count).map(|layer| of(layer, |_| true)).sum::<u64>();
    let is_offloaded = training.is_offloaded();
    let (layers, per_token) = match recompute {
        Recompute::Projections if is_offloaded => {
            let widest = (0..all).map(|layer| of(layer, |value| value.may_wait)).max().unwrap_or(0);
            (1, widest + (0..all).map(|layer| of(layer, |value| !value.may_wait)).sum::<u64>())
        }
        _ => {
            let layers = if is_offloaded { all.min(INPUTS_ON_DEVICE) } else { all };
            (layers, of_layers(layers))
        }
    };
    let what_is_saved = match recompute {
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

pub(crate) fn layer_inputs(model: &ModelSpec, training: &TrainingShape, has_backward: bool) -> MemoryLine {
    let width = model.per_layer_inputs.map_or(0, |inputs| inputs.width);
    let (layers, tokens) = (model.layers.len(), training.tokens());
    let why =
        format!("rows of their table and what is computed of it: {width} values of {layers} layers, {tokens} tokens");
    line("inputs of layers", training.layer_input_bytes(model, has_backward), why)
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
    use firebrick_arch::PerLayerInputs;
    use firebrick_arch::shapes::llama_3_1_8b;
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
    fn layers_inputs_are_counted_by_copies_and_their_table_is_in_host_memory() {
        let mut model = llama_3_1_8b();
        let shapes = [qlora(2, Recompute::Full), full(FloatType::Bf16)];
        let of = |model: &ModelSpec| shapes.clone().map(|shape| shape.with_working_set(model, Vec::new()));
        let without = of(&model);
        model.per_layer_inputs = Some(PerLayerInputs { width: 256, vocab_size: 262_144 });
        let with = of(&model);
        let copy = |tokens: u64| tokens * 32 * 256 * 2;
        assert_eq!(bytes_of(&with[0], "inputs of layers"), 3 * copy(2 * 4096));
        assert_eq!(bytes_of(&with[1], "inputs of layers"), 7 * copy(4096));
        // Gates, projections and norms of the layers, and what computes the inputs.
        let [projections, norms] = [32 * 3 * 4096 * 256, 32 * 4096 + 256];
        let added = |what: &str, run: usize| bytes_of(&with[run], what) - bytes_of(&without[run], what);
        let nf4 = added("base weights", 0) as f64 / f64::from(projections);
        assert!((0.51..0.53).contains(&nf4), "{nf4}");
        assert_eq!(added("trained weights", 1), 4 * (projections + norms) as u64);
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
}
