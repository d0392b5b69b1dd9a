//! Writing safetensors files and whole model folders, one tensor in memory at a time.
//!
//! A file or folder appears under its name only when it is complete and on the disk. Equal tensors give equal bytes, in the layout of the reference
//! writer: widest element type first, then by name.

pub(crate) mod bnb;
pub(crate) mod companions;
pub(crate) mod mxfp4;
pub(crate) mod save;

use std::borrow::Borrow;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fs::{create_dir_all, read_dir};
use std::io::Write;
use std::path::Path;

use firebrick_arch::{CONFIG_FILE, ModelConfig, is_stored_in_f32, text_name};
use firebrick_files::{AtomicFile, AtomicFolder};
use firebrick_precision::FloatType;
use safetensors::Dtype;
use serde_json::{Map, Value, json, to_string_pretty, to_vec};

use crate::checkpoint::experts::fuse::FusedTensors;
use crate::checkpoint::read::convert::{bytes_of, stored_as};
use crate::checkpoint::wrapper::WrapperTensors;
use crate::checkpoint::write::companions::{Companions, write_file};
use crate::checkpoint::{HfFolder, INDEX_FILE, TensorF32, TensorInfo, WEIGHTS_FILE};
use crate::error::ModelError;

/// The largest shard of a saved model, in bytes.
pub(super) const MAX_SHARD_BYTES: usize = 5_000_000_000;

/// A tensor that is about to be written.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Fetched {
    /// Its values, to be rounded to the format of the file.
    Values(Vec<f32>),
    /// Its little-endian bytes in that format.
    Bytes(Vec<u8>),
}

/// Returns the number format of a saved model's weights, as its config.json names it; f32 if that names none.
pub fn float_type_of(config: &ModelConfig) -> FloatType {
    let is_named = |float: &FloatType| config.dtype.as_deref() == Some(float.name());
    FloatType::ALL.into_iter().find(is_named).unwrap_or(FloatType::F32)
}

/// Returns the number format of a tensor of a model that is saved in `dtype`.
pub(crate) fn stored_format(name: &str, dtype: FloatType) -> FloatType {
    if is_stored_in_f32(name) { FloatType::F32 } else { dtype }
}

/// Writes a safetensors file atomically. `bytes_of` is called for one tensor at a time and returns little-endian bytes.
///
/// # Errors
/// A failed write, or an error of `bytes_of`; what stood at `path` before is then still there.
///
/// # Panics
/// If `bytes_of` returns another number of bytes than the tensor's info requires.
pub fn write_safetensors(
    path: &Path,
    tensors: &BTreeMap<String, TensorInfo>,
    mut bytes_of: impl FnMut(&str) -> Result<Vec<u8>, ModelError>,
) -> Result<(), ModelError> {
    let mut order = tensors.iter().collect::<Vec<_>>();
    // The sort is stable, so names stay in order within an element type.
    order.sort_by_key(|(_, info)| Reverse(info.dtype));
    let header = header(&order);
    let mut file = AtomicFile::create(path).map_err(ModelError::io("create", path))?;
    let mut put = |bytes: &[u8]| file.write_all(bytes).map_err(ModelError::io("write", path));
    put(&(header.len() as u64).to_le_bytes())?;
    put(&header)?;
    for (name, info) in &order {
        let bytes = bytes_of(name)?;
        assert_eq!(bytes.len(), info.byte_len(), "bytes of `{name}`");
        put(&bytes)?;
    }
    file.commit().map_err(ModelError::io("write", path))
}

/// Writes f32 tensors held in memory as one safetensors file; see [`write_safetensors`].
pub(crate) fn write_safetensors_f32(
    path: &Path,
    tensors: &BTreeMap<String, impl Borrow<TensorF32>>,
) -> Result<(), ModelError> {
    let info = |tensor: &TensorF32| TensorInfo { dtype: Dtype::F32, shape: tensor.shape.clone() };
    let infos = tensors.iter().map(|(name, tensor)| (name.clone(), info(tensor.borrow()))).collect();
    write_safetensors(path, &infos, |name| bytes_of(name, &tensors[name].borrow().values, FloatType::F32))
}

