//! Tests of whole files: what llama.cpp's own conversion writes of the same models (`tests/golden/make_gguf_family_goldens.py`).

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{copy, create_dir, read, read_dir, read_to_string, write};
use std::path::{Path, PathBuf};

use firebrick_arch::layer_of;
use safetensors::SafeTensors;
use safetensors::tensor::serialize;
use serde_json::{Map, Value as Json, from_str, json};
use tempfile::tempdir;

use super::{GgufEnds, GgufType, check_gguf, write_gguf};

/// Keys of the conversion that llama.cpp does not read in these families, or has by default.
const NOT_READ: [&str; 3] = ["yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow"];

fn tests_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests")
}

/// A file as it was written: metadata as JSON, and of each tensor its type's number, its shape with rows first, and its bytes.
pub(super) struct File {
    pub metadata: BTreeMap<String, Json>,
    pub tensors: BTreeMap<String, (u32, Vec<usize>, Vec<u8>)>,
}

struct Cursor<'a>(&'a [u8]);

impl<'a> Cursor<'a> {
    fn take(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(count);
        self.0 = rest;
        taken
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take(4).try_into().unwrap())
    }

    fn u64(&mut self) -> usize {
        u64::from_le_bytes(self.take(8).try_into().unwrap()) as usize
    }

    fn text(&mut self) -> String {
        let count = self.u64();
        String::from_utf8(self.take(count).to_vec()).unwrap()
    }

    fn value(&mut self, kind: u32) -> Json {
        match kind {
            4 => json!(self.u32()),
            5 => json!(self.u32() as i32),
            6 => json!(f32::from_bits(self.u32())),
            7 => json!(self.take(1)[0] == 1),
            8 => json!(self.text()),
            9 => {
                let (kind, count) = (self.u32(), self.u64());
                Json::Array((0..count).map(|_| self.value(kind)).collect())
            }
            other => panic!("a value of the type {other}"),
        }
    }
}

pub(super) fn read_file(path: &Path) -> File {
    let bytes = read(path).unwrap();
    let mut cursor = Cursor(&bytes);
    assert_eq!((cursor.take(4), cursor.u32()), (&b"GGUF"[..], 3));
    let (tensors, keys) = (cursor.u64(), cursor.u64());
    let metadata = (0..keys).map(|_| {
        let (key, kind) = (cursor.text(), cursor.u32());
        (key, cursor.value(kind))
    });
    let metadata = metadata.collect();
    let entries: Vec<_> = (0..tensors)
        .map(|_| {
            let (name, rank) = (cursor.text(), cursor.u32());
            let mut shape: Vec<usize> = (0..rank).map(|_| cursor.u64()).collect();
            shape.reverse();
            (name, shape, cursor.u32(), cursor.u64())
        })
        .collect();
    let start = (bytes.len() - cursor.0.len()).next_multiple_of(32);
    let tensors = entries.into_iter().map(|(name, shape, kind, offset)| {
        let values: usize = shape.iter().product();
        let count = match kind {
            0 => 4 * values,
            1 => 2 * values,
            39 => values / 32 * 17,
            other => panic!("a tensor of the type {other}"),
        };
        (name, (kind, shape, bytes[start + offset..][..count].to_vec()))
    });
    File { metadata, tensors: tensors.collect() }
}

