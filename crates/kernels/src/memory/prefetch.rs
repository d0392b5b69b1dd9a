//! One schedule for all data that is stored elsewhere and fetched one step ahead of its use: offloaded activations,
//! paged optimizer state, sharded weights.
//!
//! A [`Store`] fetches, takes and puts back one kind of item. [`Schedule`] walks a store in a known order and keeps up to `ahead` fetches in flight.
//! Trade-off: the order is fixed before the walk begins; an item that is not used is still fetched.

use std::collections::VecDeque;

/// Indexed items in slower memory.
pub trait Store {
    /// The fetched item.
    type Item;

    /// Starts to fetch item `index`. Further calls have no effect.
    fn prefetch(&mut self, index: usize);

    /// Returns the item, after waiting for its fetch if necessary.
    fn take(&mut self, index: usize) -> Self::Item;

    /// Puts back a changed item, for stores that read, modify and write.
    fn put(&mut self, index: usize, item: Self::Item);
}

/// A walk over a store in a fixed order, which fetches ahead.
pub struct Schedule<'a, S: Store> {
    store: &'a mut S,
    remaining: VecDeque<usize>,
    ahead: usize,
}

impl<'a, S: Store> Schedule<'a, S> {
    /// Creates a walk over `order` that keeps up to `ahead` fetches in flight while an item is in use. Starts the first ones.
    pub fn new(store: &'a mut S, order: impl IntoIterator<Item = usize>, ahead: usize) -> Self {
        let mut schedule = Self { store, remaining: order.into_iter().collect(), ahead };
        schedule.fetch_ahead();
        schedule
    }

    /// Returns the next item with its index; the fetches of the items after it have started by then.
    pub fn next_item(&mut self) -> Option<(usize, S::Item)> {
        let index = self.remaining.pop_front()?;
        let item = self.store.take(index);
        self.fetch_ahead();
        Some((index, item))
    }

    /// Puts the item `index` back.
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
