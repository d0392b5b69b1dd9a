//! Writes a model folder as one GGUF file, for llama.cpp and programs built on it.
//!
//! Tensors get llama.cpp's names; queries and keys of Llama change the order of their rows, since llama.cpp rotates neighboring columns
//! where Hugging Face rotates halves; Gemma's norms are stored with the one that is added to them. Experts in MXFP4 keep their codes and scales.
//! Trade-off: one tensor is in memory at a time, which of a mixture is a stack of experts.

mod architecture;
mod blocks;
mod container;
#[cfg(test)]
mod family_tests;
mod k_quants;
mod mix;
mod names;
mod tokenizer;

use std::path::Path;

use firebrick_arch::{ModelSpec, TensorSpec};
use firebrick_precision::QuantFormat;

use self::architecture::{Architecture, first_attention};
use self::blocks::GgmlType;
use self::container::Entry;
use self::k_quants::largest_of;
pub use self::mix::GgufType;
use self::mix::TypesByTensor;
use self::names::NamedTensor;
use crate::checkpoint::description::read_config;
use crate::checkpoint::{HfFolder, not_writable};
use crate::error::ModelError;

/// The tokens at which texts begin and end, and those that `tokenizer.json` lacks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GgufEnds {
    /// The token that ends a text.
    pub text: Option<u32>,
    /// The token that ends a turn, if it differs.
    pub turn: Option<u32>,
    /// The token that is added before every text.
    pub before_text: Option<u32>,
    /// Added tokens that only other files of the folder have: id, text, and whether it is special.
    pub added: Vec<(u32, String, bool)>,
}

/// Checks that a GGUF file can be written of the model in `folder`, from its config.json and tokenizer alone.
pub fn check_gguf(folder: &Path) -> Result<(), ModelError> {
    let config = read_config(folder)?;
    let architecture = Architecture::of(&config)?;
    tokenizer::read(folder, &config, &GgufEnds::default(), architecture.merges_in_order())?;
    Ok(())
}

/// Writes the model in `folder` to the file `to`, which appears only when it is complete. Returns what a user of the file has to know, in sentences.
///
/// # Errors
/// A folder that cannot be read, a model or tokenizer that GGUF cannot describe here ([`ModelError::NoGguf`]), a failed write.
pub fn write_gguf(folder: &Path, to: &Path, kind: GgufType, ends: GgufEnds) -> Result<Vec<String>, ModelError> {
    let weights = HfFolder::open(folder)?;
    let config = weights.read_config()?;
    weights.check_complete(&config)?;
    let architecture = Architecture::of(&config)?;
    let vocabulary = tokenizer::read(folder, &config, &ends, architecture.merges_in_order())?;
    let mut metadata = architecture.metadata(&config, &title_of(to, vocabulary.strips_spaces), kind.number());
    metadata.extend(vocabulary.metadata);

    let source = Source { weights: &weights, spec: &config.spec, architecture };
    let (tensors, mix) = (names::tensors(&config.spec)?, TypesByTensor::new(kind, &config));
    let mut entries: Vec<Entry> = tensors.iter().map(|tensor| source.entry(tensor, &mix)).collect();
    let divisors = architecture.divisors(&config.spec);
    entries.extend(divisors.iter().map(|(name, values)| Entry {
        name: (*name).to_owned(),
        shape: vec![values.len()],
        kind: GgmlType::F32,
    }));
    container::write(to, &metadata, &entries, |index| match tensors.get(index) {
        Some(tensor) => source.bytes(tensor, entries[index].kind),
        None => Ok(GgmlType::F32.encode(&divisors[index - tensors.len()].1)),
    })?;
    Ok([architecture.notes(&config), vocabulary.notes].concat())
}

/// Returns the name of a file without its extension. llama.cpp takes a model for Phi-3 by its name, and then removes white space after special tokens:
/// a name says so if the tokenizer does that, and otherwise not.
fn title_of(file: &Path, strips_spaces: bool) -> String {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    let title = name.strip_suffix(".gguf").unwrap_or(&name);
    let lower = title.to_lowercase();
    match (strips_spaces, lower.contains("phi-3") || lower.contains("phi3")) {
        (true, false) => format!("Phi-3 {title}"),
        (false, true) => lower.replace("phi-3", "phi 3").replace("phi3", "phi 3"),
        _ => title.to_owned(),
    }
}

/// The weights of a model folder, as a file has them.
struct Source<'a> {
    weights: &'a HfFolder,
    spec: &'a ModelSpec,
    architecture: &'static Architecture,
}

