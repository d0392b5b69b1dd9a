//! Scales of the rows of frozen weights in 8-bit floats: computed by the first pass that needs a weight, known to all later ones.
//! Trade-off: 4 bytes per output feature of every group, kept until memory is released.

use std::cell::RefCell;
use std::collections::HashMap;

use firebrick_cuda::{Context, DeviceBuffer};

use crate::backends::cuda::engine::check;

/// See the head of this file.
pub(crate) struct Fp8Scales {
    context: Context,
    by_weights: RefCell<HashMap<Vec<u64>, DeviceBuffer>>,
}

impl Fp8Scales {
    pub(crate) fn new(context: &Context) -> Self {
        Self { context: context.clone(), by_weights: RefCell::default() }
    }

    /// Address of the scales of all rows of the weights that `sources` identify, and whether they are computed.
    pub(crate) fn of(&self, sources: Vec<u64>, rows: usize) -> (u64, bool) {
        let mut by_weights = self.by_weights.borrow_mut();
        let is_known = by_weights.contains_key(&sources);
        let buffer = by_weights
            .entry(sources)
            .or_insert_with(|| check("allocating scales", DeviceBuffer::new(&self.context, rows * 4)));
        (buffer.pointer::<u8>().address(), is_known)
    }

    /// Forgets all of them: before memory is released, and after a failure, which may have come before they were computed.
    pub(crate) fn clear(&self) {
        self.by_weights.borrow_mut().clear();
    }
}
