//! Converted frozen weights that stay in device memory from one section to the next, as many as the plan allows.
//!
//! A weight is identified by what no other tensor of the process ever has (`Engine::source`), so a buffer cannot be taken for another
//! weight's, and by how it lies. GEMMs in the compute format read one buffer in both passes, which counts as the forward's; 8-bit ones have two.
//! What stands around the weight (its adapter) changes with every step and has contents of its own.
//! Trade-off: the weights that are requested first are kept; all are of equal use, since every pass reads each of them once.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;

use firebrick_cuda::{Context, DeviceBuffer};

use crate::backends::cuda::engine::{Contents, check};

/// Which pass reads a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Pass {
    Forward,
    Backward,
}

/// What a buffer holds already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Held {
    pub weight: bool,
    pub adapter: bool,
}

struct Kept {
    memory: DeviceBuffer,
    contents: Contents,
}

/// See the head of this file.
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

    /// Address of a weight's buffer, and what it holds; `None` where it is not kept, or was kept with
    /// fewer bytes. What it does not hold, the caller writes now.
    pub(crate) fn of(&self, pass: Pass, weight: Vec<u64>, bytes: usize, contents: Contents) -> Option<(u64, Held)> {
        let mut by_weight = self.by_weight.borrow_mut();
        let key = (pass, weight);
        if let Some(kept) = by_weight.get_mut(&key).filter(|kept| kept.memory.len_bytes() >= bytes) {
            let held = Held { weight: kept.contents.dtype == contents.dtype, adapter: kept.contents == contents };
            kept.contents = contents;
            return Some((kept.memory.pointer::<u8>().address(), held));
        }
        // Launches that wait on the host may still refer to a smaller buffer.
        if by_weight.contains_key(&key) {
            return None;
        }
        let mut left = self.left.get();
        let of_pass = &mut left[pass as usize];
        *of_pass = of_pass.checked_sub(bytes as u64)?;
        self.left.set(left);
        let memory = check("allocating room for weights", DeviceBuffer::new(&self.context, bytes));
        let address = memory.pointer::<u8>().address();
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
