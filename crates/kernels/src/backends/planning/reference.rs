//! Memory of the reference bodies at the peak of a step, besides parameters and saved activations; `cpu.rs` adds that of a process on the CPU.
//!
//! Trade-off: on wgpu, allocator rounding, the optimizer's temporaries, and a device's context and libraries are not
//! included; leave a tenth of the memory free.

use firebrick_arch::{GroupSpec, HEAD, ModelSpec, ModuleSpec, Moment, Recompute, Role, Value};
use firebrick_hwprofile::memory::MemoryLine;
use firebrick_precision::{FloatType, Format};

use super::cpu;
use super::route::planned_groups;
use crate::attention::reference::MAX_SCORES;
use crate::backends::BackendKind;
use crate::linear::GemmFormat;
use crate::memory::estimate::line;
use crate::memory::training_shape::{TrainingShape, scaled_widths, widest_dropped};

/// Counts the f32 copies of logits. In kernels the gradient replaces the logits.
pub(super) fn logit_copies(backend: BackendKind, model: &ModelSpec) -> u64 {
    if backend.is_cpu() { cpu::logit_copies(model) } else { 1 }
}

/// Counts the f32 copies of attention scores: scores, probabilities and gradient are alive together; under a soft cap also its slope.
pub(super) fn score_copies(model: &ModelSpec) -> u64 {
    if model.attentions().any(|attention| attention.soft_cap.is_some()) { 4 } else { 3 }
}

/// Returns the bytes of all copies of the scores over a document of `tokens` tokens; 0 if the backend computes them by blocks of queries or tiles.
pub(super) fn score_bytes(backend: BackendKind, model: &ModelSpec, tokens: usize) -> u64 {
    if backend != BackendKind::Candle {
        return 0;
    }
    let heads = model.attentions().map(|attention| attention.heads as u64).max().unwrap_or(0);
    let scores = heads * (tokens as u64).pow(2);
    scores.min((heads * tokens as u64).max(MAX_SCORES as u64)) * 4 * score_copies(model)
}

/// Returns the lines of the loss and of one layer's backward. They never coincide, but freed memory of one does not serve the other: an allocator on the
/// CPU still holds it, and on wgpu it waits for a tensor of the same size.
pub(super) fn lines(backend: BackendKind, model: &ModelSpec, training: &TrainingShape) -> Vec<MemoryLine> {
    let layer = layer_lines(backend, model, training);
    let loss = loss_lines(model, training, logit_copies(backend, model));
    if backend.is_cpu() {
        let process = cpu::lines(model, training, layer[0].bytes + layer[1].bytes);
        return [layer, loss, process].concat();
    }
    [layer, loss, vec![low_rank_line(model, training)]].concat()
}

/// Returns the line for `x Aᵀ`, which kernels of wgpu save.
fn low_rank_line(model: &ModelSpec, training: &TrainingShape) -> MemoryLine {
    let of_layer = |layer: usize| {
        let norms = model.layers[layer].norms.names();
        let groups = planned_groups(model, training, layer).into_iter();
        let saved = groups.filter(|planned| {
            planned.group.experts.is_none() && !training.recompute.repeats(planned.group.kind, &norms)
        });
        saved.map(|planned| planned.route.ranks as u64).sum::<u64>()
    };
    let ranks: u64 = (0..model.layers.len()).map(of_layer).sum();
    line(
        "low-rank values",
        4 * training.tokens() * ranks,
        "of adapters, of all projections that do not run twice, until their backward",
    )
}

