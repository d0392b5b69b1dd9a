//! Memory of evaluation: a forward pass over held-out rows that saves nothing, and answers with key/value caches.
//!
//! There are no gradients or saved activations then, so evaluation needs more memory than a step only with more rows or many long answers.
//! Trade-off: all buffers of a layer's forward count at once, which is an upper bound.

use firebrick_arch::ModelSpec;
use firebrick_hwprofile::memory::MemoryLine;

use super::layer::buffers_per_token;
use super::reference::{logit_copies, score_bytes, score_copies};
use super::{cpu, cuda, reference};
use crate::backends::BackendKind;
use crate::memory::estimate::{layer_inputs, line};
use crate::memory::evaluation::{Answers, EvaluatedRows};
use crate::memory::training_shape::{Recompute, TrainingShape};

/// Returns the phases between steps: when each has its peak, in words, and the lines that it adds to what stays. No two are alive together.
pub(super) fn phases(
    backend: BackendKind,
    model: &ModelSpec,
    training: &TrainingShape,
) -> impl Iterator<Item = (&'static str, Vec<MemoryLine>)> {
    let rows = match training.evaluation.rows {
        EvaluatedRows::None => 0,
        EvaluatedRows::LikeTraining => training.micro_batch_size,
        EvaluatedRows::Fixed(rows) => rows,
    };
    let scored = (rows > 0).then(|| ("while held-out rows are evaluated", scored(backend, model, training, rows)));
    let groups = training.evaluation.answers.iter();
    let answered = move |group| ("while prompts are answered", answered(backend, model, training, group));
    scored.into_iter().chain(groups.map(answered))
}

/// Returns the lines for the loss of held-out rows, including the count of correct predictions.
fn scored(backend: BackendKind, model: &ModelSpec, training: &TrainingShape, rows: usize) -> Vec<MemoryLine> {
    let pass = TrainingShape { micro_batch_size: rows, ..training.clone() };
    let chunk = pass.loss_chunk();
    let logits = match backend {
        // On CUDA, logits are part of the loss's scratch memory.
        BackendKind::Cuda => 0,
        BackendKind::Flex | BackendKind::Candle | BackendKind::Wgpu => chunk * 4 * logit_copies(backend, model),
    };
    let mut lines = forward(backend, model, &pass);
    lines.extend([
        scores(backend, model, training.longest_document),
        line("predictions", logits * model.vocab_size as u64, format!("from the logits of up to {chunk} tokens")),
    ]);
    lines
}

/// Returns the lines for prompts and their answers, just before the last token.
fn answered(backend: BackendKind, model: &ModelSpec, training: &TrainingShape, answers: &Answers) -> Vec<MemoryLine> {
    let &Answers { prompts, tokens, read, longest } = answers;
    let value = training.activation_bytes();
    // Passes after those over prompts have one token each. A cache has rows for all tokens from the start.
    let pass = TrainingShape { micro_batch_size: 1, row_len: read.max(prompts), ..training.clone() };
    let caches = model.layers.iter().map(|layer| layer.mixer.cache());
    let cached: usize = caches.map(|cache| tokens * cache.per_token + prompts * cache.per_sequence).sum();
    let mut lines = forward(backend, model, &pass);
    lines.extend([
        scores(backend, model, longest),
        line("keys and values", cached as u64 * value, format!("of {prompts} prompts and answers, {tokens} tokens")),
        line(
            "predictions",
            prompts as u64 * model.vocab_size as u64 * (value + 4),
            format!("the logits of {prompts} tokens"),
        ),
    ]);
    lines
}

/// Returns the lines for a layer's forward that saves nothing, and for memory that the backend keeps allocated.
fn forward(backend: BackendKind, model: &ModelSpec, pass: &TrainingShape) -> Vec<MemoryLine> {
    let (values, mut lines) = match backend {
        BackendKind::Flex | BackendKind::Candle => {
            (widest_layer(model), vec![reference::converted_line(backend, model, pass), cpu::process_line()])
        }
        BackendKind::Wgpu => (widest_layer(model), vec![reference::converted_line(backend, model, pass)]),
        // A recomputed layer uses the same buffers.
        BackendKind::Cuda => {
            let recomputed = TrainingShape { recompute: Recompute::Full, ..pass.clone() };
            (buffers_per_token(model, &recomputed), cuda::forward_lines(model, pass))
        }
    };
    let (bytes, tokens) = (values * pass.activation_bytes(), pass.tokens());
    let why = format!("the forward of one layer, {bytes} bytes per token, {tokens} tokens");
    lines.insert(0, line("layer at work", tokens * bytes, why));
    lines.push(layer_inputs(model, pass, false));
    lines
}

