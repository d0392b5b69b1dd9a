//! Memory and ordering on CUDA: sections and pauses, pinned host buffers, uploads from them, and deferred readbacks.
//!
//! An upload's buffer returns to the pool when its copy is done. Offloading to pinned host memory, prefetching and
//! restoring are operations of a section; `host_copies.rs` describes the streams and their order.
//! Trade-off: releasing memory waits for the device, and a tensor that was not prefetched is waited for in full.

pub(super) mod host_copies;
pub(super) mod planned;
mod processors;

use burn_tensor::backend::Backend;
use burn_tensor::{DType, Int, Tensor, TensorData};
use cubecl::cuda::CudaDevice;
use firebrick_cuda::Driver;

use crate::backends::cuda::engine::{
    Cost, Cuda, Engine, Lent, MatrixView, check, check_launch, device_count, engine, float, int_tensor, payload,
    shared, tensor, view,
};
use crate::memory::Elsewhere;
use crate::session::{DeviceTime, GemmAlgorithms, Hint, RunShape, Session};
use crate::{HostBuffer, MemoryOps, Offloaded, Payload, Readback};
use host_copies::HostCopy;

impl Session for Cuda {
    fn open(device: &CudaDevice, shape: &RunShape) {
        let engine = engine(device);
        engine.kept.allow(shape.kept_bytes);
        let blas = engine.blas.borrow();
        match shape.gemm_algorithms {
            GemmAlgorithms::Library => blas.use_proposed(),
            GemmAlgorithms::Kept => blas.use_measured(),
            GemmAlgorithms::Measured => blas.measure(),
        }
        engine.room.expect(shape.pass_bytes, shape.pass_tokens);
        shape.offloaded.iter().for_each(|&[count, bytes]| engine.copies.reserve(count, bytes));
    }

    fn hint(device: &CudaDevice, hint: Hint<'_, Self>) {
        let engine = engine(device);
        match hint {
            Hint::Pass { tokens } => make_room(&engine, tokens),
            Hint::Attention { spec, dtype, documents } => engine.prepare_attention(spec, dtype, documents),
            Hint::ForwardDone => engine.section(|| engine.copies.settle(engine.stream())),
            Hint::VaryingSizes(vary) => engine.rounds_sizes.set(vary),
        }
    }

    fn section<R>(device: &Self::Device, work: impl FnOnce() -> R) -> R {
        engine(device).section(work)
    }

    fn pause<R>(device: &Self::Device, work: impl FnOnce() -> R) -> R {
        engine(device).pause(work)
    }

    fn release_memory(device: &Self::Device) {
        let engine = engine(device);
        release_pools(&engine, device);
        engine.fp8_scales.clear();
        engine.kept.clear();
    }

    fn device_time(device: &CudaDevice, of: DeviceTime) -> Option<Readback> {
        let engine = engine(device);
        Some(match of {
            DeviceTime::RestoreWait => Readback::new(engine.copies.take_waits()),
            DeviceTime::RankWait => Readback::new(engine.collectives.take_waits()),
            DeviceTime::Collectives => Readback::new(engine.collectives.take_runs()),
        })
    }
}

impl MemoryOps for Cuda {
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
        let engine = engine(device);
        engine.section(|| {
            let matrix = engine.empty_matrix(shape[0], shape[1], dtype);
            let (bytes, mut filled) = (shape[0] * shape[1] * dtype.size(), 0);
            for buffer in buffers {
                let lent = buffer?.into_memory::<Lent>().expect("a buffer of this backend");
                let end = filled + lent.len();
                assert!(end <= bytes, "a tensor of shape {shape:?} in {dtype:?} has {bytes} bytes, and {end} came");
                engine.upload(lent, matrix.address + filled as u64);
                filled = end;
            }
            assert_eq!(filled, bytes, "a tensor of shape {shape:?} in {dtype:?} has more bytes than came");
            Ok(tensor(matrix.tensor))
        })
    }

    fn offload(x: Payload<Self, 2>) -> Offloaded<Self> {
        let (x, is_codes) = match x {
            Payload::Values(values) => (float(values), false),
            Payload::Codes(codes) => (codes.into_primitive(), true),
        };
        let engine = engine(&x.device);
        let copy = engine.section(|| {
            let matrix = engine.dense(engine.view_of(x));
            check("copying to the host", engine.copies.out(engine.stream(), matrix))
        });
        Offloaded::elsewhere(OnHost { copy, is_codes })
    }

    fn slices<const D: usize>(x: Tensor<Self, D>, ranges: &[(usize, usize)]) -> Vec<Tensor<Self, D>> {
        let (engine, dims) = (engine(&x.device()), x.dims());
        engine.section(|| {
            let x = engine.flat(x);
            // Distance in values between consecutive indices of an axis.
            let strides: Vec<usize> = (1..=D).map(|axis| dims[axis..].iter().product()).collect();
            let slice = |&(start, length): &(usize, usize)| {
                assert!(start + length <= dims[0], "{start}+{length} of {}", dims[0]);
                let mut shape = dims;
                shape[0] = length;
                tensor(view(&x, start * strides[0], &shape, strides.clone()))
            };
            ranges.iter().map(slice).collect()
        })
    }

    fn code_slices(x: Tensor<Self, 1, Int>, ranges: &[(usize, usize)]) -> Vec<Tensor<Self, 1, Int>> {
        let (engine, length) = (engine(&x.device()), x.dims()[0]);
        engine.section(|| {
            let x = engine.int_matrix(x);
            let slice = |&(start, count): &(usize, usize)| {
                assert!(start + count <= length, "{start}+{count} of {length}");
                int_tensor(view(&x, start, &[count], vec![1]))
            };
            ranges.iter().map(slice).collect()
        })
    }

    fn join_rows(parts: Vec<Tensor<Self, 2>>) -> Tensor<Self, 2> {
        let engine = engine(&parts.first().expect("some expert has rows").device());
        engine.section(|| tensor(engine.join_rows(parts).tensor))
    }

    fn zeros(shape: [usize; 2], device: &CudaDevice) -> Tensor<Self, 2> {
        let engine = engine(device);
        engine.section(|| {
            let zeros = engine.view_of(engine.empty(shape, DType::F32));
            engine.fill(zeros.block(), 0.0);
            tensor(zeros.tensor)
        })
    }

    fn read_integers(x: Tensor<Self, 1, Int>) -> Vec<i32> {
        let engine = engine(&x.device());
        engine.section(|| {
            let x = engine.int_matrix(x);
            check("reading numbers", engine.copies.integers(engine.stream(), &x))
        })
    }

    fn read_later(values: Vec<Tensor<Self, 1>>) -> Readback {
        let engine = engine(&values[0].device());
        let copied = engine.section(|| {
            let values = values.into_iter().map(|value| engine.flat(value)).collect();
            check("copying numbers to the host", engine.copies.numbers(engine.stream(), values))
        });
        Readback::new(copied)
    }
}

