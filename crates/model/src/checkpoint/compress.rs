//! Compresses the weights of model folders, and restores them byte for byte.
//!
//! Every `X.safetensors` becomes `X.safetensors.zst` or `.lz4` (weights/compressed.rs); all other files are copied. Such a folder can be read without
//! decompressing it first.
//! Trade-off: subfolders are not copied, except further chat templates; the report lists them.

use std::fs::{copy, create_dir, read_dir};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use firebrick_arch::folder::ADDITIONAL_TEMPLATES;
use firebrick_files::AtomicFile;
use rayon::current_num_threads;
use rayon::prelude::*;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::checkpoint::read::compressed::{
    CHUNK_BYTES, Chunk, ENTRY_BYTES, HASHED_HEAD_BYTES, HEAD_BYTES, MAGIC, VERSION, chunks, codec_of, split,
};
use crate::checkpoint::{Codec, HfFolder, Shard, write_folder};
use crate::error::ModelError;

/// The result of compressing or restoring a folder.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CompressReport {
    /// Number of weight files.
    pub files: usize,
    /// Their bytes before.
    pub read: u64,
    /// Their bytes after.
    pub written: u64,
    /// Subfolders that were not copied.
    pub left_out: Vec<String>,
}

/// Writes the model of the folder `from` to the new folder `to` with its weights compressed.
///
/// # Errors
/// A folder that cannot be read, or `to` that holds something.
pub fn compress_folder(from: &Path, to: &Path, codec: Codec) -> Result<CompressReport, ModelError> {
    // Finds damaged files before anything is written.
    HfFolder::open(from)?;
    convert_folder(from, to, |file, name, to| {
        if !name.ends_with(".safetensors") {
            return Ok(None);
        }
        let to = codec.path_of(&to.join(name));
        compress_file(file, &to, codec)?;
        Ok(Some(to))
    })
}

/// Writes the model of the folder `from` to the new folder `to` with its weights restored from their compressed form.
///
/// # Errors
/// A folder that cannot be read, a damaged block, or `to` that holds something.
pub fn decompress_folder(from: &Path, to: &Path) -> Result<CompressReport, ModelError> {
    HfFolder::open(from)?;
    convert_folder(from, to, |file, name, to| {
        let Some((stem, _)) = name.rsplit_once('.').filter(|(stem, _)| stem.ends_with(".safetensors")) else {
            return Ok(None);
        };
        if codec_of(file).is_none() {
            return Ok(None);
        }
        let to = to.join(stem);
        decompress_file(file, &to)?;
        Ok(Some(to))
    })
}

/// Copies a folder. `convert` writes the files that it knows, given their path, their name and the new folder; it returns where.
fn convert_folder(
    from: &Path,
    to: &Path,
    mut convert: impl FnMut(&Path, &str, &Path) -> Result<Option<PathBuf>, ModelError>,
) -> Result<CompressReport, ModelError> {
    let mut report = CompressReport::default();
    write_folder(to, |partial| {
        report = CompressReport::default();
        let size = |path: &Path| path.metadata().map(|metadata| metadata.len()).map_err(ModelError::io("read", path));
        for path in paths_in(from)? {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if path.is_dir() && name == ADDITIONAL_TEMPLATES {
                copy_files(&path, &partial.join(&name))?;
            } else if path.is_dir() {
                report.left_out.push(name);
            } else if let Some(written) = convert(&path, &name, partial)? {
                report.files += 1;
                report.read += size(&path)?;
                report.written += size(&written)?;
            } else {
                copy(&path, partial.join(&name)).map_err(ModelError::io("copy", &path))?;
            }
        }
        Ok(())
    })?;
    report.left_out.sort();
    Ok(report)
}

fn paths_in(folder: &Path) -> Result<Vec<PathBuf>, ModelError> {
    let paths = read_dir(folder).and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect());
    paths.map_err(ModelError::io("list", folder))
}

fn copy_files(from: &Path, to: &Path) -> Result<(), ModelError> {
    create_dir(to).map_err(ModelError::io("create", to))?;
    for path in paths_in(from)?.into_iter().filter(|path| path.is_file()) {
        copy(&path, to.join(path.file_name().unwrap_or_default())).map_err(ModelError::io("copy", &path))?;
    }
    Ok(())
}

/// A block as it goes into the file.
struct Packed {
    bytes: Vec<u8>,
    raw: usize,
}

