//! Tensors that go elsewhere and come back, and buffers that are uploaded, bit for bit.
//!
//! Trade-off: values are compared, not where they were kept.

use burn_tensor::{DType, TensorData};

use crate::Kernels;
use crate::conformance::check::Check;

pub(crate) fn check<B: Kernels>(check: &mut Check<'_, B>) {
    offloaded(check);
    uploaded(check);
}

fn offloaded<B: Kernels>(check: &mut Check<'_, B>) {
    let shape = [check.case.tokens(), check.case.hidden_size];
    let tensors: Vec<_> = (0..5).map(|_| check.random(shape, 1.0)).collect();
    let (ours, expected): (Vec<_>, Vec<_>) = tensors.into_iter().unzip();
    let mut away: Vec<_> = ours.into_iter().map(B::offload).collect();
    let device = check.device;
    for expected in expected.into_iter().rev() {
        let offloaded = away.pop().expect("as many as were offloaded");
        if let Some(next) = away.last_mut() {
            B::prefetch(next, device);
        }
        check.compare("offload and restore", B::restore(offloaded, device), expected);
    }
}

fn uploaded<B: Kernels>(check: &mut Check<'_, B>) {
    let shape = [check.case.tokens(), check.case.hidden_size];
    for dtype in [DType::F32, check.case.dtype] {
        let (_, expected) = check.random_in(dtype, shape, 1.0);
        let data: TensorData = expected.to_data().convert_dtype(dtype);
        let mut buffer = B::host_buffer(check.device, data.as_bytes().len());
        buffer.copy_from_slice(data.as_bytes());
        check.compare("upload", B::upload(buffer, shape, dtype, check.device), expected);
    }
}
