//! Model folders whose projections are 4-bit weights of bitsandbytes, as transformers writes them.
//!
//! A weight that the base stores in the same format is copied byte for byte; others are quantized as bitsandbytes does.
//! Trade-off: the sizes of a weight's parts are known only once it is quantized, so the tensors of a shard wait in a temporary file.

use std::collections::BTreeMap;
use std::fs::{File, rename};
use std::io::{BufWriter, Read, Seek, SeekFrom, Write};
use std::path::Path;

use firebrick_arch::{ModelConfig, Role, TensorSpec};
use firebrick_precision::FloatType;

use crate::checkpoint::quantized::{EncodedPart, encode_bnb, encode_bnb_codes};
use crate::checkpoint::read::convert::{bytes_of, stored_as};
use crate::checkpoint::wrapper::WrapperTensors;
use crate::checkpoint::write::companions::Companions;
use crate::checkpoint::write::{MAX_SHARD_BYTES, shard_file, write_companions, write_index};
use crate::checkpoint::{Bnb4bit, Fetched, HfFolder, TensorInfo, write_folder, write_safetensors};
use crate::error::ModelError;

/// Writes a model as a folder of 4-bit weights. Projections that a bitsandbytes `base` leaves unquantized stay so; all other tensors are written in
/// `dtype`. `fetch` is called once for each tensor that is not copied from `base`.
pub(crate) fn write_bnb_folder(
    dir: &Path,
    config: &ModelConfig,
    format: Bnb4bit,
    dtype: FloatType,
    companions: Option<&Companions>,
    base: &HfFolder,
    mut fetch: impl FnMut(&str) -> Result<Option<Fetched>, ModelError>,
) -> Result<(), ModelError> {
    if config.spec.is_mixture() {
        return Err(ModelError::MixtureIn4Bits { family: config.model_type.clone() });
    }
    let tensors = config.spec.tensors();
    let is_skipped = |tensor: &&TensorSpec| tensor.role == Role::Projection && base.skips(&tensor.name);
    let wrapper_tensors = WrapperTensors::new(config, Some(base));
    let module = |tensor: &TensorSpec| wrapper_tensors.module(tensor.name.trim_end_matches(".weight"));
    let skipped = tensors.iter().filter(is_skipped).map(module);
    let skipped: Vec<String> = skipped.chain(wrapper_tensors.modules()).collect();
    write_folder(dir, |partial| {
        let mut shards = Shards::new(partial)?;
        for tensor in &tensors {
            let quantizes = tensor.role == Role::Projection && !base.skips(&tensor.name);
            for (name, info, bytes) in parts(tensor, quantizes, format, dtype, base, &mut fetch)? {
                shards.push(wrapper_tensors.name_of(&name), info, &bytes)?;
            }
        }
        for (name, info) in wrapper_tensors.tensors(dtype)? {
            let bytes = wrapper_tensors.read(&name, dtype)?.expect("it is a tensor of another part");
            shards.push(name, info, &bytes)?;
        }
        shards.finish()?;
        // A list of modules replaces the default, which is the head.
        let skipped =
            (!skipped.is_empty()).then(|| skipped.iter().cloned().chain(["lm_head".to_owned()]).collect::<Vec<_>>());
        let text = config.text_with(dtype.name(), Some(format.config(dtype.name(), skipped)));
        write_companions(partial, config, companions, &text)
    })
}