fn compress_file(from: &Path, to: &Path, codec: Codec) -> Result<(), ModelError> {
    let shard = Shard::open(from)?;
    let (prefix, chunks) = (shard.prefix(), chunks(shard.metadata()));
    let blocks: usize = chunks.iter().map(|chunk| chunk.planes).sum();
    let mut head = Vec::with_capacity(HEAD_BYTES);
    head.extend(MAGIC);
    head.extend(VERSION.to_le_bytes());
    head.extend(codec.number().to_le_bytes());
    let data = shard.metadata().data_len();
    [prefix.len(), data, blocks].into_iter().for_each(|number| head.extend((number as u64).to_le_bytes()));
    assert_eq!(head.len(), HASHED_HEAD_BYTES);
    let mut file = AtomicFile::create(to).map_err(ModelError::io("create", to))?;
    let failed = || ModelError::io("write", to);
    // Head and table are known at the end.
    let blank = vec![0; HEAD_BYTES + prefix.len() + blocks * ENTRY_BYTES];
    file.write_all(&blank).map_err(failed())?;
    let mut table = Vec::with_capacity(blocks * ENTRY_BYTES);
    let mut reader = shard.reader(0).map_err(ModelError::io("read", from))?;
    for chunks in chunks.chunks(current_num_threads()) {
        for block in compress_chunks(&mut reader, chunks, codec).map_err(ModelError::io("read", from))? {
            table.extend(xxh3_64(&block.bytes).to_le_bytes());
            table.extend((block.bytes.len() as u32).to_le_bytes());
            table.extend((block.raw as u32).to_le_bytes());
            file.write_all(&block.bytes).map_err(failed())?;
        }
    }
    let mut hash = Xxh3::new();
    [&head, prefix, &table].into_iter().for_each(|part| hash.update(part));
    head.extend(hash.digest().to_le_bytes());
    file.seek(SeekFrom::Start(0)).map_err(failed())?;
    [&head, prefix, &table].into_iter().try_for_each(|part| file.write_all(part)).map_err(failed())?;
    file.commit().map_err(failed())?;
    // A file that its reader refuses must not replace its source.
    Shard::open(to).map(|_| ())
}

/// Reads chunks and compresses them side by side.
fn compress_chunks(reader: &mut impl Read, chunks: &[Chunk], codec: Codec) -> std::io::Result<Vec<Packed>> {
    let mut read = Vec::with_capacity(chunks.len());
    for chunk in chunks {
        let mut bytes = vec![0; chunk.bytes];
        reader.read_exact(&mut bytes)?;
        read.push((bytes, chunk.planes));
    }
    let pack = |plane: Vec<u8>| {
        let (packed, raw) = (codec.compress(&plane), plane.len());
        Packed { bytes: if packed.len() < raw { packed } else { plane }, raw }
    };
    Ok(read.into_par_iter().flat_map_iter(|(bytes, planes)| split(&bytes, planes).into_iter().map(&pack)).collect())
}

