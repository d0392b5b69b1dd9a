//! Compressed safetensors files, `X.safetensors.zst` and `X.safetensors.lz4`; docs/compressed-checkpoints.md describes the bytes.
//!
//! The data of a file is cut into chunks of at most 4 MiB of one tensor. The bytes of a chunk are sorted into planes (the first bytes of all
//! elements, then the second bytes, ..), and each plane is a separate block, compressed independently of all others or stored as it is. The exponents
//! of floats are then adjacent, which compresses well. Every size follows from the safetensors header, which is stored unchanged, so a block is
//! decompressed into a buffer of exactly its size and no file can request more.
//! Trade-off: a read that begins in the middle of a chunk decompresses its beginning too.

use std::fs::File;
use std::io::{Error as IoError, ErrorKind, Read, Result as IoResult, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use safetensors::tensor::Metadata;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// First bytes of a compressed file.
pub(crate) const MAGIC: [u8; 8] = *b"SAFETPLN";
/// The version of the layout.
pub(crate) const VERSION: u32 = 1;
/// Bytes before the safetensors header.
pub(crate) const HEAD_BYTES: usize = 48;
/// Bytes of the hashed part of them.
pub(crate) const HASHED_HEAD_BYTES: usize = 40;
/// Bytes of a block in the table.
pub(crate) const ENTRY_BYTES: usize = 16;
/// Maximum bytes of a chunk, a multiple of every element size: the block size of Blackwell's decompression engine.
pub(crate) const CHUNK_BYTES: usize = 4 << 20;
/// Largest ratio of claimed to actual size; above it a file is refused, because weights do not compress like this.
pub(crate) const MAX_RATIO: u64 = 256;
/// Sizes below which no ratio is refused.
const RATIO_FREE_BYTES: u64 = 16 << 20;
/// First bytes of a plain zstd stream.
const ZSTD_MAGIC: [u8; 4] = [0x28, 0xB5, 0x2F, 0xFD];
/// zstd's level: higher ones cost much more time and gain little on planes of weights.
const ZSTD_LEVEL: i32 = 3;

/// The compression of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Codec {
    /// Zstandard frames (RFC 8878): smaller.
    Zstd,
    /// LZ4 blocks without a frame: faster, and supported by decompression engines.
    Lz4,
}

impl Codec {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Zstd, Self::Lz4];

    /// Returns the file name extension after `.safetensors`, without the dot.
    pub fn extension(self) -> &'static str {
        match self {
            Self::Zstd => "zst",
            Self::Lz4 => "lz4",
        }
    }

    pub(crate) fn number(self) -> u32 {
        match self {
            Self::Zstd => 1,
            Self::Lz4 => 2,
        }
    }

    /// Returns the name of the compressed form of a file.
    pub(crate) fn path_of(self, path: &Path) -> PathBuf {
        let mut name = path.as_os_str().to_owned();
        name.push(".");
        name.push(self.extension());
        PathBuf::from(name)
    }

    pub(crate) fn compress(self, bytes: &[u8]) -> Vec<u8> {
        match self {
            Self::Zstd => zstd::bulk::compress(bytes, ZSTD_LEVEL).expect("zstd compresses any bytes in memory"),
            Self::Lz4 => lz4_flex::block::compress(bytes),
        }
    }

    /// Decompresses a block that must fill `out` exactly.
    fn decompress(self, bytes: &[u8], out: &mut [u8]) -> Result<(), String> {
        let length = match self {
            Self::Zstd => zstd::bulk::decompress_to_buffer(bytes, out).map_err(|error| error.to_string())?,
            Self::Lz4 => lz4_flex::block::decompress_into(bytes, out).map_err(|error| error.to_string())?,
        };
        if length == out.len() {
            return Ok(());
        }
        Err(format!("it decompresses to {length} bytes instead of {}", out.len()))
    }
}

/// Returns the file itself or the first of its compressed forms, whichever exists.
pub(crate) fn existing(path: &Path) -> Option<PathBuf> {
    let compressed = Codec::ALL.map(|codec| codec.path_of(path));
    [path.to_path_buf()].into_iter().chain(compressed).find(|path| path.is_file())
}

/// Returns the codec for the name of a file.
pub(crate) fn codec_of(path: &Path) -> Option<Codec> {
    let extension = path.extension()?;
    Codec::ALL.into_iter().find(|codec| extension == codec.extension())
}

/// A part of one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Chunk {
    /// Offset in the data of the safetensors file.
    pub(crate) start: u64,
    /// Its bytes, a multiple of `planes`.
    pub(crate) bytes: usize,
    /// Number of blocks: the bytes per element.
    pub(crate) planes: usize,
}