/// Returns the tensors of the file for one tensor of the model.
fn parts(
    tensor: &TensorSpec,
    quantizes: bool,
    format: Bnb4bit,
    dtype: FloatType,
    base: &HfFolder,
    fetch: &mut impl FnMut(&str) -> Result<Option<Fetched>, ModelError>,
) -> Result<Vec<(String, TensorInfo, Vec<u8>)>, ModelError> {
    let TensorSpec { name, shape, .. } = tensor;
    let fetched = fetch(name)?;
    let named = |parts: Vec<EncodedPart>| {
        let named = |(suffix, dtype, shape, bytes)| (format!("{name}{suffix}"), TensorInfo { dtype, shape }, bytes);
        parts.into_iter().map(named).collect()
    };
    if fetched.is_none()
        && quantizes
        && let Some((stored, codes, scales)) = base.read_bnb(name)?
        && stored == format
    {
        return Ok(named(encode_bnb_codes(format, codes, &scales, shape, dtype.name())));
    }
    let info = TensorInfo { dtype: stored_as(dtype), shape: shape.clone() };
    let values = match fetched {
        Some(Fetched::Bytes(bytes)) if !quantizes => return Ok(vec![(name.clone(), info, bytes)]),
        Some(Fetched::Values(values)) => values,
        None if !quantizes && base.info(name)? == info => {
            return Ok(vec![(name.clone(), info, base.read(name)?.bytes)]);
        }
        Some(Fetched::Bytes(_)) | None => base.read_f32(name, shape)?,
    };
    if !quantizes {
        return Ok(vec![(name.clone(), info, bytes_of(name, &values, dtype)?)]);
    }
    let refused = |source| ModelError::NotQuantizable { name: name.clone(), source };
    Ok(named(encode_bnb(format, &values, shape, dtype.name()).map_err(refused)?))
}

/// Shards that are written one after another.
struct Shards<'a> {
    dir: &'a Path,
    /// The tensors of the current shard, one after another.
    spool: BufWriter<File>,
    /// The tensors in the spool, with their offsets.
    tensors: BTreeMap<String, (TensorInfo, u64)>,
    filled: usize,
    /// The shard number of each written tensor.
    written: BTreeMap<String, usize>,
    count: usize,
    total: usize,
}

impl<'a> Shards<'a> {
    fn new(dir: &'a Path) -> Result<Self, ModelError> {
        let spool = BufWriter::new(tempfile::tempfile_in(dir).map_err(ModelError::io("create", dir))?);
        let (tensors, written) = (BTreeMap::new(), BTreeMap::new());
        Ok(Self { dir, spool, tensors, filled: 0, written, count: 0, total: 0 })
    }

    fn push(&mut self, name: String, info: TensorInfo, bytes: &[u8]) -> Result<(), ModelError> {
        if self.filled > 0 && self.filled + bytes.len() > MAX_SHARD_BYTES {
            self.flush()?;
        }
        self.spool.write_all(bytes).map_err(ModelError::io("write", self.dir))?;
        self.tensors.insert(name, (info, self.filled as u64));
        self.filled += bytes.len();
        Ok(())
    }

    fn path_of(&self, shard: usize) -> std::path::PathBuf {
        self.dir.join(format!("shard-{shard}"))
    }

    fn flush(&mut self) -> Result<(), ModelError> {
        let failed = |source| ModelError::io("write", self.dir)(source);
        self.spool.flush().map_err(failed)?;
        let path = self.path_of(self.count);
        let spool = self.spool.get_mut();
        let infos = self.tensors.iter().map(|(name, (info, _))| (name.clone(), info.clone())).collect();
        let tensors = &self.tensors;
        write_safetensors(&path, &infos, |name| {
            let (info, start) = &tensors[name];
            let mut bytes = vec![0; info.byte_len()];
            let read = spool.seek(SeekFrom::Start(*start)).and_then(|_| spool.read_exact(&mut bytes));
            read.map_err(ModelError::io("read", self.dir))?;
            Ok(bytes)
        })?;
        let emptied = spool.set_len(0).and_then(|()| spool.seek(SeekFrom::Start(0)));
        emptied.map_err(ModelError::io("write", self.dir))?;
        self.total += self.filled;
        self.filled = 0;
        self.written.extend(std::mem::take(&mut self.tensors).into_keys().map(|name| (name, self.count)));
        self.count += 1;
        Ok(())
    }

    /// Writes the last shard, gives all of them their names, and writes the index.
    fn finish(mut self) -> Result<(), ModelError> {
        self.flush()?;
        let file = |shard: usize| shard_file(shard, self.count);
        for shard in 0..self.count {
            let to = self.dir.join(file(shard));
            rename(self.path_of(shard), &to).map_err(ModelError::io("write", &to))?;
        }
        if self.count == 1 {
            return Ok(());
        }
        let weight_map = self.written.iter().map(|(name, shard)| (name.clone(), file(*shard))).collect();
        write_index(self.dir, self.total, &weight_map)
    }
}
