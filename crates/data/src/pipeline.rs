//! Encodes records on worker threads, which live as long as the stream, and returns the results in the same order.
//!
//! Each worker builds its own encoding function, which may own data that threads should not share. The calling thread reads records and takes
//! results, so neither the iterator nor the sink crosses threads. Records travel in blocks: block `n` goes to worker `n % workers` and comes back
//! from it, so the order needs no sorting and does not depend on timing. At most [`BLOCKS_PER_WORKER`] blocks per worker are in flight, so memory is
//! constant for any length of stream. Trade-off: no work stealing. A slow block holds up the stream once the other workers' blocks are used up.

use std::collections::VecDeque;
use std::num::NonZeroUsize;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{Scope, ScopedJoinHandle, available_parallelism, scope};

/// Blocks of one worker that are queued, being encoded or done.
const BLOCKS_PER_WORKER: usize = 4;
/// Records per block, unless its bytes reach the limit first.
const BLOCK_RECORDS: usize = 256;
/// Bytes per block: small enough that the first results come at once, large enough to hide the handoff.
const BLOCK_BYTES: usize = 128 << 10;

static ENCODED: AtomicU64 = AtomicU64::new(0);

/// Returns the number of records that this process has encoded so far, in all pipelines, for a progress display.
pub fn records_encoded() -> u64 {
    ENCODED.load(Ordering::Relaxed)
}

/// The number of encoding threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pipeline {
    /// Encoding threads, in addition to the caller's.
    pub workers: NonZeroUsize,
}

impl Default for Pipeline {
    /// Uses one worker per core.
    fn default() -> Self {
        Self { workers: available_parallelism().unwrap_or(NonZeroUsize::MIN) }
    }
}

impl Pipeline {
    /// Encodes all records and passes the results to `sink` in the order of the records.
    ///
    /// `weigh` estimates the bytes of a record. Per worker, a few blocks of 128 KiB (or of one larger record) are in
    /// flight. `encoder` runs once on each worker that receives a record and returns the function that encodes there;
    /// `records` and `sink` run on the calling thread. Errors: the first error in the order of the records, whether
    /// from reading, encoding or the sink. By then the sink has received all results before it and none after it.
    /// Panics if `encoder` or the function that it returns panics.
    pub fn run<R, T, S, E, F>(
        &self,
        records: impl IntoIterator<Item = Result<R, S>>,
        weigh: impl Fn(&R) -> usize,
        encoder: impl Fn() -> F + Sync,
        mut sink: impl FnMut(T) -> Result<(), E>,
    ) -> Result<(), E>
    where
        R: Send,
        T: Send,
        S: Send,
        E: From<S> + Send,
        F: FnMut(R) -> Result<T, E>,
    {
        let is_over = AtomicBool::new(false);
        scope(|scope| {
            let mut workers = Workers::spawn(scope, self.workers.get(), &encoder, &is_over);
            // Stops the workers in every way this closure can be left.
            let _guard = SetOnDrop(&is_over);
            let mut blocks = Blocks { records: records.into_iter(), weigh, is_over: false };
            loop {
                while workers.owed.len() < BLOCKS_PER_WORKER * workers.lanes.len()
                    && let Some(block) = blocks.next()
                {
                    workers.send(block);
                }
                let Some(results) = workers.receive() else { return Ok(()) };
                ENCODED.fetch_add(results.len() as u64, Ordering::Relaxed);
                for result in results {
                    sink(result?)?;
                }
            }
        })
    }
}

struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Cuts a stream into blocks; an error is the last item of the last block.
struct Blocks<I, W> {
    records: I,
    weigh: W,
    is_over: bool,
}

impl<R, S, I: Iterator<Item = Result<R, S>>, W: Fn(&R) -> usize> Iterator for Blocks<I, W> {
    type Item = Vec<Result<R, S>>;

    fn next(&mut self) -> Option<Self::Item> {
        let mut block = Vec::new();
        let mut bytes = 0;
        while !self.is_over && block.len() < BLOCK_RECORDS && bytes < BLOCK_BYTES {
            let Some(record) = self.records.next() else {
                self.is_over = true;
                break;
            };
            match &record {
                Ok(record) => bytes = bytes.saturating_add((self.weigh)(record)),
                Err(_) => self.is_over = true,
            }
            block.push(record);
        }
        (!block.is_empty()).then_some(block)
    }
}

