//! Transfers between the device and host memory: bytes to upload ([`HostBuffer`]), offloaded tensors ([`Offloaded`]),
//! and numbers on their way to the host ([`Readback`]).
//!
//! Trade-off: the host representation is private to each backend, hence the trait objects. A deferred readback is of f32
//! values; others are read with Burn's own operations.

use std::any::Any;
use std::fmt;
use std::ops::{Deref, DerefMut};

use burn_tensor::{TensorData, backend::Backend};

use crate::payload::Payload;

/// Bytes on the host, from [`crate::MemoryOps::host_buffer`]. Each access is a virtual call: take a slice once.
pub struct HostBuffer {
    bytes: Box<dyn Memory>,
}

/// The memory of a buffer: bytes, of the backend's own type.
pub(crate) trait Memory: DerefMut<Target = [u8]> + Any + Send {}

impl<T: DerefMut<Target = [u8]> + Any + Send> Memory for T {}

impl HostBuffer {
    pub(crate) fn new(bytes: impl Memory) -> Self {
        Self { bytes: Box::new(bytes) }
    }

    /// Returns the memory itself, if it is of this type.
    pub(crate) fn into_memory<T: Any>(self) -> Option<T> {
        let memory: Box<dyn Any> = self.bytes;
        memory.downcast().ok().map(|memory| *memory)
    }
}

impl Deref for HostBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl DerefMut for HostBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }
}

impl fmt::Debug for HostBuffer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "HostBuffer({} bytes)", self.len())
    }
}

/// A tensor that [`crate::MemoryOps::offload`] moved away, to be restored.
pub struct Offloaded<B: Backend> {
    held: Held<B>,
}

enum Held<B: Backend> {
    Device(Payload<B, 2>),
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only CUDA keeps tensors elsewhere"))]
    Elsewhere(Box<dyn Elsewhere<B>>),
}

/// A backend's representation of an offloaded tensor.
pub(crate) trait Elsewhere<B: Backend>: Send {
    /// Returns the values as they were on the device. Waits until they are copied.
    fn to_data(&self) -> TensorData;
    /// Starts to restore the tensor, unless that has started.
    fn prefetch(&mut self, device: &B::Device);
    fn restore(self: Box<Self>, device: &B::Device) -> Payload<B, 2>;
}

impl<B: Backend> Offloaded<B> {
    /// Keeps the tensor on the device.
    pub fn on_device(x: Payload<B, 2>) -> Self {
        Self { held: Held::Device(x) }
    }

    /// Wraps a backend's representation of the offloaded tensor.
    #[cfg(feature = "cuda")]
    pub(crate) fn elsewhere(kept: impl Elsewhere<B> + 'static) -> Self {
        Self { held: Held::Elsewhere(Box::new(kept)) }
    }

    /// Copies the values to the host; the tensor itself does not move. Waits for the device.
    pub fn to_data(&self) -> TensorData {
        match &self.held {
            Held::Device(x) => x.to_data(),
            Held::Elsewhere(kept) => kept.to_data(),
        }
    }

    /// Starts to restore the tensor, so that [`Offloaded::restore`] need not wait.
    pub fn prefetch(&mut self, device: &B::Device) {
        if let Held::Elsewhere(kept) = &mut self.held {
            kept.prefetch(device);
        }
    }

    /// Returns the offloaded tensor, bit for bit.
    pub fn restore(self, device: &B::Device) -> Payload<B, 2> {
        match self.held {
            Held::Device(x) => x,
            Held::Elsewhere(kept) => kept.restore(device),
        }
    }
}

impl<B: Backend> fmt::Debug for Offloaded<B> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = match self.held {
            Held::Device(_) => "device",
            Held::Elsewhere(_) => "elsewhere",
        };
        formatter.debug_struct("Offloaded").field("place", &place).finish()
    }
}

/// Numbers requested from the device by [`crate::MemoryOps::read_later`].
#[must_use = "numbers that are not waited for were copied for nothing"]
pub struct Readback {
    wait: Box<dyn FnOnce() -> Vec<f32>>,
}

impl Readback {
    /// Takes what waits for the numbers.
    pub(crate) fn new(wait: impl FnOnce() -> Vec<f32> + 'static) -> Self {
        Self { wait: Box::new(wait) }
    }

    /// Returns the numbers in the order of the request. Waits until the device has computed and copied them, but, where
    /// the backend can, not for work that was queued later.
    pub fn wait(self) -> Vec<f32> {
        (self.wait)()
    }
}

impl fmt::Debug for Readback {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Readback").finish_non_exhaustive()
    }
}
