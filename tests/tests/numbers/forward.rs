//! The forward pass: logits and losses of checkpoints and adapters, and the rope tables below them.

use std::collections::BTreeMap;
use std::fs::read_to_string;
use std::path::Path;

use firebrick_kernels::backend::Flex;
use firebrick_model::rope::inverse_frequencies;
use firebrick_model::{BaseStorage, LlamaConfig};
use firebrick_tests::{Golden, fixture, golden_file, relative_difference};
use firebrick_train::verify::{Difference, VerifyOptions, verify};
use serde_json::Value;

/// Measures a fixture, through the code of the `verify` command, against the golden of that name.
pub(crate) fn measured(golden: &str, model: &str, adapter: Option<&str>, storage: BaseStorage) -> Difference {
    let options = VerifyOptions {
        model: fixture(model),
        adapter: adapter.map(fixture),
        golden: golden_file(&format!("{golden}.safetensors")),
        tolerance: 2e-4,
        storage,
    };
    verify::<Flex>(&options, &Default::default()).expect("the fixture and its golden can be read")
}

fn assert_within_2e_4(golden: &str, model: &str, adapter: Option<&str>) {
    let difference = measured(golden, model, adapter, BaseStorage::Frozen);
    assert!(difference.largest < 2e-4, "{golden}: {difference:?}");
    assert!(difference.loss.expect("the golden has a loss") < 1e-5, "{golden}: {difference:?}");
    assert_eq!(difference.top1_agreement, 1.0, "{golden}");
}

#[test]
fn logits_equal_those_of_transformers() {
    for name in ["tiny-llama", "tiny-llama-tied", "tiny-llama-sharded", "tiny-llama-yarn"] {
        assert_within_2e_4(name, name, None);
    }
}

#[test]
fn logits_with_an_adapter_equal_those_of_peft() {
    let cases = [
        ("tiny-llama-lora", "tiny-llama"),
        ("tiny-llama-rslora", "tiny-llama"),
        ("tiny-llama-tied-lora", "tiny-llama-tied"),
    ];
    for (adapter, model) in cases {
        assert_within_2e_4(adapter, model, Some(adapter));
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
        let config = LlamaConfig::parse(&config.to_string(), Path::new("config.json")).expect("the case is supported");
        let (frequencies, scaling) = inverse_frequencies(&config);
        let apart = relative_difference(&frequencies, &golden.f32s(&format!("{name}.inv_freq")));
        assert!(apart < 1e-6, "{name}: {apart:e}");
        let expected = golden.f32s(&format!("{name}.attention_scaling"))[0];
        assert!((scaling - expected).abs() < 1e-6, "{name}: {scaling} {expected}");
    }
}
