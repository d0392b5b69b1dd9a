//! Splits block-wise work over the cores with scoped threads. The result does not depend on the number of cores.

use std::thread;

/// Minimum number of values per thread; with fewer, starting the thread costs more than it saves.
const VALUES_PER_WORKER: usize = 1 << 16;

/// Returns how many whole blocks each worker takes of `blocks` blocks of `block_size` values.
pub(crate) fn blocks_per_worker(blocks: usize, block_size: usize) -> usize {
    let cores = thread::available_parallelism().map_or(1, |cores| cores.get());
    let useful = (blocks.saturating_mul(block_size) / VALUES_PER_WORKER).clamp(1, cores);
    blocks.div_ceil(useful).max(1)
}

/// Runs the last task on this thread and each other task on its own thread. Returns the results in the order of the tasks.
pub(crate) fn run<R: Send>(tasks: impl IntoIterator<Item = impl FnOnce() -> R + Send>) -> Vec<R> {
    let mut tasks: Vec<_> = tasks.into_iter().collect();
    let Some(last) = tasks.pop() else { return Vec::new() };
    thread::scope(|scope| {
        let others: Vec<_> = tasks.into_iter().map(|task| scope.spawn(task)).collect();
        let last = last();
        // A task panics only because of a bug, so propagate it.
        let mut results: Vec<R> = others
            .into_iter()
            .map(|worker| worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect();
        results.push(last);
        results
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_keep_the_order_of_the_tasks() {
        assert_eq!(run((0..9).map(|index| move || index * index)), (0..9).map(|i| i * i).collect::<Vec<_>>());
        assert!(run(Vec::<fn() -> u8>::new()).is_empty());
    }

    #[test]
    fn spans_cover_all_blocks_and_small_work_stays_on_one_thread() {
        assert_eq!(blocks_per_worker(100, 64), 100);
        assert_eq!(blocks_per_worker(0, 64), 1);
        let span = blocks_per_worker(1 << 20, 64);
        assert!((1..=1 << 20).contains(&span));
    }
}
