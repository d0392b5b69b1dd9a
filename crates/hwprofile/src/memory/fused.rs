//! What the CUDA engine of `firebrick-kernels` holds in a half format beside parameters and stored activations.
//!
//! Scratch memory (converted weights, logits, workspaces) is made once and never given back, so all of it counts at the peak;
//! the loss itself is then never the widest point. Gives up: the small buffers of low-rank products and of partial sums,
//! under 1 % together, and cuDNN's own choice of algorithm. The constants below are what measurements correct.

use super::estimate::{MemoryLine, line};
use super::{LinearLayer, ModelShape, Recompute, TrainingShape};

/// The device's context, CubeCL's and our kernels, cuBLASLt and cuDNN once loaded.
const CONTEXT_AND_LIBRARIES: u64 = 614 << 20;
/// cuBLASLt's workspace on Hopper.
const GEMM_WORKSPACE: u64 = 64 << 20;
/// Tokens that one backward call of attention takes: its workspace grows with them.
const ATTENTION_TOKENS: u64 = 8192;
/// Bytes of that workspace for each token and value of a query: an f32 accumulator of their gradient, and gradients of keys
/// and values for every query head in the compute format, before they are summed over their group.
const ATTENTION_BYTES: u64 = 4 + 2 + 2;

/// Projections that share an input are converted, and multiplied, together.
const GROUPS: [&[LinearLayer]; 4] = [
    &[LinearLayer::QProj, LinearLayer::KProj, LinearLayer::VProj],
    &[LinearLayer::OProj],
    &[LinearLayer::GateProj, LinearLayer::UpProj],
    &[LinearLayer::DownProj],
];

/// What is alive at the widest point of a block's backward, beside what is stored.
pub(super) fn lines(model: &ModelShape, training: &TrainingShape) -> [MemoryLine; 5] {
    let flowing = flowing_bytes_per_token(model, training);
    let chunk = (training.loss_chunk_tokens as u64).min(training.tokens());
    let attended = training.tokens().min(ATTENTION_TOKENS);
    [
        line(
            "block in its backward",
            training.tokens() * flowing,
            format!("what it computes again, its gradients in their place where they can be: {flowing} bytes a token"),
        ),
        line("converted weights", converted_bytes(model, training), converted_why(training)),
        line(
            "logits",
            chunk * model.vocab_size as u64 * 4,
            format!("of {chunk} tokens in f32, their gradient in their place"),
        ),
        line(
            "workspaces",
            GEMM_WORKSPACE + attended * ATTENTION_BYTES * model.query_width() as u64,
            format!("of matrix products, and of attention's backward over {attended} tokens"),
        ),
        line("context and libraries", CONTEXT_AND_LIBRARIES, "CUDA, cuBLASLt and cuDNN, once loaded".to_string()),
    ]
}

/// The backward of the down projection holds everything of the block, the gradient of its output, and one more buffer of the
/// feed-forward width, in which the product of gate and up is made again.
fn flowing_bytes_per_token(model: &ModelShape, training: &TrainingShape) -> u64 {
    let gradients = (model.hidden_size + model.intermediate_size) * training.activation_bytes;
    let again = match training.recompute {
        Recompute::Full => training.selective_bytes_per_token(model) - training.stored_bytes_per_token(model),
        Recompute::Selective | Recompute::None => 0,
    };
    gradients as u64 + again
}

/// One buffer for each group of a block, which all blocks share; in full training one more for the head.
fn converted_bytes(model: &ModelShape, training: &TrainingShape) -> u64 {
    let is_trained_in_f32 = training.lora.is_none() && training.activation_bytes < training.trainable_bytes;
    let is_converted = training.lora.is_some() && training.base.needs_conversion(training.activation_bytes);
    if !is_trained_in_f32 && !is_converted {
        return 0;
    }
    let mut sizes: Vec<u64> = GROUPS.map(|group| group_parameters(model, group)).into();
    if is_trained_in_f32 {
        sizes.push(model.embedding_parameters());
    }
    // Buffers of one size are one buffer.
    sizes.sort_unstable();
    sizes.dedup();
    sizes.iter().sum::<u64>() * training.activation_bytes as u64
}

