//! Text generation on a card: the caches give the same text as without them, the kernels for few rows and cached attention run and never a reference
//! implementation, for one sequence and for many, and no memory is left behind.
//!
//! Trade-off: weights are random, so logits are close to each other; a chosen token may be below the largest by the rounding error.

use std::collections::BTreeMap;

use burn_tensor::DType;
use firebrick_arch::Mixer;
use firebrick_kernels::backends::cuda::scratch_bytes;
use firebrick_kernels::backends::{Cuda, Flex};
use firebrick_kernels::{Kernels, Session};
use firebrick_model::{BatchLimits, Decoder, GenerateOptions, Sampler};
use firebrick_precision::difference::worst;
use firebrick_precision::{FloatType, Format, QuantFormat};
use firebrick_tests::{FROZEN, NF4, every_next_token, host, some_in_turn, upload};

use super::gradients::fill_adapters;
use super::{BaseStorage, half, has_card, ids, random_model};

const NEW_TOKENS: usize = 12;

fn prompts(count: usize) -> Vec<Vec<u32>> {
    (0..count).map(|index| ids(index, 3 + index * 7 % 40, index as u32)).collect()
}

fn written<B: Kernels>(model: &Decoder<B>, prompts: &[Vec<u32>], limits: BatchLimits) -> Vec<Vec<u32>> {
    let options =
        GenerateOptions { max_new_tokens: NEW_TOKENS, stop_tokens: Vec::new(), sampler: Sampler::greedy(), limits };
    model.generate(prompts, &options).expect("the logits are finite")
}

/// Returns the largest distance of a chosen token's logit from the largest one, relative to the range of the logits, in a pass over the whole text.
fn distance(model: &Decoder<Cuda>, prompt: &[u32], written: &[u32]) -> f64 {
    let text = [prompt, written].concat();
    let logits = host(model.logits(&upload(model, &every_next_token(&text, text.len()))));
    let rows = logits.chunks(model.config.spec.vocab_size).skip(prompt.len() - 1);
    let of_row = |(row, &token): (&[f32], &u32)| {
        let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let smallest = row.iter().copied().fold(f32::INFINITY, f32::min);
        f64::from((largest - row[token as usize]) / (largest - smallest))
    };
    worst(rows.zip(written).map(of_row))
}

/// Counts the calls of each engine operation during generation.
fn operations(model: &Decoder<Cuda>, prompts: &[Vec<u32>]) -> BTreeMap<&'static str, usize> {
    let (_, trace) = Cuda::trace(model.device(), || written(model, prompts, BatchLimits::NONE));
    let mut counts = BTreeMap::new();
    for operation in trace {
        *counts.entry(operation.name).or_default() += 1;
    }
    counts
}

/// The families take the widths of heads in turn.
fn through_the_caches(families: Vec<&'static str>) {
    for (turn, family) in families.into_iter().enumerate() {
        for head_dim in some_in_turn(&[64, 128, 256], 1, turn) {
            // Rounding sends tokens to other experts, and states keep what those have added.
            let has_both = family.contains("qwen3-5-moe") || family == "tiny-qwen3-next";
            for (dtype, tolerance) in [(DType::F32, 1e-3), (half(), if has_both { 0.5 } else { 5e-2 })] {
                let mut model = random_model::<Cuda>(family, head_dim, dtype, NF4);
                fill_adapters(&mut model);
                let context = format!("{family}, heads of {head_dim}, {dtype:?}");
                for count in [1, 5] {
                    let prompts = prompts(count);
                    for (prompt, text) in prompts.iter().zip(written(&model, &prompts, BatchLimits::NONE)) {
                        assert_eq!(text.len(), NEW_TOKENS);
                        let distance = distance(&model, prompt, &text);
                        assert!(distance < tolerance, "{context}, {count} prompts: {distance}");
                    }
                }
                // The first token comes from the pass over the prompt.
                let steps = model.config.spec.attentions().count() * (NEW_TOKENS - 1);
                let counts = operations(&model, &prompts(1));
                let count = |name: &str| counts.get(name).copied().unwrap_or(0);
                assert_eq!(count("cached_attention"), steps, "{context}: {counts:?}");
                assert_eq!(count("most_probable"), NEW_TOKENS, "{context}: {counts:?}");
                if dtype == half() {
                    assert!(count("few_rows_8") >= 4 * steps, "{context}: {counts:?}");
                }
            }
        }
    }
}

over_families!(
    every_family_writes_through_the_caches_what_it_writes_without_them_and_uses_no_reference_body,
    through_the_caches
);

#[test]
fn every_base_format_writes_with_few_rows_what_it_computes_with_many() {
    if !has_card() {
        return;
    }
    let quantized = [
        QuantFormat::Nf4 { double_quant: false },
        QuantFormat::Nf4 { double_quant: true },
        QuantFormat::Nvfp4,
        QuantFormat::Mxfp4,
        QuantFormat::Fp8,
    ];
    let formats = quantized.map(Format::Quantized).into_iter().chain([Format::Float(FloatType::Bf16)]);
    for format in formats {
        for family in ["tiny-llama", "tiny-qwen2"] {
            let mut model = random_model::<Cuda>(family, 64, half(), BaseStorage::Frozen(format));
            fill_adapters(&mut model);
            // One count for each size of the kernels, and one that is too large for them.
            for count in [1, 12, 30, 64, 70] {
                let prompts = prompts(count);
                for (prompt, text) in prompts.iter().zip(written(&model, &prompts, BatchLimits::NONE)) {
                    let distance = distance(&model, prompt, &text);
                    assert!(distance < 5e-2, "{family}, {format}, {count} prompts: {distance}");
                }
            }
        }
    }
}

fn as_the_cpu(families: Vec<&'static str>) {
    let prompts = prompts(9);
    for family in families {
        let expected = written(&random_model::<Flex>(family, 64, DType::F32, FROZEN), &prompts, BatchLimits::NONE);
        let model = random_model::<Cuda>(family, 64, DType::F32, FROZEN);
        // States go on in products of Burn, which are TF32.
        let has_states = model.config.spec.layers.iter().any(|layer| matches!(layer.mixer, Mixer::DeltaNet(_)));
        for limits in [BatchLimits::NONE, BatchLimits { sequences: 2, tokens: 90 }] {
            let written = written(&model, &prompts, limits);
            if has_states {
                let distances = prompts.iter().zip(&written).map(|(prompt, text)| distance(&model, prompt, text));
                assert!(worst(distances) < 1e-3, "{family}, {limits:?}");
            } else {
                assert_eq!(written, expected, "{family}, {limits:?}");
            }
        }
    }
}

over_families!(the_card_writes_in_f32_what_the_cpu_writes_whatever_is_written_at_the_same_time, as_the_cpu);

#[test]
fn generation_leaves_no_scratch_memory_behind() {
    if !has_card() {
        return;
    }
    let model = random_model::<Cuda>("tiny-llama", 64, half(), NF4);
    written(&model, &prompts(20), BatchLimits::NONE);
    Cuda::release_memory(model.device());
    assert_eq!(scratch_bytes(model.device()), 0);
}
