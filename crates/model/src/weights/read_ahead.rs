//! Tensors read ahead by threads, in the order in which one consumer takes them.
//!
//! Readers fill the buffers that the device copies from, so the read itself is the only copy on the host. What is ready or being read
//! is bounded in bytes; a tensor above the bound is read alone, by all readers together. Readers also hash what they read.
//! Trade-off: nothing is read after a tensor that cannot be read: the consumer gets the tensors before it, then the error.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, Scope};

use burn_tensor::DType;
use firebrick_kernels::HostBuffer;
use firebrick_precision::{QuantFormat, QuantizedTensor};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use super::quantized::{Content, QuantizedWeight};
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

/// A tensor's finite elements, row by row.
#[derive(Debug)]
pub(crate) struct Values {
    /// The elements; empty where codes are kept.
    pub(crate) buffer: HostBuffer,
    /// Their number format: F32, BF16 or F16.
    pub(crate) dtype: DType,
    /// Codes and scales in the requested format, where the folder stores them.
    pub(crate) kept: Option<QuantizedTensor>,
    /// XXH3 of the elements in that format, or of codes and scales.
    pub(crate) hash: u64,
}

/// How far and with how many threads to read ahead.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Threads that read.
    pub(crate) readers: usize,
    /// Bytes that lie ready or are being read; a single tensor may be larger.
    pub(crate) bytes: usize,
}

/// Where a reader finds a tensor, and the format it converts to.
struct Job<'a> {
    name: &'a str,
    located: Located<'a>,
    elements: usize,
    dtype: DType,
    /// The format in which codes are kept.
    keeps: Option<QuantFormat>,
}

impl Job<'_> {
    fn bytes(&self) -> usize {
        match self.keeps {
            Some(format) => format.bytes(self.located.shape()),
            None => self.elements * self.dtype.size(),
        }
    }
}

/// What readers and consumer share.
struct Shared<'a> {
    jobs: Vec<Job<'a>>,
    limits: Limits,
    allocate: &'a (dyn Fn(usize) -> HostBuffer + Sync),
    state: Mutex<State>,
    /// Readers wait here for room.
    room: Condvar,
    /// The consumer waits here for a tensor.
    arrival: Condvar,
}

#[derive(Default)]
struct State {
    /// The next job to be claimed. Claims are in order, so every earlier one is ready, being read or taken.
    next: usize,
    /// Bytes claimed and not yet taken.
    ahead: usize,
    ready: BTreeMap<usize, Result<Values, ModelError>>,
    /// No job is claimed any more.
    closed: bool,
    /// A reader panicked.
    broken: bool,
}

/// The consumer's end. When it is dropped, readers finish the tensor that they are at and end.
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
    let jobs = requests.iter().map(|request| folder.job(request)).collect::<Result<_, _>>()?;
    let (state, room, arrival) = (Mutex::default(), Condvar::new(), Condvar::new());
    let shared = Shared { jobs, limits, allocate, state, room, arrival };
    Ok(thread::scope(|scope| {
        // Made before the first reader: should one fail to start, dropping this ends those that did.
        let mut ahead = ReadAhead { shared: &shared, taken: 0 };
        shared.start(scope);
        work(&mut ahead)
    }))
}

impl HfFolder {
    fn job<'a>(&'a self, request: &'a Request) -> Result<Job<'a>, ModelError> {
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
        let elements = request.shape.iter().product();
        Ok(Job { name: &request.name, located, elements, dtype: request.dtype.unwrap_or(stored), keeps })
    }
}

impl ReadAhead<'_> {
    /// The next tensor in the order of the requests.
    ///
    /// # Errors
    /// It could not be read, or holds a value that is not finite.
    ///
    /// # Panics
    /// If `name` is not the next tensor's: the consumer made the requests; or if a reader panicked.
    pub(crate) fn take(&mut self, name: &str) -> Result<Values, ModelError> {
        let expected = self.shared.jobs.get(self.taken).map(|job| job.name);
        assert_eq!(expected, Some(name), "tensors are taken in the order in which they were requested");
        let mut state = self.shared.lock();
        let values = loop {
            assert!(!state.broken, "a thread that reads weights panicked; its message is above");
            if let Some(values) = state.ready.remove(&self.taken) {
                break values;
            }
            state = self.shared.arrival.wait(state).unwrap_or_else(PoisonError::into_inner);
        };
        state.ahead -= self.shared.jobs[self.taken].bytes();
        self.taken += 1;
        self.shared.room.notify_all();
        values
    }
}

