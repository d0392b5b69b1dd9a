//! The forward pass: logits and losses of checkpoints and adapters, and the rope tables they need.

use std::collections::BTreeMap;
use std::fs::read_to_string;
use std::path::Path;

use firebrick_kernels::Kernels;
use firebrick_kernels::backends::Flex;
use firebrick_model::{BaseStorage, ModelConfig};
use firebrick_precision::FloatType;
use firebrick_tests::{
    FROZEN, Golden, every_next_token, families, fixture, golden_file, host, in_turn, largest_difference, load,
    on_every_backend, relative_difference, upload,
};
use firebrick_trainer::run::generate::LoadOptions;
use firebrick_trainer::run::verify::{VerifyOptions, verify};
use serde_json::Value;

/// Adapters with more settings than a rank, each with its base.
pub(crate) const ADAPTERS: [(&str, &str); 14] = [
    ("tiny-llama-rslora", "tiny-llama"),
    ("tiny-llama-tied-lora", "tiny-llama-tied"),
    ("tiny-llama-patterns", "tiny-llama"),
    ("tiny-llama-layers", "tiny-llama-tied"),
    ("tiny-llama-dora", "tiny-llama"),
    ("tiny-llama-rows", "tiny-llama"),
    ("tiny-llama-tied-rows", "tiny-llama-tied"),
    ("tiny-llama-new", "tiny-llama"),
    ("tiny-llama-tied-new", "tiny-llama-tied"),
    ("tiny-llama-pissa", "tiny-llama"),
    ("tiny-qwen3-moe-parameters", "tiny-qwen3-moe"),
    ("tiny-mixtral-parameters", "tiny-mixtral"),
    ("tiny-gpt-oss-parameters", "tiny-gpt-oss"),
    ("tiny-gemma4-moe-parameters", "tiny-gemma4-moe"),
];

/// Tokens per sequence of the golden batches, if the golden file does not say otherwise.
pub(crate) const TOKENS: usize = 48;

/// Returns the largest difference of a logit, and the difference of the mean loss, between a fixture and its golden.
pub(crate) fn differences<B: Kernels>(
    golden: &str,
    model: &str,
    adapter: Option<&str>,
    storage: BaseStorage,
) -> (f32, f32) {
    let golden = Golden::open(golden);
    let model = load::<B>(model, adapter, storage);
    let batch = every_next_token(&golden.ids("input_ids"), TOKENS);
    let on_device = upload(&model, &batch);
    let logits = largest_difference(&host(model.logits(&on_device)), &golden.f32s("logits"));
    let loss = host(model.loss_only(&on_device, 20))[0] / batch.loss_tokens() as f32;
    (logits, (loss - golden.f32s("loss")[0]).abs())
}

fn assert_forward_agrees<B: Kernels>(golden: &str, model: &str, adapter: Option<&str>) {
    let (logits, loss) = differences::<B>(golden, model, adapter, FROZEN);
    assert!(logits < 2e-4, "{golden}: a logit differs by {logits:e}");
    assert!(loss < 1e-5, "{golden}: the loss differs by {loss:e}");
}

fn every_family<B: Kernels>() {
    for family in families::<B>() {
        assert_forward_agrees::<B>(family, family, None);
    }
}

on_every_backend!(logits_and_losses_of_every_family_equal_those_of_transformers, every_family);

fn every_family_with_its_adapter<B: Kernels>() {
    for family in families::<B>() {
        let adapter = format!("{family}-lora");
        assert_forward_agrees::<B>(&adapter, family, Some(&adapter));
    }
}

on_every_backend!(
    logits_and_losses_of_every_family_with_its_adapter_equal_those_of_peft,
    every_family_with_its_adapter
);

/// Covers a tied head with `rope_scaling` of type llama3, four shards with linear scaling, yarn with an explicit attention factor, and the long
/// factors of longrope with a window; adapters with rank stabilization, patterns, modules that train whole, and on a tied model.
fn special_checkpoints<B: Kernels>() {
    for name in ["tiny-llama-tied", "tiny-llama-sharded", "tiny-llama-yarn", "tiny-phi3-long"] {
        assert_forward_agrees::<B>(name, name, None);
    }
    for (adapter, model) in ADAPTERS {
        assert_forward_agrees::<B>(adapter, model, Some(adapter));
    }
}

