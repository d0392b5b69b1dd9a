//! Memory of the CUDA engine at the peak of a step, besides parameters and saved activations, as host arithmetic that
//! is compiled without the cargo feature `cuda` too.
//!
//! Scratch memory (dequantized weights, logits, workspaces) is allocated once and kept, so all of it counts at the
//! peak; the peak is therefore never in the loss itself.
//! Trade-off: small buffers of LoRA GEMMs and partial sums, under 1 % together, and cuDNN's own choice of algorithm are
//! ignored. Measurements correct the constants below.

use std::collections::BTreeSet;

use firebrick_arch::{AttentionSpec, EMBEDDING, GroupKind, HEAD, ModelSpec, QkNorm, Role};
use firebrick_hwprofile::memory::MemoryLine;
use firebrick_precision::Format;

use super::adapters::{forward_sums_bytes, low_rank_sums_bytes, saved_low_rank_bytes};
use super::layer::buffers_per_token;
use super::route::{Planned, Route, WeightRoute, all_planned, planned_groups};
use super::rows::{fp8_stride, row_stride};
use super::wide::{FUSED_HEAD_DIM, wide_bytes};
use crate::GemmFormat;
use crate::memory::estimate::line;
use crate::memory::training_shape::{TrainingShape, scaled_widths, widest_dropped};

/// CUDA context, kernels of CubeCL and ours, and the loaded cuBLASLt and cuDNN.
const CONTEXT_BYTES: u64 = 716 << 20;
/// Memory of NCCL on a card with NVLink peers, after it has connected and summed something: the driver's count for a
/// run on two H100s minus that for a run on one (benches/results/h100-two-cards.json). It includes NCCL's defaults: per
/// channel (some dozens) and peer a buffer of 4 MiB (`NCCL_BUFFSIZE`), and smaller ones for short messages. NCCL
/// connects a rank only to its neighbors in rings and trees, so more ranks take little more.
const NCCL_BYTES: u64 = 900 << 20;
/// cuBLASLt's workspace on Hopper.
const GEMM_WORKSPACE_BYTES: u64 = 64 << 20;
/// Maximum tokens of one backward call of attention: cuDNN's workspace grows with the tokens of a call, and a few
/// thousand already keep the device busy.
pub(in crate::backends) const MAX_BACKWARD_TOKENS: usize = 16_384;
/// Maximum bytes of the gradients of scores that cuDNN's backward keeps in memory where it adds in a fixed order: 32 heads of a document of 4,096 tokens.
const MAX_ORDERED_BYTES: u64 = 1 << 30;

/// Returns the bytes of the gradients of a document's scores, of which cuDNN keeps whole tiles, in 16 bits.
fn score_gradient_bytes(query_heads: usize, length: usize) -> u64 {
    query_heads as u64 * (length.max(1).next_multiple_of(64) as u64).pow(2) * 2
}

/// Returns how many documents of a length a backward call of cuDNN may have that adds in a fixed order; `None` if one is too long.
pub(in crate::backends) fn documents_in_order(query_heads: usize, length: usize) -> Option<usize> {
    let documents = MAX_ORDERED_BYTES / score_gradient_bytes(query_heads, length);
    (documents > 0).then_some(documents as usize)
}

/// Returns the lines at the widest point of a layer's backward, besides saved values.
pub(super) fn lines(model: &ModelSpec, training: &TrainingShape) -> Vec<MemoryLine> {
    let flowing = buffers_per_token(model, training) * training.activation_bytes();
    let chunk = (training.loss_chunk_tokens as u64).min(training.tokens());
    let attended = training.tokens().min(MAX_BACKWARD_TOKENS.max(training.longest_document) as u64);
    let [weights, rows] = fp8_bytes(model, training);
    // Of inputs, or of their gradients.
    let dropped = training.tokens() * widest_dropped(model, training) * training.activation_bytes();
    vec![
        line(
            "layer at work",
            training.tokens() * flowing,
            format!("every row width as often as it is alive at once: {flowing} bytes per token{}", in_tiles(training)),
        ),
        line(
            "values next to queries",
            training.tokens() * next_to_raw_bytes_per_token(model, training),
            "in the buffers in which queries and keys are saved before their norm",
        ),
        line(
            "between tiles",
            training.bytes_between_tiles(model),
            "states of layers before each, and sums of gradients",
        ),
        line("8-bit weights", weights, "the projections of one layer in E4M3, as they are and transposed"),
        kept(training),
        line("8-bit rows", rows, "the widest activation or gradient in E4M3"),
        line(
            "low-rank values",
            saved_low_rank_bytes(model, training),
            "of adapters, of all projections that do not run twice, until their backward",
        ),
        line("parts of adapters", low_rank_sums_bytes(model, training), PARTS_WHY),
        line("dropped inputs", dropped, "the widest input of adapters under dropout"),
        line(
            "outputs before magnitudes",
            unscaled_bytes(model, training),
            "what DoRA scales, until its backward; and the widest gradient of that",
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
            GEMM_WORKSPACE_BYTES
                + attended * attention_bytes_per_token(model, training)
                + ordered_bytes(model, training)
                + wide_bytes(model, training, true),
            format!("of GEMMs, and of attention's backward over {attended} tokens"),
        ),
        line("context and libraries", CONTEXT_BYTES, "CUDA, cuBLASLt and cuDNN, once loaded"),
    ]
}

