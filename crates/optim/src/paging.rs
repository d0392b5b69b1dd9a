//! Selects the optimizer state that waits in host memory, and passes it through the device: bucket by bucket, fetched ahead of its update.
//!
//! Copies run next to other work on backends that can do that (`firebrick_kernels::memory::prefetch` has the schedule). On the others nothing moves,
//! and the numbers are the same.
//! Trade-off: a parameter's state is on the device as a whole while it is updated, so state above [`MAX_PARAMETER_BYTES`] (f32 moments of
//! an embedding) is never paged, and a budget below it cannot be met.

use std::collections::BTreeMap;
use std::sync::Arc;

use firebrick_kernels::memory::prefetch::Store;
use firebrick_kernels::{Kernels, Parameter};

use crate::state::{ParameterState, StateSpec};

/// A parameter with more bytes of pageable state stays on the device.
const MAX_PARAMETER_BYTES: u64 = 256 << 20;
/// Paged bytes that are updated at once.
const BUCKET_BYTES: u64 = 64 << 20;
/// Buckets on their way to the device while one is updated.
pub(crate) const BUCKETS_AHEAD: usize = 2;

/// Returns the bytes of a parameter's state that are in host memory when it is paged.
pub(crate) fn paged_bytes(layout: &[StateSpec]) -> u64 {
    layout.iter().filter(|spec| spec.is_paged()).map(StateSpec::bytes).sum()
}

/// Selects the parameters whose state is paged so that `resident_bytes` of all state stay on the device: from the last name backwards.
pub(crate) fn choose<'a>(layouts: &BTreeMap<&'a str, Vec<StateSpec>>, resident_bytes: u64) -> Vec<&'a str> {
    let mut resident: u64 = layouts.values().flatten().map(StateSpec::bytes).sum();
    let mut paged = Vec::new();
    for (name, layout) in layouts.iter().rev() {
        let bytes = paged_bytes(layout);
        if resident > resident_bytes && bytes > 0 && bytes <= MAX_PARAMETER_BYTES {
            resident -= bytes;
            paged.push(*name);
        }
    }
    paged
}

/// Returns the maximum device memory for paging if `paged` bytes of state are in host memory: a bucket in use, those ahead, and one on its way out. A
/// bucket may be as large as the largest parameter's state.
pub(crate) fn staging_bytes(paged: u64, largest: u64) -> u64 {
    let bucket = BUCKET_BYTES + largest;
    paged.min(bucket * (BUCKETS_AHEAD as u64 + 2))
}

/// Cuts the parameters into buckets, in order.
pub(crate) fn buckets<'a, B: Kernels>(
    parameters: Vec<&'a mut Parameter<B>>,
    bytes: impl Fn(&Parameter<B>) -> u64,
) -> Vec<Vec<&'a mut Parameter<B>>> {
    let mut buckets: Vec<Vec<&'a mut Parameter<B>>> = Vec::new();
    let mut filled = BUCKET_BYTES;
    for parameter in parameters {
        if filled >= BUCKET_BYTES {
            buckets.push(Vec::new());
            filled = 0;
        }
        filled += bytes(parameter);
        let bucket = buckets.last_mut().expect("the first parameter opens a bucket");
        bucket.push(parameter);
    }
    buckets
}

/// The paged state of a group, by bucket.
pub(crate) struct PagedState<'a, B: Kernels> {
    pub(crate) state: &'a mut BTreeMap<Arc<str>, ParameterState<B>>,
    /// Names of the parameters of each bucket.
    pub(crate) buckets: Vec<Vec<Arc<str>>>,
    pub(crate) device: B::Device,
}

impl<B: Kernels> Store for PagedState<'_, B> {
    /// The state of a bucket's parameters, on the device.
    type Item = Vec<ParameterState<B>>;

    fn prefetch(&mut self, index: usize) {
        for name in &self.buckets[index] {
            let state = self.state.get_mut(name).expect("paged state is there between two updates");
            state.prefetch(&self.device);
        }
    }

    fn take(&mut self, index: usize) -> Self::Item {
        let mut take = |name| self.state.remove(name).expect("paged state is there between two updates");
        self.buckets[index].iter().map(|name| take(name).fetched(&self.device)).collect()
    }

    fn put(&mut self, index: usize, states: Self::Item) {
        for (name, state) in self.buckets[index].iter().zip(states) {
            self.state.insert(name.clone(), state.paged());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::StateInit;

    fn layout(elements: usize) -> Vec<StateSpec> {
        let spec = |part, elements, init| StateSpec { part, elements, init };
        vec![spec("codes", elements, StateInit::Code(0)), spec("absmax", elements / 256, StateInit::F32(0.0))]
    }

    fn layouts(sizes: &[(&'static str, usize)]) -> BTreeMap<&'static str, Vec<StateSpec>> {
        sizes.iter().map(|&(name, elements)| (name, layout(elements))).collect()
    }

    #[test]
    fn state_is_paged_from_the_last_name_on() {
        let layouts = layouts(&[("a", 1 << 20), ("b", 1 << 20), ("c", 1000), ("d", 1 << 20)]);
        let total: u64 = layouts.values().flatten().map(StateSpec::bytes).sum();
        assert_eq!(choose(&layouts, total), [""; 0]);
        assert_eq!(choose(&layouts, total - 1), ["d"]);
        assert_eq!(choose(&layouts, total - (1 << 20)), ["d"]);
        assert_eq!(choose(&layouts, total - (1 << 20) - 1), ["d", "b"]);
        assert_eq!(choose(&layouts, 0), ["d", "b", "a"]);
        assert_eq!(paged_bytes(&layouts["a"]), 1 << 20, "scales stay on the device");
        assert_eq!(paged_bytes(&layouts["c"]), 0);
        let with_large = self::layouts(&[("a", 1 << 20), ("b", 1 << 29)]);
        assert_eq!(choose(&with_large, 0), ["a"], "what is too large to pass stays on the device");
    }

    #[test]
    fn staging_is_bounded_by_what_is_paged() {
        assert_eq!(staging_bytes(1000, 1000), 1000);
        assert_eq!(staging_bytes(1 << 40, 1 << 20), 4 * (65 << 20));
    }
}
