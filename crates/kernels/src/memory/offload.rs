//! A tensor that waits for its backward: on the device, or in host memory where the backend copies while other work runs.
//!
//! Trade-off: what it is on the host is private to the backend, so it is kept behind `Any`; no trait of ours has the backend as an
//! associated type (docs/decisions.md).

use std::any::Any;
use std::fmt;

use burn_tensor::{Tensor, backend::Backend};

/// A tensor that [`crate::MemoryOps::offload`] put away, for [`crate::MemoryOps::restore`].
pub struct Offloaded<B: Backend> {
    place: Place<B>,
}

enum Place<B: Backend> {
    Device(Tensor<B, 2>),
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only CUDA keeps tensors elsewhere"))]
    Elsewhere(Box<dyn Any + Send>),
}

impl<B: Backend> Offloaded<B> {
    /// Stays where it is.
    pub fn on_device(x: Tensor<B, 2>) -> Self {
        Self { place: Place::Device(x) }
    }

    /// What a backend keeps instead of the tensor.
    #[cfg(feature = "cuda")]
    pub(crate) fn elsewhere(kept: impl Any + Send) -> Self {
        Self { place: Place::Elsewhere(Box::new(kept)) }
    }

    /// The tensor that stayed on the device, or what the backend kept.
    pub(crate) fn into_parts<T: Any>(self) -> Result<Tensor<B, 2>, T> {
        match self.place {
            Place::Device(x) => Ok(x),
            Place::Elsewhere(kept) => {
                Err(*kept.downcast().expect("a tensor is restored by the backend that offloaded it"))
            }
        }
    }

    /// What the backend kept, to begin bringing it back.
    #[cfg(feature = "cuda")]
    pub(crate) fn elsewhere_mut<T: Any>(&mut self) -> Option<&mut T> {
        match &mut self.place {
            Place::Device(_) => None,
            Place::Elsewhere(kept) => kept.downcast_mut(),
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