impl Source<'_> {
    fn entry(&self, tensor: &NamedTensor, mix: &TypesByTensor) -> Entry {
        let is_mxfp4 =
            tensor.parts.iter().all(|part| self.weights.stored_format(&part.name) == Some(QuantFormat::Mxfp4));
        let kind = if is_mxfp4 { GgmlType::Mxfp4 } else { mix.type_of(&tensor.name, &tensor.shape) };
        Entry { name: tensor.name.clone(), shape: tensor.shape.clone(), kind }
    }

    fn bytes(&self, tensor: &NamedTensor, kind: GgmlType) -> Result<Vec<u8>, ModelError> {
        let mut bytes = Vec::with_capacity(kind.bytes_of(tensor.shape.iter().product()));
        for part in &tensor.parts {
            match kind {
                GgmlType::Mxfp4 => {
                    let stored = self.weights.read_quantized(&part.name)?.expect("its format was stored");
                    bytes.extend(blocks::mxfp4(&stored));
                }
                _ => {
                    let values = self.values(part)?;
                    let encoded = kind.encode(&values);
                    if let Some(index) = kind.first_not_finite(&encoded) {
                        let block = &values[index..][..kind.block()];
                        return Err(not_writable(&part.name, index, largest_of(block), &format!("{kind:?}")));
                    }
                    bytes.extend(encoded);
                }
            }
        }
        Ok(bytes)
    }

    /// Reads the values of a tensor as llama.cpp has them.
    fn values(&self, part: &TensorSpec) -> Result<Vec<f32>, ModelError> {
        let mut values = self.weights.read_f32(&part.name, &part.shape)?;
        let offset = self.spec.norm_offset_of(part) as f32;
        if offset != 0.0 {
            values.iter_mut().for_each(|value| *value += offset);
        }
        if self.architecture.reorders(&part.name) {
            let columns = part.shape.get(1).copied().unwrap_or(1);
            values = neighbors_from_halves(&values, first_attention(self.spec).head_dim, columns);
        }
        Ok(values)
    }
}

/// Reorders the rows of each head so that neighbors rotate against each other: row `2 i` is row `i`, row `2 i + 1` is row `head_dim / 2 + i`.
fn neighbors_from_halves(values: &[f32], head_dim: usize, columns: usize) -> Vec<f32> {
    let head = |rows: &[f32]| -> Vec<f32> {
        let (first, second) = rows.split_at(head_dim / 2 * columns);
        let pairs = first.chunks(columns).zip(second.chunks(columns));
        pairs.flat_map(|(first, second)| [first, second].concat()).collect()
    };
    values.chunks(head_dim * columns).flat_map(head).collect()
}

#[cfg(test)]
mod tests {
    use std::fs::write;

    use firebrick_precision::FloatType;
    use tempfile::tempdir;

    use super::*;
    use crate::test_config::{tiny, write_folder_of};

    const TOKENIZER: &str = r#"{"model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false}, "added_tokens": [{"id": 3, "content": "<end>", "special": true}]}"#;

    #[test]
    fn rows_of_a_head_alternate_between_its_halves() {
        let rows: Vec<f32> = (0..16).map(|value| value as f32).collect();
        let expected = [0.0, 1.0, 4.0, 5.0, 2.0, 3.0, 6.0, 7.0, 8.0, 9.0, 12.0, 13.0, 10.0, 11.0, 14.0, 15.0];
        assert_eq!(neighbors_from_halves(&rows, 4, 2), expected);
        assert_eq!(neighbors_from_halves(&rows[..4], 4, 1), [0.0, 2.0, 1.0, 3.0]);
    }

    #[test]
    fn a_title_names_phi_3_if_tokens_take_spaces() {
        let of = |file: &str, strips| title_of(Path::new(file), strips);
        assert_eq!([of("out/mine.gguf", true), of("my-Phi-3.gguf", true)], ["Phi-3 mine", "my-Phi-3"]);
        assert_eq!([of("out/mine.q8_0.gguf", false), of("my-Phi3", false)], ["mine.q8_0", "my-phi 3"]);
    }

    #[test]
    fn what_llama_cpp_does_otherwise_is_refused() {
        let refused = |folder: &Path| {
            write_gguf(folder, &folder.join("x.gguf"), GgufType::Q8_0, GgufEnds::default()).unwrap_err().to_string()
        };
        let temp = tempdir().unwrap();
        let folder = temp.path().join("m");
        let config = tiny(&[]).unwrap();
        write_folder_of(0.5, &folder, &config, FloatType::F32, None).unwrap();
        write(folder.join("tokenizer.json"), TOKENIZER.replace("BPE", "Unigram")).unwrap();
        assert!(refused(&folder).contains("of the kind Unigram"));
        write(folder.join("tokenizer.json"), TOKENIZER.replace("ByteLevel", "Metaspace")).unwrap();
        assert!(refused(&folder).contains("Metaspace"));
        write(folder.join("tokenizer.json"), TOKENIZER.replace("\"id\": 3", "\"id\": 11")).unwrap();
        assert!(refused(&folder).contains("a model of 11 tokens"));
        assert!(!folder.join("x.gguf").exists());
    }
}
