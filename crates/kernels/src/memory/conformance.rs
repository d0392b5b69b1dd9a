//! Offloaded tensors and codes, uploaded buffers, and deferred readbacks, bit for bit.
//!
//! Trade-off: values are compared, not their location in the meantime.

use std::convert::Infallible;

use burn_tensor::{DType, Int, IntDType, Tensor, TensorData};

use crate::conformance::check::Check;
use crate::{DeviceTime, HostBuffer, Kernels, Payload};

pub(crate) fn check<B: Kernels>(check: &mut Check<'_, B>) {
    offloaded(check);
    offloaded_codes(check);
    uploaded(check);
    numbers(check);
}

/// Tests codes that are offloaded and restored twice, and read in between, like paged optimizer state.
fn offloaded_codes<B: Kernels>(check: &mut Check<'_, B>) {
    let (device, count) = (check.device, 1000);
    let dtype = DType::from(B::CODE_DTYPE);
    let codes = |item: usize| -> Vec<u8> { (0..count).map(|index| ((index + item * 31) % 251) as u8).collect() };
    let upload = |item| {
        let data = TensorData::new(codes(item), [1, count]).convert_dtype(dtype);
        Tensor::<B, 2, Int>::from_data(data, (device, dtype))
    };
    let host = |data: TensorData| data.convert::<u8>().to_vec::<u8>().expect("just converted to bytes");
    let mut away: Vec<_> = (0..5).map(|item| B::offload(Payload::Codes(upload(item)))).collect();
    for _ in 0..2 {
        let mut back = Vec::new();
        for (item, mut offloaded) in std::mem::take(&mut away).into_iter().enumerate() {
            offloaded.prefetch(device);
            if item % 2 == 0 {
                check.same("offload: a look at codes", host(offloaded.to_data()) == codes(item));
            }
            let restored = offloaded.restore(device).into_codes();
            check.same("restore: codes", host(restored.clone().cast(IntDType::I32).into_data()) == codes(item));
            back.push(restored);
        }
        away = back.into_iter().map(|codes| B::offload(Payload::Codes(codes))).collect();
    }
}

/// Tests that numbers read after later work was queued have the values of the time of the request.
fn numbers<B: Kernels>(check: &mut Check<'_, B>) {
    let device = check.device;
    let values: Vec<f32> = (0..40).map(|index| 0.5 + index as f32).collect();
    let tensor = |value: f32| Tensor::<B, 1>::from_floats([value], device);
    let requested: Vec<_> =
        values.iter().map(|&value| B::read_later(vec![tensor(value), tensor(value) * 2.0])).collect();
    let later = B::accumulate(tensor(1.0), tensor(2.0));
    let got: Vec<Vec<f32>> = requested.into_iter().map(|readback| readback.wait()).collect();
    check.same("read_later", got.iter().zip(&values).all(|(got, value)| *got == [*value, 2.0 * value]));
    check.same("read_later: work queued after it", B::read_later(vec![later]).wait() == [3.0]);
    let several = Tensor::<B, 1>::from_floats(&values[..3], device);
    check.same("read_later: several values", B::read_later(vec![several, tensor(7.0)]).wait() == [0.5, 1.5, 2.5, 7.0]);
    let waited = B::device_time(device, DeviceTime::RestoreWait).map(|time| time.wait());
    check.same("device_time", waited.is_none_or(|waited| waited.len() == 1 && waited[0] >= 0.0));
}

fn offloaded<B: Kernels>(check: &mut Check<'_, B>) {
    let shape = [check.case.tokens(), check.case.hidden_size];
    let tensors: Vec<_> = (0..5).map(|_| check.random(shape, 1.0)).collect();
    let (ours, expected): (Vec<_>, Vec<_>) = tensors.into_iter().unzip();
    let mut away: Vec<_> = ours.into_iter().map(|x| B::offload(Payload::Values(x))).collect();
    let device = check.device;
    for expected in expected.into_iter().rev() {
        let offloaded = away.pop().expect("as many as were offloaded");
        if let Some(next) = away.last_mut() {
            next.prefetch(device);
        }
        check.compare("offload and restore", offloaded.restore(device).into_values(), expected);
    }
}

fn uploaded<B: Kernels>(check: &mut Check<'_, B>) {
    let shape = [check.case.tokens(), check.case.hidden_size];
    for dtype in [DType::F32, check.case.dtype] {
        let (_, expected) = check.random_in(dtype, shape, 1.0);
        let data: TensorData = expected.to_data().convert_dtype(dtype);
        let bytes = data.as_bytes();
        for pieces in [vec![bytes.len()], vec![2, 0, bytes.len() / 2, bytes.len() - bytes.len() / 2 - 2]] {
            let mut left = bytes;
            let buffers = pieces.into_iter().map(|count| {
                let mut buffer = B::host_buffer(check.device, count);
                buffer.copy_from_slice(left.split_off(..count).expect("the pieces are all bytes"));
                Ok::<_, Infallible>(buffer)
            });
            let Ok(uploaded) = B::upload(buffers, shape, dtype, check.device);
            check.compare("upload", uploaded, expected.clone());
        }
        let refused = B::upload([Err::<HostBuffer, _>("unread")], shape, dtype, check.device);
        check.same("upload: an error", matches!(refused, Err("unread")));
    }
}
