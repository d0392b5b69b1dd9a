//! Tests the folders that Firebrick writes, as transformers and PEFT read them.
//!
//! `saved-adapter`, `saved-dora`, `saved-rows`, `saved-vl` and `saved-model` in the fixtures were written by this file (`UPDATE_GOLDEN=1`), and
//! `make_saved_goldens.py` loaded them. Here the same bytes are written again, and our numbers are compared with theirs.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use burn_tensor::DType;
use firebrick_data::{Chat, Tokenizer};
use firebrick_kernels::GemmFormat;
use firebrick_kernels::backends::Flex;
use firebrick_model::peft::{read_adapter, read_adapter_config};
use firebrick_model::{BuildOptions, Companions, Decoder, HfFolder, LoraConfig, Merge, ModelConfig, merge_adapter};
use firebrick_precision::FloatType;
use firebrick_tests::{FAMILIES, FROZEN, TRAINED, assert_held_is_of_its_step, fixture, golden_file, load, snapshot};
use firebrick_trainer::run::generate::LoadOptions;
use serde_json::{Map, Value};
use tempfile::tempdir;

use crate::forward::{ADAPTERS, differences};

/// A template other than that of the models; its turns end with another token.
const TEMPLATE: &str = "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|eos|>{% endfor %}\
                        {% if add_generation_prompt %}<|assistant|>{% endif %}";
/// A token that is an end of text in neither model.
const NEW_END: u32 = 260;

fn companions(model: &str) -> Companions {
    Companions {
        from: fixture(model),
        chat_template: Some(TEMPLATE.to_owned()),
        chat_settings: Default::default(),
        tokenizer: Default::default(),
    }
}

/// Adapters that are saved without companions: folder, fixture and base.
const BARE: [(&str, &str, &str); 3] = [
    ("saved-dora", "tiny-llama-dora", "tiny-llama"),
    ("saved-rows", "tiny-llama-tied-rows", "tiny-llama-tied"),
    ("saved-vl", "tiny-gemma3-vl-lora", "tiny-gemma3-vl"),
];
const SAVED: [&str; 5] = ["saved-adapter", "saved-dora", "saved-rows", "saved-vl", "saved-model"];

/// Writes an rsLoRA adapter on two of the projections, DoRA, rows of single tokens, an adapter of a checkpoint with a vision tower, and a tied model with scaled rope in float16.
fn write(folder: &Path) {
    for (name, adapter, base) in BARE {
        let lora = read_adapter_config(&fixture(adapter)).expect("the fixture is an adapter");
        let lora = LoraConfig { base_model_name_or_path: Some(format!("tests/{base}")), ..lora };
        let model = load::<Flex>(base, Some(adapter), FROZEN);
        model.save_adapter(&folder.join(name), &lora, None).expect("it is written");
    }
    let mut adapted = load::<Flex>("tiny-llama", Some("tiny-llama-rslora"), FROZEN);
    adapted.config.add_eos_token_ids([NEW_END]);
    let lora = read_adapter_config(&fixture("tiny-llama-rslora")).expect("the fixture is an adapter");
    let lora = LoraConfig { base_model_name_or_path: Some("tests/tiny-llama".to_owned()), ..lora };
    adapted.save_adapter(&folder.join("saved-adapter"), &lora, Some(&companions("tiny-llama"))).expect("it is written");
    let mut model = load::<Flex>("tiny-llama-tied", None, TRAINED);
    model.config.add_eos_token_ids([NEW_END]);
    let companions = companions("tiny-llama-tied");
    model
        .save_model(Default::default(), &folder.join("saved-model"), FloatType::F16, Some(&companions), None)
        .expect("it is written");
}

#[test]
fn the_same_folders_are_written_as_those_that_transformers_and_peft_loaded() {
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        for name in SAVED {
            fs::remove_dir_all(fixture(name)).ok();
        }
        write(&fixture(""));
    }
    let folder = tempdir().expect("a temporary folder");
    write(folder.path());
    for name in SAVED {
        let (ours, loaded) = (snapshot(&folder.path().join(name)), snapshot(&fixture(name)));
        assert!(ours.keys().eq(loaded.keys()), "{name}: {:?} {:?}", ours.keys(), loaded.keys());
        for (file, bytes) in &ours {
            assert!(*bytes == loaded[file], "{name}: {} is written with other bytes", file.display());
        }
    }
}

