//! What goes between the device and host memory: bytes to upload ([`HostBuffer`]), tensors that wait for their next use
//! ([`Offloaded`]), and numbers on their way to the host ([`Readback`]).
//!
//! Trade-off: what each is on the host is private to the backend, so it is kept behind a trait object. One value that is
//! read later has one number; what is large is read with Burn's own operations.

use std::fmt;
use std::ops::{Deref, DerefMut};

use burn_tensor::{Tensor, TensorData, backend::Backend};

use crate::comm::Payload;

/// Bytes on the host; see [`crate::MemoryOps::host_buffer`]. Each access is a virtual call: take a slice once.
pub struct HostBuffer {
    bytes: Box<dyn Memory>,
}

/// What a buffer is made of: bytes, and a way back to the backend's own type.
pub(crate) trait Memory: DerefMut<Target = [u8]> + Send {
    fn into_any(self: Box<Self>) -> Box<dyn std::any::Any + Send>;
}

impl Memory for Vec<u8> {
    fn into_any(self: Box<Self>) -> Box<dyn std::any::Any + Send> {
        self
    }
}

impl HostBuffer {
    pub(crate) fn new(bytes: impl Memory + 'static) -> Self {
        Self { bytes: Box::new(bytes) }
    }

    /// The memory itself, if it is of this type.
    pub(crate) fn into_memory<T: std::any::Any>(self) -> Option<T> {
        self.bytes.into_any().downcast().ok().map(|memory| *memory)
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

/// A tensor that [`crate::MemoryOps::offload`] put away, to be restored.
pub struct Offloaded<B: Backend> {
    place: Place<B>,
}

enum Place<B: Backend> {
    Device(Payload<B, 2>),
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only CUDA keeps tensors elsewhere"))]
    Elsewhere(Box<dyn Elsewhere<B>>),
}

/// What a backend keeps instead of a tensor.
pub(crate) trait Elsewhere<B: Backend>: Send {
    /// The values, as they were on the device. Waits for their copy.
    fn to_data(&self) -> TensorData;
    /// Begins to bring the tensor back, unless it is on its way.
    fn prefetch(&mut self, device: &B::Device);
    /// The tensor again.
    fn restore(self: Box<Self>, device: &B::Device) -> Payload<B, 2>;
}

impl<B: Backend> Offloaded<B> {
    /// Stays where it is.
    pub fn on_device(x: Payload<B, 2>) -> Self {
        Self { place: Place::Device(x) }
    }

    /// What a backend keeps instead of the tensor.
    #[cfg(feature = "cuda")]
    pub(crate) fn elsewhere(kept: impl Elsewhere<B> + 'static) -> Self {
        Self { place: Place::Elsewhere(Box::new(kept)) }
    }

    /// A copy of the values on the host; the tensor stays where it is. Waits for the device.
    pub fn to_data(&self) -> TensorData {
        match &self.place {
            Place::Device(Payload::Values(values)) => values.to_data(),
            Place::Device(Payload::Codes(codes)) => codes.to_data(),
            Place::Elsewhere(kept) => kept.to_data(),
        }
    }

    /// Starts to bring the tensor back, so that [`Offloaded::restore`] need not wait.
    pub fn prefetch(&mut self, device: &B::Device) {
        if let Place::Elsewhere(kept) = &mut self.place {
            kept.prefetch(device);
        }
    }

    /// The tensor that was offloaded, bit for bit.
    pub fn restore(self, device: &B::Device) -> Payload<B, 2> {
        match self.place {
            Place::Device(x) => x,
            Place::Elsewhere(kept) => kept.restore(device),
        }
    }
}

impl<B: Backend> fmt::Debug for Offloaded<B> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = match self.place {
            Place::Device(_) => "device",
            Place::Elsewhere(_) => "elsewhere",
        };
        formatter.debug_struct("Offloaded").field("place", &place).finish()
    }
}

/// Numbers that were requested from the device, see [`crate::MemoryOps::read_later`].
#[must_use = "numbers that are not waited for were copied for nothing"]
pub struct Readback {
    numbers: Box<dyn Numbers>,
}

/// What a backend keeps until the numbers are read.
pub(crate) trait Numbers {
    /// Waits for them.
    fn wait(self: Box<Self>) -> Vec<f32>;
}

impl Readback {
    pub(crate) fn new(numbers: impl Numbers + 'static) -> Self {
        Self { numbers: Box::new(numbers) }
    }

    /// The numbers in the order in which they were requested. Waits until the device has computed and copied them, and for nothing
    /// that was queued later where the backend can distinguish the two.
    pub fn wait(self) -> Vec<f32> {
        self.numbers.wait()
    }
}

impl fmt::Debug for Readback {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Readback").finish_non_exhaustive()
    }
}

/// Tensors that are read when they are waited for.
pub(super) struct OnDevice<B: Backend>(pub(super) Vec<Tensor<B, 1>>);

impl<B: Backend> Numbers for OnDevice<B> {
    fn wait(self: Box<Self>) -> Vec<f32> {
        let data = self.0.into_iter().map(|value| value.into_data().convert::<f32>());
        data.map(|data| data.to_vec::<f32>().expect("the value was just converted to f32")[0]).collect()
    }
}