fn kept(training: &TrainingShape) -> MemoryLine {
    let bytes = training.kept_bytes.iter().sum();
    line("converted weights that stay", bytes, "what would be written again in every pass")
}

fn in_tiles(training: &TrainingShape) -> String {
    training
        .tile_rows()
        .map_or_else(String::new, |rows| format!("; MLPs and layers without attention in tiles of {rows}"))
}

const PARTS_WHY: &str = "of sums over the widest values that they read";

pub(super) fn line_of_ranks() -> MemoryLine {
    line("NCCL", NCCL_BYTES, "its buffers and kernels, once the ranks are connected")
}

/// Returns the bytes of outputs before DoRA's scaling, of all layers or of the recomputed one, and of their gradient.
/// Under dropout there is also the difference of two gradients.
fn unscaled_bytes(model: &ModelSpec, training: &TrainingShape) -> u64 {
    let widths: Vec<Vec<u64>> = (0..model.layers.len()).map(|layer| scaled_widths(model, training, layer)).collect();
    let of_layers = widths.iter().map(|layer| layer.iter().sum::<u64>());
    let saved = if training.recompute.repeats_gemms() { of_layers.max().unwrap_or(0) } else { of_layers.sum() };
    let gradients = if widest_dropped(model, training) > 0 { 2 } else { 1 };
    let widest = widths.iter().flatten().max().copied().unwrap_or(0);
    training.tokens() * (saved + gradients * widest) * training.activation_bytes()
}

/// Returns the lines of a forward pass without a backward, besides the activations of a layer.
pub(super) fn forward_lines(model: &ModelSpec, pass: &TrainingShape) -> Vec<MemoryLine> {
    vec![
        kept(pass),
        line("converted weights", converted_bytes(model, pass), converted_why(pass)),
        line("logits", wide_rows_bytes(model, pass), "of the loss in f32; or queries, keys and values side by side"),
        line("parts of adapters", forward_sums_bytes(model, pass), PARTS_WHY),
        line(
            "workspaces",
            GEMM_WORKSPACE_BYTES + wide_bytes(model, pass, false),
            "of GEMMs, and of attention's scores",
        ),
        line("context and libraries", CONTEXT_BYTES, "CUDA, cuBLASLt and cuDNN, once loaded"),
    ]
}

/// Returns the bytes of `v` and of gates that are kept with queries and keys saved before their norm, because one buffer stores all.
fn next_to_raw_bytes_per_token(model: &ModelSpec, training: &TrainingShape) -> u64 {
    // Values that are normalized count as saved before their norm, too.
    let has_plain =
        |attention: &AttentionSpec| !attention.reads_another() && (attention.values_are_keys || !attention.value_norm);
    let beside =
        |attention: &AttentionSpec| attention.gate_size() + if has_plain(attention) { attention.kv_size() } else { 0 };
    // Norms over all heads save dense copies of queries and keys instead.
    let normed = model.attentions().filter(|attention| attention.qk_norm == QkNorm::PerHead);
    let saved = if training.recompute.repeats_gemms() { 0 } else { usize::MAX };
    normed.take(saved).map(|attention| beside(attention) as u64).sum::<u64>() * training.activation_bytes()
}

