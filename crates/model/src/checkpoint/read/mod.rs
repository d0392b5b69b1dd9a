//! Weights in a Hugging Face folder: `model.safetensors`, or shards with `model.safetensors.index.json`. Weights may be quantized (`quantized`) or
//! experts in one tensor (`experts::fused`), which a caller need not know. The tensors of a text model in a larger checkpoint have the names that
//! they have alone.
//!
//! Opening a folder reads every shard's header and compares the file's length with it, so that an incomplete download is found before any weight is
//! read. Tensors are then read with plain positioned reads, one at a time or by threads that read ahead within a bound (`ahead`): no `unsafe`
//! memory map is needed, and host memory is a choice.
//! Not supported: PyTorch `.bin` files.

pub(crate) mod ahead;
pub(crate) mod complete;
pub(crate) mod convert;
pub(crate) mod shard;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, read_dir};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use firebrick_arch::folder::{INDEX_FILE, WEIGHTS_FILE};
use firebrick_arch::json::{JsonObject, parse_object, read_text};
use firebrick_arch::{ModelSpec, Role, TextLayout, counted, is_other_part, text_name, text_name_in_adapter};
use firebrick_precision::{BlockScales, QuantFormat, QuantizedTensor};
use safetensors::Dtype;
use serde_json::Value;

use self::complete::deciding_keys;
use self::shard::Shard;
use crate::checkpoint::experts::fused::{self, ExpertSlice};
use crate::checkpoint::quantized::{self, Bnb4bit, QuantizedWeight};
use crate::checkpoint::tensor::{TensorBytes, TensorF32, TensorInfo};
use crate::error::{ModelError, first_few};

/// The weights of a model folder, checked but not read.
#[derive(Debug)]
pub struct HfFolder {
    dir: PathBuf,
    /// The place of each tensor: those of the model by the model's names, those of a larger checkpoint's other parts by their own.
    holder: BTreeMap<String, Holder>,
    /// What the files call the tensors of the model.
    layout: TextLayout,
}

/// The place of a tensor of the model.
#[derive(Debug)]
pub(crate) enum Holder {
    /// Unquantized, in this shard.
    Plain(Arc<Shard>),
    /// A part of a tensor of all experts.
    OfExpert(ExpertSlice),
    /// In several tensors.
    Quantized(QuantizedWeight),
}

impl Holder {
    /// Returns the shape of the tensor, which has this name.
    fn shape(&self, name: &str) -> &[usize] {
        match self {
            Self::Plain(shard) => &shard.known(name).shape,
            Self::OfExpert(slice) => &slice.shape,
            Self::Quantized(weight) => &weight.shape,
        }
    }

    fn path(&self) -> &Path {
        match self {
            Self::Plain(shard) => &shard.path,
            Self::OfExpert(slice) => slice.path(),
            Self::Quantized(weight) => weight.path(),
        }
    }
}

impl HfFolder {
    /// Opens a model folder. `model.safetensors` takes precedence over an index, as in transformers.
    ///
    /// # Errors
    /// No weights; shards that are missing, cut short or damaged; an index that does not fit its shards; a quantized weight whose parts
    /// do not belong together.
    pub fn open(dir: &Path) -> Result<Self, ModelError> {
        let (dir, path) = (dir.to_path_buf(), dir.join(WEIGHTS_FILE));
        if path.is_file() {
            let shard = Shard::open(&path)?;
            let names: Vec<String> = shard.names().collect();
            let shard = Arc::new(shard.renamed(text_name)?);
            return Self::assemble(dir, names.into_iter().map(|name| (name, Arc::clone(&shard))).collect());
        }
        if !dir.join(INDEX_FILE).is_file() {
            let missing = "model.safetensors and no model.safetensors.index.json";
            let advice = "Give a folder with safetensors weights; convert pytorch_model.bin by loading it with \
                          transformers and calling save_pretrained";
            return Err(without_weights(&dir, ModelError::NotThere { dir: dir.clone(), missing, advice }));
        }
        Self::open_sharded(dir)
    }