/// Counts values per token in the buffers of the widest layer.
fn widest_layer(model: &ModelSpec) -> u64 {
    let of_layer = |layer| model.values(layer).iter().map(|value| value.forward as u64 * value.bytes(1)).sum();
    (0..model.layers.len()).map(of_layer).max().unwrap_or(0)
}

fn scores(backend: BackendKind, model: &ModelSpec, tokens: usize) -> MemoryLine {
    let (bytes, copies) = (score_bytes(backend, model, tokens), score_copies(model));
    line("attention scores", bytes, format!("{copies} f32 copies of the scores of {tokens} tokens"))
}

#[cfg(test)]
mod tests {
    use firebrick_arch::shapes::llama_3_1_8b;

    use super::*;
    use crate::backends::estimate;
    use crate::memory::estimate::tests::bytes_of;
    use crate::memory::evaluation::EvaluationShape;
    use crate::memory::training_shape::tests::qlora;

    fn with(training: &TrainingShape, rows: EvaluatedRows, answers: Vec<Answers>) -> TrainingShape {
        TrainingShape { evaluation: EvaluationShape { rows, answers }, ..training.clone() }
    }

    #[test]
    fn evaluating_the_rows_of_a_micro_batch_never_needs_more_than_training_them() {
        for backend in BackendKind::ALL {
            for recompute in [Recompute::Full, Recompute::Projections, Recompute::Selective, Recompute::None] {
                for (rows, offload) in [(1, false), (8, false), (8, true)] {
                    let training = TrainingShape { offload, ..qlora(rows, recompute) };
                    let evaluated = with(&training, EvaluatedRows::LikeTraining, Vec::new());
                    let [without, with] = [training, evaluated].map(|shape| estimate(backend, &llama_3_1_8b(), &shape));
                    assert_eq!(without, with, "{backend} {recompute:?} {rows} {offload}");
                }
            }
        }
    }

    #[test]
    fn more_rows_than_training_has_are_the_peak_and_named() {
        let training = qlora(1, Recompute::Full);
        for backend in BackendKind::ALL {
            let estimate = estimate(backend, &llama_3_1_8b(), &with(&training, EvaluatedRows::Fixed(64), Vec::new()));
            assert_eq!(estimate.peak, "while held-out rows are evaluated", "{backend}");
            assert_eq!(bytes_of(&estimate, "gradients") + bytes_of(&estimate, "saved activations"), 0);
            assert!(bytes_of(&estimate, "optimizer state") > 0 && bytes_of(&estimate, "base weights") > 0);
        }
        let of_kept = |kept_bytes| {
            let training = TrainingShape { kept_bytes, ..training.clone() };
            let evaluated = with(&training, EvaluatedRows::Fixed(64), Vec::new());
            estimate(BackendKind::Cuda, &llama_3_1_8b(), &evaluated).total_bytes()
        };
        assert_eq!(of_kept([1 << 30; 2]) - of_kept([0; 2]), 2 << 30, "kept weights stay in an evaluation");
    }

    #[test]
    fn caches_of_many_long_answers_count_every_token_once() {
        let training = qlora(1, Recompute::Full);
        let answers = Answers { prompts: 64, tokens: 64 * 3000, read: 64 * 3000, longest: 3500 };
        let shape = with(&training, EvaluatedRows::None, vec![answers]);
        for (backend, scores) in [(BackendKind::Cuda, 0), (BackendKind::Candle, 3 * 4 * (1 << 26))] {
            let estimate = estimate(backend, &llama_3_1_8b(), &shape);
            assert_eq!(estimate.peak, "while prompts are answered");
            // 32 layers, with keys and values of 1024 values in 2 bytes each.
            assert_eq!(bytes_of(&estimate, "keys and values"), 64 * 3000 * 32 * 2 * 1024 * 2, "{backend}");
            assert_eq!(bytes_of(&estimate, "attention scores"), scores, "{backend}");
        }
    }
}
