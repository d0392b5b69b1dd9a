//! Text models of larger checkpoints: tensors and adapters in every spelling, and folders that keep their other parts.
//!
//! transformers and PEFT wrote the fixtures.

use std::fs::{copy, create_dir_all, read, read_to_string, write};
use std::path::Path;

use firebrick_arch::folder::{ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE, PREPROCESSOR_FILES, WEIGHTS_FILE};
use firebrick_arch::{CONFIG_FILE, TextLayout, is_other_part, name_in_adapter, text_name, text_name_in_adapter};
use firebrick_model::peft::read_adapter;
use firebrick_model::{Bnb4bit, HfFolder, Merge, ModelConfig, merge_adapter};
use serde_json::{Value, from_str, json};
use tempfile::tempdir;

use crate::{fixture, plain_merge, stored, write_stored};

const LAYOUTS: [(&str, TextLayout); 6] = [
    ("tiny-gemma3-vl", TextLayout::LanguageModelFirst),
    ("tiny-mistral3", TextLayout::LanguageModelFirst),
    ("tiny-qwen2-5-vl", TextLayout::Alone),
    ("tiny-qwen3-vl", TextLayout::ModelFirst),
    ("tiny-gemma4-vl", TextLayout::ModelFirst),
    ("tiny-gemma4-unified-vl", TextLayout::ModelFirst),
];
const PROJECTIONS: [&str; 7] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];
/// Modules that have an adapter besides them.
const PER_LAYER: [&str; 2] = ["per_layer_input_gate", "per_layer_projection"];

fn json_of(path: &Path) -> Value {
    from_str(&read_to_string(path).unwrap()).unwrap()
}

fn merge(model: &Path, adapter: &Path, to: &Path, bnb_4bit: Option<Bnb4bit>) {
    let merge = Merge { bnb_4bit, ..plain_merge(model, adapter) };
    let matrices = stored(&adapter.join(ADAPTER_WEIGHTS_FILE)).len();
    assert_eq!(2 * merge_adapter(&merge, to).unwrap().modules, matrices);
}

fn write_text_model(name: &str, to: &Path) {
    let (from, wrapper) = (fixture(name), ModelConfig::read(&fixture(name)).unwrap());
    let mut config = json_of(&from.join(CONFIG_FILE))["text_config"].clone();
    config["model_type"] = json!(wrapper.model_type);
    config["dtype"] = json!("bfloat16");
    config["tie_word_embeddings"] = json!(wrapper.spec.tie_word_embeddings);
    create_dir_all(to).unwrap();
    write(to.join(CONFIG_FILE), config.to_string()).unwrap();
    let tensors = stored(&from.join(WEIGHTS_FILE)).into_iter().filter(|(name, _)| !is_other_part(name));
    write_stored(&to.join(WEIGHTS_FILE), &tensors.map(|(name, tensor)| (text_name(&name), tensor)).collect());
    assert_eq!(ModelConfig::read(to).unwrap().spec, wrapper.spec);
}

/// Writes a fixture's adapter as PEFT names its tensors in a layout, with these targets.
fn write_adapter(name: &str, layout: TextLayout, targets: &Value, to: &Path) {
    let from = fixture(name);
    create_dir_all(to).unwrap();
    let mut config = json_of(&from.join(ADAPTER_CONFIG_FILE));
    config["target_modules"] = targets.clone();
    write(to.join(ADAPTER_CONFIG_FILE), config.to_string()).unwrap();
    let renamed = |name: &str| name_in_adapter(&text_name_in_adapter(name), layout);
    let tensors = stored(&from.join(ADAPTER_WEIGHTS_FILE)).into_iter();
    write_stored(&to.join(ADAPTER_WEIGHTS_FILE), &tensors.map(|(name, tensor)| (renamed(&name), tensor)).collect());
}