    fn open_sharded(dir: PathBuf) -> Result<Self, ModelError> {
        let by_shard = read_index(&dir.join(INDEX_FILE))?;
        let missing = by_shard.iter().filter(|(file, _)| !dir.join(file).is_file());
        let missing = missing.map(|(file, names)| {
            let names = names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>();
            format!("{file} (needed by {}: {})", counted(names.len(), "tensor"), first_few(&names).replace(';', ","))
        });
        let missing = missing.collect::<Vec<_>>();
        if !missing.is_empty() {
            return Err(without_weights(&dir, ModelError::MissingShards { dir: dir.clone(), shards: missing }));
        }
        let mut places = BTreeMap::new();
        for (file, names) in by_shard {
            let shard = Shard::open(&dir.join(file))?;
            let absent = names.iter().filter(|name| shard.info(name).is_none()).cloned().collect::<Vec<_>>();
            if !absent.is_empty() {
                return Err(ModelError::NotInShard { path: shard.path.clone(), tensors: absent });
            }
            let shard = Arc::new(shard.renamed(text_name)?);
            places.extend(names.into_iter().map(|name| (name, Arc::clone(&shard))));
        }
        Self::assemble(dir, places)
    }

    /// Gives the tensors the names of the model and puts quantized weights together. `stored` has the shard of each name in the files.
    fn assemble(dir: PathBuf, stored: BTreeMap<String, Arc<Shard>>) -> Result<Self, ModelError> {
        let layout = TextLayout::of(stored.keys().map(String::as_str));
        let mut places = stored.into_iter().map(|(name, shard)| (text_name(&name), shard)).collect();
        let quantized = quantized::find(&dir, &mut places)?;
        let of_experts = fused::find(&mut places);
        let mut holder: BTreeMap<_, _> = places.into_iter().map(|(name, shard)| (name, Holder::Plain(shard))).collect();
        holder.extend(of_experts.into_iter().map(|(name, slice)| (name, Holder::OfExpert(slice))));
        holder.extend(quantized.into_iter().map(|weight| (weight.name.clone(), Holder::Quantized(weight))));
        Ok(Self { dir, holder, layout })
    }