/// The encoding threads and the order in which they return results.
struct Workers<'scope, R, T, S, E> {
    lanes: Vec<Lane<'scope, R, T, S, E>>,
    /// Lanes that owe a block, oldest first.
    owed: VecDeque<usize>,
    next: usize,
}

struct Lane<'scope, R, T, S, E> {
    blocks: Sender<Vec<Result<R, S>>>,
    results: Receiver<Vec<Result<T, E>>>,
    thread: Option<ScopedJoinHandle<'scope, ()>>,
}

impl<'scope, R, T, S, E> Workers<'scope, R, T, S, E>
where
    R: Send + 'scope,
    T: Send + 'scope,
    S: Send + 'scope,
    E: From<S> + Send + 'scope,
{
    fn spawn<'env, F: FnMut(R) -> Result<T, E>>(
        scope: &'scope Scope<'scope, 'env>,
        count: usize,
        encoder: &'scope (impl Fn() -> F + Sync),
        is_over: &'scope AtomicBool,
    ) -> Self {
        let lane = |_| {
            let (blocks, incoming) = channel::<Vec<Result<R, S>>>();
            let (outgoing, results) = channel();
            let work = move || {
                // Built for the first block: with few records most workers receive none.
                let mut encode = None;
                for block in incoming {
                    let is_unwanted = is_over.load(Ordering::Relaxed);
                    let encode = encode.get_or_insert_with(encoder);
                    if is_unwanted || outgoing.send(encode_block(block, encode, is_over)).is_err() {
                        return;
                    }
                }
            };
            Lane { blocks, results, thread: Some(scope.spawn(work)) }
        };
        Self { lanes: (0..count).map(lane).collect(), owed: VecDeque::new(), next: 0 }
    }

    fn send(&mut self, block: Vec<Result<R, S>>) {
        // A worker that is gone has panicked; receiving from it reports the panic.
        let _ = self.lanes[self.next].blocks.send(block);
        self.owed.push_back(self.next);
        self.next = (self.next + 1) % self.lanes.len();
    }

    /// Returns the results of the oldest block; `None` when all have come back.
    fn receive(&mut self) -> Option<Vec<Result<T, E>>> {
        let lane = &mut self.lanes[self.owed.pop_front()?];
        if let Ok(results) = lane.results.recv() {
            return Some(results);
        }
        let panic = lane.thread.take().expect("a lane fails once").join();
        resume_unwind(panic.expect_err("a worker that still owes a block ends only by a panic"))
    }
}

