//! Writes a model folder as one GGUF file, for llama.cpp and programs built on it.
//!
//! Tensors get llama.cpp's names; queries and keys of Llama change the order of their rows, since llama.cpp rotates neighboring columns
//! where Hugging Face rotates halves. Norms and biases stay in f32, as does everything whose rows are not whole blocks.
//! Trade-off: only families for which llama.cpp has the same formulas (Llama, Mistral, Qwen2, Qwen3), with byte-level BPE tokenizers; the others are
//! refused with the reason, since a file that loads and computes something else is worse than none.

mod blocks;
mod container;
mod k_quants;
mod mix;
mod tokenizer;

use std::path::Path;

use firebrick_arch::{EMBEDDING, FINAL_NORM, HEAD, ModelConfig, ModelSpec, RopeScaling, TensorSpec};

use self::blocks::GgmlType;
use self::container::{Entry, Value};
pub use self::mix::GgufType;
use self::mix::Mix;
use crate::error::ModelError;
use crate::weights::HfFolder;

/// The tokens that a reader of a GGUF file stops at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GgufEnds {
    /// The token that ends a text.
    pub text: Option<u32>,
    /// The token that ends a turn, if it differs.
    pub turn: Option<u32>,
}

/// Writes the model in `folder` to the file `to`, which appears only when it is complete.
///
/// # Errors
/// A folder that cannot be read, a model or tokenizer that GGUF cannot describe here ([`ModelError::NoGguf`]), a failed write.
pub fn write_gguf(folder: &Path, to: &Path, kind: GgufType, ends: GgufEnds) -> Result<(), ModelError> {
    let weights = HfFolder::open(folder)?;
    let config = ModelConfig::read(folder)?;
    weights.check_complete(&config)?;
    let architecture = Architecture::of(&config)?;
    let mut metadata = architecture.metadata(&config, folder, kind);
    metadata.extend(tokenizer::metadata(folder, config.spec.vocab_size, config.bos_token_id, ends)?);

    let tensors = config.spec.tensors();
    let mix = Mix::new(kind, &config);
    let entry = |tensor: &TensorSpec| {
        let (name, shape) = (name_of(tensor)?, tensor.shape.clone());
        Ok(Entry { kind: mix.type_of(&name, &shape), name, shape })
    };
    let mut entries: Vec<Entry> = tensors.iter().map(entry).collect::<Result<_, ModelError>>()?;
    let factors = frequency_factors(&config.spec);
    if let Some(factors) = &factors {
        entries.push(Entry { name: "rope_freqs.weight".to_owned(), shape: vec![factors.len()], kind: GgmlType::F32 });
    }
    container::write(to, &metadata, &entries, |index| {
        let Some(tensor) = tensors.get(index) else {
            return Ok(GgmlType::F32.encode(factors.as_deref().unwrap_or_default()));
        };
        let mut values = weights.read_f32(&tensor.name, &tensor.shape)?;
        if architecture.reorders(&tensor.name) {
            let columns = tensor.shape.get(1).copied().unwrap_or(1);
            values = neighbors_from_halves(&values, config.spec.layers[0].attention.head_dim, columns);
        }
        Ok(entries[index].kind.encode(&values))
    })
}

/// llama.cpp's name for an architecture, and whether it rotates neighboring columns.
struct Architecture {
    name: &'static str,
    rotates_neighbors: bool,
}

impl Architecture {
    fn of(config: &ModelConfig) -> Result<Self, ModelError> {
        let refused = |what: String| Err(ModelError::NoGguf { what });
        let (name, rotates_neighbors) = match config.model_type.as_str() {
            "llama" | "mistral" => ("llama", true),
            "qwen2" => ("qwen2", false),
            "qwen3" => ("qwen3", false),
            other => {
                return refused(format!("the family {other}: only llama, mistral, qwen2 and qwen3 can be written"));
            }
        };
        let spec = &config.spec;
        if let Some(window) = spec.layers.iter().find_map(|layer| layer.attention.window)
            && window < spec.max_position_embeddings
        {
            return refused(format!("a sliding window of {window} tokens"));
        }
        match spec.ropes.as_slice() {
            [rope]
                if matches!(
                    rope.scaling,
                    RopeScaling::Default | RopeScaling::Linear { .. } | RopeScaling::Llama3 { .. }
                ) => {}
            ropes => return refused(format!("its rotary embedding {:?}", ropes.first().map(|rope| &rope.scaling))),
        }
        Ok(Self { name, rotates_neighbors })
    }