/// Writes a model as a Hugging Face folder: config.json, weights in shards of at most 5 GB, and its companions: tokenizer, chat
/// template, generation settings with the config's end-of-text tokens, license. `fetch` is called once for each tensor of the model.
/// If the model is the text model of a larger checkpoint, the folder gets the names and the other parts of `base`.
/// The folder appears under its name only when it is complete; after an error nothing is left behind.
pub(crate) fn write_hf_folder(
    dir: &Path,
    config: &ModelConfig,
    dtype: FloatType,
    companions: Option<&Companions>,
    base: Option<&HfFolder>,
    fetch: impl FnMut(&str) -> Result<Fetched, ModelError>,
) -> Result<(), ModelError> {
    write_sharded(dir, config, dtype, companions, base, MAX_SHARD_BYTES, fetch)
}

/// Does the same as [`write_hf_folder`], with another shard size.
pub(super) fn write_sharded(
    dir: &Path,
    config: &ModelConfig,
    dtype: FloatType,
    companions: Option<&Companions>,
    base: Option<&HfFolder>,
    max_shard_bytes: usize,
    mut fetch: impl FnMut(&str) -> Result<Fetched, ModelError>,
) -> Result<(), ModelError> {
    let wrapper_tensors = WrapperTensors::new(config, base);
    let fused = FusedTensors::of(&config.spec, base);
    let mut of_model = |name: &str| match fetch(name)? {
        Fetched::Values(values) => bytes_of(name, &values, stored_format(name, dtype)),
        Fetched::Bytes(bytes) => Ok(bytes),
    };
    let mut read = |stored: &str| match wrapper_tensors.read(stored, dtype)? {
        Some(bytes) => Ok(bytes),
        None => fused.read(&text_name(stored), &mut of_model),
    };
    write_folder(dir, |partial| {
        let infos = fused.stored(config.spec.tensors()).into_iter().map(|(name, shape)| {
            let dtype = stored_as(stored_format(&name, dtype));
            (wrapper_tensors.name_of(&name), TensorInfo { dtype, shape })
        });
        let infos = infos.chain(wrapper_tensors.tensors(dtype)?);
        write_shards(partial, &in_shards(infos, max_shard_bytes), &mut read)?;
        write_companions(partial, config, companions, &config.text_with(dtype.name(), None))
    })
}

/// Writes the files of a model folder besides its weights; `text` is that of config.json.
pub(super) fn write_companions(
    dir: &Path,
    config: &ModelConfig,
    companions: Option<&Companions>,
    text: &str,
) -> Result<(), ModelError> {
    if let Some(companions) = companions {
        companions.write(dir, &config.eos_token_ids, config.pad_token_id)?;
    }
    write_file(&dir.join(CONFIG_FILE), text)
}

/// Lets `fill` write into a new folder next to `dir`, which gets its name only if that succeeds. Concurrent writers of one `dir` have separate
/// folders, and the first to be complete gets the name; the next writer removes what a killed one left.
pub(crate) fn write_folder(
    dir: &Path,
    mut fill: impl FnMut(&Path) -> Result<(), ModelError>,
) -> Result<(), ModelError> {
    if read_dir(dir).is_ok_and(|mut entries| entries.next().is_some()) {
        return Err(ModelError::AlreadyExists { dir: dir.to_path_buf() });
    }
    if let Some(parent) = dir.parent() {
        create_dir_all(parent).map_err(ModelError::io("create", dir))?;
    }
    let partial = AtomicFolder::create(dir).map_err(ModelError::io("create", dir))?;
    fill(partial.temporary())?;
    partial.commit().map_err(ModelError::io("create", dir))
}