    /// Returns the folder that was opened.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the names of the model's tensors, sorted. The parts of a quantized weight appear under the name of the weight.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.holder.keys().map(String::as_str).filter(|name| !is_other_part(name))
    }

    /// Returns the names of the tensors in other parts of a checkpoint that the model is the text model of, sorted.
    pub fn other_parts(&self) -> impl Iterator<Item = &str> {
        self.holder.keys().map(String::as_str).filter(|name| is_other_part(name))
    }

    /// Returns whether the folder stores all experts of a layer in one tensor.
    pub(crate) fn has_fused_experts(&self) -> bool {
        self.holder.values().any(|holder| matches!(holder, Holder::OfExpert(_)))
    }

    /// Returns what the files call the tensors of the model.
    pub fn layout(&self) -> TextLayout {
        self.layout
    }

    /// Returns whether a tensor of this name is there.
    pub fn contains(&self, name: &str) -> bool {
        self.holder.contains_key(name)
    }

    /// Returns format and shape of a tensor; for a quantized weight those of its dequantized values, F32.
    pub fn info(&self, name: &str) -> Result<TensorInfo, ModelError> {
        let holder = self.locate(name)?;
        let dtype = match holder {
            Holder::Plain(shard) => shard.known(name).dtype,
            Holder::OfExpert(slice) => slice.dtype(),
            Holder::Quantized(_) => Dtype::F32,
        };
        Ok(TensorInfo { dtype, shape: holder.shape(name).to_vec() })
    }

    /// Returns the format in which the folder stores a weight, if it is one of ours, bit for bit.
    pub fn stored_format(&self, name: &str) -> Option<QuantFormat> {
        match self.holder.get(name) {
            Some(Holder::Quantized(weight)) => weight.format(),
            _ => None,
        }
    }

    pub(crate) fn is_quantized(&self, name: &str) -> bool {
        matches!(self.holder.get(name), Some(Holder::Quantized(_)))
    }

    /// Returns the stored formats of quantized weights, with their number; empty for an unquantized folder.
    pub fn quantized_weights(&self) -> BTreeMap<&'static str, usize> {
        let mut counts = BTreeMap::new();
        for name in self.names() {
            if let Holder::Quantized(weight) = &self.holder[name] {
                *counts.entry(weight.stored_as()).or_default() += 1;
            }
        }
        counts
    }

    /// Returns whether a bitsandbytes folder leaves this tensor unquantized (`llm_int8_skip_modules`).
    pub fn skips(&self, name: &str) -> bool {
        let is_bnb = |holder: &Holder| matches!(holder, Holder::Quantized(weight) if weight.is_bnb());
        matches!(self.holder.get(name), Some(Holder::Plain(_))) && self.holder.values().any(is_bnb)
    }

    /// Returns the projections that a bitsandbytes folder leaves unquantized.
    pub(crate) fn unquantized(&self, spec: &ModelSpec) -> BTreeSet<String> {
        let projections = spec.tensors().into_iter().filter(|tensor| tensor.role == Role::Projection);
        projections.map(|tensor| tensor.name).filter(|name| self.skips(name)).collect()
    }

    /// Reads the codes and scales of a weight for which [`HfFolder::stored_format`] names a format.
    ///
    /// # Errors
    /// No such weight, a failed read, or a scale that is not finite.
    pub fn read_quantized(&self, name: &str) -> Result<Option<QuantizedTensor>, ModelError> {
        let Holder::Quantized(weight) = self.locate(name)? else { return Ok(None) };
        let codes = weight.read()?;
        if let Some(codes) = &codes {
            let scales = codes.scales.block.values();
            convert::check_finite(&format!("{name} (scales)"), weight.path(), &scales)?;
        }
        Ok(codes)
    }

    /// Reads format, codes and scales of a weight that bitsandbytes quantized; `None` for any other tensor.
    pub(crate) fn read_bnb(&self, name: &str) -> Result<Option<(Bnb4bit, Vec<u8>, BlockScales)>, ModelError> {
        match self.holder.get(name) {
            Some(Holder::Quantized(weight)) => weight.read_bnb(),
            _ => Ok(None),
        }
    }

    /// Returns the file of a tensor that is read in rows.
    ///
    /// # Errors
    /// No tensor of this name, or one that is stored quantized or in a format that is no weight's.
    pub(crate) fn shard_of(&self, name: &str) -> Result<Arc<Shard>, ModelError> {
        let Holder::Plain(shard) = self.locate(name)? else {
            let problem = "its rows are read one by one, which needs them in F32, BF16 or F16".to_owned();
            return Err(ModelError::QuantizedWeight { dir: self.dir.clone(), name: name.to_owned(), problem });
        };
        shard.weight_dtype(name, name)?;
        Ok(Arc::clone(shard))
    }

    /// Reads one tensor in the format that [`HfFolder::info`] returns.
    ///
    /// # Errors
    /// No tensor of this name, a failed read, or a value of the model that is not finite; other parts of a checkpoint are read as they are.
    pub fn read(&self, name: &str) -> Result<TensorBytes, ModelError> {
        match self.locate(name)? {
            Holder::Plain(shard) => {
                let tensor = shard.read(name)?;
                let dtype = convert::device_dtype(tensor.dtype).filter(|_| !is_other_part(name));
                match dtype.and_then(|dtype| Some((dtype, convert::first_not_finite(&tensor.bytes, dtype)?))) {
                    None => Ok(tensor),
                    Some((dtype, index)) => {
                        let value = convert::element(&tensor.bytes, dtype, index);
                        Err(convert::not_finite(name, &shard.path, index, value, &format!("{dtype:?}")))
                    }
                }
            }
            Holder::OfExpert(slice) => slice.read(name),
            Holder::Quantized(weight) => {
                let bytes = weight.values()?.iter().flat_map(|value| value.to_le_bytes()).collect();
                Ok(TensorBytes { dtype: Dtype::F32, shape: weight.shape.clone(), bytes })
            }
        }
    }

    /// Reads one tensor stored as F32, BF16 or F16, or a quantized weight, into f32. Besides the result it holds one block of 1 MiB, or the codes of
    /// the weight.
    ///
    /// # Errors
    /// No tensor of this name, a shape other than `expected_shape` (which config.json decides), another number format,
    /// a failed read, or a value that is not finite.
    pub fn read_f32(&self, name: &str, expected_shape: &[usize]) -> Result<Vec<f32>, ModelError> {
        match self.locate_shaped(name, expected_shape)? {
            Holder::Plain(shard) => shard.read_f32(name),
            Holder::OfExpert(slice) => slice.read_f32(name),
            Holder::Quantized(weight) => {
                let values = weight.values()?;
                convert::check_finite(name, weight.path(), &values)?;
                Ok(values)
            }
        }
    }

    /// Returns whether two tensors hold the same values. Tensors of one format are read in blocks, up to the first difference.
    pub(crate) fn same_values(&self, one: &str, two: &str) -> Result<bool, ModelError> {
        match (self.locate(one)?, self.locate(two)?) {
            (of_one, of_two) if of_one.shape(one) != of_two.shape(two) => Ok(false),
            (Holder::Plain(shard), Holder::Plain(other)) if shard.known(one).dtype == other.known(two).dtype => {
                shard.same_bytes(one, other, two)
            }
            (of_one, of_two) => Ok(self.read_f32(one, of_one.shape(one))? == self.read_f32(two, of_two.shape(two))?),
        }
    }

    /// Locates a tensor and checks that it has the shape that config.json decides.
    fn locate_shaped(&self, name: &str, expected_shape: &[usize]) -> Result<&Holder, ModelError> {
        let holder = self.locate(name)?;
        if holder.shape(name) == expected_shape {
            return Ok(holder);
        }
        Err(ModelError::WrongShape {
            name: name.to_owned(),
            path: holder.path().to_path_buf(),
            expected: expected_shape.to_vec(),
            got: holder.shape(name).to_vec(),
            keys: deciding_keys(name),
        })
    }

    fn locate(&self, name: &str) -> Result<&Holder, ModelError> {
        let missing = || ModelError::MissingTensor { dir: self.dir.clone(), name: name.to_owned() };
        self.holder.get(name).ok_or_else(missing)
    }
}