#[test]
fn every_layout_gives_the_text_model() {
    for (name, layout) in LAYOUTS {
        let (folder, config) = (HfFolder::open(&fixture(name)).unwrap(), ModelConfig::read(&fixture(name)).unwrap());
        folder.check_complete(&config).unwrap();
        assert_eq!(folder.layout(), layout, "{name}");
        assert_eq!(folder.names().count(), config.spec.tensors().len(), "{name}");
        let file = stored(&fixture(name).join(WEIGHTS_FILE));
        assert_eq!(folder.names().count() + folder.other_parts().count(), file.len(), "{name}");
        for tensor in folder.names() {
            assert_eq!(folder.read(tensor).unwrap(), file[&layout.name_of(tensor)], "{name}, {tensor}");
        }
    }
}

#[test]
fn an_undescribed_tower_is_refused() {
    let (temp, from) = (tempdir().unwrap(), fixture("tiny-qwen2-5-vl"));
    copy(from.join(WEIGHTS_FILE), temp.path().join(WEIGHTS_FILE)).unwrap();
    copy(fixture("tiny-qwen2").join(CONFIG_FILE), temp.path().join(CONFIG_FILE)).unwrap();
    let (folder, config) = (HfFolder::open(temp.path()).unwrap(), ModelConfig::read(temp.path()).unwrap());
    assert_eq!(config.spec, ModelConfig::read(&from).unwrap().spec);
    let message = folder.check_complete(&config).unwrap_err().to_string();
    assert!(message.contains("`visual.") && message.contains("config.json has no place for it"), "{message}");
}

#[test]
fn a_merge_keeps_names_tower_and_preprocessors() {
    for (name, _) in LAYOUTS {
        let temp = tempdir().unwrap();
        let (base, merged) = (fixture(name), temp.path().join("merged"));
        merge(&base, &fixture(&format!("{name}-lora")), &merged, None);
        let [before, after] = [&base, &merged].map(|dir| stored(&dir.join(WEIGHTS_FILE)));
        assert_eq!(before.keys().collect::<Vec<_>>(), after.keys().collect::<Vec<_>>(), "{name}");
        for (tensor, value) in &after {
            let mut adapted = PROJECTIONS.iter().chain(&PER_LAYER);
            let changed = adapted.any(|end| tensor.ends_with(&format!(".{end}.weight")));
            assert_eq!(*value == before[tensor], !changed || is_other_part(tensor), "{name}, {tensor}");
        }
        assert_eq!(read(merged.join(CONFIG_FILE)).unwrap(), read(base.join(CONFIG_FILE)).unwrap());
        for file in PREPROCESSOR_FILES.into_iter().filter(|file| base.join(file).exists()) {
            assert_eq!(read(merged.join(file)).unwrap(), read(base.join(file)).unwrap(), "{name}, {file}");
        }
    }
    assert!(PREPROCESSOR_FILES.iter().all(|file| fixture("tiny-gemma3-vl").join(file).exists()));
}

#[test]
fn a_4_bit_merge_keeps_its_tower() {
    let temp = tempdir().unwrap();
    let (base, merged) = (fixture("tiny-gemma3-vl"), temp.path().join("merged"));
    merge(&base, &fixture("tiny-gemma3-vl-lora"), &merged, Some(Bnb4bit::Nf4 { double_quant: true }));
    let [before, after] = [&base, &merged].map(|dir| stored(&dir.join(WEIGHTS_FILE)));
    for (tensor, value) in before.iter().filter(|(tensor, _)| is_other_part(tensor)) {
        assert_eq!(after[tensor], *value, "{tensor}");
    }
    assert!(after.contains_key("language_model.model.layers.0.mlp.up_proj.weight.absmax"));
    let skipped = &json_of(&merged.join(CONFIG_FILE))["quantization_config"]["llm_int8_skip_modules"];
    let names =
        ["multi_modal_projector", "model.multi_modal_projector", "vision_tower", "model.vision_tower", "lm_head"];
    assert_eq!(*skipped, json!(names));
    // Quantized parts have their names back too, and the codes are kept.
    let again = temp.path().join("again");
    let folder = HfFolder::open(&merged).unwrap();
    assert_eq!(folder.quantized_weights().values().sum::<usize>(), 14);
    merge(&merged, &fixture("tiny-gemma3-vl-lora"), &again, None);
    let config = ModelConfig::read(&again).unwrap();
    HfFolder::open(&again).unwrap().check_complete(&config).unwrap();
    assert!(config.wrapper.is_some() && !config.text().contains("quantization_config"));
}