/// Builds the JSON header, padded with spaces so that the data begins at a multiple of 8 bytes.
fn header(order: &[(&String, &TensorInfo)]) -> Vec<u8> {
    // transformers requires this format.
    let mut entries = Map::from_iter([("__metadata__".to_owned(), json!({"format": "pt"}))]);
    let mut start = 0;
    for (name, info) in order {
        let end = start + info.byte_len();
        let entry = json!({"dtype": info.dtype, "shape": info.shape, "data_offsets": [start, end]});
        entries.insert((*name).clone(), entry);
        start = end;
    }
    let mut header = to_vec(&Value::Object(entries)).expect("a JSON value prints");
    header.resize(header.len().next_multiple_of(8), b' ');
    header
}

/// Fills shards with tensors in their order, each up to `max_bytes`; a tensor is never split.
pub(super) fn in_shards(
    tensors: impl Iterator<Item = (String, TensorInfo)>,
    max_bytes: usize,
) -> Vec<BTreeMap<String, TensorInfo>> {
    let mut shards = vec![BTreeMap::new()];
    let mut filled = 0;
    for (name, info) in tensors {
        if filled > 0 && filled + info.byte_len() > max_bytes {
            shards.push(BTreeMap::new());
            filled = 0;
        }
        filled += info.byte_len();
        shards.last_mut().expect("there is always one shard").insert(name, info);
    }
    shards
}

pub(super) fn write_shards(
    dir: &Path,
    shards: &[BTreeMap<String, TensorInfo>],
    read: &mut impl FnMut(&str) -> Result<Vec<u8>, ModelError>,
) -> Result<(), ModelError> {
    let mut weight_map = BTreeMap::new();
    for (index, tensors) in shards.iter().enumerate() {
        let file = shard_file(index, shards.len());
        write_safetensors(&dir.join(&file), tensors, &mut *read)?;
        weight_map.extend(tensors.keys().map(|name| (name.clone(), file.clone())));
    }
    if shards.len() == 1 {
        return Ok(());
    }
    let total_size = shards.iter().flat_map(BTreeMap::values).map(TensorInfo::byte_len).sum::<usize>();
    write_index(dir, total_size, &weight_map)
}

/// Names shard number `index`, from 0.
pub(super) fn shard_file(index: usize, count: usize) -> String {
    if count == 1 { WEIGHTS_FILE.to_owned() } else { format!("model-{:05}-of-{count:05}.safetensors", index + 1) }
}

pub(super) fn write_index(
    dir: &Path,
    total_size: usize,
    weight_map: &BTreeMap<String, String>,
) -> Result<(), ModelError> {
    let index = json!({"metadata": {"total_size": total_size}, "weight_map": weight_map});
    let text = to_string_pretty(&index).expect("a JSON value prints") + "\n";
    write_file(&dir.join(INDEX_FILE), &text)
}

#[cfg(test)]
mod tests {
    use std::fs::{create_dir, read, read_to_string, write};
    use std::path::PathBuf;

    use firebrick_arch::{TextLayout, WRAPPERS};
    use safetensors::tensor::{TensorView, serialize};
    use tempfile::tempdir;

    use super::*;
    use crate::checkpoint::HfFolder;
    use crate::test_config::{shapes, tiny, write_folder_of};

    fn one(name: &str, value: f32) -> BTreeMap<String, TensorF32> {
        BTreeMap::from([(name.to_owned(), TensorF32 { shape: vec![1], values: vec![value] })])
    }

