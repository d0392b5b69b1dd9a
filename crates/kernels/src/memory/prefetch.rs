//! One schedule for everything that lives elsewhere and is fetched one step ahead of its use: offloaded activations, paged optimizer
//! state, sharded weights.
//!
//! A [`Store`] knows how to fetch, take and put back one kind of item. [`Schedule`] walks a store in a known order and keeps
//! `ahead` items on their way.
//! Trade-off: the order is fixed before the walk begins; an item that is not used is still fetched.

use std::collections::VecDeque;

/// Items by index that live somewhere slower.
pub trait Store {
    /// What is fetched.
    type Item;

    /// Starts to bring item `index` near. Calling it twice is the same as calling it once.
    fn prefetch(&mut self, index: usize);

    /// The item, waiting for it if it is not here yet.
    fn take(&mut self, index: usize) -> Self::Item;

    /// Gives an item back that was changed, for stores that read, modify and write.
    fn put(&mut self, index: usize, item: Self::Item);
}

/// Walks a store in a fixed order, fetching ahead.
pub struct Schedule<'a, S: Store> {
    store: &'a mut S,
    remaining: VecDeque<usize>,
    ahead: usize,
}

impl<'a, S: Store> Schedule<'a, S> {
    /// A walk over `order`, with up to `ahead` items on their way while one is in use. Starts to fetch the first ones.
    pub fn new(store: &'a mut S, order: impl IntoIterator<Item = usize>, ahead: usize) -> Self {
        let mut schedule = Self { store, remaining: order.into_iter().collect(), ahead };
        schedule.fetch_ahead();
        schedule
    }

    /// The next item with its index; the ones after it are on their way when this returns.
    pub fn next_item(&mut self) -> Option<(usize, S::Item)> {
        let index = self.remaining.pop_front()?;
        let item = self.store.take(index);
        self.fetch_ahead();
        Some((index, item))
    }

    /// Gives the item `index` back.
    pub fn put(&mut self, index: usize, item: S::Item) {
        self.store.put(index, item);
    }

    fn fetch_ahead(&mut self) {
        for &index in self.remaining.iter().take(self.ahead) {
            self.store.prefetch(index);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Records what happens to it.
    #[derive(Default)]
    struct Recorder {
        log: Vec<String>,
    }

    impl Store for Recorder {
        type Item = usize;

        fn prefetch(&mut self, index: usize) {
            self.log.push(format!("prefetch {index}"));
        }

        fn take(&mut self, index: usize) -> usize {
            self.log.push(format!("take {index}"));
            10 * index
        }

        fn put(&mut self, index: usize, item: usize) {
            self.log.push(format!("put {index} {item}"));
        }
    }

    #[test]
    fn the_next_item_is_on_its_way_while_one_is_in_use() {
        let mut store = Recorder::default();
        let mut schedule = Schedule::new(&mut store, [2, 1, 0], 1);
        while let Some((index, item)) = schedule.next_item() {
            schedule.put(index, item + 1);
        }
        let expected =
            ["prefetch 2", "take 2", "prefetch 1", "put 2 21", "take 1", "prefetch 0", "put 1 11", "take 0", "put 0 1"];
        assert_eq!(store.log, expected);
    }
}