/// Returns the error for a folder that lacks weights: `usual`, unless earlier builds compressed them.
fn without_weights(dir: &Path, usual: ModelError) -> ModelError {
    let mut paths = read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    let is_compressed = |path: &PathBuf| {
        let mut start = [0; 8];
        path.extension().is_some_and(|end| end == "zst" || end == "lz4")
            && File::open(path).is_ok_and(|mut file| file.read_exact(&mut start).is_ok())
            && start == *b"SAFETPLN"
    };
    paths.find(is_compressed).map_or(usual, |path| ModelError::CompressedWeights { path })
}

pub(crate) fn safetensors_names(path: &Path) -> Result<Vec<String>, ModelError> {
    Ok(Shard::open(path)?.names().collect())
}

/// Opens the tensors of an adapter, by their names for the text model alone.
pub(crate) fn open_adapter(path: &Path) -> Result<Shard, ModelError> {
    Shard::open(path)?.renamed(text_name_in_adapter)
}

/// Reads the shapes of an adapter's tensors from the header of its file.
pub(crate) fn adapter_shapes(path: &Path) -> Result<BTreeMap<String, Vec<usize>>, ModelError> {
    let shard = open_adapter(path)?;
    Ok(shard.names().map(|name| (name.clone(), shard.known(&name).shape.clone())).collect())
}