on_every_backend!(logits_of_tied_sharded_and_rope_scaled_checkpoints_equal_those_of_transformers, special_checkpoints);

#[test]
fn the_verify_command_measures_the_same_agreement() {
    for (golden, adapter) in [("tiny-llama", None), ("tiny-llama-lora", Some("tiny-llama-lora"))] {
        let load = LoadOptions {
            model: fixture("tiny-llama"),
            adapter: adapter.map(fixture),
            storage: FROZEN,
            compute: FloatType::F32,
        };
        let options = VerifyOptions { load, golden: golden_file(&format!("{golden}.safetensors")), tolerance: 2e-4 };
        let difference = verify::<Flex>(&options, &Default::default()).expect("the fixture and its golden are read");
        assert!(difference.largest < 2e-4 && difference.mean <= difference.largest, "{golden}: {difference:?}");
        assert!(difference.loss.expect("the golden has a loss") < 1e-5, "{golden}: {difference:?}");
        assert_eq!(difference.top1_agreement, 1.0, "{golden}");
    }
}

#[test]
fn rope_frequencies_equal_those_of_transformers_for_every_scaling() {
    let golden = Golden::open("rope-tables");
    let text = read_to_string(golden_file("rope-tables.json")).expect("the cases are there");
    let cases: BTreeMap<String, Value> = serde_json::from_str(&text).expect("the cases are JSON");
    let config = read_to_string(fixture("tiny-llama").join("config.json")).expect("the fixture has a config");
    for (name, case) in cases {
        let mut config: Value = serde_json::from_str(&config).expect("the config is JSON");
        config["head_dim"] = case["head_dim"].clone();
        config["rope_parameters"] = case["rope_parameters"].clone();
        config["max_position_embeddings"] = 131_072.into();
        let config = ModelConfig::parse(&config.to_string(), Path::new("config.json")).expect("the case is supported");
        let [rope] = config.spec.ropes.as_slice() else { panic!("{name}: all layers share one rope") };
        let (frequencies, scaling) = rope.inverse_frequencies(TOKENS);
        let difference = relative_difference(&frequencies, &golden.f32s(&format!("{name}.inv_freq")));
        assert!(difference < 1e-6, "{name}: {difference:e}");
        let expected = golden.f32s(&format!("{name}.attention_scaling"))[0];
        assert!((scaling - expected).abs() < 1e-6, "{name}: {scaling} {expected}");
    }
}

/// Uses targets that transformers' logits predict at every second token, and miss at the others.
fn score_of_every_family<B: Kernels>() {
    for (turn, family) in families::<B>().into_iter().enumerate() {
        let golden = Golden::open(family);
        let model = load::<B>(family, None, FROZEN);
        let batch = every_next_token(&golden.ids("input_ids"), TOKENS);
        let vocabulary = model.config.spec.vocab_size;
        let logits = golden.f32s("logits");
        let highest =
            |row: &[f32]| (0..vocabulary).max_by(|&a, &b| row[a].total_cmp(&row[b])).expect("there are logits");
        let targets: Vec<i64> = logits
            .chunks(vocabulary)
            .map(highest)
            .enumerate()
            .map(|(token, predicted)| if token % 2 == 0 { predicted } else { (predicted + 1) % vocabulary } as i64)
            .collect();
        let on_device = model.upload(&batch.input_ids, &targets, &batch.positions, &batch.cu_seqlens);
        let on_device = on_device.expect("the batch has tokens of the model");
        for chunk_tokens in in_turn::<B, _>(&[7, 1024], turn) {
            let score = model.score(&on_device, chunk_tokens);
            assert_eq!(host(score.correct), [targets.len().div_ceil(2) as f32], "{family}");
            assert_eq!(host(score.loss_sum), host(model.loss_only(&on_device, chunk_tokens)), "{family}");
        }
    }
}

on_every_backend!(the_score_counts_the_targets_that_have_the_highest_logit, score_of_every_family);
