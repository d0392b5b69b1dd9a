//! Tensors read ahead by threads, piece by piece, in the order in which one consumer takes them.
//!
//! Readers fill the buffers that CUDA copies from, so the read itself is the only copy on the host there; other backends join the pieces of
//! a tensor. An unquantized tensor of any size is read by all readers, and goes to the device while its later pieces are read; a quantized
//! weight is one piece. What is ready or being read is bounded in bytes; a piece above the bound is read alone. Weights whose codes turn out
//! not to be kept (NVFP4 with a negative scale) take more than was counted for them. Readers also hash what they read.
//! Trade-off: nothing is read after a piece that cannot be read: the consumer gets the tensors before it, then the error.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, Scope};

use burn_tensor::DType;
use firebrick_kernels::{HostBuffer, padded_codes};
use firebrick_precision::{HostScales, QuantFormat};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use super::quantized::QuantizedWeight;
use super::shard::Shard;
use super::{HfFolder, Located, convert};
use crate::error::ModelError;

/// A tensor to be read.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Request {
    /// Its name in the folder.
    pub(crate) name: String,
    /// Its shape by config.json.
    pub(crate) shape: Vec<usize>,
    /// F32, BF16 or F16; `None`: as it is stored, or F32 for a quantized weight.
    pub(crate) dtype: Option<DType>,
    /// The format in which the codes of a quantized weight are kept, if the folder stores it so.
    pub(crate) format: Option<QuantFormat>,
}

/// How far, with how many threads and in what pieces to read ahead.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Threads that read.
    pub(crate) readers: usize,
    /// Bytes that lie ready or are being read; a single piece may be larger.
    pub(crate) bytes: usize,
    /// Bytes of a piece of an unquantized tensor. Hashes depend on it, and on nothing else here.
    pub(crate) piece: usize,
}

/// A tensor's finite elements, row by row: pieces on the host, in order, some of which may not have been read yet.
#[derive(Debug)]
pub(crate) struct Values<'a> {
    /// The number format of the elements: F32, BF16 or F16.
    pub(crate) dtype: DType,
    source: Source<'a>,
}

#[derive(Debug)]
enum Source<'a> {
    /// All elements; `None` once they were taken.
    Here(Option<HostBuffer>),
    /// Pieces that threads read: those that were not taken yet, and whether they may be codes.
    Ahead { shared: &'a Shared<'a>, left: Range<usize>, keeps: bool },
}

/// What a tensor was read as.
#[derive(Debug)]
pub(crate) enum CodesOrValues<'a> {
    /// Codes in the requested format, with the codes of zero after them that fill the last block, and their scales.
    Codes { codes: HostBuffer, scales: HostScales },
    /// Elements.
    Values(Values<'a>),
}

/// A tensor to be read, and the format it is converted to.
struct Job<'a> {
    name: &'a str,
    located: Located<'a>,
    shape: &'a [usize],
    dtype: DType,
    /// The format in which codes are kept.
    keeps: Option<QuantFormat>,
    /// Its pieces among those of all tensors.
    pieces: Range<usize>,
}

/// A part of a tensor that one reader reads: these bytes, elements from `first` on. A quantized weight is one piece.
struct Piece {
    job: usize,
    first: usize,
    bytes: usize,
}

/// What a reader has read.
struct Ready {
    /// Elements, or codes with the codes of zero after them that fill the last block.
    buffer: HostBuffer,
    /// The scales of kept codes.
    scales: Option<HostScales>,
    /// XXH3 of the elements in their format, or of codes and scales.
    hash: u64,
}

/// What readers and consumer share.
struct Shared<'a> {
    jobs: Vec<Job<'a>>,
    pieces: Vec<Piece>,
    limits: Limits,
    allocate: &'a (dyn Fn(usize) -> HostBuffer + Sync),
    state: Mutex<State>,
    /// Readers wait here for room.
    room: Condvar,
    /// The consumer waits here for a piece.
    arrival: Condvar,
}