    fn metadata(&self, config: &ModelConfig, folder: &Path, kind: GgufType) -> Vec<(String, Value)> {
        let (spec, name) = (&config.spec, self.name);
        let (layer, rope) = (&spec.layers[0], &spec.ropes[0]);
        let attention = &layer.attention;
        let folder = folder.file_name().map_or_else(|| name.to_owned(), |folder| folder.to_string_lossy().into_owned());
        let count = |key: &str, value: usize| (format!("{name}.{key}"), Value::U32(value as u32));
        let mut metadata = vec![
            ("general.architecture".to_owned(), Value::Text(name.to_owned())),
            ("general.type".to_owned(), Value::Text("model".to_owned())),
            ("general.name".to_owned(), Value::Text(folder)),
            ("general.file_type".to_owned(), Value::U32(kind.number())),
            ("general.quantization_version".to_owned(), Value::U32(2)),
            count("block_count", spec.layers.len()),
            count("context_length", spec.max_position_embeddings),
            count("embedding_length", spec.hidden_size),
            count("feed_forward_length", layer.mlp.intermediate_size()),
            count("attention.head_count", attention.heads),
            count("attention.head_count_kv", attention.kv_heads),
            count("attention.key_length", attention.head_dim),
            count("attention.value_length", attention.head_dim),
            count("rope.dimension_count", rope.rotary_dim),
            count("vocab_size", spec.vocab_size),
            (format!("{name}.rope.freq_base"), Value::F32(rope.theta as f32)),
            (format!("{name}.attention.layer_norm_rms_epsilon"), Value::F32(spec.rms_norm_eps as f32)),
        ];
        if let RopeScaling::Linear { factor } = rope.scaling {
            metadata.push((format!("{name}.rope.scaling.type"), Value::Text("linear".to_owned())));
            metadata.push((format!("{name}.rope.scaling.factor"), Value::F32(factor as f32)));
        }
        metadata
    }

    /// Returns whether the rows of a tensor are reordered.
    fn reorders(&self, name: &str) -> bool {
        self.rotates_neighbors && (name.contains("self_attn.q_proj") || name.contains("self_attn.k_proj"))
    }
}

/// Returns llama.cpp's name of a tensor.
fn name_of(tensor: &TensorSpec) -> Result<String, ModelError> {
    const OF_LAYERS: [(&str, &str); 11] = [
        ("input_layernorm", "attn_norm"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
    ];
    let outside = [(EMBEDDING, "token_embd.weight"), (HEAD, "output.weight"), (FINAL_NORM, "output_norm.weight")];
    if let Some((_, name)) = outside.into_iter().find(|(ours, _)| *ours == tensor.name) {
        return Ok(name.to_owned());
    }
    let of_layer = || {
        let (layer, rest) = tensor.name.strip_prefix("model.layers.")?.split_once('.')?;
        let (module, kind) = rest.rsplit_once('.')?;
        let (_, name) = OF_LAYERS.into_iter().find(|(ours, _)| *ours == module)?;
        Some(format!("blk.{layer}.{name}.{kind}"))
    };
    of_layer().ok_or_else(|| ModelError::NoGguf { what: format!("the tensor `{}`", tensor.name) })
}

/// Computes the divisors of the frequencies under Llama 3's scaling, which llama.cpp takes as a tensor.
fn frequency_factors(spec: &ModelSpec) -> Option<Vec<f32>> {
    let rope = &spec.ropes[0];
    if !matches!(rope.scaling, RopeScaling::Llama3 { .. }) {
        return None;
    }
    let plain = firebrick_arch::Rope { scaling: RopeScaling::Default, ..rope.clone() };
    let [(plain, _), (scaled, _)] = [&plain, rope].map(|rope| rope.inverse_frequencies(1));
    Some(plain.iter().zip(&scaled).map(|(plain, scaled)| plain / scaled).collect())
}

/// Reorders the rows of each head so that neighbors are rotated against each other: row `2 i` is row `i` of the head, row `2 i + 1` is row `head_dim
/// / 2 + i`.
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
    use std::fs::{read, write};

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
    fn a_file_begins_as_gguf_says_and_holds_every_tensor_at_its_place() {
        let temp = tempdir().unwrap();
        let (folder, file) = (temp.path().join("m"), temp.path().join("m.gguf"));
        let config = tiny(&[]).unwrap();
        write_folder_of(0.5, &folder, &config, FloatType::F32, None).unwrap();
        write(folder.join("tokenizer.json"), TOKENIZER).unwrap();
        write_gguf(&folder, &file, GgufType::F16, GgufEnds::default()).unwrap();
        let bytes = read(&file).unwrap();
        assert_eq!((&bytes[..4], bytes[4], bytes[8]), (&b"GGUF"[..], 3, config.spec.tensors().len() as u8));
        // The last tensor is the head, 11 rows of 8 halves, padded to 32 bytes.
        let end = &bytes[bytes.len() - 192..];
        assert!(end[..176].chunks(2).all(|half| half == [0x00, 0x38]) && end[176..].iter().all(|&byte| byte == 0));
    }

    #[test]
    fn what_llama_cpp_computes_differently_is_refused_by_name() {
        let refused = |folder: &Path| {
            write_gguf(folder, &folder.join("x.gguf"), GgufType::Q8_0, GgufEnds::default()).unwrap_err().to_string()
        };
        let temp = tempdir().unwrap();
        let folder = temp.path().join("m");
        let config = tiny(&[]).unwrap();
        write_folder_of(0.5, &folder, &config, FloatType::F32, None).unwrap();
        write(folder.join("tokenizer.json"), TOKENIZER.replace("BPE", "Unigram")).unwrap();
        assert!(refused(&folder).contains("not byte-level BPE"));
        write(folder.join("tokenizer.json"), TOKENIZER.replace("ByteLevel", "Metaspace")).unwrap();
        assert!(refused(&folder).contains("Metaspace"));
        write(folder.join("tokenizer.json"), TOKENIZER.replace("\"id\": 3", "\"id\": 11")).unwrap();
        assert!(refused(&folder).contains("a model of 11 tokens"));
        assert!(!folder.join("x.gguf").exists());
    }
}
