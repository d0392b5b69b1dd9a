//! Uploads of host bytes to the device: through pinned memory, on the engine's stream, without blocking the host.

use burn_tensor::DType;
use firebrick_cuda::Event;

use super::pinned::{Lent, shared};
use crate::backends::cuda::device::Device;
use crate::backends::cuda::engine::{Primitive, check};

impl Device {
    /// Copies a pinned buffer to an address with room for it. The buffer returns to its pool once the copy is done.
    pub(crate) fn upload(&self, lent: Lent, address: u64) {
        let (stream, done) = (self.stream(), check("creating an event", Event::new(&self.context)));
        // SAFETY: the memory at the address belongs to a tensor with the bytes of the buffer; the buffer is held below until the copy is
        // done.
        let copied = unsafe { stream.copy_to_device(address, lent.pinned(), lent.len()) };
        if let Err(error) = copied.and_then(|()| stream.record(&done)) {
            // No event marks the end of the copy, so wait for the whole stream. If that fails, the context is lost anyway.
            let _ = stream.synchronize();
            check("copying to the device", Err(error))
        }
        self.copies.keep_until(lent, done);
    }

    /// Creates a tensor `[count]` f32.
    pub(crate) fn uploaded_values(&self, values: &[f32]) -> Primitive {
        self.written(values.len(), DType::F32, |bytes| {
            let words = bytes.as_chunks_mut().0;
            words.iter_mut().zip(values).for_each(|(word, value)| *word = value.to_ne_bytes());
        })
    }

    /// Creates a tensor `[count]` from bytes that `write` puts into pinned memory.
    pub(crate) fn written(&self, count: usize, dtype: DType, write: impl FnOnce(&mut [u8])) -> Primitive {
        let (context, pool) = shared(self.device());
        let mut lent = check("allocating pinned memory", pool.lend(&context, count * dtype.size()));
        write(&mut lent);
        self.uploaded(lent, dtype)
    }

    /// Creates a one-dimensional tensor from its bytes.
    pub(crate) fn uploaded(&self, lent: Lent, dtype: DType) -> Primitive {
        let new = self.empty([lent.len() / dtype.size()], dtype);
        self.upload(lent, self.address(&new));
        new
    }
}