fn group_parameters(model: &ModelShape, group: &[LinearLayer]) -> u64 {
    group.iter().map(|&layer| super::shape::elements(model.linear_shape(layer))).sum()
}

fn converted_why(training: &TrainingShape) -> String {
    let head = if training.lora.is_none() { ", and the head" } else { "" };
    format!("the projections of one block{head}, in {} bytes a parameter", training.activation_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{BaseStorage, LoraShape, estimate, llama_3_1_8b};

    const GIB: f64 = (1u64 << 30) as f64;

    fn qlora(micro_batch_size: usize, recompute: Recompute, offload: bool) -> TrainingShape {
        TrainingShape {
            base: BaseStorage::Nf4 { double_quant: true },
            lora: Some(LoraShape::all_linear(16)),
            optimizer_bytes_per_parameter: 2.03,
            micro_batch_size,
            row_len: 4096,
            recompute,
            offload,
            fused: true,
            activation_bytes: 2,
            trainable_bytes: 4,
            loss_chunk_tokens: 1024,
            score_tokens: 0,
        }
    }

    fn bytes_of(training: &TrainingShape, what: &str) -> u64 {
        let estimate = estimate(&llama_3_1_8b(), training);
        estimate.lines.iter().filter(|line| line.what == what).map(|line| line.bytes).sum()
    }

    #[test]
    fn qlora_of_llama_8b_with_offloaded_inputs_stays_under_14_gib() {
        let estimate = estimate(&llama_3_1_8b(), &qlora(8, Recompute::Full, true));
        let gib = estimate.total_bytes() as f64 / GIB;
        assert!((12.0..14.0).contains(&gib), "{gib:.2} GiB: {estimate:#?}");
    }

    #[test]
    fn a_block_in_its_backward_holds_128_kib_a_token_of_the_8b_shape() {
        let training = qlora(8, Recompute::Full, false);
        let held = bytes_of(&training, "block in its backward") + training.tokens() * 8192;
        // Five of the model's width (input, queries, attention, sum, output gradient), keys and values, three of the
        // feed-forward width, and one log-sum-exp a head.
        let values = 5 * 4096 + 2 * 1024 + 3 * 14_336;
        assert_eq!((values * 2, held), (128 << 10, training.tokens() * (values * 2 + 4 * 32)));
    }

    #[test]
    fn scores_and_copies_of_logits_do_not_count() {
        let long = TrainingShape { score_tokens: 4096, ..qlora(1, Recompute::None, false) };
        assert_eq!(estimate(&llama_3_1_8b(), &long), estimate(&llama_3_1_8b(), &qlora(1, Recompute::None, false)));
        assert_eq!(bytes_of(&long, "logits"), 1024 * 128_256 * 4);
    }

    #[test]
    fn every_projection_of_one_block_is_converted_at_a_time() {
        assert_eq!(bytes_of(&qlora(1, Recompute::Full, false), "converted weights"), 218_103_808 * 2);
        let dense = TrainingShape { base: BaseStorage::Bf16, ..qlora(1, Recompute::Full, false) };
        assert_eq!(bytes_of(&dense, "converted weights"), 0);
        let full = TrainingShape { lora: None, ..qlora(1, Recompute::Full, false) };
        assert_eq!(bytes_of(&full, "converted weights"), (218_103_808 + 128_256 * 4096) * 2);
        assert_eq!(bytes_of(&full, "base weights"), 0, "no second copy of all weights");
    }

    #[test]
    fn what_is_kept_is_not_computed_again() {
        let again = |recompute| bytes_of(&qlora(2, recompute, false), "block in its backward");
        assert_eq!(again(Recompute::Selective), again(Recompute::None));
        assert!(again(Recompute::Selective) < again(Recompute::Full));
    }
}
