//! Launches of hand-written kernels.
//!
//! All launches are sound for the same reasons: addresses come from tensors that the caller holds (or from scratch memory, which lives as long as the
//! engine), sizes and strides are those of the same tensors, and everything runs on one stream in the order of the calls, so memory that is freed
//! after a call is reused only by later work on that stream. Launches of a section may wait on the host for later ones, to be submitted as one graph.

use std::hash::Hash;

use burn_tensor::DType;
use firebrick_cuda::{Arguments, CudaError, DeviceBuffer, LaunchShape, Stream};

use super::Engine;
use super::failure::{check, check_launch};
use super::matrix::DeviceBlock;
use super::program::Source;
use super::trace::Cost;

/// Largest number of blocks along the first axis of a grid.
pub(super) const MAX_BLOCKS: usize = (1 << 31) - 1;

/// The kernel of a launch, its shape, and the bytes it moves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Launch {
    pub source: Source,
    pub dtype: DType,
    pub name: &'static str,
    pub shape: LaunchShape,
    /// Unavoidable bytes, for the trace.
    pub bytes: usize,
}

impl Source {
    /// Describes a launch of its kernel `name`, which moves at least `bytes` bytes.
    pub(crate) fn launch(self, dtype: DType, name: &'static str, shape: LaunchShape, bytes: usize) -> Launch {
        Launch { source: self, dtype, name, shape, bytes }
    }
}

impl Launch {
    /// Lets blocks start while earlier work ends, where the card can: the kernel begins with `wait_for_earlier`.
    pub(crate) fn early(mut self) -> Self {
        self.shape.starts_early = true;
        self
    }
}

/// Appends engine values to the arguments of a launch, with the types that kernels take.
pub(crate) trait BlockArguments {
    /// Appends the address of rows, all of which the kernel may use.
    fn rows(self, block: &DeviceBlock) -> Self;
    fn int(self, number: usize) -> Self;
    fn long(self, number: usize) -> Self;
    fn float(self, number: f64) -> Self;
}

impl BlockArguments for Arguments {
    #[inline(always)]
    fn rows(self, block: &DeviceBlock) -> Self {
        self.block(block.address, block.extent() as usize)
    }

    #[inline(always)]
    fn int(self, number: usize) -> Self {
        self.i32(number as i32)
    }

    #[inline(always)]
    fn long(self, number: usize) -> Self {
        self.i64(number as i64)
    }

    #[inline(always)]
    fn float(self, number: f64) -> Self {
        self.f32(number as f32)
    }
}

/// Builds the arguments of a launch, or appends to others, under the names that the kernel declares:
/// `name: type(value)`, where the type is a method of [`Arguments`] or [`BlockArguments`]. The kernel's source is the
/// only declaration: debug builds compare names and types with it at each launch, which CI does without a card.
macro_rules! arguments {
    ($($name:ident: $type:ident($value:expr)),* $(,)?) => {
        firebrick_cuda::Arguments::new()$(.named(stringify!($name)).$type($value))*
    };
    ($first:expr => $($name:ident: $type:ident($value:expr)),+ $(,)?) => {
        $first$(.named(stringify!($name)).$type($value))+
    };
}
pub(crate) use arguments;

pub(crate) fn grid(blocks: usize, threads: u32) -> LaunchShape {
    grid_of([blocks.clamp(1, MAX_BLOCKS), 1, 1], threads)
}

pub(crate) fn grid_of(grid: [usize; 3], threads: u32) -> LaunchShape {
    LaunchShape { grid: grid.map(|blocks| blocks as u32), block: [threads, 1, 1], shared_bytes: 0, starts_early: false }
}

/// Returns the threads for a row of `width` values, sixteen values per thread: whole warps, 32 to `max` threads.
pub(crate) fn threads_for(width: usize, max: usize) -> u32 {
    width.div_ceil(16).next_multiple_of(32).clamp(32, max) as u32
}

/// Returns blocks of 256 threads for rows of `width` values; if there are few rows, their columns are divided as well.
pub(crate) fn rows_and_columns(rows: usize, width: usize) -> LaunchShape {
    let columns = if rows < 1024 { width.div_ceil(4096).max(1) } else { 1 };
    grid_of([rows.clamp(1, MAX_BLOCKS), columns, 1], 256)
}

