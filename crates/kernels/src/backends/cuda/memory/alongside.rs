//! Reading of tensors by any thread, which needs no engine, while another thread trains.
//!
//! What a thread submits runs after the sections that have ended by then, and before the next one (`StreamHandoff` of firebrick-cuda): a copy that is
//! waited for takes up to a step, however small it is. So pieces of many tensors are on their way at a time, few enough that sections hardly wait.
//! They pass through pinned buffers of the pool of all threads, because pinning as much memory as there is to read takes longer than reading.
//! Trade-off: half a gigabyte of pinned memory, kept for the next time.

use std::collections::VecDeque;
use std::sync::{Arc, PoisonError};

use burn_tensor::{Bytes, TensorData};
use firebrick_cuda::{Event, Stream, StreamHandoff};
use rayon::prelude::*;

use super::pinned::{Lent, shared};
use crate::backends::cuda::engine::{Primitive, check, lock_of};

/// Bytes of a copy, and of those on their way.
const PIECE: usize = 32 << 20;
const COMING: usize = 512 << 20;
/// Maximum number of copies on their way: each has a buffer, and pinning one takes long for the small tensors of adapters.
const MAX_COMING: usize = 64;
/// Bytes that one core takes out of a buffer at a time; most of that is the system's work for new pages.
const TASK: usize = 2 << 20;

/// A piece of a tensor on its way, with all that its copy uses.
struct Piece {
    tensor: Primitive,
    buffer: Lent,
    done: Event,
}

/// Copies on a stream of their own.
struct Reader {
    stream: Arc<Stream>,
    coming: VecDeque<Piece>,
    bytes_coming: usize,
    /// The bytes of the first tensor that have arrived, in words, which become f32 without another copy.
    words: Vec<u32>,
    filled: usize,
}

impl Drop for Reader {
    /// Waits for copies that a failure leaves in flight, so that no buffer returns to the pool while one may still write it.
    fn drop(&mut self) {
        // A failure here means that the context is lost, and with it the copies.
        let _ = self.stream.synchronize();
    }
}

/// Implements [`read_alongside`](crate::MemoryOps::read_alongside).
pub(super) fn read(tensors: impl Iterator<Item = Primitive>, mut arrived: impl FnMut(TensorData)) {
    let mut tensors = tensors.peekable();
    let Some(first) = tensors.peek() else { return };
    let (context, pool) = shared(&first.device);
    let stream = Arc::new(check("creating a stream", Stream::new(&context)));
    order_after_all_work(first, &stream);
    let mut reader = Reader { stream, coming: VecDeque::new(), bytes_coming: 0, words: Vec::new(), filled: 0 };
    for tensor in tensors {
        let (address, bytes) = (address_of(&tensor), bytes_of(&tensor));
        assert!(tensor.is_contiguous() && bytes > 0, "tensors are read as they lie");
        for start in (0..bytes).step_by(PIECE) {
            let length = PIECE.min(bytes - start);
            while reader.bytes_coming + length > COMING || reader.coming.len() == MAX_COMING {
                reader.take_first().into_iter().for_each(&mut arrived);
            }
            let buffer = check("allocating pinned memory", pool.lend(&context, length));
            let piece =
                Piece { tensor: tensor.clone(), buffer, done: check("creating an event", Event::new(&context)) };
            // SAFETY: the piece's bytes are there in memory of its tensor. It holds the tensor, so that nothing is written there, and the buffer, which is
            // read after `done`, until it is taken or the stream was waited for.
            let copied = unsafe { reader.stream.copy_to_host(piece.buffer.pinned(), address + start as u64, length) };
            let started = copied.and_then(|()| reader.stream.record(&piece.done));
            reader.coming.push_back(piece);
            reader.bytes_coming += length;
            check("copying to the host", started);
        }
    }
    while !reader.coming.is_empty() {
        reader.take_first().into_iter().for_each(&mut arrived);
    }
}

/// Orders the stream after all work of the device so far, also that which CubeCL has not submitted yet.
fn order_after_all_work(tensor: &Primitive, stream: &Arc<Stream>) {
    address_of(tensor);
    let handoff = check("creating events", StreamHandoff::new(stream.clone()));
    // Sections record graphs, and the driver rejects this meanwhile.
    let _turn = lock_of(tensor.device.index).lock().unwrap_or_else(PoisonError::into_inner);
    check("ordering streams", handoff.begin());
}

/// Returns the address of a tensor that the caller holds. Waits for CubeCL's queue thread.
fn address_of(tensor: &Primitive) -> u64 {
    tensor.client.get_resource(tensor.handle.clone()).expect("a tensor has memory").resource().ptr
}

fn bytes_of(tensor: &Primitive) -> usize {
    tensor.meta.shape().num_elements() * tensor.dtype.size()
}

impl Reader {
    /// Waits for the first piece. Returns its tensor's values if that was the last piece of it.
    fn take_first(&mut self) -> Option<TensorData> {
        check("waiting for a copy", self.coming.front()?.done.synchronize());
        let Piece { tensor, buffer, .. } = self.coming.pop_front()?;
        self.bytes_coming -= buffer.len();
        let (bytes, end) = (bytes_of(&tensor), self.filled + buffer.len());
        if self.filled == 0 {
            self.words = vec![0; bytes.div_ceil(size_of::<u32>())];
        }
        let room = &mut bytemuck::cast_slice_mut::<u32, u8>(&mut self.words)[self.filled..end];
        room.par_chunks_mut(TASK).zip(buffer.par_chunks(TASK)).for_each(|(to, from)| to.copy_from_slice(from));
        self.filled = if end == bytes { 0 } else { end };
        (end == bytes).then(|| {
            let words = std::mem::take(&mut self.words);
            let bytes = match bytes.is_multiple_of(size_of::<u32>()) {
                true => Bytes::from_elems(words),
                false => Bytes::from_bytes_vec(bytemuck::cast_slice::<u32, u8>(&words)[..bytes].to_vec()),
            };
            TensorData::from_bytes(bytes, tensor.meta.shape().clone(), tensor.dtype)
        })
    }
}
