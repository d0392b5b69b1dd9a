//! The CUDA engine's memory at the peak of a step, without parameters and saved activations. Host arithmetic: compiled without the
//! cargo feature `cuda` too.
//!
//! Scratch memory (dequantized weights, logits, workspaces) is allocated once and kept, so all of it counts at the peak; the loss
//! itself is then never the widest point.
//! Trade-off: the small buffers of LoRA GEMMs and of partial sums, under 1 % together, and cuDNN's own choice of algorithm are left
//! out. The constants below are what measurements correct.

use std::collections::BTreeSet;

use firebrick_arch::{GroupSpec, ModelSpec, ModuleSpec, QkNorm};
use firebrick_hwprofile::memory::MemoryLine;
use firebrick_precision::Format;

use super::cuda_layer::buffers_per_token;
use crate::memory::estimate::{Recompute, TrainingShape, line};

/// The device's context, CubeCL's and our kernels, cuBLASLt and cuDNN once loaded.
const CONTEXT_BYTES: u64 = 614 << 20;
/// cuBLASLt's workspace on Hopper.
const GEMM_WORKSPACE_BYTES: u64 = 64 << 20;
/// Tokens of documents of one length that one backward call of attention takes: cuDNN's workspace grows with the tokens of a call, and a
/// few thousand of them fill the device.
pub(super) const MAX_BACKWARD_TOKENS: usize = 16_384;

/// Ranks are appended to the inner dimension of a group's GEMM while they are at most this part of it; more are separate GEMMs, which
/// read and write the outputs once more but multiply with no zeros.
const MOST_APPENDED: usize = 8;
/// Rows with appended columns begin on multiples of this many values, as matrix units like them.
pub(super) const ROW_MULTIPLE: usize = 64;

/// Columns that the adapters of a group add to its input of `in_features`, from the rank of each module: all ranks, filled up to a
/// multiple of 8 for the matrix units; 0 where their GEMMs are separate.
pub(super) fn appended_ranks(in_features: usize, ranks: &[usize]) -> usize {
    let all = ranks.iter().sum::<usize>().next_multiple_of(8);
    if std::env::var_os("XSEPARATE").is_none()
        && (all * MOST_APPENDED <= in_features || std::env::var_os("XAPPEND").is_some())
    {
        all
    } else {
        0
    }
}

/// Values from the start of one row to the next.
pub(super) fn row_stride(width: usize, appended: usize) -> usize {
    if appended == 0 { width } else { (width + appended).next_multiple_of(ROW_MULTIPLE) }
}

/// What is alive at the widest point of a layer's backward, in addition to what is saved.
pub(super) fn lines(model: &ModelSpec, training: &TrainingShape) -> Vec<MemoryLine> {
    let flowing = buffers_per_token(model, training) * training.activation_bytes();
    let chunk = (training.loss_chunk_tokens as u64).min(training.tokens());
    let attended = training.tokens().min(MAX_BACKWARD_TOKENS as u64);
    vec![
        line(
            "layer at work",
            training.tokens() * flowing,
            format!("every row width as often as it is alive at once: {flowing} bytes per token"),
        ),
        line(
            "values beside queries",
            training.tokens() * beside_raw_bytes_per_token(model, training),
            "in the buffers in which queries and keys are saved before their norm".to_owned(),
        ),
        line("converted weights", converted_bytes(model, training), converted_why(training)),
        line(
            "logits",
            wide_rows_bytes(model, training),
            format!(
                "of {chunk} tokens in f32, their gradient in their place; or queries, keys and values side by side"
            ),
        ),
        line(
            "workspaces",
            GEMM_WORKSPACE_BYTES + attended * attention_bytes_per_token(model, training),
            format!("of GEMMs, and of attention's backward over {attended} tokens"),
        ),
        line("context and libraries", CONTEXT_BYTES, "CUDA, cuBLASLt and cuDNN, once loaded".to_owned()),
    ]
}

/// Values of `v` that lie beside queries and keys where those are saved before their norm: one buffer holds all three.
fn beside_raw_bytes_per_token(model: &ModelSpec, training: &TrainingShape) -> u64 {
    let layers = model.layers.iter().filter(|layer| layer.attention.qk_norm != QkNorm::None);
    let saved = if training.recompute == Recompute::Full { 0 } else { usize::MAX };
    layers.take(saved).map(|layer| layer.attention.kv_size() as u64).sum::<u64>() * training.activation_bytes()
}