/// Encodes up to the first error, which becomes the last result.
fn encode_block<R, T, S, E: From<S>>(
    block: Vec<Result<R, S>>,
    mut encode: impl FnMut(R) -> Result<T, E>,
    is_over: &AtomicBool,
) -> Vec<Result<T, E>> {
    let mut results = Vec::with_capacity(block.len());
    for record in block {
        // These results are no longer read.
        if is_over.load(Ordering::Relaxed) {
            break;
        }
        let result = record.map_err(E::from).and_then(&mut encode);
        let is_error = result.is_err();
        results.push(result);
        if is_error {
            break;
        }
    }
    results
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::atomic::AtomicUsize;
    use std::thread::sleep;
    use std::time::Duration;

    use super::*;

    fn pipeline(workers: usize) -> Pipeline {
        Pipeline { workers: NonZeroUsize::new(workers).unwrap() }
    }

    #[test]
    fn results_come_in_order_whatever_workers_do() {
        for workers in 1..5 {
            let records = (0..5000_usize).map(Ok::<_, String>);
            let encode = |number: usize| {
                if number % 700 < 3 {
                    sleep(Duration::from_millis(3));
                }
                Ok::<_, String>(2 * number)
            };
            let mut results = Vec::new();
            let keep = |result| {
                results.push(result);
                Ok(())
            };
            pipeline(workers).run(records, |number| number % 9000, || encode, keep).unwrap();
            assert!(results.into_iter().eq((0..5000).map(|number| 2 * number)));
        }
    }

    #[test]
    fn first_error_in_order_wins_and_all_before_it_were_delivered() {
        let run = |unreadable: usize, refused: usize, full: usize| {
            let records = (0..3000).map(|number| if number == unreadable { Err("read") } else { Ok(number) });
            // Later records fail earlier.
            let encode = |number| {
                if number == refused {
                    sleep(Duration::from_millis(5));
                }
                if number >= refused { Err(format!("encode {number}")) } else { Ok(number) }
            };
            let mut last = None;
            let sink = |number| {
                if number == full {
                    return Err("sink".to_owned());
                }
                last = Some(number);
                Ok(())
            };
            (pipeline(3).run(records, |_| 1000, || encode, sink).unwrap_err(), last)
        };
        const NEVER: usize = usize::MAX;
        assert_eq!(run(2000, NEVER, NEVER), ("read".to_owned(), Some(1999)));
        assert_eq!(run(2000, 1200, NEVER), ("encode 1200".to_owned(), Some(1199)));
        assert_eq!(run(700, 1200, NEVER), ("read".to_owned(), Some(699)));
        assert_eq!(run(2000, 1200, 300), ("sink".to_owned(), Some(299)));
        assert_eq!(run(0, NEVER, NEVER), ("read".to_owned(), None));
    }

    #[test]
    fn what_is_in_flight_is_bounded_by_weight_and_by_count() {
        for (weight, records_per_block) in [(1, BLOCK_RECORDS), (BLOCK_BYTES / 2, 2), (usize::MAX >> 1, 1)] {
            let (read, taken, most) = (Cell::new(0), Cell::new(0), Cell::new(0));
            let records = (0..20_000).map(|number| {
                read.set(read.get() + 1);
                most.set(most.get().max(read.get() - taken.get()));
                Ok::<usize, String>(number)
            });
            let sink = |_| {
                taken.set(taken.get() + 1);
                Ok(())
            };
            pipeline(2).run(records, |_| weight, || Ok::<_, String>, sink).unwrap();
            assert_eq!(taken.get(), 20_000);
            assert!(most.get() <= 2 * BLOCKS_PER_WORKER * records_per_block + records_per_block, "{}", most.get());
        }
    }

    #[test]
    fn each_worker_has_an_encoder_of_its_own() {
        let (made, ids) = (AtomicUsize::new(0), 0..9000_usize);
        let encoder = || {
            made.fetch_add(1, Ordering::Relaxed);
            let mut encoded = 0;
            move |_| {
                encoded += 1;
                Ok::<usize, String>(encoded)
            }
        };
        let mut most = 0;
        let keep = |encoded: usize| {
            most = most.max(encoded);
            Ok(())
        };
        pipeline(3).run(ids.map(Ok::<_, String>), |_| 1, encoder, keep).unwrap();
        assert_eq!(made.into_inner(), 3);
        assert!(most < 9000 / 2, "one of three workers encoded {most}");
    }

    #[test]
    fn an_error_stops_the_workers_soon() {
        let encoded = AtomicUsize::new(0);
        let encode = |number: usize| {
            encoded.fetch_add(1, Ordering::Relaxed);
            if number == 0 { Err("stop".to_owned()) } else { Ok(number) }
        };
        let endless = (0..).map(Ok::<usize, String>);
        assert_eq!(pipeline(2).run(endless, |_| 1, || &encode, |_| Ok(())), Err("stop".to_owned()));
        assert!(encoded.into_inner() <= 2 * BLOCKS_PER_WORKER * BLOCK_RECORDS);
    }

    #[test]
    #[should_panic(expected = "a bug in record 1500")]
    fn panic_of_a_worker_becomes_the_callers() {
        let encode = |number: usize| {
            assert_ne!(number, 1500, "a bug in record 1500");
            Ok::<_, String>(number)
        };
        let _ = pipeline(2).run((0..9000).map(Ok::<usize, String>), |_| 1, || encode, |_| Ok(()));
    }
}
