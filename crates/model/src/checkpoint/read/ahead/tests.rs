//! Tests that any number of readers, look-ahead and piece size reads the same bytes within the bound, and reports the folder's first error.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use burn_tensor::DType;
use firebrick_kernels::backends::Flex;
use firebrick_kernels::{HostBuffer, MemoryOps};
use safetensors::Dtype;
use tempfile::{TempDir, tempdir};

use super::*;
use crate::checkpoint::{TensorInfo, WEIGHTS_FILE, write_safetensors};
use crate::test_config::encode;

const NARROW: Limits = Limits { readers: 3, bytes: 4_000, piece: 400 };
const WIDE: Limits = Limits { readers: 8, bytes: 1 << 30, piece: 1 << 20 };

fn buffer(bytes: usize) -> HostBuffer {
    Flex::host_buffer(&Default::default(), bytes)
}

/// Counts the buffers that are requested.
fn counting(started: &AtomicUsize) -> impl Fn(usize) -> HostBuffer + Sync {
    |bytes| {
        started.fetch_add(1, Ordering::SeqCst);
        buffer(bytes)
    }
}

/// Returns values of the tensor `index` that each format rounds differently.
fn values(index: usize, len: usize) -> Vec<f32> {
    (0..len).map(|i| (i as f32 * 0.37 + index as f32).sin()).collect()
}

/// Creates a folder with tensors `t000`, `t001`, ..., of these lengths; `damage` may change their values.
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
    write_safetensors(&path, &infos.collect::<BTreeMap<_, _>>(), bytes).unwrap();
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
fn readers_and_look_ahead_change_no_byte() {
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
fn a_nan_is_refused_by_tensor_and_place() {
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
fn a_value_too_large_for_a_format_is_refused() {
    let (temp, _) = folder(&[9], Dtype::F32, |_, values| values[4] = 65536.0);
    let folder = HfFolder::open(temp.path()).unwrap();
    let message = read_all(&folder, &requests(&[9], Some(DType::F16)), NARROW).unwrap_err().to_string();
    assert!(message.contains("value 4 of `t000`") && message.contains("6.5536e4"), "{message}");
    assert!(message.contains("no finite number in F16"), "{message}");
    read_all(&folder, &requests(&[9], Some(DType::BF16)), NARROW).unwrap();
}

#[test]
fn a_failed_read_names_file_and_tensor() {
    let lengths = [100; 20];
    for limits in [NARROW, Limits { readers: 1, bytes: 1, piece: 60 }, WIDE] {
        let (temp, path) = folder(&lengths, Dtype::F32, |_, _| ());
        let (folder, requests) = (HfFolder::open(temp.path()).unwrap(), requests(&lengths, None));
        // Cut inside the twelfth of 20 tensors of 400 bytes, once the header has been read.
        let length = path.metadata().unwrap().len();
        OpenOptions::new().write(true).open(&path).unwrap().set_len(length - 8 * 400 - 7).unwrap();
        let mut taken = 0;
        let error = read_ahead(&folder, &requests, limits, &buffer, |ahead| {
            requests.iter().find_map(|request| ahead.take(&request.name).skip().map(|_| taken += 1).err())
        })
        .unwrap()
        .unwrap();
        let message = error.to_string();
        assert_eq!(taken, 11);
        assert!(message.contains("`t011`") && message.contains(&path.display().to_string()), "{message}");
    }
}

#[test]
fn a_dropped_loader_joins_its_threads() {
    let (lengths, started) = ([100; 50], AtomicUsize::new(0));
    let (temp, _) = folder(&lengths, Dtype::F32, |_, _| ());
    let (folder, requests) = (HfFolder::open(temp.path()).unwrap(), requests(&lengths, None));
    let allocate = counting(&started);
    read_ahead(&folder, &requests, NARROW, &allocate, |ahead| ahead.take("t000").skip()).unwrap().unwrap();
    let read = started.load(Ordering::SeqCst);
    // One was taken, and ten of 400 bytes each fit ahead.
    assert!((1..=11).contains(&read), "{read} of 50 tensors were read");
    thread::sleep(Duration::from_millis(30));
    assert_eq!(started.load(Ordering::SeqCst), read, "a reader outlived the loader");
}

#[test]
fn what_lies_ahead_stays_within_the_bound() {
    let (lengths, started) = ([100; 50], AtomicUsize::new(0));
    let (temp, _) = folder(&lengths, Dtype::F32, |_, _| ());
    let (folder, requests) = (HfFolder::open(temp.path()).unwrap(), requests(&lengths, None));
    let allocate = counting(&started);
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
fn the_hash_is_that_of_contents_and_pieces() {
    let lengths = [40, 700, 3];
    let hash = |damaged: usize, limits: Limits, again: bool| {
        let (temp, _) = folder(&lengths, Dtype::F32, |index, values| values[2] += (index == damaged) as u8 as f32);
        let (folder, mut requests) = (HfFolder::open(temp.path()).unwrap(), requests(&lengths, None));
        requests.extend(again.then(|| requests[1].clone()));
        read_ahead(&folder, &requests, limits, &buffer, |ahead| {
            for request in &requests {
                ahead.take(&request.name).skip().unwrap();
            }
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

    // Checkpoints store this number: tensors of one piece by their bytes, others by the hashes of their pieces.
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
            for request in &requests {
                ahead.take(&request.name).skip().unwrap();
            }
        })
    };
    assert!(catch_unwind(AssertUnwindSafe(reader)).is_err());
    let consumer = || read_ahead(&folder, &requests, NARROW, &buffer, |ahead| drop(ahead.take("t007")));
    assert!(catch_unwind(AssertUnwindSafe(consumer)).is_err(), "t007 is not the first tensor");
}

#[test]
fn what_cannot_be_a_weight_is_never_read() {
    let temp = tempdir().unwrap();
    let infos = [("t000", Dtype::F32), ("t001", Dtype::I64)]
        .map(|(name, dtype)| (name.to_owned(), TensorInfo { dtype, shape: vec![4] }));
    let bytes = |name: &str| Ok(vec![0; if name == "t000" { 16 } else { 32 }]);
    write_safetensors(&temp.path().join(WEIGHTS_FILE), &BTreeMap::from(infos), bytes).unwrap();
    let folder = HfFolder::open(temp.path()).unwrap();
    let refused = |lengths: &[usize]| {
        let never = |_| -> HostBuffer { panic!("nothing is read") };
        read_ahead(&folder, &requests(lengths, None), NARROW, &never, |_| ()).unwrap_err()
    };
    assert!(matches!(refused(&[4, 4]), ModelError::UnsupportedDtype { name, .. } if name == "t001"));
    assert!(matches!(refused(&[5]), ModelError::WrongShape { .. }));
}