/// Returns the bytes of the buffer for the widest rows, which operations share: logits of a chunk, or joined QKV with adapters, where
/// heads are taken apart.
fn wide_rows_bytes(model: &ModelSpec, training: &TrainingShape) -> u64 {
    let chunk = (training.loss_chunk_tokens as u64).min(training.tokens());
    let with_heads = (0..model.layers.len()).filter(|&layer| model.layers[layer].mixer.attention().is_some());
    let groups = with_heads.flat_map(|layer| planned_groups(model, training, layer));
    let inputs = groups.filter(|planned| planned.group.kind == GroupKind::MixerInput);
    let joined = inputs.map(|planned| row_stride(planned.group.out_features(), planned.route.room()) as u64);
    let joined = joined.max().unwrap_or(0) * training.tokens() * training.activation_bytes();
    (chunk * model.vocab_size as u64 * 4).max(joined)
}

/// Returns the workspace of attention's backward: an f32 gradient accumulator per query value, and gradients of keys and values for
/// every query head before the sum over their group, in the compute format, or in f32 for packed documents.
fn attention_bytes_per_token(model: &ModelSpec, training: &TrainingShape) -> u64 {
    let fused = model.attentions().filter(|attention| attention.head_dim <= FUSED_HEAD_DIM);
    let widest = fused.map(|attention| attention.query_size()).max().unwrap_or(0);
    let is_packed = training.documents > training.micro_batch_size;
    widest as u64 * (4 + 2 * if is_packed { 4 } else { training.activation_bytes() })
}

/// Returns the bytes of the gradients of scores that a call of attention's backward keeps to add in a fixed order; packed documents, and longer
/// ones, go to kernels that keep none.
fn ordered_bytes(model: &ModelSpec, training: &TrainingShape) -> u64 {
    if !training.deterministic || training.documents > training.micro_batch_size {
        return 0;
    }
    let bytes = |attention: &AttentionSpec| {
        let documents = documents_in_order(attention.heads, training.longest_document).unwrap_or(0);
        documents.min(training.documents) as u64 * score_gradient_bytes(attention.heads, training.longest_document)
    };
    model.attentions().filter(|attention| attention.head_dim <= FUSED_HEAD_DIM).map(bytes).max().unwrap_or(0)
}

/// Returns the bytes of converted weights: one buffer per group of a layer, including its adapters, shared by all
/// layers, and in full training one more for the head. Dense weights need one only if adapters are appended, and none is
/// needed if all stay converted.
fn converted_bytes(model: &ModelSpec, training: &TrainingShape) -> u64 {
    if all_stay(model, training) {
        return 0;
    }
    // Buffers of equal shape are shared.
    let mut shapes: BTreeSet<[usize; 2]> = BTreeSet::new();
    for Planned { group, shape, route, .. } in all_planned(model, training) {
        let is_converted = match route.weight {
            WeightRoute::WrittenOut => true,
            WeightRoute::OneByOne => shape.is_converted(training.compute),
            WeightRoute::Stored | WeightRoute::Codes | WeightRoute::FewRows => false,
        };
        if is_converted {
            let (appended, matrices) = (route.room(), if route.is_grouped { group.matrices() } else { 1 });
            shapes.insert([matrices * (group.out_features() + appended), row_stride(group.in_features, appended)]);
        }
    }
    // The projection of the layers' own inputs is of no layer.
    if let Some([_, projection, _]) = model.per_layer_tensors()
        && training.storage().storage_of(model, &projection.name, projection.role) != Format::Float(training.compute)
    {
        shapes.insert([projection.shape[0], projection.shape[1]]);
    }
    let (head, role) = if model.tie_word_embeddings { (EMBEDDING, Role::Embedding) } else { (HEAD, Role::Head) };
    if training.storage().storage_of(model, head, role) != Format::Float(training.compute) {
        shapes.insert([model.vocab_size, model.hidden_size]);
    }
    shapes.iter().map(|[rows, columns]| (rows * columns) as u64).sum::<u64>() * training.activation_bytes()
}

/// Returns whether all weights that GEMMs read in another format stay on the device in that.
fn all_stay(model: &ModelSpec, training: &TrainingShape) -> bool {
    let all = converted_weights_bytes(model, training);
    all != [0; 2] && training.kept_bytes.iter().zip(all).all(|(kept, all)| *kept >= all)
}

