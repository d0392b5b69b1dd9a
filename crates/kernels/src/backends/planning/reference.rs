//! Memory of the reference bodies at the peak of a step, besides parameters and saved activations; `cpu.rs` adds that of a process on the CPU.
//!
//! Trade-off: on wgpu, allocator rounding, the optimizer's temporaries, and a device's context and libraries are not
//! included; leave a tenth of the memory free.

use firebrick_arch::{ModelSpec, ModuleSpec, Moment, Recompute, Role, Value};
use firebrick_hwprofile::memory::MemoryLine;
use firebrick_precision::{FloatType, Format};

use super::cpu;
use crate::backends::BackendKind;
use crate::memory::estimate::{line, sum};
use crate::memory::training_shape::{TrainingShape, scaled_widths, widest_dropped};

/// Counts the f32 copies of logits: logits, exponentials and gradient are alive together; under a soft cap also its slope and the uncapped logits.
/// In kernels of wgpu the gradient replaces the logits.
pub(super) fn logit_copies(backend: BackendKind, model: &ModelSpec, compute: FloatType) -> u64 {
    match (backend.is_cpu(), model.logit_soft_cap.is_some()) {
        (true, _) => cpu::logit_copies(model),
        (false, _) if backend.has_kernels(compute) => 1,
        (false, has_cap) => {
            if has_cap {
                5
            } else {
                3
            }
        }
    }
}

/// Counts the f32 copies of attention scores: scores, probabilities and gradient are alive together; under a soft cap also its slope.
pub(super) fn score_copies(model: &ModelSpec) -> u64 {
    if model.attentions().any(|attention| attention.soft_cap.is_some()) { 4 } else { 3 }
}

/// Returns the bytes of all copies of the scores over a document of `tokens` tokens; 0 if the backend computes them block by block.
pub(super) fn score_bytes(backend: BackendKind, model: &ModelSpec, compute: FloatType, tokens: usize) -> u64 {
    if !backend.materializes_scores(compute) {
        return 0;
    }
    let heads = model.attentions().map(|attention| attention.heads as u64).max().unwrap_or(0);
    heads * (tokens as u64).pow(2) * 4 * score_copies(model)
}

/// Returns the lines of the loss or of one layer's backward, which never coincide, whichever needs more. On the CPU the
/// allocator still holds the freed memory of the other one, so both count.
pub(super) fn lines(backend: BackendKind, model: &ModelSpec, training: &TrainingShape) -> Vec<MemoryLine> {
    let layer = layer_lines(backend, model, training);
    let loss = loss_lines(model, training, logit_copies(backend, model, training.compute));
    if backend.is_cpu() {
        let process = cpu::lines(model, training, layer[0].bytes + layer[1].bytes);
        return [layer, loss, process].concat();
    }
    if sum(&layer) >= sum(&loss) { layer } else { loss }
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
        line("attention scores", score_bytes(backend, model, training.compute, document), scores),
    ]
}

/// Returns the line for weights of linear modules in the format of their GEMMs. Kernels of wgpu read codes and 16-bit weights themselves.
pub(super) fn converted_line(backend: BackendKind, model: &ModelSpec, training: &TrainingShape) -> MemoryLine {
    let (storage, compute) = (training.storage(), Format::Float(training.compute));
    let reads_all = backend.has_kernels(training.compute) && !model.is_mixture();
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
    vec![
        line("loss", chunk * model.vocab_size as u64 * 4 * copies, logits),
        line("hidden states", hidden, "the last layer's output and its gradient"),
    ]
}
