//! A tensor that waits for its next use: on the device, or in host memory where the backend copies while other work runs.
//!
//! Trade-off: what it is on the host is private to the backend, so it is kept behind a trait object.

use std::fmt;

use burn_tensor::{TensorData, backend::Backend};

use crate::comm::Payload;

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
