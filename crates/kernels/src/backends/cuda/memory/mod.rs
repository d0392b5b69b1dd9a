//! Memory on CUDA: pinned host buffers, uploads from them, deferred readbacks, and tensors that are read while steps go on (`alongside.rs`).
//!
//! An upload's buffer returns to the pool when its copy is done. Offloading to pinned host memory, prefetching and
//! restoring are operations of a section; `host_copies.rs` describes the streams and their order.

mod alongside;
pub(super) mod host_copies;
mod pinned;
pub(super) mod planned;
mod processors;
mod upload;

use burn_tensor::{DType, Int, Tensor, TensorData, TensorMetadata};
use cubecl::cuda::CudaDevice;
use firebrick_cuda::Driver;

use crate::backends::cuda::device::{Device, in_section};
use crate::backends::cuda::engine::{Cost, Cuda, MatrixView, check, device_count, payload, primitive, tensor, view};
use crate::memory::Elsewhere;
use crate::{HostBuffer, MemoryOps, Offloaded, Payload, Readback};
use host_copies::HostCopy;
use pinned::{Lent, shared};

impl MemoryOps for Cuda {
    const READS_LATER: bool = true;

    /// Returns a device by its number among those that this process sees. A launcher that shows each rank only its own
    /// device (SLURM's `--gpus-per-task`) makes that number 0.
    fn device_of(local_rank: usize) -> CudaDevice {
        CudaDevice::new(if device_count() == 1 { 0 } else { local_rank })
    }

    fn host_buffer(device: &Self::Device, bytes: usize) -> HostBuffer {
        let (context, pool) = shared(device);
        HostBuffer::new(check("allocating pinned memory", pool.lend(&context, bytes)))
    }

    fn upload<E>(
        buffers: impl IntoIterator<Item = Result<HostBuffer, E>>,
        shape: [usize; 2],
        dtype: DType,
        device: &Self::Device,
    ) -> Result<Tensor<Self, 2>, E> {
        in_section(device, |device| {
            let matrix = device.empty_matrix(shape[0], shape[1], dtype);
            let (bytes, mut filled) = (shape[0] * shape[1] * dtype.size(), 0);
            for buffer in buffers {
                let lent = buffer?.into_memory::<Lent>().expect("a buffer of this backend");
                let end = filled + lent.len();
                assert!(end <= bytes, "a tensor of shape {shape:?} in {dtype:?} has {bytes} bytes, and {end} came");
                device.upload(lent, matrix.address + filled as u64);
                filled = end;
            }
            assert_eq!(filled, bytes, "a tensor of shape {shape:?} in {dtype:?} has more bytes than came");
            Ok(tensor(matrix.tensor))
        })
    }

    fn offload(x: Payload<Self, 2>) -> Offloaded<Self> {
        let (x, is_codes) = primitive(x);
        let device = Device::of(&x.device);
        let copy = device.section(|| {
            let matrix = device.dense(device.view_of(x));
            check("copying to the host", device.copies.out(device.stream(), matrix))
        });
        Offloaded::elsewhere(OnHost { copy, is_codes })
    }

    fn slices<const D: usize>(x: Payload<Self, D>, ranges: &[(usize, usize)]) -> Vec<Payload<Self, D>> {
        let (x, is_codes) = primitive(x);
        let (device, dims) = (Device::of(&x.device), x.shape().dims::<D>());
        device.section(|| {
            let x = device.dense(device.view_of(x));
            // Distance in values between consecutive indices of an axis.
            let strides: Vec<usize> = (1..=D).map(|axis| dims[axis..].iter().product()).collect();
            let slice = |&(start, length): &(usize, usize)| {
                assert!(start + length <= dims[0], "{start}+{length} of {}", dims[0]);
                let mut shape = dims;
                shape[0] = length;
                payload(view(&x, start * strides[0], &shape, strides.clone()), is_codes)
            };
            ranges.iter().map(slice).collect()
        })
    }

    fn join_rows(parts: Vec<Tensor<Self, 2>>) -> Tensor<Self, 2> {
        let device = Device::of(&parts.first().expect("some expert has rows").device());
        device.section(|| tensor(device.join_rows(parts).tensor))
    }

    fn zeros(shape: [usize; 2], dtype: DType, device: &CudaDevice) -> Tensor<Self, 2> {
        in_section(device, |device| {
            let zeros = device.view_of(device.empty(shape, dtype));
            if dtype == DType::F32 {
                device.fill(zeros.block, 0.0)
            } else {
                device.fill_zero(zeros.block)
            }
            tensor(zeros.tensor)
        })
    }

    fn read_integers(x: Tensor<Self, 1, Int>) -> Vec<i32> {
        in_section(&x.device(), |device| {
            let x = device.int_matrix(x);
            check("reading numbers", device.copies.integers(device.stream(), &x))
        })
    }

    fn read_alongside(tensors: Vec<Payload<Self>>, arrived: impl FnMut(TensorData)) {
        alongside::read(tensors.into_iter().map(|tensor| primitive(tensor).0), arrived);
    }

    fn read_later(values: Vec<Tensor<Self, 1>>) -> Readback {
        let device = Device::of(&values[0].device());
        let copied = device.section(|| {
            let values = values.into_iter().map(|value| device.flat(value)).collect();
            check("copying numbers to the host", device.copies.numbers(device.stream(), values))
        });
        Readback::new(move || copied.wait())
    }
}

/// Keeps threads near the card of a rank (`processors.rs`).
pub(in crate::backends) fn stay_near(local_rank: usize) -> Option<String> {
    let driver = Driver::load().ok()?;
    let bus_id = driver.bus_id(Cuda::device_of(local_rank).index).ok()?;
    processors::stay_near(&bus_id).map(|done| done.to_string())
}

impl Device {
    fn join_rows(&self, parts: Vec<Tensor<Cuda, 2>>) -> MatrixView {
        let parts: Vec<MatrixView> = parts.into_iter().map(|part| self.matrix(part)).collect();
        let joined = self.empty_matrix(parts.iter().map(|part| part.rows).sum(), parts[0].width, parts[0].dtype);
        let mut start = 0;
        for part in &parts {
            self.copy_rows(part.block, joined.block.rows(start, part.rows));
            start += part.rows;
        }
        joined
    }
}

struct OnHost {
    copy: HostCopy,
    is_codes: bool,
}

impl Elsewhere<Cuda> for OnHost {
    fn to_data(&self) -> TensorData {
        self.copy.to_data()
    }

    fn prefetch(&mut self, device: &CudaDevice) {
        in_section(device, |device| start_back(device, &mut self.copy));
    }

    fn restore(self: Box<Self>, device: &CudaDevice) -> Payload<Cuda, 2> {
        let (device, Self { mut copy, is_codes }) = (Device::of(device), *self);
        device.section(|| {
            start_back(&device, &mut copy);
            let start = check("recording an event", device.mark());
            let wait = || device.stream().wait_for(&copy.done);
            check("waiting for a copy", device.traced("wait for a copy from the host", Cost::default(), wait));
            device.copies.waited([start, check("recording an event", device.mark())]);
            payload(device.copies.arrived(copy), is_codes)
        })
    }
}

fn start_back(device: &Device, copy: &mut HostCopy) {
    if copy.coming.is_none() {
        let [rows, width] = copy.shape;
        let new = device.empty_matrix(rows, width, copy.dtype);
        check("copying from the host", device.copies.back(device.stream(), copy, new));
    }
}