pub(crate) fn read_adapter_f32(path: &Path) -> Result<BTreeMap<String, TensorF32>, ModelError> {
    let shard = open_adapter(path)?;
    let read = |name: String| {
        let tensor = TensorF32 { shape: shard.known(&name).shape.clone(), values: shard.read_f32(&name)? };
        Ok((name, tensor))
    };
    shard.names().map(read).collect()
}

fn read_index(path: &Path) -> Result<BTreeMap<String, Vec<String>>, ModelError> {
    let map = parse_object(&read_text(path)?, path)?;
    let json = JsonObject::new(path, &map);
    let weight_map = json.get("weight_map");
    let weight_map = json.required("weight_map", weight_map, "an object of tensor names and shard files")?;
    let wrong = || json.wrong_type("weight_map", "an object of tensor names and shard files", weight_map);
    let mut by_shard = BTreeMap::<String, Vec<String>>::new();
    for (name, file) in weight_map.as_object().ok_or_else(wrong)? {
        let Value::String(file) = file else { return Err(wrong().into()) };
        // A shard is in the same folder, on every system.
        if matches!(file.as_str(), "" | "." | "..") || file.contains(['/', '\\', ':', '\0']) {
            return Err(ModelError::OutsideFolder {
                path: path.to_path_buf(),
                tensor: name.clone(),
                file: file.clone(),
            });
        }
        by_shard.entry(file.clone()).or_default().push(name.clone());
    }
    Ok(by_shard)
}

#[cfg(test)]
mod tests {
    use std::fs::{OpenOptions, copy, remove_file, write};

    use firebrick_arch::{ArchError, ModelConfig};
    use firebrick_precision::FloatType;
    use serde_json::json;
    use tempfile::{TempDir, tempdir};

    use super::*;
    use crate::checkpoint::write::{self, Fetched, write_safetensors, write_safetensors_f32};
    use crate::test_config::{shapes, tiny, write_folder_of};

    fn values(name: &str, len: usize) -> Vec<f32> {
        let start = name.bytes().map(u32::from).sum::<u32>() as f32;
        (0..len).map(|i| start + i as f32 * 0.25).collect()
    }

    /// Returns the tiny model of the config tests, in three shards.
    fn sharded() -> (TempDir, PathBuf, ModelConfig) {
        let (temp, config) = (tempdir().unwrap(), tiny(&[]).unwrap());
        let dir = temp.path().join("model");
        let shapes = shapes(&config);
        let fetch = |name: &str| Ok(Fetched::Values(values(name, shapes[name].iter().product())));
        write::write_sharded(&dir, &config, FloatType::F32, None, None, 2_000, fetch).unwrap();
        assert!(dir.join("model-00001-of-00003.safetensors").is_file());
        (temp, dir, config)
    }

    #[test]
    fn a_truncated_shard_is_found_at_open() {
        let (_temp, dir, _) = sharded();
        let path = dir.join("model-00003-of-00003.safetensors");
        let full = path.metadata().unwrap().len();
        for length in [full - 1, 40, 3, 0] {
            OpenOptions::new().write(true).open(&path).unwrap().set_len(length).unwrap();
            let error = HfFolder::open(&dir).unwrap_err();
            match error {
                ModelError::WrongLength { expected, got, .. } => {
                    assert!(got == length && (expected == full || length == 40))
                }
                ModelError::BadHeader { .. } => assert!(length < 8),
                other => panic!("{other}"),
            }
        }
    }