/// Returns the bytes of all quantized weights as GEMMs read them, for the forward and for the backward, which may stay on the device. In the compute
/// format both share one buffer, counted as the forward's. 0 for weights that ranks divide, since each arrives in a new tensor.
pub fn converted_weights_bytes(model: &ModelSpec, training: &TrainingShape) -> [u64; 2] {
    if training.divided.weights_elsewhere > 0 {
        return [0; 2];
    }
    let quantized = all_planned(model, training).into_iter().filter(|planned| planned.route.is_quantized);
    quantized.fold([0; 2], |sum, planned| {
        let matrices = planned.group.matrices();
        let bytes = match training.gemms {
            GemmFormat::Compute | GemmFormat::F16 => {
                [planned.converted_values() * training.activation_bytes() as usize, 0]
            }
            GemmFormat::Fp8 => planned.fp8_weight_bytes(),
        };
        [sum[0] + (matrices * bytes[0]) as u64, sum[1] + (matrices * bytes[1]) as u64]
    })
}

impl Planned {
    /// Counts the values of the converted weight with its adapters, in the compute format, of one expert in a stack.
    fn converted_values(&self) -> usize {
        let appended = self.route.room();
        (self.group.out_features() + appended) * row_stride(self.group.in_features, appended)
    }

    /// Returns the bytes of the weight in 8-bit codes with their scales, of one expert in a stack: for the forward, and transposed.
    fn fp8_weight_bytes(&self) -> [usize; 2] {
        let Route { ranks, is_grouped, .. } = self.route;
        let (outputs, inputs) = (self.group.out_features(), self.group.in_features);
        // The adapters in the compute format (at most all of B for each module), and the maxima.
        let around = if is_grouped {
            let b_values: usize = self.shape.adapted().map(|module| module.rank * module.columns.len()).sum();
            4 * (ranks * inputs + b_values) + 1024
        } else {
            4 * ranks * (inputs + outputs) + 4096
        };
        [[outputs, inputs], [inputs, outputs]]
            .map(|[rows, width]| rows * (fp8_stride(width, ranks, is_grouped) + 4) + around)
    }
}

/// Returns the bytes of one layer's weights in 8-bit codes, in both orders, and of the rows that they are multiplied with.
fn fp8_bytes(model: &ModelSpec, training: &TrainingShape) -> [u64; 2] {
    if training.gemms == GemmFormat::Compute {
        return [0; 2];
    }
    let passing = u64::from(!all_stay(model, training));
    let (mut weights, mut all_rows) = (BTreeSet::new(), 0);
    let of_layers = (0..model.layers.len())
        .flat_map(|layer| planned_groups(model, training, layer).into_iter().map(move |planned| (layer, planned)));
    for (layer, planned) in of_layers.filter(|(_, planned)| !planned.group.kind.decides()) {
        let (Planned { group, .. }, Route { ranks, is_grouped, .. }) = (&planned, planned.route);
        // Experts that run one after the other share buffers, and have at most one row of a token each.
        let [matrices, rows] = if is_grouped { [group.matrices(), planned.group.rows] } else { [1; 2] };
        let bytes = planned.fp8_weight_bytes().map(|bytes| matrices * bytes);
        // Buffers of equal shape are shared.
        weights.insert((matrices * group.out_features(), group.in_features, bytes));
        let row = rows * (fp8_stride(group.in_features.max(group.out_features()), ranks, is_grouped) + 4);
        let tokens = training.rows_of_group(&model.layers[layer], planned.group.kind);
        all_rows = all_rows.max(tokens * row as u64);
    }
    let weights = weights.iter().flat_map(|(.., bytes)| bytes).sum::<usize>() as u64;
    [passing * weights, all_rows]
}

fn converted_why(training: &TrainingShape) -> String {
    let head = if training.lora.is_none() { ", and the head" } else { "" };
    format!("the projections of one layer{head}, in {} bytes per parameter", training.activation_bytes())
}

#[cfg(test)]
mod tests {
    use firebrick_arch::shapes::llama_3_1_8b;
    use firebrick_arch::{Activation, ExpertNames, KeysAndValues, MlpSpec, RouterSpec};
    use firebrick_precision::FloatType;

    use super::*;
    use crate::backends::{BackendKind, estimate};
    use crate::memory::estimate::MemoryEstimate;
    use crate::memory::estimate::tests::bytes_of;
    use crate::memory::training_shape::Recompute;
    use crate::memory::training_shape::tests::{dense, full, qlora};

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
    fn scores_and_copies_of_logits_do_not_count() {
        let long = on_cuda(&TrainingShape { longest_document: 4096, ..qlora(1, Recompute::None) });
        let short = on_cuda(&TrainingShape { longest_document: 1, ..qlora(1, Recompute::None) });
        assert_eq!(long, short);
        assert_eq!(bytes_of(&long, "logits"), 1024 * 128_256 * 4);
    }

