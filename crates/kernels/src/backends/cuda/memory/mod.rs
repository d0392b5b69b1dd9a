//! Memory and ordering on CUDA: sections and pauses, pinned host buffers, uploads from them, and numbers that are read later.
//!
//! An upload's buffer returns to the pool when its copy is done.
//! Tensors that wait in pinned host memory are operations of a section: out, on their way back, and back; `host_copies.rs` has the
//! streams and their order.
//! Trade-off: releasing memory waits for the device, and a tensor that was not prefetched is waited for in full.

pub(super) mod host_copies;
pub(super) mod planned;
mod processors;

use burn_tensor::backend::Backend;
use burn_tensor::{DType, Int, Tensor};
use cubecl::cuda::CudaDevice;
use firebrick_cuda::Driver;

use crate::backends::cuda::engine::{
    Cost, Cuda, Engine, Lent, Primitive, check, check_launch, engine, float, int_tensor, shared, tensor,
};
use crate::{HostBuffer, MemoryOps, Offloaded, Readback};
use host_copies::HostCopy;

impl MemoryOps for Cuda {
    fn stay_near(device: &CudaDevice) -> Option<String> {
        let driver = Driver::load().ok()?;
        processors::stay_near(&driver.bus_id(device.index).ok()?).map(|done| done.to_string())
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

    fn offload(x_nd: Tensor<Self, 2>) -> Offloaded<Self> {
        let engine = engine(&x_nd.device());
        Offloaded::elsewhere(offload(&engine, float(x_nd)))
    }

    fn settle_offloads(device: &Self::Device) {
        let engine = engine(device);
        engine.section(|| engine.copies.settle(engine.stream()));
    }

    fn prefetch(offloaded: &mut Offloaded<Self>, device: &Self::Device) {
        prefetch(&engine(device), offloaded.elsewhere_mut());
    }

    fn restore(offloaded: Offloaded<Self>, device: &Self::Device) -> Tensor<Self, 2> {
        offloaded.into_parts().unwrap_or_else(|copy| tensor(restore(&engine(device), copy)))
    }

    fn offload_codes(codes: Tensor<Self, 2, Int>) -> Offloaded<Self, Int> {
        let engine = engine(&codes.device());
        Offloaded::elsewhere(offload(&engine, codes.into_primitive()))
    }

    fn prefetch_codes(offloaded: &mut Offloaded<Self, Int>, device: &Self::Device) {
        prefetch(&engine(device), offloaded.elsewhere_mut());
    }

    fn restore_codes(offloaded: Offloaded<Self, Int>, device: &Self::Device) -> Tensor<Self, 2, Int> {
        offloaded.into_parts().unwrap_or_else(|copy| int_tensor(restore(&engine(device), copy)))
    }

    fn read_later(values: Vec<Tensor<Self, 1>>) -> Readback {
        let engine = engine(&values[0].device());
        let copied = engine.section(|| {
            let values = values.into_iter().map(|value| engine.flat(value)).collect();
            check("copying numbers to the host", engine.copies.numbers(engine.stream(), values))
        });
        Readback::new(copied)
    }

    fn restore_wait(device: &Self::Device) -> Readback {
        Readback::new(engine(device).copies.take_waits())
    }

    fn keep_weights(device: &Self::Device, bytes: [u64; 2]) {
        engine(device).kept.allow(bytes);
    }

    fn expect_passes(device: &Self::Device, bytes: [u64; 2], tokens: usize) {
        engine(device).room.expect(bytes, tokens);
    }

    fn make_room(device: &Self::Device, tokens: usize) {
        let engine = engine(device);
        let Some([needed, pinned]) = engine.room.needed(tokens) else { return };
        let free = check("asking for free memory", engine.context().memory()).free_bytes;
        if free < needed || engine.copies.waiting_bytes() > pinned {
            // Kept weights are the same for passes of every size.
            release_pools(&engine, device);
        }
    }

    fn reserve_offload(device: &Self::Device, count: usize, bytes: usize) {
        engine(device).copies.reserve(count, bytes);
    }
}

impl Engine {
    /// Returns memory that waits to be used again where the device has less than a section needs now: CubeCL's queue thread panics if it
    /// cannot allocate.
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
        // What CubeCL has freed is the driver's once the device is done.
        check("waiting for the device", self.context().synchronize());
    }
}

/// Waits for the device, and returns buffers that wait for operations of the same sizes.
fn release_pools(engine: &Engine, device: &CudaDevice) {
    engine.while_idle(|| {
        engine.repeats.release();
        engine.scratch.release();
        engine.copies.release();
        engine.recycled.release();
        engine.addresses.forget();
        Cuda::memory_cleanup(device);
        // The next section, of whichever thread, begins after the memory is gone.
        engine.wait_until_submitted();
    });
}

/// Starts the copy of a tensor to pinned host memory.
fn offload(engine: &Engine, x: Primitive) -> HostCopy {
    engine.section(|| {
        let matrix = engine.dense(engine.view_of(x));
        check("copying to the host", engine.copies.out(engine.stream(), matrix))
    })
}

/// Starts the copy back of what is there.
fn prefetch(engine: &Engine, copy: Option<&mut HostCopy>) {
    if let Some(copy) = copy {
        engine.section(|| start_back(engine, copy));
    }
}

/// The tensor again, once its copy has come back.
fn restore(engine: &Engine, mut copy: HostCopy) -> Primitive {
    engine.section(|| {
        start_back(engine, &mut copy);
        let start = check("recording an event", engine.mark());
        let wait = || engine.stream().wait_for(&copy.done);
        check("waiting for a copy", engine.traced("wait for a copy from the host", Cost::default(), wait));
        engine.copies.waited((start, check("recording an event", engine.mark())));
        engine.copies.arrived(copy)
    })
}

/// Starts the copy back, unless it is under way.
fn start_back(engine: &Engine, copy: &mut HostCopy) {
    if !copy.is_coming() {
        let [rows, width] = copy.shape;
        let new = engine.empty_matrix(rows, width, copy.dtype);
        check("copying from the host", engine.copies.back(engine.stream(), copy, new));
    }
}
