//! The checkpoints in `tests/fixtures` against the specs that their config.json parses to: transformers and PEFT wrote the files, so
//! names and shapes in the safetensors headers are the reference.
//!
//! Trade-off: tiny random models only; published parameter counts in `src/counts.rs` and `tests/published.rs` cover real sizes.

mod reading;

use std::collections::BTreeMap;
use std::fs::{read, read_dir, read_to_string};
use std::path::{Path, PathBuf};

use firebrick_arch::{
    FAMILIES, LoraConfig, ModelConfig, ModelSpec, TargetModules, TensorSpec, TextLayout, WRAPPERS, adapter_layout,
    is_other_part, name_in_adapter, stored_name,
};
use serde_json::{Map, Value, from_slice, from_str};

use reading::reading;

type Shapes = BTreeMap<String, Vec<usize>>;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(name)
}

/// Reads names and shapes from the header of a safetensors file: its length as a little-endian u64, then JSON.
fn header(path: &Path) -> Shapes {
    let bytes = read(path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let map: BTreeMap<String, Value> = from_slice(&bytes[8..8 + length]).unwrap();
    let size = |size: &Value| size.as_u64().unwrap() as usize;
    let shape = |tensor: &Value| tensor["shape"].as_array().unwrap().iter().map(size).collect();
    map.iter().filter(|(name, _)| *name != "__metadata__").map(|(name, tensor)| (name.clone(), shape(tensor))).collect()
}

fn shapes(tensors: Vec<TensorSpec>) -> Shapes {
    tensors.into_iter().map(|tensor| (tensor.name, tensor.shape)).collect()
}

/// Takes out the tensors of experts and returns how many values they have.
fn take_experts(shapes: &mut Shapes) -> usize {
    let of_experts = shapes.extract_if(.., |name, _| name.contains(".experts."));
    of_experts.map(|(_, shape)| shape.iter().product::<usize>()).sum()
}

fn spec(name: &str) -> ModelSpec {
    ModelConfig::read(&fixture(name)).unwrap().spec
}

#[test]
fn constants_that_no_shape_shows_are_those_of_the_table() {
    let rows: BTreeMap<String, Map<String, Value>> = from_str(include_str!("fixtures.json")).unwrap();
    for (name, constants) in rows {
        let spec = spec(&name);
        for (path, expected) in constants {
            assert_eq!(reading(&spec, &path), expected, "{name}: {path}");
        }
    }
}

#[test]
fn text_models_of_wrappers_have_the_specs_of_their_families() {
    assert_eq!(spec("tiny-gemma3-vl"), spec("tiny-gemma3"));
    assert_eq!(spec("tiny-qwen2-5-vl"), spec("tiny-qwen2"));
    assert_eq!(spec("tiny-qwen3-vl"), spec("tiny-qwen3"));
    assert_eq!(spec("tiny-gemma4-vl"), spec("tiny-gemma4"));
    // One file has the sizes of each layer, the other has those of layers with full attention.
    assert_eq!(spec("tiny-gemma4-unified-vl"), spec("tiny-gemma4-unified"));
}

/// Lists the checkpoints or adapters that transformers and PEFT wrote: folders with this file.
fn folders_with(file: &str) -> Vec<String> {
    let folders = read_dir(fixture("")).unwrap().map(|entry| entry.unwrap().path());
    let folders = folders.filter(|path| path.join(file).is_file());
    let names = folders.map(|path| path.file_name().unwrap().to_string_lossy().into_owned());
    names.filter(|name| name.starts_with("tiny-")).collect()
}

#[test]
fn tensors_equal_the_header_of_every_checkpoint() {
    let names = folders_with("model.safetensors");
    assert!(names.len() >= FAMILIES.len() + WRAPPERS.len(), "{names:?}");
    for name in names {
        let config = ModelConfig::read(&fixture(&name)).unwrap();
        let mut text = header(&fixture(&name).join("model.safetensors"));
        let (layout, all) = (TextLayout::of(text.keys().map(String::as_str)), text.len());
        text.retain(|name, _| !is_other_part(name));
        assert_eq!(all > text.len(), config.wrapper.is_some(), "{name}: a tower");
        let tensors = shapes(config.spec.tensors()).into_iter();
        let mut tensors: Shapes = tensors.map(|(name, shape)| (layout.name_of(&stored_name(&name)), shape)).collect();
        if text.keys().any(|name| name.ends_with(".experts.gate_up_proj")) {
            // All experts of a layer are few tensors there, with as many values.
            assert_eq!(take_experts(&mut tensors), take_experts(&mut text), "{name}");
        }
        assert_eq!(tensors, text, "{name}");
    }
}

#[test]
fn adapter_tensors_equal_the_header_of_every_adapter() {
    let mut names = folders_with("adapter_model.safetensors");
    // Those of new tokens have rows that their base does not have.
    names.retain(|name| !name.ends_with("-new"));
    assert!(names.len() >= FAMILIES.len() + WRAPPERS.len(), "{names:?}");
    for name in names {
        let text = read_to_string(fixture(&name).join("adapter_config.json")).unwrap();
        let (mut lora, json): (LoraConfig, Value) = (from_str(&text).unwrap(), from_str(&text).unwrap());
        let config = ModelConfig::read(&fixture(json["base_model_name_or_path"].as_str().unwrap())).unwrap();
        let mut layout = TextLayout::Alone;
        if config.wrapper.is_some() {
            // An expression for paths that end with one of several names.
            let (_, names) = json["target_modules"].as_str().unwrap().split_once('(').unwrap();
            let names = names.trim_end_matches(')').split('|').map(str::to_owned).collect();
            (lora.target_modules, layout) = (TargetModules::from_names(names), TextLayout::ModelFirst);
        }
        let spec = config.for_adapter(Some(&lora)).spec;
        let tensors = shapes(spec.adapter_tensors(&lora).unwrap()).into_iter();
        let named: Shapes = tensors.map(|(name, shape)| (name_in_adapter(&name, layout), shape)).collect();
        let header = header(&fixture(&name).join("adapter_model.safetensors"));
        assert_eq!(named, header, "{name}");
        assert_eq!(adapter_layout(header.keys().map(String::as_str)), layout, "{name}");
        if name == "tiny-qwen3-lora" {
            assert_eq!(lora.target_modules.resolve(&spec).unwrap(), TargetModules::AllLinear);
        }
    }
}