    #[test]
    fn gradients_of_scores_count_where_sums_have_a_fixed_order_and_documents_are_of_one_length() {
        let workspaces = |longest_document, documents, deterministic| {
            let training = TrainingShape { longest_document, documents, deterministic, ..qlora(8, Recompute::None) };
            bytes_of(&on_cuda(&training), "workspaces")
        };
        let more = |longest, documents| workspaces(longest, documents, true) - workspaces(longest, documents, false);
        assert_eq!([more(4096, 8), more(2048, 8), more(1024, 8)], [1 << 30, 1 << 30, 8 << 26]);
        assert_eq!([more(4097, 8), more(4096, 9)], [0, 0], "the flash kernels keep none");
        assert_eq!(documents_in_order(32, 2000), Some(4));
    }

    #[test]
    fn every_projection_of_one_layer_is_converted_at_a_time() {
        // All seven with their adapters of rank 16: appended to qkv 48, to gate and up 32, to the others 16.
        let shapes = [[6144 + 48, 4160], [4096 + 16, 4160], [28_672 + 32, 4160], [4096 + 16, 14_400]];
        let values: u64 = shapes.iter().map(|[rows, columns]| rows * columns).sum();
        assert_eq!(bytes_of(&on_cuda(&qlora(1, Recompute::Full)), "converted weights"), values * 2);
        assert_eq!(
            bytes_of(&on_cuda(&dense(FloatType::Bf16)), "converted weights"),
            values * 2,
            "next to their adapters"
        );
        let full = on_cuda(&full(FloatType::Bf16));
        assert_eq!(bytes_of(&full, "converted weights"), (218_103_808 + 128_256 * 4096) * 2);
        assert_eq!(bytes_of(&full, "base weights"), 0, "no second copy of all weights");
    }

    #[test]
    fn what_is_next_to_saved_queries_depends_on_the_parts_of_the_group() {
        let per_layer = |change: fn(&mut AttentionSpec)| {
            let mut model = llama_3_1_8b();
            model.attentions_mut().for_each(|attention| {
                attention.qk_norm = QkNorm::PerHead;
                change(attention);
            });
            next_to_raw_bytes_per_token(&model, &qlora(1, Recompute::Selective)) / 32 / 2
        };
        assert_eq!(per_layer(|_| {}), 1024);
        assert_eq!(per_layer(|attention| attention.value_norm = true), 0, "values were counted before their norm");
        assert_eq!(per_layer(|attention| attention.keys_and_values = KeysAndValues::OfLayer(0)), 0);
        let both = per_layer(|attention| (attention.values_are_keys, attention.value_norm) = (true, true));
        assert_eq!(both, 1024, "what keys and values are made of");
    }

    #[test]
    fn experts_have_codes_of_all_matrices_and_of_every_row_where_one_launch_reads_them() {
        let mut model = llama_3_1_8b();
        let (sizes, router) = ([16, 4, 1024], RouterSpec::softmax(true));
        let mlp = MlpSpec::experts(ExpertNames::Qwen, sizes, Activation::Silu, router, None);
        model.layers.iter_mut().for_each(|layer| layer.mlp = mlp.clone());
        let bytes = |has_wgmma| {
            let training = TrainingShape { gemms: GemmFormat::Fp8, has_wgmma, ..qlora(1, Recompute::Full) };
            let estimate = estimate(BackendKind::Cuda, &model, &training);
            ["8-bit weights", "8-bit rows"].map(|name| bytes_of(&estimate, name))
        };
        let [[weights, rows], [alone, rows_alone]] = [true, false].map(bytes);
        // Both matrices of an expert in both orders, their scales, and adapters: at most an eighth more than the codes.
        let codes = 2 * 3 * 1024 * 4096;
        let added = (weights - alone) as f64 / f64::from(15 * codes);
        assert!((1.0..1.125).contains(&added), "{added}");
        // The widest rows are those of the experts, which have no adapters; alone, those of queries, keys and values.
        assert_eq!([rows, rows_alone], [4096 * 4 * (4096 + 4), 4096 * (128 + 6144 + 4)]);
    }
}