impl Engine {
    /// Launches a kernel on the stream.
    ///
    /// # Safety
    /// The arguments must be those that the kernel of this name declares, in its order; every address must be valid for
    /// the kernel's reads and writes until the stream has run it.
    pub(crate) unsafe fn launch(&self, launch: Launch, arguments: &Arguments) {
        let cost = Cost { bytes: launch.bytes as f64, ..Cost::default() };
        // SAFETY: the caller promises the same.
        unsafe { self.launch_with_cost(launch, cost, arguments) };
    }

    /// Launches a kernel whose work is counted in operations of matrix units.
    ///
    /// # Safety
    /// The requirements of [`Engine::launch`] must hold.
    pub(crate) unsafe fn launch_with_cost(&self, launch: Launch, cost: Cost, arguments: &Arguments) {
        let kernel = self.programs.kernel(launch.source, launch.dtype, launch.name);
        #[cfg(debug_assertions)]
        arguments.blocks().iter().for_each(|&[address, bytes]| self.assert_live(launch.name, address, bytes));
        let (needed, there_is) = (launch.shape.shared_bytes as usize, self.shared_bytes());
        assert!(
            needed <= there_is,
            "{}: a block needs {needed} bytes of shared memory and may have {there_is}",
            launch.name
        );
        if needed > 48 << 10 {
            check(launch.name, kernel.set_dynamic_shared_memory(launch.shape.shared_bytes));
        }
        let starts_early = launch.shape.starts_early && self.starts_early;
        let (shape, arguments) = (LaunchShape { starts_early, ..launch.shape }, arguments.clone());
        // SAFETY: the caller's promise; kernel, shape and arguments are all that a launch depends on.
        unsafe {
            self.submit(launch.name, cost, (kernel, shape, arguments), |(kernel, shape, arguments), stream| {
                kernel.launch(stream, *shape, arguments)
            });
        }
    }

    /// Panics in debug builds if rows are outside live memory.
    pub(in crate::backends::cuda) fn assert_block_is_live(&self, name: &str, block: DeviceBlock) {
        self.assert_live(name, block.address, block.extent());
    }

    /// Panics in debug builds if bytes are outside live memory. Null is no address.
    fn assert_live(&self, name: &str, address: u64, bytes: u64) {
        if cfg!(debug_assertions) && address != 0 && self.is_in_section() {
            let is_in_use = |number| self.recycled.is_in_use(number);
            let is_live = self.addresses.live.holds(address, bytes, self.section_number(), is_in_use)
                || DeviceBuffer::is_live(&self.context, address, bytes);
            assert!(is_live, "{name}: {bytes} bytes at {address:#x} are in no live allocation");
        }
    }

    /// Calls `submit` for the stream, in the order of the calls: now, or later in this section, or never if the graph
    /// of an earlier step does the same work. While a trace is recorded, it is called now, between two events.
    ///
    /// # Safety
    /// `submit` may only submit to the stream; its work must be the same for all `what` with equal hash input, and
    /// valid at any time before the section ends, in the order of the calls.
    pub(crate) unsafe fn submit<W: Hash + 'static>(
        &self,
        name: &'static str,
        cost: Cost,
        what: W,
        submit: impl Fn(&W, &Stream) -> Result<(), CudaError> + 'static,
    ) {
        if self.trace.is_recording() || !self.is_in_section() {
            return self.traced(name, cost, || check(name, submit(&what, self.stream())));
        }
        // SAFETY: the caller's promise.
        check_launch(unsafe { self.repeats.submit(name, what, submit) });
    }

    /// Runs `work`, which submits to the stream, between two events if a trace is recorded.
    pub(crate) fn traced<R>(&self, name: &'static str, cost: Cost, work: impl FnOnce() -> R) -> R {
        if !self.trace.is_recording() {
            return work();
        }
        let start = check("recording an event", self.mark());
        let result = work();
        let end = check("recording an event", self.mark());
        self.trace.record(name, cost, [start, end]);
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_come_in_whole_warps() {
        assert_eq!([1, 64, 4096, 100_000].map(|width| threads_for(width, 512)), [32, 32, 256, 512]);
        assert!((1..5000).all(|width| threads_for(width, 256).is_multiple_of(32)));
    }
}
