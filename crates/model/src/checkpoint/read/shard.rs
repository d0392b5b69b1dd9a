//! One safetensors file: its header, checked against its length, and reads of single tensors.
//!
//! The file is opened again for each read: that costs microseconds, needs no lock between threads, and works the same on every system.
//! Trade-off: a file that is replaced between its header and a read is not noticed.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use burn_tensor::DType;
use rayon::prelude::*;
use safetensors::tensor::{Metadata, TensorInfo};
use serde_json::from_slice;
use xxhash_rust::xxh3::Xxh3;

use crate::checkpoint::read::convert;
use crate::checkpoint::tensor::TensorBytes;
use crate::error::ModelError;

/// Bytes before the header: its length as a little-endian u64.
const LENGTH_BYTES: u64 = 8;
/// The largest header that the safetensors format allows.
const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Bytes read from the file at a time; a multiple of every element size.
const BLOCK_BYTES: usize = 1 << 20;
/// Elements that one processor reads at a time.
const PART: usize = 4 << 20;
/// First bytes of a Git LFS pointer, which stands for a file that is not yet fetched.
const GIT_LFS_POINTER: &[u8] = b"version ";

/// A safetensors file whose header has been read.
#[derive(Debug)]
pub(crate) struct Shard {
    pub(crate) path: PathBuf,
    metadata: Metadata,
    /// Bytes before the data: the length of the header, and the header.
    data_start: u64,
}

impl Shard {
    /// Reads and checks the header.
    pub(crate) fn open(path: &Path) -> Result<Self, ModelError> {
        let bad = |reason: String| ModelError::BadHeader { path: path.to_path_buf(), reason };
        let wrong_length = |expected, got| ModelError::WrongLength { path: path.to_path_buf(), expected, got };
        let mut file = File::open(path).map_err(ModelError::io("open", path))?;
        let length = file.metadata().map_err(ModelError::io("read", path))?.len();
        if length < LENGTH_BYTES {
            return Err(bad(format!("it is {length} bytes, too short for a header")));
        }
        let mut header_length = [0; LENGTH_BYTES as usize];
        file.read_exact(&mut header_length).map_err(ModelError::io("read", path))?;
        if header_length == GIT_LFS_POINTER {
            return Err(ModelError::LfsPointer { path: path.to_path_buf() });
        }
        let header_length = u64::from_le_bytes(header_length);
        if header_length > MAX_HEADER_BYTES {
            return Err(bad(format!("its first bytes announce a header of {header_length} bytes")));
        }
        let data_start = LENGTH_BYTES + header_length;
        if data_start > length {
            return Err(wrong_length(data_start, length));
        }
        let mut header = vec![0; header_length as usize];
        file.read_exact(&mut header).map_err(ModelError::io("read", path))?;
        let metadata =
            from_slice::<Metadata>(&header).map_err(|error| bad(format!("its header is invalid: {error}")))?;
        let expected = data_start + metadata.data_len() as u64;
        if expected != length {
            return Err(wrong_length(expected, length));
        }
        Ok(Self { path: path.to_path_buf(), metadata, data_start })
    }

    /// Returns the same file with its tensors under other names.
    pub(crate) fn renamed(mut self, name_of: impl Fn(&str) -> String) -> Result<Self, ModelError> {
        let bad = |reason: String| ModelError::BadHeader { path: self.path.clone(), reason };
        let (names, infos) = (self.metadata.offset_keys(), self.metadata.tensors());
        let mut renamed = BTreeMap::new();
        for name in &names {
            if let Some(other) = renamed.insert(name_of(name), name) {
                return Err(bad(format!("`{other}` and `{name}` are the same tensor of the text model")));
            }
        }
        let tensors = names.iter().map(|name| (name_of(name), infos[name].clone())).collect();
        let metadata = Metadata::new(self.metadata.metadata().clone(), tensors);
        self.metadata = metadata.map_err(|error| bad(format!("its header is invalid: {error}")))?;
        Ok(self)
    }

    /// Opens a tensor at byte `begin`. Each call of the result reads the next bytes, as many as fit.
    fn reader(&self, name: &str, begin: usize) -> Result<impl FnMut(&mut [u8]) -> Result<(), ModelError>, ModelError> {
        let failed = move |source| ModelError::ReadTensor { name: name.to_owned(), path: self.path.clone(), source };
        let mut file = File::open(&self.path).map_err(failed)?;
        let start = self.data_start + (self.known(name).data_offsets.0 + begin) as u64;
        file.seek(SeekFrom::Start(start)).map_err(failed)?;
        Ok(move |out: &mut [u8]| file.read_exact(out).map_err(failed))
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = String> {
        self.metadata.offset_keys().into_iter()
    }

    pub(crate) fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.metadata.info(name)
    }