/// Keeps threads near the card of a rank (`processors.rs`).
pub(in crate::backends) fn stay_near(local_rank: usize) -> Option<String> {
    let driver = Driver::load().ok()?;
    let bus_id = driver.bus_id(Cuda::device_of(local_rank).index).ok()?;
    processors::stay_near(&bus_id).map(|done| done.to_string())
}

fn make_room(engine: &Engine, tokens: usize) {
    let Some([needed, pinned]) = engine.room.needed(tokens) else { return };
    let free = check("asking for free memory", engine.context().memory()).free_bytes;
    if free < needed || engine.copies.waiting_bytes() > pinned {
        // Kept weights are the same for passes of every size.
        release_pools(engine, engine.device());
    }
}

impl Engine {
    /// Puts matrices below each other.
    fn join_rows(&self, parts: Vec<Tensor<Cuda, 2>>) -> MatrixView {
        let parts: Vec<MatrixView> = parts.into_iter().map(|part| self.matrix(part)).collect();
        let joined = self.empty_matrix(parts.iter().map(|part| part.rows).sum(), parts[0].width, parts[0].dtype);
        let mut start = 0;
        for part in &parts {
            self.copy_rows(part.block(), joined.block().rows(start, part.rows));
            start += part.rows;
        }
        joined
    }

    /// Returns unused pool memory if the device has less than a section needs now, because CubeCL's queue thread panics if it cannot allocate.
    pub(super) fn make_room_for(&self, bytes: usize) {
        let free = || check("asking for free memory", self.context().memory()).free_bytes;
        if free() >= bytes as u64 {
            return;
        }
        check_launch(self.repeats.flush());
        check("waiting for the device", self.context().synchronize());
        self.repeats.release();
        self.scratch.release_unused();
        self.recycled.release_free();
        Cuda::memory_cleanup(self.device());
        self.wait_until_submitted();
        // Memory that CubeCL has freed returns to the driver once the device is done.
        check("waiting for the device", self.context().synchronize());
    }
}

/// Waits for the device, and frees buffers that wait for reuse at the same size.
fn release_pools(engine: &Engine, device: &CudaDevice) {
    engine.while_idle(|| {
        engine.repeats.release();
        engine.scratch.release();
        engine.copies.release();
        engine.recycled.release();
        engine.addresses.forget();
        Cuda::memory_cleanup(device);
        // The next section, of any thread, must begin after the memory is freed.
        engine.wait_until_submitted();
    });
}

/// A tensor in pinned host memory.
struct OnHost {
    copy: HostCopy,
    is_codes: bool,
}

impl Elsewhere<Cuda> for OnHost {
    fn to_data(&self) -> TensorData {
        self.copy.to_data()
    }

    fn prefetch(&mut self, device: &CudaDevice) {
        let engine = engine(device);
        engine.section(|| start_back(&engine, &mut self.copy));
    }

    fn restore(self: Box<Self>, device: &CudaDevice) -> Payload<Cuda, 2> {
        let (engine, Self { mut copy, is_codes }) = (engine(device), *self);
        engine.section(|| {
            start_back(&engine, &mut copy);
            let start = check("recording an event", engine.mark());
            let wait = || engine.stream().wait_for(&copy.done);
            check("waiting for a copy", engine.traced("wait for a copy from the host", Cost::default(), wait));
            engine.copies.waited((start, check("recording an event", engine.mark())));
            payload(engine.copies.arrived(copy), is_codes)
        })
    }
}

/// Starts the copy back, unless it has started.
fn start_back(engine: &Engine, copy: &mut HostCopy) {
    if !copy.is_coming() {
        let [rows, width] = copy.shape;
        let new = engine.empty_matrix(rows, width, copy.dtype);
        check("copying from the host", engine.copies.back(engine.stream(), copy, new));
    }
}
