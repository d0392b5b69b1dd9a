//! The decompression engine of Blackwell's data-center cards, for the LZ4 blocks of compressed checkpoints.
//!
//! The engine takes a batch of independent blocks that lie in device memory and writes them next to each other. [`places`] takes the
//! sizes in a checkpoint's table of blocks (docs/compressed-checkpoints.md), [`DecompressionEngine::descriptors`] makes what
//! `cuMemBatchDecompressAsync` reads of it, and [`Stream::decompress`] submits that.
//! Trade-off: written from the documentation and tested to the bytes of the descriptors; no card with such an engine has run it.

use std::ffi::{c_int, c_uint, c_void};

use crate::driver::Driver;
use crate::error::CudaError;
use crate::memory::DeviceBuffer;
use crate::stream::Stream;

/// `CU_DEVICE_ATTRIBUTE_MEM_DECOMPRESS_ALGORITHM_MASK`: the bindings of a CUDA before 12.8 do not have it.
const ALGORITHM_MASK: c_int = 136;
/// `CU_DEVICE_ATTRIBUTE_MEM_DECOMPRESS_MAXIMUM_LENGTH`.
const MAXIMUM_LENGTH: c_int = 137;
/// `CU_MEM_DECOMPRESS_ALGORITHM_LZ4`, a bit of the mask and the value in a descriptor; of CUDA 12.9.
const LZ4: c_uint = 4;

/// `CUmemDecompressParams`: one block. 64 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Descriptor {
    source_bytes: usize,
    target_bytes: usize,
    actual_bytes: *mut u32,
    source: *const c_void,
    target: *mut c_void,
    algorithm: c_uint,
    padding: [u8; 20],
}

/// Where a block is in two buffers: as it is stored, all blocks one after another, and in memory, the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockPlace {
    /// Where it begins as it is stored.
    pub stored_at: usize,
    /// Its bytes as it is stored.
    pub stored_bytes: usize,
    /// Where it begins in memory.
    pub at: usize,
    /// Its bytes in memory.
    pub bytes: usize,
}

impl BlockPlace {
    /// Whether it is compressed: a block of the same size is stored as it is, and is copied.
    pub fn is_compressed(&self) -> bool {
        self.stored_bytes < self.bytes
    }
}

/// The places of blocks of these sizes, stored and in memory, in the order of a checkpoint's table.
pub fn places(sizes: &[[u32; 2]]) -> Vec<BlockPlace> {
    let (mut stored_at, mut at) = (0, 0);
    let of = |&[stored, bytes]: &[u32; 2]| {
        let place = BlockPlace { stored_at, stored_bytes: stored as usize, at, bytes: bytes as usize };
        (stored_at, at) = (stored_at + place.stored_bytes, at + place.bytes);
        place
    };
    sizes.iter().map(of).collect()
}

/// A decompression engine that takes LZ4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecompressionEngine {
    /// Bytes in memory of the longest block that it takes.
    pub longest_bytes: usize,
}

impl DecompressionEngine {
    /// The engine of a device; `None` if it has none, has none for LZ4, or its driver cannot use it (before CUDA 12.9).
    ///
    /// # Errors
    /// [`CudaError::NoSuchDevice`], or errors of the driver.
    pub fn of(driver: &Driver, ordinal: usize) -> Result<Option<Self>, CudaError> {
        let device = driver.handle(ordinal)?;
        let Some(mask) = driver.attribute_if_known(ALGORITHM_MASK, device) else { return Ok(None) };
        let longest = driver.attribute_if_known(MAXIMUM_LENGTH, device).unwrap_or(0);
        Ok(Self::from_attributes(mask, longest).filter(|_| driver.batch_decompress().is_some()))
    }

    fn from_attributes(mask: c_int, longest: c_int) -> Option<Self> {
        let longest_bytes = usize::try_from(longest).ok().filter(|bytes| *bytes > 0)?;
        (mask & LZ4 as c_int != 0).then_some(Self { longest_bytes })
    }

    /// The descriptors of the blocks of `places` that are compressed. `source` holds all blocks as they are stored, `target` gets them, and
    /// `actual` gets the number of bytes of each descriptor's result, as u32.
    ///
    /// # Errors
    /// [`CudaError::Decompression`]: a block is longer than the engine takes, or a buffer is too short.
    pub fn descriptors(
        &self,
        places: &[BlockPlace],
        source: &DeviceBuffer,
        target: &DeviceBuffer,
        actual: &DeviceBuffer,
    ) -> Result<Vec<Descriptor>, CudaError> {
        let buffers = [source, target, actual].map(|buffer| (buffer.pointer::<u8>().address(), buffer.len_bytes()));
        self.descriptors_at(places, buffers)
    }

    /// [`Self::descriptors`] of the addresses and lengths of the buffers.
    fn descriptors_at(
        &self,
        places: &[BlockPlace],
        [source, target, actual]: [(u64, usize); 3],
    ) -> Result<Vec<Descriptor>, CudaError> {
        let refuse = |reason: String| Err(CudaError::Decompression { reason });
        let mut descriptors = Vec::new();
        for (index, place) in places.iter().enumerate().filter(|(_, place)| place.is_compressed()) {
            let BlockPlace { stored_at, stored_bytes, at, bytes } = *place;
            if bytes > self.longest_bytes {
                return refuse(format!("block {index} has {bytes} bytes, and the engine takes {}", self.longest_bytes));
            }
            let ends = [(stored_at + stored_bytes, source), (at + bytes, target), (4 * descriptors.len() + 4, actual)];
            if let Some((end, (_, length))) = ends.into_iter().find(|(end, (_, length))| end > length) {
                return refuse(format!("block {index} ends at {end} of a buffer of {length} bytes"));
            }
            descriptors.push(Descriptor {
                source_bytes: stored_bytes,
                target_bytes: bytes,
                actual_bytes: (actual.0 + 4 * descriptors.len() as u64) as *mut u32,
                source: (source.0 + stored_at as u64) as *const c_void,
                target: (target.0 + at as u64) as *mut c_void,
                algorithm: LZ4,
                padding: [0; 20],
            });
        }
        Ok(descriptors)
    }
}