/// Copies a fixture, with changes of its config.json and without its first layers if these leave fewer.
fn changed_fixture(name: &str, changes: &Map<String, Json>, to: &Path) {
    let from = tests_folder().join("fixtures").join(name);
    create_dir(to).unwrap();
    for entry in read_dir(&from).unwrap().map(Result::unwrap) {
        copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
    let mut config: Json = from_str(&read_to_string(from.join("config.json")).unwrap()).unwrap();
    for (key, value) in changes {
        *config.pointer_mut(&format!("/{}", key.replace('.', "/"))).expect("a key of the fixture") = value.clone();
    }
    write(to.join("config.json"), config.to_string()).unwrap();
    if let Some(layers) = changes.get("num_hidden_layers").and_then(Json::as_u64) {
        keep_last_layers(&to.join("model.safetensors"), layers as usize);
    }
}

fn keep_last_layers(path: &Path, count: usize) {
    let bytes = read(path).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let first = 1 + tensors.names().into_iter().filter_map(layer_of).max().unwrap() - count;
    let kept = tensors.tensors().into_iter().filter_map(|(name, view)| match layer_of(&name) {
        Some(number) if number < first => None,
        Some(number) => Some((name.replacen(&format!(".{number}."), &format!(".{}.", number - first), 1), view)),
        None => Some((name, view)),
    });
    write(path, serialize(kept.collect::<Vec<_>>(), None).unwrap()).unwrap();
}

/// Returns the sum of the values, each times its position's remainder by 97 plus one.
fn weighted_sum(values: impl Iterator<Item = f64>) -> f64 {
    values.enumerate().map(|(at, value)| value * (at % 97 + 1) as f64).sum()
}

fn is_close(got: &Json, expected: &Json) -> bool {
    match (got.as_f64(), expected.as_f64()) {
        (Some(got), Some(expected)) => (got - expected).abs() <= 1e-6 * expected.abs().max(1e-6),
        _ => got == expected,
    }
}

#[test]
fn every_family_is_written_as_llama_cpp_does() {
    let golden = read_to_string(tests_folder().join("golden/gguf-families.json")).unwrap();
    let golden: Map<String, Json> = from_str(&golden).unwrap();
    for (name, golden) in &golden {
        let temp = tempdir().unwrap();
        let (folder, path) = (temp.path().join("model"), temp.path().join("m.gguf"));
        changed_fixture(name, golden["changes"].as_object().unwrap(), &folder);
        write_gguf(&folder, &path, GgufType::F32, GgufEnds::default()).unwrap();
        let file = read_file(&path);
        for (key, expected) in golden["metadata"].as_object().unwrap() {
            let got = &file.metadata.get(key).unwrap_or(&Json::Null);
            let is_read = !NOT_READ.iter().any(|end| key.ends_with(end));
            assert!(!is_read || is_close(got, expected), "{name}: {key} is {got}, not {expected}");
        }
        let expected = golden["tensors"].as_object().unwrap();
        assert_eq!(file.tensors.keys().collect::<BTreeSet<_>>(), expected.keys().collect(), "{name}");
        for (tensor, (kind, shape, bytes)) in &file.tensors {
            let (kind, sum) = match kind {
                0 => {
                    let floats = bytes.chunks(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()));
                    ("f32", weighted_sum(floats.map(f64::from)))
                }
                _ => ("mxfp4", weighted_sum(bytes.iter().map(|&byte| f64::from(byte)))),
            };
            assert_eq!(json!([kind, shape]), json!([expected[tensor][0], expected[tensor][1]]), "{name}: {tensor}");
            assert!(
                is_close(&json!(sum), &expected[tensor][2]),
                "{name}: {tensor}: {sum}, not {}",
                expected[tensor][2]
            );
        }
    }
}

#[test]
fn a_vocabulary_without_merges_is_written() {
    let temp = tempdir().unwrap();
    let path = temp.path().join("m.gguf");
    write_gguf(&tests_folder().join("../assets/quickstart/base"), &path, GgufType::F16, GgufEnds::default()).unwrap();
    let file = read_file(&path);
    let of = |key: &str| &file.metadata[&format!("tokenizer.ggml.{key}")];
    assert_eq!((of("model"), of("pre"), of("merges")), (&json!("gpt2"), &json!("gpt-2"), &json!([])));
    assert_eq!(of("tokens").as_array().unwrap().len(), file.tensors["token_embd.weight"].1[0]);
}