fn decompress_file(from: &Path, to: &Path) -> Result<(), ModelError> {
    let shard = Shard::open(from)?;
    let mut file = AtomicFile::create(to).map_err(ModelError::io("create", to))?;
    file.write_all(shard.prefix()).map_err(ModelError::io("write", to))?;
    let mut reader = shard.reader(0).map_err(ModelError::io("read", from))?;
    let mut block = vec![0; CHUNK_BYTES];
    loop {
        let length = reader.read(&mut block).map_err(ModelError::io("read", from))?;
        if length == 0 {
            return file.commit().map_err(ModelError::io("write", to));
        }
        file.write_all(&block[..length]).map_err(ModelError::io("write", to))?;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs::{read, write};

    use safetensors::Dtype;
    use tempfile::{TempDir, tempdir};

    use super::*;
    use crate::checkpoint::{INDEX_FILE, TensorInfo, WEIGHTS_FILE, write_safetensors};

    /// Returns a folder with tensors of every element size, one of them larger than a chunk, in one shard or with an index.
    fn folder(sharded: bool) -> (TempDir, PathBuf) {
        let temp = tempdir().unwrap();
        let dir = temp.path().join("model");
        std::fs::create_dir(&dir).unwrap();
        let stored = [
            ("large", Dtype::BF16, vec![1500, 1601]),
            ("floats", Dtype::F32, vec![3, 7]),
            ("doubles", Dtype::F64, vec![5]),
            ("bytes", Dtype::U8, vec![11]),
            ("empty", Dtype::F16, vec![0, 4]),
        ];
        let infos = stored.map(|(name, dtype, shape)| (name.to_owned(), TensorInfo { dtype, shape }));
        let infos = BTreeMap::from(infos);
        let bytes = |name: &str| {
            let value = |at: usize| half::bf16::from_f32((at as f32 * 0.37).sin()).to_le_bytes();
            let all: Vec<u8> = (0..infos[name].byte_len().div_ceil(2)).flat_map(value).collect();
            Ok(all[..infos[name].byte_len()].to_vec())
        };
        let file = if sharded { "model-00001-of-00001.safetensors" } else { WEIGHTS_FILE };
        write_safetensors(&dir.join(file), &infos, bytes).unwrap();
        if sharded {
            let map: BTreeMap<_, _> = infos.keys().map(|name| (name.clone(), file)).collect();
            write(dir.join(INDEX_FILE), serde_json::json!({ "weight_map": map }).to_string()).unwrap();
        }
        write(dir.join("config.json"), "{}").unwrap();
        (temp, dir)
    }

    #[test]
    fn compression_gives_every_byte_back() {
        for (codec, sharded) in [(Codec::Zstd, false), (Codec::Lz4, true)] {
            let (temp, dir) = folder(sharded);
            let [packed, back] = ["packed", "back"].map(|name| temp.path().join(name));
            let report = compress_folder(&dir, &packed, codec).unwrap();
            assert!(report.files == 1 && report.written < report.read, "{report:?}");
            let [plain, read_packed] = [&dir, &packed].map(|dir| HfFolder::open(dir).unwrap());
            for name in plain.names() {
                assert!(plain.read(name).unwrap() == read_packed.read(name).unwrap(), "{name}");
            }
            decompress_folder(&packed, &back).unwrap();
            for entry in read_dir(&dir).unwrap() {
                let name = entry.unwrap().file_name();
                assert!(read(dir.join(&name)).unwrap() == read(back.join(&name)).unwrap(), "{name:?}");
            }
            assert_eq!(read_dir(&dir).unwrap().count(), read_dir(&back).unwrap().count());
        }
    }

    #[test]
    fn a_read_from_the_middle_of_a_tensor_gives_that_part() {
        let (temp, dir) = folder(false);
        let packed = temp.path().join("packed");
        compress_folder(&dir, &packed, Codec::Zstd).unwrap();
        let [plain, packed] =
            [dir.join(WEIGHTS_FILE), packed.join("model.safetensors.zst")].map(|path| Shard::open(&path).unwrap());
        let total = plain.metadata().data_len() as u64;
        for start in [0, 1, 4_194_303, 4_194_304, 4_194_305, total - 1, total] {
            let [expected, got] = [&plain, &packed].map(|shard| {
                let mut bytes = Vec::new();
                shard.reader(start).unwrap().read_to_end(&mut bytes).unwrap();
                bytes
            });
            assert!(expected == got, "from {start}");
        }
    }

    #[test]
    fn a_damaged_byte_is_found_wherever_it_is() {
        let (temp, dir) = folder(false);
        let packed = temp.path().join("packed");
        compress_folder(&dir, &packed, Codec::Lz4).unwrap();
        let path = packed.join("model.safetensors.lz4");
        let whole = read(&path).unwrap();
        for at in (0..400).chain((400..whole.len()).step_by(99_991)).chain([whole.len() - 1]) {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            write(&path, damaged).unwrap();
            let read = HfFolder::open(&packed)
                .and_then(|folder| folder.names().map(|name| folder.read(name)).collect::<Result<Vec<_>, _>>());
            assert!(read.is_err(), "byte {at}");
        }
        write(&path, &whole[..whole.len() - 1]).unwrap();
        assert!(HfFolder::open(&packed).unwrap_err().to_string().contains("by its own table"));
    }

    #[test]
    fn a_file_that_claims_more_than_it_has_is_refused() {
        let (temp, dir) = folder(false);
        let packed = temp.path().join("packed");
        compress_folder(&dir, &packed, Codec::Zstd).unwrap();
        let path = packed.join("model.safetensors.zst");
        let whole = read(&path).unwrap();
        let refusal = |at: usize, value: u64| {
            let mut bytes = whole.clone();
            bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
            write(&path, bytes).unwrap();
            HfFolder::open(&packed).unwrap_err().to_string()
        };
        assert!(refusal(24, 1 << 50).contains("do not compress like this"));
        assert!(refusal(24, 12345).contains("checksum"));
        assert!(refusal(16, 1 << 26).contains("longer than the file"));
        assert!(refusal(32, 1 << 40).contains("longer than the file"));
        assert!(refusal(32, u64::MAX).contains("longer than the file"));
        write(&path, zstd::bulk::compress(&whole, 1).unwrap()).unwrap();
        assert!(HfFolder::open(&packed).unwrap_err().to_string().contains("plain zstd stream"));
    }

    #[cfg(unix)]
    #[test]
    fn a_link_is_not_written_through() {
        let (temp, dir) = folder(false);
        let outside = temp.path().join("outside");
        std::fs::create_dir(&outside).unwrap();
        std::os::unix::fs::symlink(&outside, temp.path().join("packed")).unwrap();
        let result = compress_folder(&dir, &temp.path().join("packed"), Codec::Lz4);
        assert_eq!(read_dir(&outside).unwrap().count(), 0, "{result:?}");
    }
}