/// Reads shapes and bytes of the tensors of a folder, by name.
fn tensors(folder: &Path) -> BTreeMap<String, (Vec<usize>, Vec<u8>)> {
    let bytes = fs::read(folder.join("model.safetensors")).expect("weights");
    let tensors = safetensors::SafeTensors::deserialize(&bytes).expect("a safetensors file").tensors();
    tensors.into_iter().map(|(name, view)| (name, (view.shape().to_vec(), view.data().to_vec()))).collect()
}

#[test]
fn experts_in_one_tensor_are_saved_as_they_were_read() {
    let folder = tempdir().expect("a temporary folder");
    for name in ["tiny-gpt-oss", "tiny-gemma4-moe"] {
        let (model, written) = (load::<Flex>(name, None, TRAINED), folder.path().join(name));
        model.save_model(Default::default(), &written, FloatType::Bf16, None, None).unwrap();
        assert!(tensors(&written) == tensors(&fixture(name)), "{name}: names, shapes or bytes differ");
    }
    // Merged into a base without adapters on experts, codes become the values that they stand for.
    let (mxfp4, merged) = (fixture("quant-mxfp4-gpt-oss"), folder.path().join("merged"));
    let companions = Companions { from: mxfp4.clone(), ..Companions::default() };
    let adapter = fixture("tiny-gpt-oss-lora");
    let merge = Merge {
        model: &mxfp4,
        adapter: &adapter,
        requantized: None,
        dtype: None,
        bnb_4bit: None,
        mxfp4: false,
        companions,
    };
    merge_adapter(&merge, &merged).expect("it merges");
    let [of_base, of_merged] = [&mxfp4, &merged].map(|folder| HfFolder::open(folder).unwrap());
    assert!(of_merged.quantized_weights().is_empty());
    assert!(tensors(&merged).contains_key("model.layers.1.mlp.experts.gate_up_proj"));
    for expert in of_base.names().filter(|name| name.contains(".experts.")) {
        let shape = of_base.info(expert).unwrap().shape;
        assert_eq!(of_merged.read_f32(expert, &shape).unwrap(), of_base.read_f32(expert, &shape).unwrap(), "{expert}");
    }
}

#[test]
fn saved_folders_give_transformers_and_peft_our_logits() {
    let whole = [("saved-adapter", "tiny-llama", Some("saved-adapter")), ("saved-model", "saved-model", None)];
    for (golden, model, adapter) in whole.into_iter().chain(BARE.map(|(name, _, base)| (name, base, Some(name)))) {
        let (logits, loss) = differences::<Flex>(golden, model, adapter, FROZEN);
        assert!(logits < 2e-4 && loss < 1e-5, "{golden}: a logit differs by {logits:e}, the loss by {loss:e}");
    }
}

#[test]
fn saved_folders_give_transformers_our_prompts_and_ends_of_text() {
    let text = fs::read_to_string(golden_file("saved-chats.json")).expect("the golden is there");
    let cases: BTreeMap<String, Value> = serde_json::from_str(&text).expect("the golden is JSON");
    assert!(cases.keys().eq(["saved-adapter", "saved-model"]));
    for (name, case) in cases {
        let tokenizer = Tokenizer::from_folder(&fixture(&name)).expect("the folder has a tokenizer");
        let messages: Vec<Map<String, Value>> = serde_json::from_value(case["messages"].clone()).expect("messages");
        let rendered = tokenizer
            .chat_template()
            .expect("a template")
            .render(&Chat::from_messages(messages), true)
            .expect("it renders");
        assert_eq!(rendered, case["rendered"], "{name}");
        let ids: Vec<u32> = serde_json::from_value(case["ids"].clone()).expect("token ids");
        assert_eq!(tokenizer.encode(&rendered, false).expect("it encodes"), ids, "{name}");
        let ends: Vec<u32> = serde_json::from_value(case["eos_token_id"].clone()).expect("token ids");
        assert!(ends.contains(&NEW_END), "{name}: {ends:?}");
        let ours = firebrick_arch::generation_eos_token_ids(&fixture(&name)).expect("the folder has settings");
        assert_eq!(ours, ends, "{name}");
    }
    let config = ModelConfig::read(&fixture("saved-model")).expect("the folder has a config");
    assert_eq!(config.dtype.as_deref(), Some("float16"));
}

