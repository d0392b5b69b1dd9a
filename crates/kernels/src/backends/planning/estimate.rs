//! Memory of a training run on one backend: the lines that follow from the model, and the backend's working set for a
//! step or for a phase between steps (evaluation, answers), whichever needs more. Also describes how a backend runs adapters and attention.
//!
//! Where cuDNN may be used, each micro-batch's shape determines the attention kernel; the plan names only what is certain in advance.
//! Trade-off: `flex`, `candle` and `wgpu` share the lines of the reference bodies, although what they run may need less.

use firebrick_arch::{GroupSpec, ModelSpec};
use firebrick_hwprofile::memory::{MemoryEstimate, MemoryLine};
use firebrick_precision::FloatType;

use super::route::Route;
use super::{adapters, cuda, evaluation, flash, reference};
use crate::backends::BackendKind;
use crate::memory::estimate::{adapter_starts, sum};
use crate::memory::training_shape::TrainingShape;

/// Estimates the peak memory of training `model` on `backend`. Lines of zero bytes are left out.
pub fn estimate(backend: BackendKind, model: &ModelSpec, training: &TrainingShape) -> MemoryEstimate {
    let mut estimate = backend.step_lines(model, training);
    for (peak, lines) in evaluation::phases(backend, model, training) {
        let mut lines = [training.resident_lines(model), lines].concat();
        lines.retain(|line| line.bytes > 0);
        if sum(&lines) > estimate.total_bytes() {
            (estimate.peak, estimate.lines) = (peak, lines);
        }
    }
    let starts = adapter_starts(model, training);
    if starts.bytes > 0 {
        let of_host = if backend.is_cpu() { &mut estimate.lines } else { &mut estimate.host_lines };
        of_host.push(starts);
    }
    estimate
}

impl BackendKind {
    fn step_lines(self, model: &ModelSpec, training: &TrainingShape) -> MemoryEstimate {
        let lines = match self {
            Self::Flex | Self::Candle | Self::Wgpu => reference::lines(self, model, training),
            Self::Cuda => cuda::lines(model, training),
        };
        training.with_working_set(model, lines)
    }

    /// Returns the bytes of a micro-batch's forward and backward on the device and in host memory, besides what persists between steps.
    pub fn pass_bytes(self, model: &ModelSpec, training: &TrainingShape) -> [u64; 2] {
        let stays = training.parameter_bytes(model) + training.kept_bytes.iter().sum::<u64>();
        let step = self.step_lines(model, training);
        [step.total_bytes() - stays, sum(&step.host_lines) - training.paged_bytes]
    }

    /// Returns the memory per device of a job with this number of ranks, in addition to [`estimate`].
    pub fn memory_line_of_ranks(self, ranks: usize) -> Option<MemoryLine> {
        (self == Self::Cuda && ranks > 1).then(cuda::line_of_ranks)
    }

    /// Describes how the adapters' GEMMs run: appended to the inner dimension of the base's, or separate; `None` without adapters.
    pub fn adapter_gemms(self, model: &ModelSpec, training: &TrainingShape) -> Option<String> {
        match self {
            Self::Flex | Self::Candle | Self::Wgpu => training.lora.as_ref().map(|_| "separate".to_owned()),
            Self::Cuda => adapters::adapter_gemms(model, training),
        }
    }