#[test]
fn an_adapter_is_read_in_every_spelling() {
    let expected = read_adapter(&fixture("tiny-gemma3-vl-lora")).unwrap().1;
    let tower = r".*language_model.*\.(?:q|k|v|o|gate|up|down)_proj";
    let spellings = [
        (TextLayout::ModelFirst, json!(tower)),
        (TextLayout::ModelFirst, json!(PROJECTIONS)),
        (TextLayout::LanguageModelFirst, json!(tower)),
        (TextLayout::LanguageModelFirst, json!(PROJECTIONS)),
        (TextLayout::Alone, json!(PROJECTIONS)),
        (TextLayout::Alone, json!(r"model\.layers\..*_proj")),
    ];
    for (layout, targets) in spellings {
        let temp = tempdir().unwrap();
        write_adapter("tiny-gemma3-vl-lora", layout, &targets, temp.path());
        let (lora, tensors) = read_adapter(temp.path()).unwrap();
        assert_eq!(tensors, expected, "{layout:?}");
        let spec = ModelConfig::read(&fixture("tiny-gemma3-vl")).unwrap().spec;
        let names: Vec<String> = spec.adapter_tensors(&lora).unwrap().into_iter().map(|tensor| tensor.name).collect();
        assert_eq!(names.len(), expected.len(), "{layout:?}, {targets}");
        assert!(names.iter().all(|name| expected.contains_key(name)), "{layout:?}, {targets}");
    }
}

#[test]
fn adapters_merge_into_text_model_and_wrapper() {
    let temp = tempdir().unwrap();
    let path = |name: &str| temp.path().join(name);
    write_text_model("tiny-gemma3-vl", &path("text"));
    write_adapter("tiny-gemma3-vl-lora", TextLayout::Alone, &json!(PROJECTIONS), &path("text-adapter"));
    let (wrapper, adapter) = (fixture("tiny-gemma3-vl"), fixture("tiny-gemma3-vl-lora"));
    merge(&wrapper, &adapter, &path("both-of-wrapper"), None);
    merge(&wrapper, &path("text-adapter"), &path("adapter-of-text"), None);
    merge(&path("text"), &adapter, &path("model-of-text"), None);
    let [both, other] = ["both-of-wrapper", "adapter-of-text"].map(|name| stored(&path(name).join(WEIGHTS_FILE)));
    assert_eq!(both, other);
    let text = stored(&path("model-of-text").join(WEIGHTS_FILE));
    for (name, value) in &text {
        assert_eq!(both[&TextLayout::LanguageModelFirst.name_of(name)], *value, "{name}");
    }
    assert!(text.keys().all(|name| !is_other_part(name)));
}

#[test]
fn an_adapter_of_the_tower_is_refused_by_name() {
    let (temp, from) = (tempdir().unwrap(), fixture("tiny-gemma3-vl-lora"));
    copy(from.join(ADAPTER_CONFIG_FILE), temp.path().join(ADAPTER_CONFIG_FILE)).unwrap();
    let mut tensors = stored(&from.join(ADAPTER_WEIGHTS_FILE));
    let matrix = tensors.values().next().unwrap().clone();
    let name = "base_model.model.model.vision_tower.encoder.layers.0.self_attn.q_proj.lora_A.weight";
    tensors.insert(name.to_owned(), matrix);
    write_stored(&temp.path().join(ADAPTER_WEIGHTS_FILE), &tensors);
    let message = read_adapter(temp.path()).unwrap_err().to_string();
    assert!(message.contains(name) && message.contains("another part than the text model"), "{message}");
}