impl Drop for ReadAhead<'_> {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.room.notify_all();
    }
}

/// Notifies the consumer when a reader panics, so that it does not wait for its tensor.
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
        for reader in 0..self.limits.readers.clamp(1, self.jobs.len().max(1)) {
            let builder = thread::Builder::new().name(format!("weights {reader}"));
            builder.spawn_scoped(scope, || self.read()).expect("the system can start a few threads");
        }
    }

    /// One reader.
    fn read(&self) {
        let _watch = Watch(self);
        while let Some(index) = self.claim() {
            let values = self.read_tensor(&self.jobs[index]);
            let mut state = self.lock();
            state.closed |= values.is_err();
            state.ready.insert(index, values);
            self.arrival.notify_one();
            if state.closed {
                self.room.notify_all();
            }
        }
    }

    /// The next job, once there is room for it; `None` when there is nothing more to read.
    fn claim(&self) -> Option<usize> {
        let mut state = self.lock();
        loop {
            let index = state.next;
            let bytes = self.jobs.get(index).filter(|_| !state.closed)?.bytes();
            // With nothing ahead, the consumer may be waiting for just this one.
            if state.ahead == 0 || state.ahead + bytes <= self.limits.bytes {
                (state.next, state.ahead) = (index + 1, state.ahead + bytes);
                return Some(index);
            }
            state = self.room.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn read_tensor(&self, job: &Job<'_>) -> Result<Values, ModelError> {
        match &job.located {
            Located::Plain(shard, _) => self.read_plain(job, shard),
            Located::Quantized(weight, shards) => self.read_quantized(job, weight, shards),
        }
    }

    fn buffer(&self, bytes: usize) -> HostBuffer {
        let buffer = (self.allocate)(bytes);
        assert_eq!(buffer.len(), bytes, "a host buffer has the requested size");
        buffer
    }

    fn read_plain(&self, job: &Job<'_>, shard: &Shard) -> Result<Values, ModelError> {
        let mut buffer = self.buffer(job.bytes());
        let share = self.share(job);
        if share >= job.elements {
            shard.read_elements(job.name, 0, job.dtype, &mut buffer)?;
        } else {
            let shares = buffer.chunks_mut(share * job.dtype.size()).enumerate();
            let read = |(index, out)| move || shard.read_elements(job.name, index * share, job.dtype, out);
            thread::scope(|scope| {
                let readers: Vec<_> = shares.map(|share| scope.spawn(read(share))).collect();
                // In order, so that of several errors the first in the tensor is reported.
                readers.into_iter().try_for_each(|reader| reader.join().expect("reading returns its errors"))
            })?;
        }
        let hash = xxh3_64(&buffer);
        Ok(Values { buffer, dtype: job.dtype, kept: None, hash })
    }

    /// Codes that are kept, or values in the format of the request.
    fn read_quantized(&self, job: &Job<'_>, weight: &QuantizedWeight, shards: &[Shard]) -> Result<Values, ModelError> {
        let not_finite = |index: usize, value: f32| ModelError::NotFiniteWeight {
            name: job.name.to_owned(),
            path: weight.path(shards).to_path_buf(),
            index,
            value,
            format: format!("{:?}", job.dtype),
        };
        let values = match weight.read(shards)? {
            Content::Codes(codes) if job.keeps == Some(codes.format) => {
                let scales = codes.scales.block.values();
                if let Some(block) = scales.iter().position(|scale| !scale.is_finite()) {
                    return Err(not_finite(block * codes.format.block_size(job.located.shape()[1]), scales[block]));
                }
                let mut hash = Xxh3::new();
                hash.update(&codes.codes);
                scales.iter().for_each(|scale| hash.update(&scale.to_le_bytes()));
                let (buffer, hash) = (self.buffer(0), hash.digest());
                return Ok(Values { buffer, dtype: job.dtype, kept: Some(codes), hash });
            }
            Content::Codes(codes) => codes.dequantize(),
            Content::Values(values) => values,
        };
        let bytes = convert::from_f32(&values, f32::to_le_bytes);
        let mut buffer = self.buffer(job.elements * job.dtype.size());
        match job.dtype {
            DType::F32 => buffer.copy_from_slice(&bytes),
            dtype => convert::convert(DType::F32, &bytes, dtype, &mut buffer),
        }
        if let Some(index) = convert::first_not_finite(&buffer, job.dtype) {
            return Err(not_finite(index, values[index]));
        }
        let hash = xxh3_64(&buffer);
        Ok(Values { buffer, dtype: job.dtype, kept: None, hash })
    }

    /// Elements that one thread reads of a tensor: all of it, unless it takes so much of the room that other readers have
    /// nothing to do meanwhile.
    fn share(&self, job: &Job<'_>) -> usize {
        let readers = self.limits.readers.max(1);
        let parts = (job.bytes() / (self.limits.bytes / readers).max(1)).clamp(1, readers);
        job.elements.div_ceil(parts).max(1)
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

    const NARROW: Limits = Limits { readers: 3, bytes: 4_000 };

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
            requests.iter().map(|request| Ok(ahead.take(&request.name)?.buffer.to_vec())).collect()
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
                    let read = read_all(&folder, &requests, Limits { readers, bytes }).unwrap();
                    assert!(read == expected, "{stored:?} as {dtype:?}, {readers} readers, {bytes} bytes ahead");
                }
            }
        }
    }

    #[test]
    fn a_nan_is_refused_by_tensor_and_place_after_the_tensors_before_it() {
        let lengths = [40, 600_000, 40, 40];
        for (bad, dtype, limits) in [
            (f32::NAN, None, NARROW),
            (f32::INFINITY, Some(DType::F32), Limits { readers: 1, bytes: 1 << 30 }),
            (f32::NEG_INFINITY, Some(DType::F16), Limits { readers: 8, bytes: 1_000_000 }),
        ] {
            let (temp, path) = folder(&lengths, Dtype::BF16, |index, values| {
                if index == 1 {
                    values[580_007] = bad;
                    values[599_999] = bad;
                }
            });
            let (folder, requests) = (HfFolder::open(temp.path()).unwrap(), requests(&lengths, dtype));
            let (before, error) = read_ahead(&folder, &requests, limits, &buffer, |ahead| {
                (ahead.take("t000").map(|_| ()), ahead.take("t001").unwrap_err())
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
        for limits in [NARROW, Limits { readers: 1, bytes: 1 }, Limits { readers: 8, bytes: 1 << 30 }] {
            let (temp, path) = folder(&lengths, Dtype::F32, |_, _| ());
            let (folder, requests) = (HfFolder::open(temp.path()).unwrap(), requests(&lengths, None));
            // Cut inside the twelfth of 20 tensors of 400 bytes, once the header has been read.
            let length = path.metadata().unwrap().len();
            OpenOptions::new().write(true).open(&path).unwrap().set_len(length - 8 * 400 - 7).unwrap();
            let mut taken = 0;
            let error = read_ahead(&folder, &requests, limits, &buffer, |ahead| {
                requests.iter().find_map(|request| ahead.take(&request.name).map(|_| taken += 1).err())
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
        read_ahead(&folder, &requests, NARROW, &allocate, |ahead| ahead.take("t000").map(|_| ())).unwrap().unwrap();
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
        read_ahead(&folder, &requests, NARROW, &allocate, |ahead| {
            for (taken, request) in requests.iter().enumerate() {
                thread::sleep(Duration::from_millis(1));
                let read = started.load(Ordering::SeqCst);
                assert!(read <= taken + 10, "{read} tensors read, {taken} taken");
                ahead.take(&request.name).unwrap();
            }
        })
        .unwrap();
        assert_eq!(started.load(Ordering::SeqCst), 50);
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
                requests.iter().for_each(|request| drop(ahead.take(&request.name).unwrap()));
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
