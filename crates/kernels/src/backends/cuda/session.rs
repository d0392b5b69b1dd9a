//! The protocol of a run on CUDA: what it announces, sections and pauses, release of memory, and waits that it reports.

use burn_tensor::backend::Backend;
use cubecl::cuda::CudaDevice;
use firebrick_cuda::Measuring;

use super::device::Device;
use super::engine::{Cuda, check};
use super::memory::host_copies::milliseconds;
use crate::Readback;
use crate::session::{DeviceTime, GemmAlgorithms, Hint, RunShape, Session};

/// Memory in use that is not worth the milliseconds, and the graphs to be recorded again, that freeing a part of it costs; on a small card a quarter of
/// its memory.
const LITTLE_BYTES: u64 = 8 << 30;

impl Session for Cuda {
    fn open(device: &CudaDevice, shape: &RunShape) {
        let device = Device::of(device);
        device.kept.allow(shape.kept_bytes);
        let blas = device.blas.borrow();
        // Another run may keep a choice between two that are to be the same.
        let algorithms = if shape.deterministic { GemmAlgorithms::Library } else { shape.gemm_algorithms };
        blas.choose(match algorithms {
            GemmAlgorithms::Library => Measuring::Off,
            GemmAlgorithms::Kept => Measuring::Kept,
            GemmAlgorithms::Measured => Measuring::On,
        });
        blas.add_in_order(shape.deterministic);
        device.library.in_order.set(shape.deterministic);
        device.room.expect(shape.pass_bytes, shape.pass_tokens);
        shape.offloaded.iter().for_each(|&[count, bytes]| device.copies.reserve(count, bytes));
    }

    fn hint(device: &CudaDevice, hint: Hint<'_, Self>) {
        let device = Device::of(device);
        match hint {
            Hint::Pass { tokens } => make_room(&device, tokens),
            Hint::Attention { spec, dtype, documents } => device.prepare_attention(spec, dtype, documents),
            Hint::ForwardDone => device.section(|| device.copies.settle(device.stream())),
            Hint::NewSizes => {
                let memory = check("asking for free memory", device.context.memory());
                if memory.total_bytes - memory.free_bytes > LITTLE_BYTES.min(memory.total_bytes / 4) {
                    // Pinned memory is the host's, and takes long to allocate.
                    release_pools(&device, || ());
                }
            }
            Hint::VaryingSizes(vary) => device.rounds_sizes.set(vary),
        }
    }

    fn section<R>(device: &Self::Device, work: impl FnOnce() -> R) -> R {
        Device::of(device).section(work)
    }

    fn pause<R>(device: &Self::Device, work: impl FnOnce() -> R) -> R {
        Device::of(device).pause(work)
    }

    fn unchanged<R>(device: &Self::Device, work: impl FnOnce() -> R) -> R {
        let device = Device::of(device);
        let _until_it_ends = device.keep_contents();
        work()
    }

    fn release_memory(device: &Self::Device) {
        let device = Device::of(device);
        release_pools(&device, || device.copies.release());
        device.fp8_scales.clear();
        device.kept.clear();
    }

    fn device_time(device: &CudaDevice, of: DeviceTime) -> Option<Readback> {
        let device = Device::of(device);
        Some(match of {
            DeviceTime::RestoreWait => milliseconds(device.copies.take_waits()),
            DeviceTime::RankWait => milliseconds(device.collectives.take_waits()),
            DeviceTime::Collectives => milliseconds(device.collectives.take_runs()),
        })
    }
}

fn make_room(device: &Device, tokens: usize) {
    let Some([needed, pinned]) = device.room.needed(tokens) else { return };
    let free = check("asking for free memory", device.context.memory()).free_bytes;
    if free < needed || device.copies.waiting_bytes() > pinned {
        // Kept weights are the same for passes of every size.
        release_pools(device, || device.copies.release());
    }
}

/// Waits for the device, and frees its buffers that wait for reuse at the same size, with what `others` frees.
fn release_pools(device: &Device, others: impl FnOnce()) {
    device.while_idle(|| {
        device.repeats.release();
        device.scratch.release();
        others();
        device.recycled.release();
        device.addresses.forget();
        Cuda::memory_cleanup(device.device());
        // The next section, of any thread, must begin after the memory is freed.
        device.wait_until_submitted();
    });
}