impl std::fmt::Debug for Shared<'_> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Shared({} pieces of {} tensors)", self.pieces.len(), self.jobs.len())
    }
}

#[derive(Default)]
struct State {
    /// The next piece to be claimed. Claims are in order, so every earlier one is ready, being read or taken.
    next: usize,
    /// Bytes claimed and not yet taken.
    ahead: usize,
    ready: BTreeMap<usize, Result<Ready, ModelError>>,
    /// Hashes of the pieces that were taken.
    hashes: Vec<u64>,
    /// No piece is claimed any more.
    closed: bool,
    /// A reader panicked.
    broken: bool,
}

/// The consumer's end. When it is dropped, readers finish the pieces that they are at and end.
pub(crate) struct ReadAhead<'a> {
    shared: &'a Shared<'a>,
    taken: usize,
}

/// Runs `work` while threads read the requested tensors ahead of it; when this returns, they have ended.
///
/// # Errors
/// A tensor that is not there, in another shape, or in a format that is no weight's: before anything is read.
pub(crate) fn read_ahead<R>(
    folder: &HfFolder,
    requests: &[Request],
    limits: Limits,
    allocate: &(dyn Fn(usize) -> HostBuffer + Sync),
    work: impl FnOnce(&mut ReadAhead<'_>) -> R,
) -> Result<R, ModelError> {
    let (mut jobs, mut pieces) = (Vec::with_capacity(requests.len()), Vec::new());
    for (index, request) in requests.iter().enumerate() {
        let job = folder.job(request, pieces.len())?;
        pieces.extend(job.pieces(index, limits.piece));
        jobs.push(Job { pieces: job.pieces.start..pieces.len(), ..job });
    }
    let (state, room, arrival) = (Mutex::default(), Condvar::new(), Condvar::new());
    let shared = Shared { jobs, pieces, limits, allocate, state, room, arrival };
    Ok(thread::scope(|scope| {
        // Made before the first reader: should one fail to start, dropping this ends those that did.
        let mut ahead = ReadAhead { shared: &shared, taken: 0 };
        shared.start(scope);
        work(&mut ahead)
    }))
}

impl HfFolder {
    /// A request, with the first of its pieces.
    fn job<'a>(&'a self, request: &'a Request, first_piece: usize) -> Result<Job<'a>, ModelError> {
        let located = self.locate_shaped(&request.name, &request.shape)?;
        let (stored, keeps) = match &located {
            Located::Plain(shard, info) => {
                let unsupported = || ModelError::UnsupportedDtype {
                    name: request.name.clone(),
                    path: shard.path().to_path_buf(),
                    got: format!("{:?}", info.dtype),
                };
                (convert::device_dtype(info.dtype).ok_or_else(unsupported)?, None)
            }
            Located::Quantized(weight, _) => {
                (DType::F32, weight.format().filter(|format| request.format == Some(*format)))
            }
        };
        let (dtype, pieces) = (request.dtype.unwrap_or(stored), first_piece..first_piece);
        Ok(Job { name: &request.name, located, shape: &request.shape, dtype, keeps, pieces })
    }
}

impl Job<'_> {
    fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// The parts that readers claim; `index` is this job's.
    fn pieces(&self, index: usize, piece_bytes: usize) -> impl Iterator<Item = Piece> {
        let (all, size) = (self.elements(), self.dtype.size());
        let kept_bytes = self.keeps.map(|format| format.bytes(self.shape));
        let per_piece = match self.located {
            Located::Plain(..) => (piece_bytes / size).max(1),
            Located::Quantized(..) => all.max(1),
        };
        // A tensor without elements is one piece, too.
        (0..all.max(1)).step_by(per_piece).map(move |first| Piece {
            job: index,
            first,
            bytes: kept_bytes.unwrap_or(per_piece.min(all - first) * size),
        })
    }

    /// A block whose scale is not a finite number, or a value that the requested format does not have.
    fn not_finite(&self, weight: &QuantizedWeight, shards: &[Shard], index: usize, value: f32) -> ModelError {
        ModelError::NotFiniteWeight {
            name: self.name.to_owned(),
            path: weight.path(shards).to_path_buf(),
            index,
            value,
            format: format!("{:?}", self.dtype),
        }
    }
}