impl Stream {
    /// Submits a batch to the decompression engine of this stream's device. A block that is damaged is an error of the stream, or has another
    /// number of bytes than the table says: compare them.
    ///
    /// # Safety
    /// The descriptors were made for an engine of this device. Until the work is done, their buffers stay allocated, the source is not
    /// written, and no other work accesses target and actual bytes.
    ///
    /// # Errors
    /// [`CudaError::Decompression`]: the driver has no such call. Errors of the driver.
    pub unsafe fn decompress(&self, descriptors: &mut [Descriptor]) -> Result<(), CudaError> {
        let driver = self.context().driver();
        let Some(call) = driver.batch_decompress() else {
            return Err(CudaError::Decompression { reason: "the driver is older than CUDA 12.8".to_owned() });
        };
        if descriptors.is_empty() {
            return Ok(());
        }
        let mut failed = usize::MAX;
        self.context().with_current(|| {
            // SAFETY: the descriptors are in the layout of cuda.h, and the index is valid for a write; addresses and lifetimes are the
            // caller's promise. Flags must be 0.
            let status =
                unsafe { call(descriptors.as_mut_ptr().cast(), descriptors.len(), 0, &mut failed, self.handle()) };
            driver.status("cuMemBatchDecompressAsync", status)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENGINE: DecompressionEngine = DecompressionEngine { longest_bytes: 4 << 20 };
    const BLOCKS: [[u32; 2]; 3] = [[100, 4 << 20], [4096, 4096], [7, 640]];
    const TARGET_BYTES: usize = (4 << 20) + 4096 + 640;

    #[test]
    fn blocks_of_a_table_lie_one_after_another_in_both_buffers() {
        let places = places(&BLOCKS);
        let of = |index: usize| {
            let BlockPlace { stored_at, stored_bytes, at, bytes } = places[index];
            [stored_at, stored_bytes, at, bytes]
        };
        assert_eq!(of(0), [0, 100, 0, 4 << 20]);
        assert_eq!(of(1), [100, 4096, 4 << 20, 4096]);
        assert_eq!(of(2), [4196, 7, (4 << 20) + 4096, 640]);
        assert_eq!(places.iter().map(BlockPlace::is_compressed).collect::<Vec<_>>(), [true, false, true]);
    }

    #[test]
    fn descriptors_have_the_bytes_of_the_documented_structure() {
        let buffers = [(0x7000_0000_0000, 4203), (0x7100_0000_0000, TARGET_BYTES), (0x7200_0000_0000, 8)];
        let descriptors = ENGINE.descriptors_at(&places(&BLOCKS), buffers).unwrap();
        assert_eq!((size_of::<Descriptor>(), align_of::<Descriptor>(), descriptors.len()), (64, 8, 2));
        // srcNumBytes, dstNumBytes, dstActBytes, src, dst, algo; then 20 bytes of zeros.
        let expected = [
            [100, 4 << 20, 0x7200_0000_0000_u64, 0x7000_0000_0000, 0x7100_0000_0000],
            [7, 640, 0x7200_0000_0004, 0x7000_0000_0000 + 4196, 0x7100_0000_0000 + (4 << 20) + 4096],
        ];
        for (descriptor, words) in descriptors.iter().zip(expected) {
            // SAFETY: the structure is plain data of 64 bytes, without gaps between its fields.
            let bytes: [u8; 64] = unsafe { std::mem::transmute(*descriptor) };
            let mut expected: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
            expected.extend(4_u32.to_ne_bytes());
            expected.extend([0; 20]);
            assert_eq!(bytes[..], expected);
        }
    }

    #[test]
    fn blocks_that_the_engine_does_not_take_and_buffers_that_are_short_are_refused() {
        let refusal = |engine: DecompressionEngine, lengths: [usize; 3]| {
            let buffers = lengths.map(|length| (0x1000, length));
            engine.descriptors_at(&places(&BLOCKS), buffers).unwrap_err().to_string()
        };
        let short = DecompressionEngine { longest_bytes: 1 << 20 };
        assert!(
            refusal(short, [4203, TARGET_BYTES, 8]).contains("block 0 has 4194304 bytes, and the engine takes 1048576")
        );
        assert!(refusal(ENGINE, [4202, TARGET_BYTES, 8]).contains("block 2 ends at 4203 of a buffer of 4202 bytes"));
        assert!(refusal(ENGINE, [4203, TARGET_BYTES - 1, 8]).contains("block 2 ends at"));
        assert!(refusal(ENGINE, [4203, TARGET_BYTES, 7]).contains("block 2 ends at 8 of a buffer of 7 bytes"));
    }

    #[test]
    fn the_device_attributes_decide_whether_there_is_an_engine_for_lz4() {
        let engine = |mask, longest| DecompressionEngine::from_attributes(mask, longest);
        assert_eq!(engine(7, 4 << 20), Some(ENGINE));
        assert_eq!(engine(4, 1), Some(DecompressionEngine { longest_bytes: 1 }));
        assert_eq!([engine(0, 4 << 20), engine(3, 4 << 20), engine(7, 0), engine(7, -1)], [None; 4]);
    }
}