/// Lists the chunks of a file, in the order of its data. Depends on the safetensors header alone.
pub(crate) fn chunks(metadata: &Metadata) -> Vec<Chunk> {
    let mut tensors: Vec<_> = metadata.tensors().into_values().collect();
    tensors.sort_by_key(|info| info.data_offsets);
    let mut chunks = Vec::new();
    for info in tensors {
        let (mut start, end) = info.data_offsets;
        while start < end {
            let bytes = (end - start).min(CHUNK_BYTES);
            chunks.push(Chunk { start: start as u64, bytes, planes: planes(info.dtype) });
            start += bytes;
        }
    }
    chunks
}

/// Returns the bytes per element; 1 for elements of less than a byte.
fn planes(dtype: Dtype) -> usize {
    match dtype.bitsize() {
        bits @ (16 | 32 | 64) => bits / 8,
        _ => 1,
    }
}

/// Sorts the bytes of a chunk into planes.
pub(crate) fn split(chunk: &[u8], planes: usize) -> Vec<Vec<u8>> {
    (0..planes).map(|plane| chunk.iter().skip(plane).step_by(planes).copied().collect()).collect()
}

/// Puts the bytes of a plane back.
fn join(plane: &[u8], index: usize, planes: usize, chunk: &mut [u8]) {
    chunk.iter_mut().skip(index).step_by(planes).zip(plane).for_each(|(byte, from)| *byte = *from);
}

/// A block in the file.
#[derive(Debug)]
struct Block {
    /// XXH3-64 of its bytes in the file.
    hash: u64,
    /// Offset in the file.
    at: u64,
    /// Size in the file in bytes; as in memory if it is stored uncompressed.
    stored: usize,
}

/// A compressed file whose table has been read.
#[derive(Debug)]
pub(crate) struct Compressed {
    codec: Codec,
    chunks: Vec<Chunk>,
    /// Blocks of all chunks, plane by plane.
    blocks: Vec<Block>,
    /// The first block of each chunk.
    first_block: Vec<usize>,
}

/// The fixed bytes at the beginning of a compressed file.
pub(crate) struct Head {
    bytes: [u8; HEAD_BYTES],
    codec: Codec,
    /// Bytes of the safetensors file before its data.
    pub(crate) prefix: u64,
    data: u64,
    blocks: u64,
}

fn number(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

impl Head {
    /// Reads the head from a file of `length` bytes.
    ///
    /// # Errors
    /// The problem, as a clause about the file.
    pub(crate) fn read(file: &mut impl Read, codec: Codec, length: u64) -> Result<Self, String> {
        let mut bytes = [0; HEAD_BYTES];
        file.read_exact(&mut bytes).map_err(|_| format!("it is {length} bytes, too short for a header"))?;
        if bytes[..4] == ZSTD_MAGIC {
            return Err(
                "it is a plain zstd stream, of which single tensors cannot be read: decompress it with `zstd -d`; \
                        `firebrick compress` writes files that can be read"
                    .to_owned(),
            );
        }
        if bytes[..8] != MAGIC {
            return Err("it does not begin as a compressed safetensors file".to_owned());
        }
        let [version, coded] = [8, 12].map(|at| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes")));
        if version != VERSION || coded != codec.number() {
            let expected = codec.number();
            return Err(format!("its version is {version} and its codec {coded}; expected {VERSION} and {expected}"));
        }
        let [prefix, data, blocks] = [16, 24, 32].map(|at| number(&bytes, at));
        let claimed = prefix.saturating_add(data);
        if claimed > RATIO_FREE_BYTES && claimed / MAX_RATIO > length {
            return Err(format!("it claims to hold {claimed} bytes in {length}: weights do not compress like this"));
        }
        let table = blocks.checked_mul(ENTRY_BYTES as u64);
        if table
            .and_then(|table| table.checked_add(prefix)?.checked_add(HEAD_BYTES as u64))
            .is_none_or(|end| end > length)
        {
            return Err(format!(
                "its header of {prefix} bytes and its table of {blocks} blocks are longer than the file"
            ));
        }
        Ok(Self { bytes, codec, prefix, data, blocks })
    }

    /// Reads the table. `file` is at its beginning, `prefix` precedes it, and `metadata` is the prefix parsed.
    ///
    /// # Errors
    /// The problem, as a clause about the file.
    pub(crate) fn read_table(
        self,
        file: &mut impl Read,
        prefix: &[u8],
        metadata: &Metadata,
        length: u64,
    ) -> Result<Compressed, String> {
        let mut table = vec![0; self.blocks as usize * ENTRY_BYTES];
        file.read_exact(&mut table).map_err(|error| format!("its table cannot be read: {error}"))?;
        let mut hash = Xxh3::new();
        [&self.bytes[..HASHED_HEAD_BYTES], prefix, &table].into_iter().for_each(|part| hash.update(part));
        if hash.digest() != number(&self.bytes, HASHED_HEAD_BYTES) {
            return Err("its header or table is damaged: the checksum differs".to_owned());
        }
        if self.data != metadata.data_len() as u64 {
            let (data, expected) = (self.data, metadata.data_len());
            return Err(format!("it claims to hold {data} bytes of data, but its tensors take {expected}"));
        }
        let chunks = chunks(metadata);
        let blocks_expected: usize = chunks.iter().map(|chunk| chunk.planes).sum();
        if blocks_expected as u64 != self.blocks {
            return Err(format!("it has {} blocks, but its tensors take {blocks_expected}", self.blocks));
        }
        let mut at = (HEAD_BYTES + prefix.len() + table.len()) as u64;
        let (mut blocks, mut first_block) = (Vec::with_capacity(blocks_expected), Vec::with_capacity(chunks.len()));
        let mut entries = table.chunks_exact(ENTRY_BYTES);
        for chunk in &chunks {
            first_block.push(blocks.len());
            for entry in entries.by_ref().take(chunk.planes) {
                let [stored, raw] =
                    [8, 12].map(|at| u32::from_le_bytes(entry[at..at + 4].try_into().expect("four bytes")) as usize);
                let expected = chunk.bytes / chunk.planes;
                if raw != expected || stored > raw || stored == 0 {
                    let block = blocks.len();
                    return Err(format!("block {block} is {stored} bytes for {raw}, but its tensor takes {expected}"));
                }
                blocks.push(Block { hash: number(entry, 0), at, stored });
                at += stored as u64;
            }
        }
        if at != length {
            return Err(format!("it should be {at} bytes by its own table but is {length} bytes"));
        }
        Ok(Compressed { codec: self.codec, chunks, blocks, first_block })
    }
}

impl Compressed {
    /// Reads the data of the safetensors file from `start` on.
    pub(crate) fn reader(&self, file: File, start: u64) -> ChunkReader<'_> {
        let next = self.chunks.partition_point(|chunk| chunk.start + chunk.bytes as u64 <= start);
        let skip = self.chunks.get(next).map_or(0, |chunk| start - chunk.start);
        ChunkReader { source: self, file, next, chunk: Vec::new(), at: 0, skip: skip as usize }
    }
}

/// Data from some place on, chunk by chunk.
pub(crate) struct ChunkReader<'a> {
    source: &'a Compressed,
    file: File,
    next: usize,
    chunk: Vec<u8>,
    /// Bytes of the chunk that have been returned.
    at: usize,
    /// Bytes of the next chunk to skip.
    skip: usize,
}

