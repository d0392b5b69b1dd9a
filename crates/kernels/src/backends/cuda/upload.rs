//! Bytes of the host on their way to the device: through pinned memory, on the engine's stream, while the host goes on.
//! Trade-off: what lies elsewhere on the host is copied once more, into pinned memory.

use burn_tensor::DType;
use firebrick_cuda::Event;
use firebrick_precision::QuantizedTensor;

use super::engine::Engine;
use super::failure::check;
use super::launch::at;
use super::matrix::{Cuda, Primitive, int_tensor, tensor};
use super::pinned::{Lent, shared};
use crate::QuantizedWeight;
use crate::weights::reference::{matrix_shape, padding, scales_by};

impl Engine {
    /// Copies a pinned buffer to an address with room for it. The buffer returns to its pool once that is done.
    pub(super) fn upload(&self, lent: Lent, address: u64) {
        // SAFETY: the memory at the address belongs to a tensor with the bytes of the buffer; the buffer is held below until the copy is
        // done.
        let copied = unsafe { self.stream().copy_to_device(at(address), lent.pinned(), lent.len()) };
        check("copying to the device", copied);
        let done = check("recording an event", Event::new(self.context()));
        check("recording an event", self.stream().record(&done));
        self.copies.keep_until(lent, done);
    }

    /// Codes and scales that the host has, as [`Engine::quantize`] would have written them.
    pub(super) fn upload_quantized(&self, quantized: &QuantizedTensor) -> QuantizedWeight<Cuda> {
        let format = quantized.format;
        let (bytes, fill) = padding(quantized);
        let codes = int_tensor(self.uploaded_codes(&quantized.codes, bytes, fill));
        let scales = scales_by(
            &quantized.scales,
            |codes, count| int_tensor(self.uploaded_codes(codes, count, 0)),
            |values| tensor(self.uploaded_values(values)),
            || self.tables.signed(),
        );
        QuantizedWeight { format, codes, scales, table: self.tables.byte_table(format), shape: matrix_shape(quantized) }
    }

    /// A tensor of `count` codes: these, then `fill`.
    fn uploaded_codes(&self, codes: &[u8], count: usize, fill: u8) -> Primitive {
        self.uploaded(count, DType::U8, |bytes| {
            let (given, padding) = bytes.split_at_mut(codes.len());
            given.copy_from_slice(codes);
            padding.fill(fill);
        })
    }

    fn uploaded_values(&self, values: &[f32]) -> Primitive {
        self.uploaded(values.len(), DType::F32, |bytes| {
            let words = bytes.as_chunks_mut().0;
            words.iter_mut().zip(values).for_each(|(word, value)| *word = value.to_ne_bytes());
        })
    }

    /// A tensor `[count]` of bytes that `write` puts into pinned memory.
    fn uploaded(&self, count: usize, dtype: DType, write: impl FnOnce(&mut [u8])) -> Primitive {
        let (context, pool) = shared(self.device());
        let mut lent = check("allocating pinned memory", pool.lend(&context, count * dtype.size()));
        write(&mut lent);
        let new = self.empty([count], dtype);
        self.upload(lent, self.address(&new));
        new
    }
}
