//! Device 0 for the tests on a GPU, and memory on it. A copy is done when its call returns.

use std::sync::Arc;

use bytemuck::{AnyBitPattern, NoUninit};
use firebrick_cuda::{Context, DeviceBuffer, Driver, PinnedBuffer, Stream};

pub(crate) struct Device {
    pub(crate) context: Context,
    pub(crate) stream: Arc<Stream>,
}

impl Device {
    /// Finds it; `None` without a driver.
    pub(crate) fn find() -> Option<Self> {
        let driver = Driver::load().ok()?;
        let context = Context::retain(&driver, 0).expect("device 0 of a loaded driver");
        let stream = Arc::new(Stream::new(&context).expect("a stream"));
        Some(Self { context, stream })
    }

    pub(crate) fn upload<T: NoUninit>(&self, values: &[T]) -> DeviceBuffer {
        let buffer = DeviceBuffer::new(&self.context, size_of_val(values)).expect("device memory");
        self.write(buffer.address(), values);
        buffer
    }

    /// Writes values to memory of a test, which has room for them.
    pub(crate) fn write<T: NoUninit>(&self, address: u64, values: &[T]) {
        let bytes = bytemuck::cast_slice::<T, u8>(values);
        let mut host = PinnedBuffer::new(&self.context, bytes.len()).expect("pinned memory");
        host.copy_from_slice(bytes);
        // SAFETY: both sides have the bytes and live until the stream is synchronized.
        unsafe { self.stream.copy_to_device(address, &host, bytes.len()) }.expect("copied");
        self.stream.synchronize().expect("synchronized");
    }

    /// Reads `count` values of memory of a test, which has so many, after all work of the stream.
    pub(crate) fn read<T: NoUninit + AnyBitPattern>(&self, address: u64, count: usize) -> Vec<T> {
        let bytes = count * size_of::<T>();
        let host = PinnedBuffer::new(&self.context, bytes).expect("pinned memory");
        // SAFETY: both sides have the bytes and live until the stream is synchronized; the host reads only then.
        unsafe { self.stream.copy_to_host(&host, address, bytes) }.expect("copied");
        self.stream.synchronize().expect("synchronized");
        host.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
    }

    pub(crate) fn download<T: NoUninit + AnyBitPattern>(&self, buffer: &DeviceBuffer) -> Vec<T> {
        self.read(buffer.address(), buffer.len_bytes() / size_of::<T>())
    }
}
