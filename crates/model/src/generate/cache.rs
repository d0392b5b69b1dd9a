//! Keys and values of all running sequences, and the free rows of their caches.
//!
//! Everything is allocated before the first token. A sequence owns the rows for its prompt and for the longest answer it may get; when it has ended,
//! they go to another one.
//! Trade-off: rows are assigned first fit, so a long prompt may have to wait for neighbors although enough rows are free.

use std::ops::Range;

use burn_tensor::DType;
use firebrick_arch::ModelSpec;
use firebrick_kernels::Kernels;

use crate::mixer::Cache;

/// The states of each layer; of one with keys and values, none.
pub(crate) type States<B> = Vec<Option<Cache<B>>>;

/// One cache per layer, all with the same rows.
#[derive(Debug)]
pub(crate) struct Caches<B: Kernels> {
    pub(crate) layers: Vec<Cache<B>>,
    /// Free rows, as ascending ranges.
    free: Vec<Range<usize>>,
}

impl<B: Kernels> Default for Caches<B> {
    fn default() -> Self {
        Self { layers: Vec::new(), free: Vec::new() }
    }
}

impl<B: Kernels> Caches<B> {
    pub(crate) fn new(spec: &ModelSpec, rows: usize, dtype: DType, device: &B::Device) -> Self {
        let layers = spec.layers.iter().map(|layer| Cache::new(&layer.mixer, rows, dtype, device)).collect();
        Self { layers, free: Vec::from_iter((rows > 0).then_some(0..rows)) }
    }

    /// Returns whether any layer has states, which are those after the last token alone.
    pub(crate) fn have_states(&self) -> bool {
        self.layers.iter().any(|cache| !matches!(cache, Cache::Rows(_)))
    }

    /// Returns the states of all layers: handles, because an operation makes new ones.
    pub(crate) fn states(&self) -> States<B> {
        self.layers.iter().map(Cache::states).collect()
    }

    /// Puts states back.
    pub(crate) fn restore(&mut self, states: &States<B>) {
        for (layer, states) in self.layers.iter_mut().zip(states) {
            if let Some(states) = states.as_ref().and_then(Cache::states) {
                *layer = states;
            }
        }
    }

    /// Takes `rows` consecutive rows and returns the first; `None` if there are not so many.
    pub(crate) fn take(&mut self, rows: usize) -> Option<usize> {
        let index = self.free.iter().position(|range| range.len() >= rows)?;
        let range = &mut self.free[index];
        let first = range.start;
        range.start += rows;
        if range.start == range.end {
            self.free.remove(index);
        }
        Some(first)
    }

    /// Returns rows to the free list.
    pub(crate) fn give_back(&mut self, rows: Range<usize>) {
        let index = self.free.partition_point(|range| range.start < rows.start);
        self.free.insert(index, rows);
        self.free.dedup_by(|next, range| {
            let touch = range.end == next.start;
            if touch {
                range.end = next.end;
            }
            touch
        });
    }
}

#[cfg(test)]
mod tests {
    use firebrick_kernels::backends::Flex;

    use super::*;
    use crate::test_config::tiny;

    #[test]
    fn rows_are_given_out_once_and_join_when_they_return() {
        let spec = tiny(&[]).unwrap().spec;
        let mut caches = Caches::<Flex>::new(&spec, 10, DType::F32, &Default::default());
        assert_eq!(caches.layers.len(), spec.layers.len());
        assert_eq!([caches.take(4), caches.take(3), caches.take(3), caches.take(1)], [Some(0), Some(4), Some(7), None]);
        caches.give_back(0..4);
        caches.give_back(7..10);
        assert_eq!(caches.take(5), None, "seven rows are free, in two places");
        caches.give_back(4..7);
        assert!(caches.free.len() == 1 && caches.free[0] == (0..10), "neighbors are joined");
        assert_eq!(caches.take(10), Some(0));
    }
}