impl ChunkReader<'_> {
    fn read_chunk(&mut self) -> IoResult<()> {
        let &Chunk { bytes, planes, .. } = &self.source.chunks[self.next];
        let first = self.source.first_block[self.next];
        self.chunk.resize(bytes, 0);
        let (mut stored, mut plane) = (Vec::new(), vec![0; bytes / planes]);
        self.file.seek(SeekFrom::Start(self.source.blocks[first].at))?;
        for (index, block) in self.source.blocks[first..first + planes].iter().enumerate() {
            stored.resize(block.stored, 0);
            self.file.read_exact(&mut stored)?;
            let damaged = |reason: String| {
                IoError::new(ErrorKind::InvalidData, format!("block {} is damaged: {reason}", first + index))
            };
            if xxh3_64(&stored) != block.hash {
                return Err(damaged("its checksum differs".to_owned()));
            }
            let plane = if block.stored == plane.len() {
                &stored
            } else {
                self.source.codec.decompress(&stored, &mut plane).map_err(damaged)?;
                &plane
            };
            join(plane, index, planes, &mut self.chunk);
        }
        (self.at, self.skip) = (std::mem::take(&mut self.skip), 0);
        self.next += 1;
        Ok(())
    }
}

impl Read for ChunkReader<'_> {
    fn read(&mut self, out: &mut [u8]) -> IoResult<usize> {
        if self.at == self.chunk.len() {
            if self.next == self.source.chunks.len() {
                return Ok(0);
            }
            self.read_chunk()?;
        }
        let length = out.len().min(self.chunk.len() - self.at);
        out[..length].copy_from_slice(&self.chunk[self.at..self.at + length]);
        self.at += length;
        Ok(length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn planes_join_to_the_chunk_that_they_were_split_from() {
        let chunk: Vec<u8> = (0..240).collect();
        for count in [1, 2, 4, 8] {
            let mut joined = vec![0; chunk.len()];
            for (index, plane) in split(&chunk, count).iter().enumerate() {
                join(plane, index, count, &mut joined);
            }
            assert_eq!(joined, chunk);
        }
        assert_eq!(split(&[1, 2, 3, 4], 2), [vec![1, 3], vec![2, 4]]);
    }

    #[test]
    fn a_block_of_another_size_is_refused() {
        for codec in Codec::ALL {
            let packed = codec.compress(&[7; 1000]);
            let mut exact = [0; 1000];
            codec.decompress(&packed, &mut exact).unwrap();
            assert_eq!(exact, [7; 1000]);
            assert!(codec.decompress(&packed, &mut [0; 999]).is_err(), "{codec:?}: a bomb");
            assert!(codec.decompress(&packed, &mut [0; 1001]).is_err(), "{codec:?}: cut short");
        }
    }
}