    #[test]
    fn the_layout_is_the_reference_writers() {
        let temp = tempdir().unwrap();
        let path = temp.path().join("a.safetensors");
        let stored = [("a", Dtype::U8), ("b", Dtype::F32), ("c", Dtype::F32)];
        let tensors = stored.map(|(name, dtype)| (name.to_owned(), TensorInfo { dtype, shape: vec![2] }));
        let data = |name: &str| if name == "a" { vec![1, 2] } else { vec![name.as_bytes()[0]; 8] };
        write_safetensors(&path, &BTreeMap::from(tensors), |name| Ok(data(name))).unwrap();

        let bytes = stored.map(|(name, dtype)| (name, dtype, data(name)));
        let views = bytes.iter().map(|(name, dtype, data)| (*name, TensorView::new(*dtype, vec![2], data).unwrap()));
        let metadata = [("format".to_owned(), "pt".to_owned())].into_iter().collect();
        assert_eq!(read(&path).unwrap(), serialize(views, Some(metadata)).unwrap());
    }

    #[test]
    fn an_unwritable_place_is_named() {
        let temp = tempdir().unwrap();
        let file = temp.path().join("file");
        write(&file, "").unwrap();
        let error = write_safetensors_f32(&file.join("a.safetensors"), &one("x", 1.0)).unwrap_err();
        assert!(error.to_string().starts_with("cannot create `"), "{error}");
        assert!(error.to_string().contains("a.safetensors"), "{error}");
    }

    #[test]
    fn a_saved_folder_is_complete_and_rounded() {
        let temp = tempdir().unwrap();
        let (from, dir) = (temp.path().join("from"), temp.path().join("to"));
        create_dir(&from).unwrap();
        write(from.join("tokenizer.json"), "{}").unwrap();
        write(from.join("optimizer.pt"), "not ours").unwrap();
        let config = tiny(&[]).unwrap();
        // Half way between two bf16 values: ties go to the even one.
        let value = 1.0 + 1.0 / 256.0;
        let companions = Companions { from, ..Companions::default() };
        write_folder_of(value, &dir, &config, FloatType::Bf16, Some(&companions)).unwrap();
        let mut files = read_dir(&dir).unwrap().map(|entry| entry.unwrap().file_name()).collect::<Vec<_>>();
        files.sort();
        assert_eq!(files, [CONFIG_FILE, "generation_config.json", WEIGHTS_FILE, "tokenizer.json"]);
        assert!(read_to_string(dir.join(CONFIG_FILE)).unwrap().contains("\"torch_dtype\": \"bfloat16\""));
        let folder = HfFolder::open(&dir).unwrap();
        assert_eq!(folder.read_f32("model.norm.weight", &[8]).unwrap(), [1.0; 8]);
        let again = write_folder_of(value, &dir, &config, FloatType::F32, None).unwrap_err();
        assert!(matches!(again, ModelError::AlreadyExists { .. }));
    }

    #[test]
    fn a_text_model_alone_has_the_names_of_transformers() {
        let (temp, mut config) = (tempdir().unwrap(), tiny(&[]).unwrap());
        config.wrapper = WRAPPERS.first();
        let dir = temp.path().join("to");
        write_folder_of(0.5, &dir, &config, FloatType::F32, None).unwrap();
        let folder = HfFolder::open(&dir).unwrap();
        assert_eq!((folder.layout(), folder.other_parts().count()), (TextLayout::ModelFirst, 0));
        folder.check_complete(&config).unwrap();
    }

    #[test]
    fn a_failing_writer_touches_no_other() {
        let temp = tempdir().unwrap();
        let (dir, config) = (temp.path().join("to"), tiny(&[]).unwrap());
        let shapes = shapes(&config);
        let fail = |name: &str| Err(ModelError::MissingTensor { dir: PathBuf::new(), name: name.to_owned() });
        write_hf_folder(&dir, &config, FloatType::F32, None, None, |name| {
            write_hf_folder(&dir, &config, FloatType::F32, None, None, fail).unwrap_err();
            Ok(Fetched::Values(vec![1.0; shapes[name].iter().product()]))
        })
        .unwrap();
        assert_eq!(HfFolder::open(&dir).unwrap().read_f32("model.norm.weight", &[8]).unwrap(), [1.0; 8]);
        assert_eq!(read_dir(temp.path()).unwrap().count(), 1);
    }
}
