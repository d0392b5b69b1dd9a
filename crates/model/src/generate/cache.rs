//! Keys and values of all running sequences, and the free pages of their caches.
//!
//! Everything is allocated before the first token. A sequence takes pages for its prompt and for the longest answer it may get, and shares those of
//! which it only reads; a page is free when no sequence has it.
//! Trade-off: pages for the longest answer are taken at the beginning, so that no sequence has to be stopped halfway.

use burn_tensor::DType;
use firebrick_arch::ModelSpec;
use firebrick_kernels::{Kernels, PAGE_ROWS};

use crate::mixer::Cache;

/// The states of each layer; of one with keys and values, none.
pub(crate) type States<B> = Vec<Option<Cache<B>>>;

/// One cache per layer, all with the same pages.
#[derive(Debug)]
pub(crate) struct Caches<B: Kernels> {
    pub(crate) layers: Vec<Cache<B>>,
    /// How many sequences have each page.
    users: Vec<u32>,
}

impl<B: Kernels> Default for Caches<B> {
    fn default() -> Self {
        Self { layers: Vec::new(), users: Vec::new() }
    }
}

impl<B: Kernels> Caches<B> {
    pub(crate) fn new(spec: &ModelSpec, pages: usize, dtype: DType, device: &B::Device) -> Self {
        let layers =
            spec.layers.iter().map(|layer| Cache::new(&layer.mixer, pages * PAGE_ROWS, dtype, device)).collect();
        Self { layers, users: vec![0; pages] }
    }

    /// Returns whether any layer has states, which are those after the last token alone.
    pub(crate) fn have_states(&self) -> bool {
        self.layers.iter().any(|cache| !matches!(cache, Cache::Rows(_)))
    }

    /// Returns the states of all layers: handles, because an operation makes new ones.
    pub(crate) fn states(&self) -> States<B> {
        self.layers.iter().map(Cache::states).collect()
    }

    pub(crate) fn restore(&mut self, states: &States<B>) {
        for (layer, states) in self.layers.iter_mut().zip(states) {
            if let Some(states) = states.as_ref().and_then(Cache::states) {
                *layer = states;
            }
        }
    }

    /// Takes free pages for `tokens` tokens, of which the first are in `shared` pages; `None` if there are not so many.
    pub(crate) fn take(&mut self, tokens: usize, shared: &[u32]) -> Option<Vec<u32>> {
        let new = tokens.div_ceil(PAGE_ROWS).saturating_sub(shared.len());
        let free = self.users.iter().enumerate().filter(|(_, users)| **users == 0);
        let free: Vec<u32> = free.map(|(page, _)| page as u32).take(new).collect();
        (free.len() == new).then(|| {
            let pages = [shared, &free].concat();
            pages.iter().for_each(|&page| self.users[page as usize] += 1);
            pages
        })
    }

    /// Takes all pages for the only sequence.
    pub(crate) fn take_all(&mut self) -> Vec<u32> {
        self.users.fill(1);
        (0..self.users.len() as u32).collect()
    }

    /// Takes pages that a sequence has once more.
    pub(crate) fn hold(&mut self, pages: &[u32]) {
        pages.iter().for_each(|&page| self.users[page as usize] += 1);
    }

    /// Gives pages back that [`Caches::take`] has returned.
    pub(crate) fn give_back(&mut self, pages: &[u32]) {
        pages.iter().for_each(|&page| self.users[page as usize] -= 1);
    }
}

#[cfg(test)]
mod tests {
    use firebrick_kernels::backends::Flex;

    use super::*;
    use crate::test_config::tiny;

    #[test]
    fn a_page_is_free_when_no_sequence_has_it() {
        let spec = tiny(&[]).unwrap().spec;
        let mut caches = Caches::<Flex>::new(&spec, 3, DType::F32, &Default::default());
        assert_eq!(caches.layers.len(), spec.layers.len());
        let first = caches.take(PAGE_ROWS + 1, &[]).unwrap();
        assert_eq!(first, [0, 1]);
        let second = caches.take(PAGE_ROWS + 5, &first[..1]).unwrap();
        assert_eq!((&second[..], caches.take(1, &[])), (&[0, 2][..], None));
        caches.give_back(&first);
        assert_eq!(caches.take(2 * PAGE_ROWS, &[]), None, "the first page is still read");
        caches.give_back(&second);
        assert_eq!(caches.take(3 * PAGE_ROWS, &[]).unwrap(), [0, 1, 2]);
    }
}