impl<'a> ReadAhead<'a> {
    /// The next tensor in the order of the requests. Its pieces are to be taken before the next tensor is.
    ///
    /// # Panics
    /// If `name` is not the next tensor's: the consumer made the requests.
    pub(crate) fn take(&mut self, name: &str) -> Values<'a> {
        let Some(job) = self.shared.jobs.get(self.taken).filter(|job| job.name == name) else {
            panic!("tensors are taken in the order in which they were requested, so not {name} now")
        };
        self.taken += 1;
        Values {
            dtype: job.dtype,
            source: Source::Ahead { shared: self.shared, left: job.pieces.clone(), keeps: job.keeps.is_some() },
        }
    }

    /// Hash of names and contents of all tensors, each counted once. Does not depend on the order in which pieces were read.
    ///
    /// # Panics
    /// If a piece was not taken.
    pub(crate) fn hash(&self) -> u64 {
        let (state, mut hash, mut seen) = (self.shared.lock(), Xxh3::new(), BTreeSet::new());
        for job in self.shared.jobs.iter().filter(|job| seen.insert(job.name)) {
            let of_tensor = match &state.hashes[job.pieces.clone()] {
                &[of_piece] => of_piece,
                of_pieces => xxh3_64(&of_pieces.iter().flat_map(|hash| hash.to_le_bytes()).collect::<Vec<_>>()),
            };
            hash.update(job.name.as_bytes());
            hash.update(&of_tensor.to_le_bytes());
        }
        hash.digest()
    }
}

impl Drop for ReadAhead<'_> {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.room.notify_all();
    }
}

impl<'a> Values<'a> {
    /// Codes, where the folder stores those that were requested. Waits for them.
    ///
    /// # Errors
    /// They could not be read, or a scale is not finite.
    pub(crate) fn into_codes_or_values(mut self) -> Result<CodesOrValues<'a>, ModelError> {
        if !matches!(self.source, Source::Ahead { keeps: true, .. }) {
            return Ok(CodesOrValues::Values(self));
        }
        let Ready { buffer, scales, .. } = self.next_ready().expect("values are taken once")?;
        Ok(match scales {
            Some(scales) => CodesOrValues::Codes { codes: buffer, scales },
            None => CodesOrValues::Values(Values::here(buffer, self.dtype)),
        })
    }

    /// Elements in this format that are on the host.
    pub(crate) fn here(buffer: HostBuffer, dtype: DType) -> Self {
        Self { dtype, source: Source::Here(Some(buffer)) }
    }

    /// All elements in one buffer.
    ///
    /// # Errors
    /// They could not be read, or one is not finite.
    pub(crate) fn into_buffer(mut self, allocate: &dyn Fn(usize) -> HostBuffer) -> Result<HostBuffer, ModelError> {
        let bytes = match &self.source {
            Source::Ahead { shared, left, .. } if left.len() > 1 => {
                shared.pieces[left.clone()].iter().map(|piece| piece.bytes).sum()
            }
            _ => return self.next().expect("values are taken once"),
        };
        let mut all = allocate(bytes);
        self.read_into(&mut all)?;
        Ok(all)
    }

    /// Writes all elements to the beginning of `out`, and returns the number of their bytes.
    ///
    /// # Errors
    /// They could not be read, or one is not finite.
    ///
    /// # Panics
    /// If `out` has too little room.
    pub(crate) fn read_into(self, out: &mut [u8]) -> Result<usize, ModelError> {
        let mut filled = 0;
        for piece in self {
            let piece = piece?;
            out[filled..][..piece.len()].copy_from_slice(&piece);
            filled += piece.len();
        }
        Ok(filled)
    }

    /// Reads the tensor without a use for it.
    ///
    /// # Errors
    /// It could not be read.
    pub(crate) fn skip(mut self) -> Result<(), ModelError> {
        while let Some(ready) = self.next_ready() {
            drop(ready?);
        }
        Ok(())
    }

    fn next_ready(&mut self) -> Option<Result<Ready, ModelError>> {
        match &mut self.source {
            Source::Here(buffer) => buffer.take().map(|buffer| Ok(Ready { buffer, scales: None, hash: 0 })),
            Source::Ahead { shared, left, .. } => left.next().map(|piece| shared.wait_for(piece)),
        }
    }
}