    /// Reads one tensor as stored. The caller has checked that it is here.
    pub(crate) fn read(&self, name: &str) -> Result<TensorBytes, ModelError> {
        let info = self.known(name);
        let mut bytes = vec![0; info.data_offsets.1 - info.data_offsets.0];
        self.read_from(name, 0, &mut bytes)?;
        Ok(TensorBytes { dtype: info.dtype, shape: info.shape.clone(), bytes })
    }

    /// Reads the bytes of one tensor from `begin` on, as many as fit into `out`. The caller has checked that they are here.
    pub(crate) fn read_from(&self, name: &str, begin: usize, out: &mut [u8]) -> Result<(), ModelError> {
        self.reader(name, begin)?(out)
    }

    /// Compares the bytes of a tensor with those of one of another file, of the same size. The caller has checked that they are here.
    pub(crate) fn same_bytes(&self, name: &str, other: &Self, of_other: &str) -> Result<bool, ModelError> {
        let (start, end) = self.known(name).data_offsets;
        let (mut read, mut read_other) = (self.reader(name, 0)?, other.reader(of_other, 0)?);
        let mut blocks = [vec![0; BLOCK_BYTES.min(end - start)], vec![0; BLOCK_BYTES.min(end - start)]];
        for first in (start..end).step_by(BLOCK_BYTES) {
            let [one, two] = blocks.each_mut().map(|block| &mut block[..BLOCK_BYTES.min(end - first)]);
            read(one)?;
            read_other(two)?;
            if one != two {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Reads one tensor into f32, on all processors, and checks that it is finite. The caller has checked that it is here.
    pub(crate) fn read_f32(&self, name: &str) -> Result<Vec<f32>, ModelError> {
        self.weight_dtype(name, name)?;
        let mut values = vec![0.0; self.known(name).shape.iter().product()];
        let part = |(index, out): (usize, &mut [f32])| {
            self.read_elements(name, index * PART, DType::F32, bytemuck::cast_slice_mut(out)).map(drop)
        };
        values.par_chunks_mut(PART).enumerate().try_for_each(part)?;
        Ok(values)
    }

    /// Returns the device's name of a tensor's format. An error for a format that is not read as weights names the tensor `shown`.
    pub(crate) fn weight_dtype(&self, name: &str, shown: &str) -> Result<DType, ModelError> {
        let stored = self.known(name).dtype;
        convert::device_dtype(stored).ok_or_else(|| {
            let (name, path, got) = (shown.to_owned(), self.path.clone(), format!("{stored:?}"));
            ModelError::UnsupportedDtype { name, path, got }
        })
    }

    /// Reads the elements of a tensor from `first` on, as many as fit into `out` in the number format `requested`, and checks that they are finite.
    /// The caller has checked that they are here, in a format that is read as weights. Returns the XXH3 of `out`.
    pub(crate) fn read_elements(
        &self,
        name: &str,
        first: usize,
        requested: DType,
        out: &mut [u8],
    ) -> Result<u64, ModelError> {
        let info = self.known(name);
        let stored = convert::device_dtype(info.dtype).expect("callers have checked the format");
        let mut read = self.reader(name, first * stored.size())?;
        let block_elements = BLOCK_BYTES / stored.size();
        let in_scratch = if stored == requested { 0 } else { block_elements.min(out.len() / requested.size()) };
        let mut scratch = vec![0; in_scratch * stored.size()];
        let mut hash = Xxh3::new();
        for (block, out) in out.chunks_mut(block_elements * requested.size()).enumerate() {
            let elements = out.len() / requested.size();
            if stored == requested {
                read(out)?;
            } else {
                let scratch = &mut scratch[..elements * stored.size()];
                read(scratch)?;
                convert::convert(stored, scratch, requested, out);
            }
            if let Some(index) = convert::first_not_finite(out, requested) {
                let value = convert::element(if stored == requested { out } else { &scratch }, stored, index);
                let index = first + block * block_elements + index;
                return Err(convert::not_finite(name, &self.path, index, value, &format!("{requested:?}")));
            }
            // The block is still in the processor's cache.
            hash.update(out);
        }
        Ok(hash.digest())
    }

    /// Returns the info of a tensor that the caller knows to be here.
    pub(crate) fn known(&self, name: &str) -> &TensorInfo {
        self.info(name).expect("callers ask a shard only for tensors that it holds")
    }
}