/// Writes a fixture with changes of its config.json; returns the notes or the error.
fn written(name: &str, changes: Json, folder: &Path) -> Result<(File, String), String> {
    let (model, path) = (folder.join(format!("{name}-model")), folder.join("m.gguf"));
    changed_fixture(name, changes.as_object().unwrap(), &model);
    let notes = write_gguf(&model, &path, GgufType::F32, GgufEnds::default()).map_err(|error| error.to_string())?;
    Ok((read_file(&path), notes.join(" | ")))
}

#[test]
fn what_llama_cpp_does_not_compute_is_refused_by_name() {
    let refused = |name: &str, changes: Json, what: &str| {
        let temp = tempdir().unwrap();
        let error = written(name, changes, temp.path()).err().unwrap_or_else(|| panic!("{name} was written"));
        assert!(error.contains(what), "{name}: {error}");
        assert!(!temp.path().join("m.gguf").exists());
    };
    refused("tiny-gemma2", json!({}), "attention scores times 0.20412");
    refused("tiny-smollm3", json!({}), "no rotation of queries and keys in layer 1");
    refused("tiny-qwen3-moe", json!({}), "an MLP of another kind than in other layers in layer 0");
    refused("tiny-gemma", json!({ "tie_word_embeddings": false }), "`lm_head.weight`");
    refused("tiny-llama", json!({ "hidden_act": "gelu_pytorch_tanh" }), "the activation gelu_pytorch_tanh in layer 0");
    refused("tiny-glm4", json!({}), "the family glm4: only gemma, gemma2,");
}

#[test]
fn layers_of_gemma_4_share_and_read_what_they_do_in_llama_cpp() {
    let refused = |changes: Json, what: &str| {
        let temp = tempdir().unwrap();
        let folder = temp.path().join("model");
        changed_fixture("tiny-gemma4", changes.as_object().unwrap(), &folder);
        let error = check_gguf(&folder).unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
    };
    refused(json!({ "num_kv_shared_layers": 2 }), "keys and values of layer 3 in layer 4");
    refused(json!({ "vocab_size_per_layer_input": 300 }), "a table of layers' inputs for 300 of 264 tokens");
    refused(json!({ "layer_types": vec!["full_attention"; 6] }), "no layer with a window");
}

#[test]
fn suppressed_tokens_are_those_of_the_folder() {
    let temp = tempdir().unwrap();
    let (folder, path) = (temp.path().join("model"), temp.path().join("m.gguf"));
    changed_fixture("tiny-llama", &Map::new(), &folder);
    write(folder.join("generation_config.json"), json!({ "suppress_tokens": [3, 7] }).to_string()).unwrap();
    write_gguf(&folder, &path, GgufType::F16, GgufEnds::default()).unwrap();
    assert_eq!(read_file(&path).metadata["tokenizer.ggml.suppress_tokens"], json!([3, 7]));
}

#[test]
fn what_a_file_leaves_out_or_has_otherwise_is_said() {
    let temp = tempdir().unwrap();
    let (file, said) = written("tiny-mistral", json!({}), temp.path()).unwrap();
    assert_eq!(file.metadata["llama.context_length"], json!(12), "the window");
    assert!(said.contains("names its 12 tokens as the whole context"), "{said}");
    let (_, said) = written("tiny-gemma3-vl", json!({ "text_config.query_pre_attn_scalar": 32 }), temp.path()).unwrap();
    assert_eq!(said, "the file has the text model alone; the vision tower is left out");
    let (_, said) = written("tiny-gemma4-vl", json!({}), temp.path()).unwrap();
    assert_eq!(said, "the file has the text model alone; the part for images and sound is left out");
    let (_, said) = written("tiny-gpt-oss", json!({}), temp.path()).unwrap();
    assert!(said.contains("rounds the ends of YaRN's ramp"), "{said}");
    assert_eq!(written("tiny-qwen3", json!({}), temp.path()).unwrap().1, "");
}