/// The pieces of the elements, in order.
impl Iterator for Values<'_> {
    type Item = Result<HostBuffer, ModelError>;

    fn next(&mut self) -> Option<Self::Item> {
        Some(self.next_ready()?.map(|ready| {
            assert!(ready.scales.is_none(), "what may be codes is taken by into_codes_or_values");
            ready.buffer
        }))
    }
}

/// Notifies the consumer when a reader panics, so that it does not wait for its piece.
struct Watch<'a>(&'a Shared<'a>);

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            let mut state = self.0.lock();
            (state.broken, state.closed) = (true, true);
            self.0.arrival.notify_all();
            self.0.room.notify_all();
        }
    }
}

impl<'a> Shared<'a> {
    fn start<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) {
        for reader in 0..self.limits.readers.clamp(1, self.pieces.len().max(1)) {
            let builder = thread::Builder::new().name(format!("weights {reader}"));
            builder.spawn_scoped(scope, || self.read()).expect("the system can start a few threads");
        }
    }

    /// The consumer waits for the piece `index`, the next one that it has not taken.
    fn wait_for(&self, index: usize) -> Result<Ready, ModelError> {
        let mut state = self.lock();
        assert_eq!(index, state.hashes.len(), "tensors are taken whole, in the order in which they were requested");
        let ready = loop {
            assert!(!state.broken, "a thread that reads weights panicked; its message is above");
            if let Some(ready) = state.ready.remove(&index) {
                break ready?;
            }
            state = self.arrival.wait(state).unwrap_or_else(PoisonError::into_inner);
        };
        state.ahead -= self.pieces[index].bytes;
        state.hashes.push(ready.hash);
        self.room.notify_all();
        Ok(ready)
    }

    /// One reader.
    fn read(&self) {
        let _watch = Watch(self);
        while let Some(index) = self.claim() {
            let ready = self.read_piece(&self.pieces[index]);
            let mut state = self.lock();
            state.closed |= ready.is_err();
            state.ready.insert(index, ready);
            self.arrival.notify_one();
            if state.closed {
                self.room.notify_all();
            }
        }
    }

    /// The next piece, once there is room for it; `None` when there is nothing more to read.
    fn claim(&self) -> Option<usize> {
        let mut state = self.lock();
        loop {
            let index = state.next;
            let bytes = self.pieces.get(index).filter(|_| !state.closed)?.bytes;
            // With nothing ahead, the consumer may be waiting for just this one.
            if state.ahead == 0 || state.ahead + bytes <= self.limits.bytes {
                (state.next, state.ahead) = (index + 1, state.ahead + bytes);
                return Some(index);
            }
            state = self.room.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn read_piece(&self, piece: &Piece) -> Result<Ready, ModelError> {
        let job = &self.jobs[piece.job];
        match &job.located {
            Located::Plain(shard, _) => {
                let mut buffer = self.buffer(piece.bytes);
                let hash = shard.read_elements(job.name, piece.first, job.dtype, &mut buffer)?;
                Ok(Ready { buffer, scales: None, hash })
            }
            Located::Quantized(weight, shards) => match job.keeps {
                Some(format) => match self.read_codes(job, format, weight, shards)? {
                    Some(codes) => Ok(codes),
                    None => self.read_dequantized(job, weight, shards),
                },
                None => self.read_dequantized(job, weight, shards),
            },
        }
    }

    fn buffer(&self, bytes: usize) -> HostBuffer {
        let buffer = (self.allocate)(bytes);
        assert_eq!(buffer.len(), bytes, "a host buffer has the requested size");
        buffer
    }

    /// Codes and scales; `None` where they are not those of the format.
    fn read_codes(
        &self,
        job: &Job<'_>,
        format: QuantFormat,
        weight: &QuantizedWeight,
        shards: &[Shard],
    ) -> Result<Option<Ready>, ModelError> {
        let (bytes, fill) = padded_codes(format, job.shape);
        let mut buffer = self.buffer(bytes);
        let (codes, padding) = buffer.split_at_mut(weight.code_bytes(shards));
        padding.fill(fill);
        let Some(block) = weight.read_codes(shards, codes)? else { return Ok(None) };
        let scales = block.values();
        if let Some(index) = scales.iter().position(|scale| !scale.is_finite()) {
            let first = index * format.block_size(job.shape[1]);
            return Err(job.not_finite(weight, shards, first, scales[index]));
        }
        let mut hash = Xxh3::new();
        hash.update(codes);
        hash.update(&scales.iter().flat_map(|scale| scale.to_le_bytes()).collect::<Vec<_>>());
        Ok(Some(Ready { hash: hash.digest(), buffer, scales: Some(HostScales { block }) }))
    }

    /// A quantized weight in the format of the request.
    fn read_dequantized(&self, job: &Job<'_>, weight: &QuantizedWeight, shards: &[Shard]) -> Result<Ready, ModelError> {
        let values = weight.values(shards)?;
        let bytes = convert::from_f32(&values, f32::to_le_bytes);
        let mut buffer = self.buffer(job.elements() * job.dtype.size());
        match job.dtype {
            DType::F32 => buffer.copy_from_slice(&bytes),
            dtype => convert::convert(DType::F32, &bytes, dtype, &mut buffer),
        }
        if let Some(index) = convert::first_not_finite(&buffer, job.dtype) {
            return Err(job.not_finite(weight, shards, index, values[index]));
        }
        let hash = xxh3_64(&buffer);
        Ok(Ready { buffer, scales: None, hash })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic between two assignments is not possible, so what a panicking thread leaves is whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs::OpenOptions;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::path::PathBuf;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use firebrick_kernels::MemoryOps;
    use firebrick_kernels::backends::Flex;
    use half::{bf16, f16};
    use safetensors::Dtype;
    use tempfile::{TempDir, tempdir};

    use super::*;
    use crate::weights::{TensorInfo, WEIGHTS_FILE, write_safetensors};

    const NARROW: Limits = Limits { readers: 3, bytes: 4_000, piece: 400 };
    const WIDE: Limits = Limits { readers: 8, bytes: 1 << 30, piece: 1 << 20 };

    fn buffer(bytes: usize) -> HostBuffer {
        Flex::host_buffer(&Default::default(), bytes)
    }

    fn encode(values: &[f32], dtype: Dtype) -> Vec<u8> {
        match dtype {
            Dtype::F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
            Dtype::BF16 => values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect(),
            _ => values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes()).collect(),
        }
    }

    /// Numbers of the tensor `index` that every format rounds its own way.
    fn values(index: usize, len: usize) -> Vec<f32> {
        (0..len).map(|i| (i as f32 * 0.37 + index as f32).sin()).collect()
    }

    /// A folder of tensors `t000`, `t001`, ..., of these lengths; `damage` may change their values.
    fn folder(lengths: &[usize], dtype: Dtype, damage: impl Fn(usize, &mut Vec<f32>)) -> (TempDir, PathBuf) {
        let temp = tempdir().unwrap();
        let path = temp.path().join(WEIGHTS_FILE);
        let infos = lengths.iter().enumerate();
        let infos = infos.map(|(i, &len)| (format!("t{i:03}"), TensorInfo { dtype, shape: vec![len] }));
        let bytes = |name: &str| {
            let index: usize = name[1..].parse().unwrap();
            let mut values = values(index, lengths[index]);
            damage(index, &mut values);
            Ok(encode(&values, dtype))
        };
        write_safetensors(&path, &infos.collect::<BTreeMap<_, _>>(), &BTreeMap::new(), bytes).unwrap();
        (temp, path)
    }

    fn requests(lengths: &[usize], dtype: Option<DType>) -> Vec<Request> {
        let request =
            |(i, &len): (usize, &usize)| Request { name: format!("t{i:03}"), shape: vec![len], dtype, format: None };
        lengths.iter().enumerate().map(request).collect()
    }

    fn read_all(folder: &HfFolder, requests: &[Request], limits: Limits) -> Result<Vec<Vec<u8>>, ModelError> {
        read_ahead(folder, requests, limits, &buffer, |ahead| {
            requests.iter().map(|request| Ok(ahead.take(&request.name).into_buffer(&buffer)?.to_vec())).collect()
        })?
    }

    #[test]
    fn any_number_of_readers_and_any_look_ahead_read_the_same_bytes() {
        let lengths = [5, 1, 64, 1000, 3, 700_001, 8, 0, 17];
        for stored in [Dtype::F32, Dtype::BF16, Dtype::F16] {
            let (temp, _) = folder(&lengths, stored, |_, _| ());
            let folder = HfFolder::open(temp.path()).unwrap();
            let requested = [(None, stored), (Some(DType::F32), Dtype::F32), (Some(DType::BF16), Dtype::BF16)];
            for (dtype, format) in requested.into_iter().chain([(Some(DType::F16), Dtype::F16)]) {
                let requests = requests(&lengths, dtype);
                // Through f32, which holds what is stored, then to the requested format.
                let expected: Vec<_> = lengths
                    .iter()
                    .enumerate()
                    .map(|(i, &len)| encode(&folder.read_f32(&format!("t{i:03}"), &[len]).unwrap(), format))
                    .collect();
                for (readers, bytes) in [(1, 1 << 30), (1, 1), (8, 1 << 30), (8, 1), (8, 100_000)] {
                    for piece in [10_002, 1 << 30] {
                        let limits = Limits { readers, bytes, piece };
                        let read = read_all(&folder, &requests, limits).unwrap();
                        assert!(read == expected, "{stored:?} as {dtype:?}, {limits:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_nan_is_refused_by_tensor_and_place_after_the_tensors_before_it() {
        let lengths = [40, 600_000, 40, 40];
        for (bad, dtype, limits) in [
            (f32::NAN, None, NARROW),
            (f32::INFINITY, Some(DType::F32), Limits { readers: 1, ..WIDE }),
            (f32::NEG_INFINITY, Some(DType::F16), Limits { bytes: 1_000_000, piece: 30_000, ..WIDE }),
        ] {
            let (temp, path) = folder(&lengths, Dtype::BF16, |index, values| {
                if index == 1 {
                    values[580_007] = bad;
                    values[599_999] = bad;
                }
            });
            let (folder, requests) = (HfFolder::open(temp.path()).unwrap(), requests(&lengths, dtype));
            let (before, error) = read_ahead(&folder, &requests, limits, &buffer, |ahead| {
                (ahead.take("t000").skip(), ahead.take("t001").skip().unwrap_err())
            })
            .unwrap();
            before.unwrap();
            let message = error.to_string();
            let place = format!("value 580007 of `t001` in `{}` is {bad:e}", path.display());
            assert!(message.contains(&place) && matches!(error, ModelError::NotFiniteWeight { .. }), "{message}");
        }
    }

    #[test]
    fn a_value_too_large_for_the_requested_format_is_refused_as_it_is_stored() {
        let (temp, _) = folder(&[9], Dtype::F32, |_, values| values[4] = 65536.0);
        let folder = HfFolder::open(temp.path()).unwrap();
        let message = read_all(&folder, &requests(&[9], Some(DType::F16)), NARROW).unwrap_err().to_string();
        assert!(message.contains("value 4 of `t000`") && message.contains("6.5536e4"), "{message}");
        assert!(message.contains("no finite number in F16"), "{message}");
        read_all(&folder, &requests(&[9], Some(DType::BF16)), NARROW).unwrap();
    }

    #[test]
    fn a_read_that_fails_in_the_middle_names_file_and_tensor() {
        let lengths = [100; 20];
        for limits in [NARROW, Limits { readers: 1, bytes: 1, piece: 60 }, WIDE] {
            let (temp, path) = folder(&lengths, Dtype::F32, |_, _| ());
            let (folder, requests) = (HfFolder::open(temp.path()).unwrap(), requests(&lengths, None));
            // Cut inside the twelfth of 20 tensors of 400 bytes, once the header has been read.
            let length = path.metadata().unwrap().len();
            OpenOptions::new().write(true).open(&path).unwrap().set_len(length - 8 * 400 - 7).unwrap();
            let mut taken = 0;
            let error = read_ahead(&folder, &requests, limits, &buffer, |ahead| {
                requests.iter().find_map(|request| ahead.take(&request.name).skip().map(|()| taken += 1).err())
            })
            .unwrap()
            .unwrap();
            let message = error.to_string();
            assert_eq!(taken, 11);
            assert!(message.contains("`t011`") && message.contains(&path.display().to_string()), "{message}");
        }
    }

    #[test]
    fn a_dropped_loader_joins_its_threads_before_they_have_read_everything() {
        let (lengths, started) = ([100; 50], AtomicUsize::new(0));
        let (temp, _) = folder(&lengths, Dtype::F32, |_, _| ());
        let (folder, requests) = (HfFolder::open(temp.path()).unwrap(), requests(&lengths, None));
        let allocate = |bytes| {
            started.fetch_add(1, Ordering::SeqCst);
            buffer(bytes)
        };
        read_ahead(&folder, &requests, NARROW, &allocate, |ahead| ahead.take("t000").skip()).unwrap().unwrap();
        let read = started.load(Ordering::SeqCst);
        // One taken, and ten of 400 bytes each that fit ahead.
        assert!((1..=11).contains(&read), "{read} of 50 tensors were read");
        thread::sleep(Duration::from_millis(30));
        assert_eq!(started.load(Ordering::SeqCst), read, "a reader outlived the loader");
    }

    #[test]
    fn what_lies_ahead_stays_within_the_bound() {
        let (lengths, started) = ([100; 50], AtomicUsize::new(0));
        let (temp, _) = folder(&lengths, Dtype::F32, |_, _| ());
        let (folder, requests) = (HfFolder::open(temp.path()).unwrap(), requests(&lengths, None));
        let allocate = |bytes| {
            started.fetch_add(1, Ordering::SeqCst);
            buffer(bytes)
        };
        let halves = Limits { piece: 200, ..NARROW };
        read_ahead(&folder, &requests, halves, &allocate, |ahead| {
            for (taken, request) in requests.iter().enumerate() {
                thread::sleep(Duration::from_millis(1));
                let read = started.load(Ordering::SeqCst);
                assert!(read <= 2 * taken + 20, "{read} pieces read, {taken} tensors of two pieces taken");
                ahead.take(&request.name).skip().unwrap();
            }
        })
        .unwrap();
        assert_eq!(started.load(Ordering::SeqCst), 100);
    }

    #[test]
    fn the_hash_depends_on_contents_and_pieces_and_not_on_readers_or_repeats() {
        let lengths = [40, 700, 3];
        let hash = |damaged: usize, limits: Limits, again: bool| {
            let (temp, _) = folder(&lengths, Dtype::F32, |index, values| values[2] += (index == damaged) as u8 as f32);
            let (folder, mut requests) = (HfFolder::open(temp.path()).unwrap(), requests(&lengths, None));
            requests.extend(again.then(|| requests[1].clone()));
            read_ahead(&folder, &requests, limits, &buffer, |ahead| {
                requests.iter().for_each(|request| ahead.take(&request.name).skip().unwrap());
                ahead.hash()
            })
            .unwrap()
        };
        let expected = hash(9, NARROW, false);
        assert_eq!(hash(9, Limits { readers: 1, bytes: 1, ..NARROW }, true), expected);
        for index in 0..3 {
            assert_ne!(hash(index, NARROW, false), expected, "tensor {index}");
        }
        assert_ne!(hash(9, Limits { piece: 800, ..NARROW }, false), expected);

        // Checkpoints have this number: tensors of one piece by their bytes, others by the hashes of their pieces.
        let mut bytes = Vec::new();
        for (index, &len) in lengths.iter().enumerate() {
            let stored = encode(&values(index, len), Dtype::F32);
            let pieces: Vec<u8> = stored.chunks(400).flat_map(|piece| xxh3_64(piece).to_le_bytes()).collect();
            let of_tensor = if pieces.len() == 8 { xxh3_64(&stored) } else { xxh3_64(&pieces) };
            bytes.extend_from_slice(format!("t{index:03}").as_bytes());
            bytes.extend(of_tensor.to_le_bytes());
        }
        assert_eq!(xxh3_64(&bytes), expected);
    }

    #[test]
    #[should_panic(expected = "tensors are taken whole")]
    fn a_tensor_that_is_not_taken_whole_is_a_mistake() {
        let (temp, _) = folder(&[300, 4], Dtype::F32, |_, _| ());
        let (folder, requests) = (HfFolder::open(temp.path()).unwrap(), requests(&[300, 4], None));
        let _ = read_ahead(&folder, &requests, NARROW, &buffer, |ahead| {
            ahead.take("t000").next().unwrap().unwrap();
            ahead.take("t001").skip()
        });
    }

    #[test]
    fn a_panic_on_either_side_ends_the_other() {
        let lengths = [100; 50];
        let (temp, _) = folder(&lengths, Dtype::F32, |_, _| ());
        let (folder, requests) = (HfFolder::open(temp.path()).unwrap(), requests(&lengths, None));
        let started = AtomicUsize::new(0);
        let fails = |bytes| {
            assert!(started.fetch_add(1, Ordering::SeqCst) != 5, "no memory for a sixth tensor");
            buffer(bytes)
        };
        let reader = || {
            read_ahead(&folder, &requests, NARROW, &fails, |ahead| {
                requests.iter().for_each(|request| ahead.take(&request.name).skip().unwrap());
            })
        };
        assert!(catch_unwind(AssertUnwindSafe(reader)).is_err());
        let consumer = || read_ahead(&folder, &requests, NARROW, &buffer, |ahead| drop(ahead.take("t007")));
        assert!(catch_unwind(AssertUnwindSafe(consumer)).is_err(), "t007 is not the first tensor");
    }

    #[test]
    fn what_cannot_be_a_weight_is_refused_before_anything_is_read() {
        let temp = tempdir().unwrap();
        let infos = [("t000", Dtype::F32), ("t001", Dtype::I64)]
            .map(|(name, dtype)| (name.to_owned(), TensorInfo { dtype, shape: vec![4] }));
        let bytes = |name: &str| Ok(vec![0; if name == "t000" { 16 } else { 32 }]);
        write_safetensors(&temp.path().join(WEIGHTS_FILE), &BTreeMap::from(infos), &BTreeMap::new(), bytes).unwrap();
        let folder = HfFolder::open(temp.path()).unwrap();
        let refused = |lengths: &[usize]| {
            let never = |_| -> HostBuffer { panic!("nothing is read") };
            read_ahead(&folder, &requests(lengths, None), NARROW, &never, |_| ()).unwrap_err()
        };
        assert!(matches!(refused(&[4, 4]), ModelError::UnsupportedDtype { name, .. } if name == "t001"));
        assert!(matches!(refused(&[5]), ModelError::WrongShape { .. }));
    }
}
