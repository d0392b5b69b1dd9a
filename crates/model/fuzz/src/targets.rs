//! The fuzz targets: files of a model or adapter folder with these bytes as content, and the invariants that hold for all of them.
//!
//! A target returns the messages about its input. Only panics are findings; the caller measures time.
//! Not supported: folders with several hostile files at once.

use std::fs;
use std::path::Path;

use firebrick_model::checkpoint::{INDEX_FILE, WEIGHTS_FILE};
use firebrick_model::peft::read_adapter;
use firebrick_model::{HfFolder, ModelConfig};

pub(crate) type Target = fn(&[u8]) -> Vec<String>;

/// All targets by name; the corpus of each is the folder with its name.
pub(crate) const TARGETS: [(&str, Target); 5] = [
    ("adapter_config", adapter_config),
    ("config", config),
    ("index", index),
    ("quantized", quantized),
    ("safetensors", safetensors),
];

/// A shard that an index may name: one tensor `a`.
const SHARD: &str = "a.safetensors";

fn folder_with(name: &str, bytes: &[u8]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a temporary folder can be created");
    fs::write(folder.path().join(name), bytes).expect("a file can be written into it");
    folder
}

/// Checks `config.json`: an accepted model has tensors with shapes, and its sizes can be counted.
fn config(bytes: &[u8]) -> Vec<String> {
    let Ok(text) = std::str::from_utf8(bytes) else { return Vec::new() };
    match ModelConfig::parse(text, Path::new("config.json")) {
        Ok(config) => {
            assert!(config.spec.parameters() > 0, "a model without parameters was accepted");
            assert!(config.spec.tensors().iter().all(|tensor| tensor.elements() > 0), "an empty tensor was accepted");
            Vec::new()
        }
        Err(error) => vec![error.to_string()],
    }
}

/// Checks `adapter_config.json` next to the matrices of one projection: an accepted adapter has their rank and a numeric scale.
fn adapter_config(bytes: &[u8]) -> Vec<String> {
    let folder = folder_with("adapter_config.json", bytes);
    let q_proj = "base_model.model.model.layers.0.self_attn.q_proj";
    let matrices = [(format!("{q_proj}.lora_A.weight"), [4, 8]), (format!("{q_proj}.lora_B.weight"), [8, 4])];
    fs::write(folder.path().join("adapter_model.safetensors"), safetensors_file(&matrices))
        .expect("a file can be written");
    match read_adapter(folder.path()) {
        Ok((config, _)) => {
            assert!(
                config.r > 0 && config.scaling_of("model.layers.0.mlp.up_proj").is_finite(),
                "{config:?} was accepted"
            );
            Vec::new()
        }
        Err(error) => vec![error.to_string()],
    }
}

/// Checks `model.safetensors.index.json` next to one shard, with a file outside of the folder that it must not reach.
fn index(bytes: &[u8]) -> Vec<String> {
    let outside = folder_with("secret.safetensors", &shard());
    let folder = outside.path().join("model");
    fs::create_dir(&folder).expect("a folder can be created");
    fs::write(folder.join(SHARD), shard()).expect("a file can be written into it");
    fs::write(folder.join(INDEX_FILE), bytes).expect("a file can be written into it");
    match HfFolder::open(&folder) {
        Ok(opened) => {
            fs::remove_file(folder.join(SHARD)).expect("the shard can be removed");
            let names: Vec<String> = opened.names().map(str::to_owned).collect();
            assert!(names.iter().all(|name| opened.read(name).is_err()), "weights came from outside of the folder");
            Vec::new()
        }
        Err(error) => vec![error.to_string()],
    }
}

/// Checks `model.safetensors`: every tensor of an accepted file can be read, or its number format is refused.
fn safetensors(bytes: &[u8]) -> Vec<String> {
    let folder = folder_with(WEIGHTS_FILE, bytes);
    let opened = match HfFolder::open(folder.path()) {
        Ok(opened) => opened,
        Err(error) => return vec![error.to_string()],
    };
    let refusal = |name: &str| {
        let stored = opened.read(name).expect("a tensor of an accepted file can be read");
        let info = opened.info(name).expect("a tensor that is listed is there");
        assert_eq!(stored.bytes.len(), info.byte_len(), "{name}");
        match opened.read_f32(name, &info.shape) {
            Ok(values) => {
                assert_eq!(values.len(), info.shape.iter().product::<usize>(), "{name}");
                None
            }
            Err(error) => Some(error.to_string()),
        }
    };
    opened.names().filter_map(refusal).collect()
}

/// Does the same for quantized weights, which have parts: each is read as codes if one of our formats has the same, and as values.
fn quantized(bytes: &[u8]) -> Vec<String> {
    let folder = folder_with(WEIGHTS_FILE, bytes);
    if let Ok(opened) = HfFolder::open(folder.path()) {
        for name in opened.names() {
            let codes = opened.read_quantized(name).expect("a weight of an accepted file can be read");
            let expected = opened.info(name).expect("a tensor that is listed is there").shape;
            assert!(codes.is_none_or(|codes| codes.dequantize().len() == expected.iter().product::<usize>()), "{name}");
        }
    }
    safetensors(bytes)
}

fn shard() -> Vec<u8> {
    safetensors_file(&[("a".to_owned(), [1, 2])])
}

/// Returns the bytes of a safetensors file of zeros in f32.
fn safetensors_file(tensors: &[(String, [usize; 2])]) -> Vec<u8> {
    let mut end = 0;
    let entries = tensors.iter().map(|(name, [rows, columns])| {
        let start = end;
        end += 4 * rows * columns;
        format!("\"{name}\":{{\"dtype\":\"F32\",\"shape\":[{rows},{columns}],\"data_offsets\":[{start},{end}]}}")
    });
    let header = format!("{{{}}}", entries.collect::<Vec<_>>().join(","));
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &vec![0; end]].concat()
}