    /// Returns why the experts of a mixture run one after the other; `None` if one launch computes all of them, or there are none.
    pub fn experts_one_by_one(self, model: &ModelSpec, training: &TrainingShape) -> Option<&'static str> {
        let group = model.all_groups().find(|group| group.experts.is_some())?;
        let is_grouped = |group: &GroupSpec| Route::planned(model, group, training).is_grouped;
        match self {
            Self::Flex | Self::Candle | Self::Wgpu => Some("this backend multiplies each expert's rows by themselves"),
            Self::Cuda if is_grouped(&group) => None,
            Self::Cuda if training.compute == FloatType::F32 => Some("grouped GEMMs are for 16-bit formats"),
            Self::Cuda if training.lora.as_ref().is_some_and(|lora| lora.use_dora) => {
                Some("grouped GEMMs know no magnitudes (DoRA)")
            }
            Self::Cuda => Some("grouped GEMMs need widths and ranks that are multiples of 8"),
        }
    }

    /// Returns the kernels that compute attention with a soft cap, and the reason; `None` for models without a cap, and
    /// for backends with one implementation for all models.
    pub fn capped_attention(self, model: &ModelSpec) -> Option<[String; 2]> {
        let mut capped = model.attentions().filter(|attention| attention.soft_cap.is_some());
        let attention = capped.next().filter(|_| self == Self::Cuda)?;
        let head_dim = attention.head_dim;
        // Values of 16 bits are converted if only the f32 kernels support the heads.
        let (kernels, why) = if flash::flash_takes_f32(head_dim) {
            ("hand-written", "cuDNN is not given scores with a soft cap; slower than it")
        } else {
            (
                "reference",
                "no kernel takes a soft cap with heads of this width; in memory, quadratic in the longest document",
            )
        };
        Some([kernels.to_owned(), format!("{why} (heads of {head_dim})")])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::estimate::tests::bytes_of;
    use crate::memory::training_shape::Recompute;
    use crate::memory::training_shape::tests::{full, qlora};
    use firebrick_arch::LoraInit;
    use firebrick_arch::shapes::{llama_3_1_8b, llama_3_2_1b};

    /// Complete reports of one run on each of two cards, and of one run on both.
    const TWO_CARDS: &str = include_str!("../../../../../benches/results/h100-two-cards.json");

    #[test]
    fn what_nccl_takes_on_a_card_is_what_was_measured() {
        let reports: serde_json::Value = serde_json::from_str(TWO_CARDS).unwrap();
        let peak = |report: usize| reports[report]["peak_gib"].as_f64().unwrap() * GIB;
        let planned = BackendKind::Cuda.memory_line_of_ranks(2).unwrap().bytes as f64;
        assert!(((peak(2) - peak(0)) / planned - 1.0).abs() < 0.05, "{} measured", peak(2) - peak(0));
        assert_eq!(BackendKind::Cuda.memory_line_of_ranks(1), None);
        assert_eq!(BackendKind::Flex.memory_line_of_ranks(4), None);
    }

    const GIB: f64 = (1u64 << 30) as f64;

    /// Estimates Llama-3.1-8B on wgpu.
    fn on_wgpu(training: &TrainingShape) -> MemoryEstimate {
        estimate(BackendKind::Wgpu, &llama_3_1_8b(), training)
    }

    /// What the pools of wgpu held on an H200 (`benches/results/h200-vulkan.json`).
    #[test]
    fn qlora_on_wgpu_in_f32_is_within_a_tenth_of_what_its_pools_held() {
        let in_f32 = |recompute, tokens: usize| TrainingShape {
            compute: FloatType::F32,
            row_len: tokens,
            longest_document: tokens,
            loss_tokens_per_row: tokens,
            loss_chunk_tokens: 1024,
            ..qlora(1, recompute)
        };
        let rows = |training: TrainingShape| TrainingShape { micro_batch_size: 4, documents: 4, ..training };
        let (one, eight) = (llama_3_2_1b(), llama_3_1_8b());
        for (model, training, measured) in [
            (&one, in_f32(Recompute::Selective, 512), 2.77),
            (&one, rows(in_f32(Recompute::Selective, 2048)), 16.47),
            (&one, in_f32(Recompute::Selective, 16_384), 30.28),
            (&eight, in_f32(Recompute::Full, 2048), 11.15),
        ] {
            let gib = estimate(BackendKind::Wgpu, model, &training).total_bytes() as f64 / GIB;
            assert!((gib / measured - 1.0).abs() < 0.1, "{gib:.2} GiB planned, {measured} held");
        }
    }

    #[test]
    fn what_adapters_started_as_is_in_host_memory() {
        let mut training = qlora(1, Recompute::Full);
        training.lora.as_mut().unwrap().init_lora_weights = LoraInit::Pissa { niter: Some(4) };
        let flex = |training: &TrainingShape| estimate(BackendKind::Flex, &llama_3_1_8b(), training);
        let (on_card, on_host) = (on_wgpu(&training), flex(&training));
        // 41,943,040 parameters of adapters.
        assert_eq!(
            (on_card.host_bytes(), on_card.total_bytes()),
            (4 * 41_943_040, on_wgpu(&qlora(1, Recompute::Full)).total_bytes())
        );
        assert_eq!(on_host.total_bytes() - flex(&qlora(1, Recompute::Full)).total_bytes(), 4 * 41_943_040);
        assert_eq!(on_host.host_bytes(), 0);
    }

    #[test]
    fn recomputation_trades_saved_activations_for_one_layer() {
        let (with, without) = (on_wgpu(&qlora(8, Recompute::Full)), on_wgpu(&qlora(8, Recompute::None)));
        let per_layer = bytes_of(&without, "saved activations") / 32;
        let input = bytes_of(&with, "saved activations") / 32;
        assert_eq!(input + bytes_of(&with, "recomputed layer"), per_layer);
        assert!(with.total_bytes() < without.total_bytes());
        assert_eq!(without.largest().map(|line| line.what), Some("saved activations"));
    }

    #[test]
    fn what_is_offloaded_is_in_host_memory_but_for_the_layers_at_work() {
        let row = 8 * 4096 * 4096 * 2;
        // One value per head and token stays.
        let sums = 8 * 4096 * 32 * 4;
        // Saved without offloading, saved with it, and in host memory: inputs; or those of both halves, and attention's output.
        for (recompute, all, left, on_host) in [
            (Recompute::Full, 32 * row, 2 * row, 31 * row),
            (Recompute::Projections, 32 * (3 * row + sums), 3 * row + 32 * sums, (31 + 2 * 32) * row),
        ] {
            let without = on_wgpu(&qlora(8, recompute));
            let with = on_wgpu(&TrainingShape { offload: true, ..qlora(8, recompute) });
            let saved = [&without, &with].map(|estimate| bytes_of(estimate, "saved activations"));
            assert_eq!((saved, without.host_bytes(), with.host_bytes()), ([all, left], 0, on_host), "{recompute:?}");
            assert_eq!(without.total_bytes() - with.total_bytes(), all - left);
        }
        let selective = on_wgpu(&TrainingShape { offload: true, ..qlora(1, Recompute::Selective) });
        assert_eq!(selective, on_wgpu(&qlora(1, Recompute::Selective)), "its layers save too much");
    }

    #[test]
    fn full_training_takes_16_bytes_per_parameter_and_converts_one_module_at_a_time() {
        for (compute, converted) in [(FloatType::F32, 0), (FloatType::Bf16, 2 * 4096 * 14_336 * 2)] {
            // Enough tokens that the peak is in a layer's backward and not in the loss.
            let training = TrainingShape { micro_batch_size: 8, ..full(compute) };
            let estimate = estimate(BackendKind::Candle, &llama_3_1_8b(), &training);
            let names = ["base weights", "trained weights", "gradients", "optimizer state"];
            let bytes: u64 = names.iter().map(|name| bytes_of(&estimate, name)).sum();
            assert_eq!(bytes, 16 * llama_3_1_8b().parameters());
            assert_eq!(bytes_of(&estimate, "converted weights"), converted);
        }
    }

    #[test]
    fn scores_count_only_where_attention_holds_them() {
        let training = TrainingShape { longest_document: 512, ..qlora(8, Recompute::Full) };
        let scores = 3 * 4 * 32 * 512 * 512;
        let of = |backend| bytes_of(&estimate(backend, &llama_3_1_8b(), &training), "attention scores");
        assert_eq!(of(BackendKind::Candle), scores);
        for backend in [BackendKind::Flex, BackendKind::Wgpu, BackendKind::Cuda] {
            assert_eq!(of(backend), 0);
        }
    }

    #[test]
    fn a_loss_chunk_never_exceeds_the_micro_batch() {
        let long_chunk = TrainingShape { loss_chunk_tokens: 1 << 20, ..qlora(1, Recompute::Full) };
        let estimate = on_wgpu(&long_chunk);
        assert_eq!(bytes_of(&estimate, "loss"), 4096 * 128_256 * 4);
    }

    #[test]
    fn no_line_is_empty() {
        let offloaded = TrainingShape { offload: true, ..qlora(1, Recompute::Full) };
        for training in [qlora(1, Recompute::None), full(FloatType::F32), offloaded] {
            for backend in BackendKind::ALL {
                let estimate = estimate(backend, &llama_3_1_8b(), &training);
                assert!(estimate.lines.iter().all(|line| line.bytes > 0 && !line.why.is_empty()), "{estimate:#?}");
            }
        }
    }

    #[test]
    fn a_soft_cap_goes_to_the_flash_kernels_where_they_take_the_heads() {
        let mut model = llama_3_1_8b();
        assert_eq!(BackendKind::Cuda.capped_attention(&model), None);
        for (head_dim, expected) in
            [(256, "hand-written"), (128, "hand-written"), (32, "hand-written"), (24, "reference")]
        {
            for attention in model.attentions_mut() {
                (attention.head_dim, attention.soft_cap) = (head_dim, Some(50.0));
            }
            let [kernels, why] = BackendKind::Cuda.capped_attention(&model).unwrap();
            assert_eq!(kernels, expected);
            assert!(why.contains(&head_dim.to_string()), "{why}");
            assert_eq!(BackendKind::Flex.capped_attention(&model), None);
        }
    }
}
