//! The CUDA engine's memory at the peak of a step, without parameters and saved activations. Host arithmetic: compiled without the
//! cargo feature `cuda` too.
//!
//! Scratch memory (dequantized weights, logits, workspaces) is allocated once and kept, so all of it counts at the peak; the loss
//! itself is then never the widest point.
//! Trade-off: the small buffers of LoRA GEMMs and of partial sums, under 1 % together, and cuDNN's own choice of algorithm are left
//! out. The constants below are what measurements correct.

use std::collections::BTreeSet;

use firebrick_arch::ModelSpec;
use firebrick_hwprofile::memory::MemoryLine;

use crate::memory::estimate::{Recompute, TrainingShape, layer_values, line};

/// The device's context, CubeCL's and our kernels, cuBLASLt and cuDNN once loaded.
const CONTEXT_BYTES: u64 = 614 << 20;
/// cuBLASLt's workspace on Hopper.
const GEMM_WORKSPACE_BYTES: u64 = 64 << 20;
/// Tokens of documents of one length that one backward call of attention takes: cuDNN's workspace grows with the tokens of a call, and a
/// few thousand of them fill the device.
pub(super) const MAX_BACKWARD_TOKENS: usize = 16_384;

/// What is alive at the widest point of a layer's backward, in addition to what is saved.
pub(super) fn lines(model: &ModelSpec, training: &TrainingShape) -> Vec<MemoryLine> {
    let flowing = flowing_bytes_per_token(model, training);
    let chunk = (training.loss_chunk_tokens as u64).min(training.tokens());
    let attended = training.tokens().min(MAX_BACKWARD_TOKENS as u64);
    vec![
        line(
            "layer in its backward",
            training.tokens() * flowing,
            format!("what it recomputes, gradients in its place where possible: {flowing} bytes per token"),
        ),
        line("converted weights", converted_bytes(model, training), converted_why(training)),
        line(
            "logits",
            chunk * model.vocab_size as u64 * 4,
            format!("of {chunk} tokens in f32, their gradient in their place"),
        ),
        line(
            "workspaces",
            GEMM_WORKSPACE_BYTES + attended * attention_bytes_per_token(model, training),
            format!("of GEMMs, and of attention's backward over {attended} tokens"),
        ),
        line("context and libraries", CONTEXT_BYTES, "CUDA, cuBLASLt and cuDNN, once loaded".to_owned()),
    ]
}

/// The backward of the down projection holds everything of the layer, the gradient of its output, and one more buffer of the MLP's
/// width, in which the product of gate and up is recomputed.
fn flowing_bytes_per_token(model: &ModelSpec, training: &TrainingShape) -> u64 {
    let value = training.activation_bytes();
    let of_layer = |layer: usize| {
        let gradients = (model.hidden_size + model.layers[layer].mlp.intermediate_size()) as u64 * value;
        let values = layer_values(model, layer);
        let recomputed = match training.recompute {
            Recompute::Full => values.selective(value) - values.saved(Recompute::Full, value),
            Recompute::Selective | Recompute::None => 0,
        };
        gradients + recomputed
    };
    (0..model.layers.len()).map(of_layer).max().unwrap_or(0)
}

/// The workspace of attention's backward: per value of a query an f32 accumulator of its gradient, and gradients of keys and values for
/// every query head in the compute format, before they are summed over their group.
fn attention_bytes_per_token(model: &ModelSpec, training: &TrainingShape) -> u64 {
    let widest = model.layers.iter().map(|layer| layer.attention.query_size()).max().unwrap_or(0);
    widest as u64 * (4 + 2 * training.activation_bytes())
}

/// One buffer per group of a layer, which all layers share; in full training one more for the head.
fn converted_bytes(model: &ModelSpec, training: &TrainingShape) -> u64 {
    if !training.needs_conversion() {
        return 0;
    }
    // Buffers of one size are one buffer.
    let mut sizes: BTreeSet<u64> = BTreeSet::new();
    for layer in 0..model.layers.len() {
        sizes.extend(model.groups(layer).map(|group| group.weight_parameters()));
    }
    if training.lora.is_none() {
        sizes.insert(model.vocab_size as u64 * model.hidden_size as u64);
    }
    sizes.iter().sum::<u64>() * training.activation_bytes()
}

fn converted_why(training: &TrainingShape) -> String {
    let head = if training.lora.is_none() { ", and the head" } else { "" };
    format!("the projections of one layer{head}, in {} bytes per parameter", training.activation_bytes())
}

#[cfg(test)]
mod tests {
    use firebrick_arch::shapes::llama_3_1_8b;

    use super::*;
    use crate::backends::{BackendKind, estimate};
    use crate::memory::estimate::MemoryEstimate;
    use crate::memory::estimate::tests::{bytes_of, dense, full, qlora};
    use firebrick_precision::Format;

    const GIB: f64 = (1u64 << 30) as f64;

    fn on_cuda(training: &TrainingShape) -> MemoryEstimate {
        estimate(BackendKind::Cuda, &llama_3_1_8b(), training)
    }

    #[test]
    fn qlora_of_llama_8b_with_offloaded_inputs_stays_under_14_gib() {
        let estimate = on_cuda(&TrainingShape { offload: true, ..qlora(8, Recompute::Full) });
        let gib = estimate.total_bytes() as f64 / GIB;
        assert!((12.0..14.0).contains(&gib), "{gib:.2} GiB: {estimate:#?}");
    }

    #[test]
    fn a_layer_in_its_backward_holds_128_kib_per_token_of_the_8b_shape() {
        let training = qlora(8, Recompute::Full);
        let held = bytes_of(&on_cuda(&training), "layer in its backward") + training.tokens() * 8192;
        // Five times the hidden size (input, queries, attention, sum, output gradient), keys and values, three times the MLP's width,
        // and one log-sum-exp per head.
        let values = 5 * 4096 + 2 * 1024 + 3 * 14_336;
        assert_eq!((values * 2, held), (128 << 10, training.tokens() * (values * 2 + 4 * 32)));
    }

    #[test]
    fn scores_and_copies_of_logits_do_not_count() {
        let long = on_cuda(&TrainingShape { longest_document: 4096, ..qlora(1, Recompute::None) });
        let short = on_cuda(&TrainingShape { longest_document: 1, ..qlora(1, Recompute::None) });
        assert_eq!(long, short);
        assert_eq!(bytes_of(&long, "logits"), 1024 * 128_256 * 4);
    }

    #[test]
    fn every_projection_of_one_layer_is_converted_at_a_time() {
        assert_eq!(bytes_of(&on_cuda(&qlora(1, Recompute::Full)), "converted weights"), 218_103_808 * 2);
        assert_eq!(bytes_of(&on_cuda(&dense(Format::Bf16)), "converted weights"), 0);
        let full = on_cuda(&full(Format::Bf16));
        assert_eq!(bytes_of(&full, "converted weights"), (218_103_808 + 128_256 * 4096) * 2);
        assert_eq!(bytes_of(&full, "base weights"), 0, "no second copy of all weights");
    }

    #[test]
    fn what_is_saved_is_not_recomputed() {
        let flowing = |recompute| bytes_of(&on_cuda(&qlora(2, recompute)), "layer in its backward");
        assert_eq!(flowing(Recompute::Selective), flowing(Recompute::None));
        assert!(flowing(Recompute::Selective) < flowing(Recompute::Full));
    }
}
