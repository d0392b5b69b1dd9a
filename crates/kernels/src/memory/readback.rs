//! Values on their way from the device to the host.
//!
//! Trade-off: one value has one number; what is large is read with Burn's own operations.

use std::fmt;

use burn_tensor::{Tensor, backend::Backend};

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