/// A written adapter has the settings and values of the one that was read.
#[test]
fn adapters_of_every_kind_read_back_as_they_were_saved() {
    for (adapter, model) in ADAPTERS {
        let folder = tempdir().expect("a temporary folder");
        let loaded = load::<Flex>(model, Some(adapter), FROZEN);
        let (settings, tensors) = read_adapter(&fixture(adapter)).expect("the fixture is an adapter");
        loaded.save_adapter(folder.path(), &settings, None).expect("it is written");
        assert_eq!(read_adapter(folder.path()).expect("it is an adapter"), (settings, tensors), "{adapter}");
    }
}

/// Lists every tiny model of the fixtures.
fn models() -> Vec<PathBuf> {
    let entries = fs::read_dir(fixture("")).expect("the fixtures can be listed");
    let paths = entries.map(|entry| entry.expect("the fixtures can be listed").path());
    let models: Vec<PathBuf> =
        paths.filter(|path| path.to_string_lossy().contains("tiny-") && path.join("config.json").is_file()).collect();
    assert!(models.len() > FAMILIES.len());
    models
}

/// Writes a new adapter of rank 4 on the default targets of a model; it changes no output yet.
pub(crate) fn save_new_adapter(model: &Path, adapter: &Path) {
    let lora = LoraConfig { r: 4, ..LoraConfig::default() };
    let build = BuildOptions {
        storage: FROZEN,
        lora: Some(lora.clone()),
        seed: 0,
        compute_dtype: DType::F32,
        gemms: GemmFormat::Compute,
        max_positions: 16,
        sequence_tokens: 16,
    };
    let config = ModelConfig::read(model).expect("the model has a readable config");
    let weights = HfFolder::open(model).expect("the model has weights");
    let adapted = Decoder::<Flex>::load(&weights, config, &build, &Default::default(), &mut |_| ());
    adapted.expect("it loads").save_adapter(adapter, &lora, None).expect("it is written");
}

#[test]
fn an_adapter_of_the_default_targets_loads_and_merges_on_every_model() {
    for model in models() {
        let folder = tempdir().expect("a temporary folder");
        let adapter = folder.path().join("adapter");
        save_new_adapter(&model, &adapter);
        let load = LoadOptions {
            model: model.clone(),
            adapter: Some(adapter.clone()),
            storage: FROZEN,
            compute: FloatType::F32,
        };
        if let Err(error) = load.load::<Flex>(16, 16, &Default::default()) {
            panic!("{}: {error}", model.display());
        }
        merge(&model, &adapter, &folder.path().join("merged"));
    }
}

/// Merges an adapter into a base, in f32.
fn merge(base: &Path, adapter: &Path, to: &Path) {
    let companions = Companions {
        from: base.to_owned(),
        chat_template: None,
        chat_settings: Default::default(),
        tokenizer: Default::default(),
    };
    let dtype = Some(FloatType::F32);
    let merge = Merge { model: base, adapter, requantized: None, dtype, bnb_4bit: None, mxfp4: false, companions };
    let report = merge_adapter(&merge, to).expect("it is merged and checked");
    assert!(report.modules > 0 && report.largest_error < 1e-5, "{}: {report:?}", adapter.display());
}

/// Asserts that a merged folder gives the logits of base and adapter; embedding and head are two tables if one of them trained.
fn assert_merged(adapter: &str, model: &str) {
    let folder = tempdir().expect("a temporary folder");
    let merged = folder.path().join("merged");
    merge(&fixture(model), &fixture(adapter), &merged);
    let merged = merged.to_str().expect("a plain path");
    let (logits, loss) = differences::<Flex>(adapter, merged, None, FROZEN);
    assert!(logits < 2e-4 && loss < 1e-5, "{adapter}: a logit differs by {logits:e}, the loss by {loss:e}");
}

#[test]
fn merged_adapters_of_every_kind_give_the_logits_of_peft() {
    for (adapter, model) in ADAPTERS {
        assert_merged(adapter, model);
    }
}

#[test]
fn merged_adapters_of_every_family_give_the_logits_of_peft() {
    for family in FAMILIES {
        assert_merged(&format!("{family}-lora"), family);
    }
}

#[test]
fn a_checkpoint_that_is_held_while_steps_go_on_has_the_bytes_of_one_that_they_wait_for() {
    for adapter in [None, Some("tiny-llama-lora")] {
        let folder = tempdir().unwrap();
        assert_held_is_of_its_step::<Flex>(adapter, DType::F32, folder.path());
    }
}