/// Returns the lines for what is alive in the backward of the widest layer: first its activations and their gradients.
fn layer_lines(backend: BackendKind, model: &ModelSpec, training: &TrainingShape) -> Vec<MemoryLine> {
    let (tokens, value, document) = (training.tokens(), training.activation_bytes(), training.longest_document);
    let widest = |of: &dyn Fn(usize) -> u64| (0..model.layers.len()).map(of).max().unwrap_or(0);
    let recomputed = |value: &Value| Recompute::None.saves(value) && !training.recompute.saves(value);
    let recomputed = widest(&|layer| training.bytes_of(model, layer, recomputed));
    // At the widest point of a layer's backward.
    let passing = |value: &Value| value.passing.contains(&Moment::DownBackward);
    let gradients = widest(&|layer| training.bytes_of(model, layer, passing)) + 2 * model.hidden_size as u64 * value;
    let scaled = widest(&|layer| scaled_widths(model, training, layer).into_iter().max().unwrap_or(0));
    let dropped = widest_dropped(model, training) * (4 + value);
    let scores = format!("{} f32 copies of the scores of a document of {document} tokens", score_copies(model));
    vec![
        line("recomputed layer", tokens * recomputed, "one layer's activations, while its backward runs"),
        line("activation gradients", tokens * gradients, "those of the MLP and of both residual sums of one layer"),
        converted_line(backend, model, training),
        line("dropped inputs", tokens * dropped, "a mask in f32 and what it leaves of the widest input of adapters"),
        line(
            "outputs before magnitudes",
            tokens * scaled * 16,
            "what DoRA scales, its gradient, and their product in f32",
        ),
        line("attention scores", score_bytes(backend, model, document), scores),
        half_line(model, training),
    ]
}

/// Returns the line for what matrix units of wgpu read in one group's backward: its input, its output gradients, and weights that are stored in f32.
fn half_line(model: &ModelSpec, training: &TrainingShape) -> MemoryLine {
    let storage = training.storage();
    let of_weight = |group: &GroupSpec, module: &ModuleSpec| {
        let is_wide =
            storage.storage_of(model, &module.weight_name(), Role::Projection) == Format::Float(FloatType::F32);
        if is_wide { 2 * (module.out_features() * group.in_features) as u64 } else { 0 }
    };
    let of_group = |group: GroupSpec| {
        let values = (group.in_features + group.parts.iter().sum::<usize>()) as u64;
        2 * training.tokens() * values + group.modules.iter().map(|module| of_weight(&group, module)).sum::<u64>()
    };
    let bytes = model.all_groups().filter(|group| group.experts.is_none()).map(of_group).max().unwrap_or(0);
    let bytes = if training.gemms == GemmFormat::F16 { bytes } else { 0 };
    line("operands in float16", bytes, "input and output gradients of one group of linear modules")
}

/// Returns the line for weights of linear modules in the format of their GEMMs. Kernels of wgpu read codes and 16-bit weights themselves.
pub(super) fn converted_line(backend: BackendKind, model: &ModelSpec, training: &TrainingShape) -> MemoryLine {
    let (storage, compute) = (training.storage(), Format::Float(training.compute));
    let reads_all = !backend.is_cpu() && !model.is_mixture();
    let is_converted =
        |module: &ModuleSpec| storage.storage_of(model, &module.weight_name(), Role::Projection) != compute;
    let values = |(module, inputs): (ModuleSpec, usize)| {
        if is_converted(&module) && !reads_all { (module.out_features() * inputs) as u64 } else { 0 }
    };
    let bytes = 2 * model.modules().map(values).max().unwrap_or(0) * training.activation_bytes();
    line("converted weights", bytes, "two of the largest linear module in the compute format")
}

fn loss_lines(model: &ModelSpec, training: &TrainingShape, copies: u64) -> Vec<MemoryLine> {
    let chunk = training.loss_chunk();
    let logits = format!("{copies} f32 copies of the logits of {chunk} tokens");
    let hidden = 2 * training.tokens() * model.hidden_size as u64 * training.activation_bytes();
    let is_wide = training.storage().storage_of(model, HEAD, Role::Head) == Format::Float(FloatType::F32);
    let rows = chunk + if is_wide { model.hidden_size as u64 } else { 0 };
    let halves = if training.gemms == GemmFormat::F16 { 2 * rows } else { 0 };
    vec![
        line("loss", chunk * model.vocab_size as u64 * 4 * copies, logits),
        line(
            "head in float16",
            model.vocab_size as u64 * halves,
            "the gradient of the logits, and the head's weight if that is in f32",
        ),
        line("hidden states", hidden, "the last layer's output and its gradient"),
    ]
}
