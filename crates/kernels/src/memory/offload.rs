//! A tensor that waits for its next use: on the device, or in host memory where the backend copies while other work runs.
//!
//! Trade-off: what it is on the host is private to the backend, so it is kept behind a trait object; no trait of ours has the backend
//! as an associated type (docs/decisions.md).

use std::any::Any;
use std::fmt;

use burn_tensor::{BasicOps, Float, Tensor, TensorData, backend::Backend};

/// A tensor that [`crate::MemoryOps::offload`] or [`crate::MemoryOps::offload_codes`] put away, to be restored.
pub struct Offloaded<B: Backend, K: BasicOps<B> = Float> {
    place: Place<B, K>,
}

enum Place<B: Backend, K: BasicOps<B>> {
    Device(Tensor<B, 2, K>),
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only CUDA keeps tensors elsewhere"))]
    Elsewhere(Box<dyn Elsewhere>),
}

/// What a backend keeps instead of a tensor.
pub(crate) trait Elsewhere: Send {
    /// The values, as they were on the device. Waits for their copy.
    fn to_data(&self) -> TensorData;
    /// To take it back.
    fn into_any(self: Box<Self>) -> Box<dyn Any>;
    /// To begin bringing it back.
    #[cfg(feature = "cuda")]
    fn as_any_mut(&mut self) -> &mut dyn Any;
}

impl<B: Backend, K: BasicOps<B>> Offloaded<B, K> {
    /// Stays where it is.
    pub fn on_device(x: Tensor<B, 2, K>) -> Self {
        Self { place: Place::Device(x) }
    }

    /// A copy of the values on the host; the tensor stays where it is. Waits for the device.
    pub fn to_data(&self) -> TensorData {
        match &self.place {
            Place::Device(x) => x.to_data(),
            Place::Elsewhere(kept) => kept.to_data(),
        }
    }

    /// What a backend keeps instead of the tensor.
    #[cfg(feature = "cuda")]
    pub(crate) fn elsewhere(kept: impl Elsewhere + 'static) -> Self {
        Self { place: Place::Elsewhere(Box::new(kept)) }
    }

    /// The tensor that stayed on the device, or what the backend kept.
    pub(crate) fn into_parts<T: Any>(self) -> Result<Tensor<B, 2, K>, T> {
        match self.place {
            Place::Device(x) => Ok(x),
            Place::Elsewhere(kept) => {
                Err(*kept.into_any().downcast().expect("a tensor is restored by the backend that offloaded it"))
            }
        }
    }

    /// What the backend kept, to begin bringing it back.
    #[cfg(feature = "cuda")]
    pub(crate) fn elsewhere_mut<T: Any>(&mut self) -> Option<&mut T> {
        match &mut self.place {
            Place::Device(_) => None,
            Place::Elsewhere(kept) => kept.as_any_mut().downcast_mut(),
        }
    }
}

impl<B: Backend, K: BasicOps<B>> fmt::Debug for Offloaded<B, K> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = match self.place {
            Place::Device(_) => "device",
            Place::Elsewhere(_) => "elsewhere",
        };
        formatter.debug_struct("Offloaded").field("place", &place).finish()
    }
}