    #[test]
    fn a_damaged_header_is_refused() {
        let temp = tempdir().unwrap();
        let path = temp.path().join(WEIGHTS_FILE);
        let header = |json: &str| [&(json.len() as u64).to_le_bytes(), json.as_bytes()].concat();
        let cases = [
            (header(r#"{"a":{"dtype":"F99","shape":[1],"data_offsets":[0,0]}}"#), "F99"),
            (header(r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}"#), "header"),
            (u64::MAX.to_le_bytes().to_vec(), "header"),
            (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n".to_vec(), "git lfs pull"),
            (b"<html><body>Access to this model is restricted</body></html>".to_vec(), "header"),
        ];
        for (bytes, part) in cases {
            write(&path, bytes).unwrap();
            let error = HfFolder::open(temp.path()).unwrap_err();
            assert!(matches!(error, ModelError::BadHeader { .. } | ModelError::LfsPointer { .. }), "{error}");
            let text = error.to_string();
            assert!(text.contains(part) && !(text.contains("LFS") && text.contains("Delete it")), "{text}");
        }
    }

    #[test]
    fn an_index_that_does_not_fit_its_shards_is_refused() {
        let (_temp, dir, _) = sharded();
        let first = dir.join("model-00001-of-00003.safetensors");
        copy(&first, dir.join("model-00002-of-00003.safetensors")).unwrap();
        let error = HfFolder::open(&dir).unwrap_err();
        assert!(matches!(error, ModelError::NotInShard { .. }), "{error}");
        write(dir.join(INDEX_FILE), r#"{"weight_map": ["a"]}"#).unwrap();
        assert!(matches!(HfFolder::open(&dir).unwrap_err(), ModelError::Arch(ArchError::WrongType { .. })));
    }

    #[test]
    fn an_index_cannot_lead_outside_of_its_folder() {
        let (temp, dir, _) = sharded();
        copy(dir.join("model-00001-of-00003.safetensors"), temp.path().join("secret.safetensors")).unwrap();
        let absolute = temp.path().join("secret.safetensors").display().to_string();
        for file in ["../secret.safetensors", "a/../../secret.safetensors", absolute.as_str(), "..", "", "c:secret"] {
            write(dir.join(INDEX_FILE), json!({ "weight_map": { "norm": file } }).to_string()).unwrap();
            let error = HfFolder::open(&dir).unwrap_err();
            assert!(matches!(&error, ModelError::OutsideFolder { tensor, .. } if tensor == "norm"), "{file}: {error}");
        }
    }

    #[test]
    fn a_folder_without_safetensors_says_how_to_convert() {
        let temp = tempdir().unwrap();
        File::create(temp.path().join("pytorch_model.bin")).unwrap();
        assert!(HfFolder::open(temp.path()).unwrap_err().to_string().contains("save_pretrained"));
    }

    #[test]
    fn compressed_weights_are_refused_with_the_way_back() {
        let (_temp, dir, _) = sharded();
        let shard = dir.join("model-00002-of-00003.safetensors");
        remove_file(&shard).unwrap();
        let packed = shard.with_extension("safetensors.lz4");
        let error = |start: &[u8]| {
            write(&packed, start).unwrap();
            HfFolder::open(&dir).unwrap_err()
        };
        assert!(matches!(error(b"another format"), ModelError::MissingShards { .. }));
        let message = error(b"SAFETPLN, and the rest").to_string();
        assert!(message.contains("safetensors.lz4") && message.contains("the command decompress"), "{message}");
        remove_file(dir.join(INDEX_FILE)).unwrap();
        assert_eq!(HfFolder::open(&dir).unwrap_err().to_string(), message);
    }

    #[test]
    fn a_wrong_shape_names_the_keys() {
        let (_temp, dir, _) = sharded();
        let folder = HfFolder::open(&dir).unwrap();
        let message = folder.read_f32("model.layers.0.self_attn.k_proj.weight", &[8, 8]).unwrap_err().to_string();
        for part in ["[4, 8]", "[8, 8]", "num_key_value_heads", "model-00001-of-00003"] {
            assert!(message.contains(part), "{message}");
        }
    }

    #[test]
    fn all_wrong_and_missing_tensors_come_in_one_error() {
        let (_temp, dir, _) = sharded();
        let folder = HfFolder::open(&dir).unwrap();
        let wider = tiny(&[("intermediate_size", json!(16)), ("num_hidden_layers", json!(3))]).unwrap();
        let message = folder.check_complete(&wider).unwrap_err().to_string();
        // Three projections in each of two layers, and nine tensors of a third layer.
        for part in ["15 tensors", "[12, 8]", "[16, 8]", "intermediate_size", "and 10 more"] {
            assert!(message.contains(part), "{message}");
        }
        let narrower = tiny(&[("num_hidden_layers", json!(1))]).unwrap();
        assert!(folder.check_complete(&narrower).unwrap_err().to_string().contains("no place for it"));
    }

    #[test]
    fn only_an_untied_model_needs_its_head() {
        let (temp, config) = (tempdir().unwrap(), tiny(&[("tie_word_embeddings", json!(true))]).unwrap());
        let dir = temp.path().join("tied");
        write_folder_of(0.0, &dir, &config, FloatType::F32, None).unwrap();
        let folder = HfFolder::open(&dir).unwrap();
        assert!(!folder.contains("lm_head.weight"));
        folder.check_complete(&config).unwrap();
        let message = folder.check_complete(&tiny(&[]).unwrap()).unwrap_err().to_string();
        assert!(message.contains("lm_head.weight") && message.contains("tie_word_embeddings"), "{message}");
    }

    #[test]
    fn half_formats_read_into_f32_and_others_are_refused() {
        let temp = tempdir().unwrap();
        let path = temp.path().join(WEIGHTS_FILE);
        let stored = [("b", Dtype::BF16), ("h", Dtype::F16), ("i", Dtype::I64)];
        let infos = stored.map(|(name, dtype)| (name.to_owned(), TensorInfo { dtype, shape: vec![2] }));
        let bytes = |name: &str| {
            Ok(match name {
                "b" => [half::bf16::from_f32(1.5), half::bf16::from_f32(-3e38)].map(|x| x.to_le_bytes()).concat(),
                "h" => [half::f16::from_f32(0.25), half::f16::from_f32(-65504.0)].map(|x| x.to_le_bytes()).concat(),
                _ => vec![0; 16],
            })
        };
        write_safetensors(&path, &BTreeMap::from(infos), bytes).unwrap();
        let folder = HfFolder::open(temp.path()).unwrap();
        assert_eq!(folder.read_f32("b", &[2]).unwrap(), [1.5, half::bf16::from_f32(-3e38).to_f32()]);
        assert_eq!(folder.read_f32("h", &[2]).unwrap(), [0.25, -65504.0]);
        assert_eq!(folder.read("i").unwrap(), TensorBytes { dtype: Dtype::I64, shape: vec![2], bytes: vec![0; 16] });
        assert!(folder.read_f32("i", &[2]).unwrap_err().to_string().contains("stored as I64"));
        assert!(matches!(folder.read("absent"), Err(ModelError::MissingTensor { .. })));
    }

    #[test]
    fn a_tensor_larger_than_one_read_block_reads_whole() {
        let temp = tempdir().unwrap();
        let large = TensorF32 { shape: vec![700_001], values: values("large", 700_001) };
        let path = temp.path().join(WEIGHTS_FILE);
        write_safetensors_f32(&path, &BTreeMap::from([("large".to_owned(), large.clone())])).unwrap();
        assert_eq!(HfFolder::open(temp.path()).unwrap().read_f32("large", &[700_001]).unwrap(), large.values);
        assert_eq!(read_adapter_f32(&path).unwrap()["large"], large);
    }
}
