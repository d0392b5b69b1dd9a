//! Splits block-wise work over the machine's cores with scoped threads: no pool, no state, same result for any core
//! count.
//!
//! Gives up work stealing: blocks cost the same, so equal spans finish together.

use std::thread;

/// Below this many values per thread, starting the thread costs more than it saves.
const VALUES_PER_WORKER: usize = 1 << 16;

/// Whole blocks that one worker takes, so that `blocks` blocks of `block_size` values keep every useful core busy.
pub(crate) fn blocks_per_worker(blocks: usize, block_size: usize) -> usize {
    let cores = thread::available_parallelism().map_or(1, |cores| cores.get());
    let useful = (blocks.saturating_mul(block_size) / VALUES_PER_WORKER).clamp(1, cores);
    blocks.div_ceil(useful).max(1)
}

/// Runs every task, each on a thread of its own but for the last, which stays here; results come in the tasks' order.
pub(crate) fn run<R: Send>(tasks: impl IntoIterator<Item = impl FnOnce() -> R + Send>) -> Vec<R> {
    let mut tasks: Vec<_> = tasks.into_iter().collect();
    let Some(last) = tasks.pop() else { return Vec::new() };
    thread::scope(|scope| {
        let others: Vec<_> = tasks.into_iter().map(|task| scope.spawn(task)).collect();
        let last = last();
        // A panicking task is a bug of ours: hand its panic on.
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
        assert_eq!(run(Vec::<fn() -> u8>::new()), []);
    }

    #[test]
    fn spans_cover_all_blocks_and_small_work_stays_on_one_thread() {
        assert_eq!(blocks_per_worker(100, 64), 100);
        assert_eq!(blocks_per_worker(0, 64), 1);
        let span = blocks_per_worker(1 << 20, 64);
        assert!((1..=1 << 20).contains(&span));
    }
}
