//! A plan's limits for the memory of a device: how many converted weights may stay ([`KeptWeights`]), and the memory of passes ([`Room`]).
//!
//! Converted frozen weights stay in device memory from one section to the next, as many as the plan allows. A weight is identified by
//! its source number, which is unique in the process (`Engine::source`), and by its layout, so a buffer cannot be mistaken for that of
//! another weight. GEMMs in the compute format read one buffer in both passes, which counts as the forward's; 8-bit ones have two. The
//! adapter around the weight changes with every step, and its contents are tracked separately.
//!
//! CubeCL's pools keep a buffer for every exact size, so rows of many lengths (`pack = false`) would leave a set of buffers for each length. A pass
//! over a different number of tokens than the previous one therefore queries the free memory; if that is less than the pass may take, everything kept
//! for reuse is freed first. The same holds for pinned buffers of saved values once the unused ones exceed the needs of the largest pass.
//! Trade-off: the weights that are requested first are kept; all are equally useful, since every pass reads each of them once. Freeing
//! memory waits for the device and allocates again, so on a nearly full card rows of many lengths are slower than packed rows.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;

use firebrick_cuda::{Context, DeviceBuffer};

use crate::backends::cuda::engine::{Contents, check};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Pass {
    Forward,
    Backward,
}

/// Current contents of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Held {
    pub weight: bool,
    pub adapter: bool,
}

struct Kept {
    memory: DeviceBuffer,
    contents: Contents,
}

/// Converted weights in device memory, and the bytes that may still be added.
pub(crate) struct KeptWeights {
    context: Context,
    left: Cell<[u64; 2]>,
    by_weight: RefCell<HashMap<(Pass, Vec<u64>), Kept>>,
}

impl KeptWeights {
    pub(crate) fn new(context: &Context) -> Self {
        Self { context: context.clone(), left: Cell::new([0; 2]), by_weight: RefCell::default() }
    }

    /// Sets how many more bytes may be kept, for the forward and for the backward.
    pub(crate) fn allow(&self, bytes: [u64; 2]) {
        self.left.set(bytes);
    }

    /// Returns whether weights of the forward are kept, or may be.
    pub(crate) fn keeps_forward(&self) -> bool {
        self.left.get()[Pass::Forward as usize] > 0
            || self.by_weight.borrow().keys().any(|(pass, _)| *pass == Pass::Forward)
    }

    /// Returns the address of a weight's buffer and its current contents, of which the caller must write the missing
    /// ones now; `None` if the weight is not kept, or was kept with fewer bytes.
    pub(crate) fn of(&self, pass: Pass, weight: Vec<u64>, bytes: usize, contents: Contents) -> Option<(u64, Held)> {
        let mut by_weight = self.by_weight.borrow_mut();
        let key = (pass, weight);
        if let Some(kept) = by_weight.get_mut(&key).filter(|kept| kept.memory.len_bytes() >= bytes) {
            let held = Held { weight: kept.contents.dtype == contents.dtype, adapter: kept.contents == contents };
            kept.contents = contents;
            return Some((kept.memory.address(), held));
        }
        // Launches waiting on the host may still refer to a smaller buffer.
        if by_weight.contains_key(&key) {
            return None;
        }
        let mut left = self.left.get();
        let of_pass = &mut left[pass as usize];
        *of_pass = of_pass.checked_sub(bytes as u64)?;
        self.left.set(left);
        let memory = check("allocating room for weights", DeviceBuffer::new(&self.context, bytes));
        let address = memory.address();
        by_weight.insert(key, Kept { memory, contents });
        Some((address, Held { weight: false, adapter: false }))
    }

    /// Returns all of them to the driver; they may be kept again. The caller has waited for the device, or the section has failed.
    pub(crate) fn clear(&self) {
        let mut left = self.left.get();
        for ((pass, _), kept) in self.by_weight.borrow_mut().drain() {
            left[pass as usize] += kept.memory.len_bytes() as u64;
        }
        self.left.set(left);
    }
}

/// Allowance of pinned bytes for ids, numbers and other small transfers.
const SMALL_BYTES: u64 = 64 << 20;

/// Memory of passes, and the size of the last one.
#[derive(Debug, Default)]
pub(crate) struct Room {
    /// Bytes of a pass, on the device and pinned, and its tokens.
    expected: Cell<([u64; 2], usize)>,
    last_tokens: Cell<usize>,
}

impl Room {
    /// Records that a pass over `tokens` tokens takes up to `bytes` on the device and in pinned memory.
    pub(crate) fn expect(&self, bytes: [u64; 2], tokens: usize) {
        self.expected.set((bytes, tokens));
    }

    /// Returns the device bytes that a pass over `tokens` tokens may take, and the pinned bytes that may wait for
    /// reuse; `None` if it is as large as the last one, or no expectation was set.
    pub(crate) fn needed(&self, tokens: usize) -> Option<[u64; 2]> {
        let ([device, pinned], expected_tokens) = self.expected.get();
        let is_another = self.last_tokens.replace(tokens) != tokens;
        let share = |of: usize| (u128::from(device) * tokens as u128).div_ceil(of as u128) as u64;
        (is_another && expected_tokens > 0).then(|| [share(expected_tokens), pinned + SMALL_BYTES])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pass_of_another_size_needs_its_share_and_one_of_the_same_size_nothing_new() {
        let room = Room::default();
        assert_eq!(room.needed(64), None, "nothing is known about passes");
        room.expect([1 << 40, 0], 4096);
        let device = |tokens| room.needed(tokens).map(|[device, _]| device);
        assert_eq!([1024, 1024, 4096, 1024].map(device), [Some(1 << 38), None, Some(1 << 40), Some(1 << 38)]);
    }
}