/// The widest rows of one operation share a buffer: logits of a chunk, and queries, keys and values side by side with their adapters.
fn wide_rows_bytes(model: &ModelSpec, training: &TrainingShape) -> u64 {
    let chunk = (training.loss_chunk_tokens as u64).min(training.tokens());
    let joined = (0..model.layers.len()).map(|layer| {
        let [qkv, ..] = model.groups(layer);
        row_stride(qkv.out_features(), appended_to(&qkv, training)) as u64
    });
    let joined = joined.max().unwrap_or(0) * training.tokens() * training.activation_bytes();
    (chunk * model.vocab_size as u64 * 4).max(joined)
}

/// The workspace of attention's backward: per value of a query an f32 accumulator of its gradient, and gradients of keys and values for
/// every query head in the compute format, before they are summed over their group.
fn attention_bytes_per_token(model: &ModelSpec, training: &TrainingShape) -> u64 {
    let widest = model.layers.iter().map(|layer| layer.attention.query_size()).max().unwrap_or(0);
    widest as u64 * (4 + 2 * training.activation_bytes())
}

/// One buffer per group of a layer, which all layers share, with the adapters around the weight; in full training one more for the head.
fn converted_bytes(model: &ModelSpec, training: &TrainingShape) -> u64 {
    if !training.needs_conversion() {
        return 0;
    }
    // Buffers of one shape are one buffer.
    let mut shapes: BTreeSet<[usize; 2]> = BTreeSet::new();
    for group in (0..model.layers.len()).flat_map(|layer| model.groups(layer)) {
        let appended = appended_to(&group, training);
        shapes.insert([group.out_features() + appended, row_stride(group.in_features, appended)]);
    }
    if training.lora.is_none() {
        shapes.insert([model.vocab_size, model.hidden_size]);
    }
    shapes.iter().map(|[rows, columns]| (rows * columns) as u64).sum::<u64>() * training.activation_bytes()
}

/// See [`appended_ranks`].
pub(super) fn appended_to(group: &GroupSpec, training: &TrainingShape) -> usize {
    let Some(lora) = training.lora.as_ref().filter(|_| matches!(training.stored_format(), Format::Quantized(_))) else {
        return 0;
    };
    let rank = |module: &ModuleSpec| if lora.target_modules.matches(&module.path) { lora.r } else { 0 };
    appended_ranks(group.in_features, &group.modules.iter().map(rank).collect::<Vec<_>>())
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
    fn ranks_are_appended_while_they_are_few() {
        assert_eq!(appended_ranks(4096, &[16, 16, 16]), 48);
        assert_eq!(appended_ranks(4096, &[3, 0, 3]), 8, "filled up to a multiple of 8");
        assert_eq!(appended_ranks(4096, &[256, 256, 256]), 0, "separate GEMMs");
        assert_eq!(appended_ranks(14_336, &[256]), 256);
        assert_eq!([row_stride(4096, 48), row_stride(4096, 65), row_stride(4100, 0)], [4160, 4224, 4100]);
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
        // All seven with their adapters of rank 16 around them: appended to qkv 48, to gate and up 32, to the others 16.
        let shapes = [[6144 + 48, 4160], [4096 + 16, 4160], [28_672 + 32, 4160], [4096 + 16, 14_400]];
        let values: u64 = shapes.iter().map(|[rows, columns]| rows * columns).sum();
        assert_eq!(bytes_of(&on_cuda(&qlora(1, Recompute::Full)), "converted weights"), values * 2);
        assert_eq!(bytes_of(&on_cuda(&dense(Format::Bf16)), "converted weights"), 0);
        let full = on_cuda(&full(Format::Bf16));
        assert_eq!(bytes_of(&full, "converted weights"), (218_103_808 + 128_256 * 4096) * 2);
        assert_eq!(bytes_of(&full, "base weights"), 0, "no second copy of all weights");
    }

    #[test]
    fn what_is_saved_is_not_recomputed() {
        let flowing = |recompute| bytes_of(&on_cuda(&qlora(2, recompute)), "layer at work");
        assert_eq!(flowing(Recompute::Selective), flowing(Recompute::None));
        assert!(flowing(Recompute::Selective) < flowing(Recompute::Full));
    }
}
