//! Repeated work of a stream, submitted as CUDA graphs.
//!
//! Every step of a run repeats the launches of the previous step, mostly with the same arguments, since buffers are reused in the same
//! order. Submitting a launch costs the host several microseconds in the driver and the libraries, which for short rows is longer than
//! the kernel runs. So launches wait here until there are [`MAX_WAITING`] of them, or until something else is about to be submitted to
//! the stream. If the same sequence came before, with the same arguments byte by byte, one call launches its recorded graph; otherwise
//! each launch is submitted. The third time, a sequence is recorded.
//!
//! A graph only replaces launches that were requested with exactly its arguments. So the callers' promises about
//! addresses hold for the graph as well, and this code need not know where memory comes from.
//!
//! Trade-off: the host still computes the arguments of every launch, and the device starts a few launches later. If one
//! argument differs, such as a learning rate, the launches around it are submitted one by one.

use std::cell::{Cell, RefCell};
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use rustc_hash::FxHashMap;
use xxhash_rust::xxh3::xxh3_64;

use crate::error::CudaError;
use crate::graph::Graph;
use crate::stream::Stream;

/// Maximum number of waiting launches. Step times were equal for any number from 16 to 512, and smaller graphs leave
/// fewer launches to submit one by one if an argument differs.
const MAX_WAITING: usize = 32;
/// Minimum number of launches in a graph; fewer are not worth one.
const MIN_RECORDED: usize = 3;
/// The occurrence of a sequence at which it is recorded.
const DUE: u32 = 3;
/// Maximum number of failures to record a sequence.
const MAX_REFUSALS: u32 = 3;
/// Maximum number of launches in all graphs together, and of graphs. Beyond it, new graphs replace those that were not used recently. On an H100,
/// graphs with 4 launches each take 120 KiB of memory: 2,048 of them took 242 MiB. A training step of a 1B model uses about 30 graphs.
const MAX_IN_GRAPHS: usize = 1 << 13;
const MAX_GRAPHS: usize = 1 << 9;
/// A graph counts as unused after this many times as many sequences as there are graphs.
const UNUSED: u64 = 8;
/// Maximum number of sequences remembered without a graph; beyond this all are dropped, since they come from batches that never repeat.
const MAX_SEEN: usize = 1 << 16;

/// A stream, and launches that wait to be submitted to it.
pub struct Repeats {
    stream: Arc<Stream>,
    is_on: Cell<bool>,
    waiting: RefCell<Waiting>,
    known: RefCell<Known>,
}

/// Launches that were requested but not yet submitted.
#[derive(Default)]
struct Waiting {
    launches: Vec<Launch>,
    /// Distinguishes them from all others.
    key: Key,
}

struct Launch {
    name: &'static str,
    submit: Box<Submit>,
}

type Submit = dyn Fn(&Stream) -> Result<(), CudaError>;

/// Earlier sequences of launches, by the hash of their key.
#[derive(Default)]
struct Known {
    by_hash: FxHashMap<u64, Sequence>,
    graphs: usize,
    in_graphs: usize,
    /// Number of sequences so far.
    now: u64,
    next_search: u64,
}

enum Sequence {
    /// Number of occurrences.
    Seen(u32),
    Recorded(Recorded),
    /// Number of times that the driver failed to record it.
    Refused(u32),
}

struct Recorded {
    // Dropped before the launches, which keep its operands alive.
    graph: Graph,
    launches: Vec<Launch>,
    key: Box<[u8]>,
    /// Time of the last launch.
    used: u64,
}

/// The bytes that values write when hashed.
#[derive(Default)]
struct Key(Vec<u8>);

impl Hasher for Key {
    fn write(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    fn finish(&self) -> u64 {
        xxh3_64(&self.0)
    }
}

/// A launch that the driver or a library rejected, or the first launch of a rejected graph.
#[derive(Debug)]
pub struct FailedLaunch {
    /// The name that was given to [`Repeats::submit`].
    pub name: &'static str,
    /// What the driver or a library answered.
    pub error: CudaError,
}

impl Repeats {
    /// Creates an empty queue for the stream.
    pub fn new(stream: Arc<Stream>) -> Self {
        Self { stream, is_on: Cell::new(true), waiting: RefCell::default(), known: RefCell::default() }
    }

    /// Sets whether launches wait and are repeated as graphs (the default); if off, each is submitted at once, and graphs are released.
    pub fn turn(&self, on: bool) {
        assert!(self.waiting.borrow().launches.is_empty(), "this is decided where nothing waits");
        self.is_on.set(on);
        if !on {
            self.release();
        }
    }

    /// Returns the stream. Work submitted to it directly follows the waiting launches only after [`Self::flush`].
    pub fn stream(&self) -> &Arc<Stream> {
        &self.stream
    }

    /// Requests that `submit` be called for the stream: later, to record its work, or never if a graph does the same.
    ///
    /// # Errors
    /// The error of this launch or of one that waited.
    ///
    /// # Safety
    /// `submit` must only submit to the stream. If two `what` write the same bytes when hashed, the same work with the
    /// same arguments must be submitted. Its promises about addresses must hold until the stream has done the work,
    /// even though memory freed earlier may be given to work that is submitted to this stream later.
    pub unsafe fn submit<W: Hash + 'static>(
        &self,
        name: &'static str,
        what: W,
        submit: impl Fn(&W, &Stream) -> Result<(), CudaError> + 'static,
    ) -> Result<(), FailedLaunch> {
        if !self.is_on.get() {
            return submit(&what, &self.stream).map_err(|error| FailedLaunch { name, error });
        }
        let is_full = {
            let mut waiting = self.waiting.borrow_mut();
            let begin = waiting.key.0.len();
            what.hash(&mut waiting.key);
            // The boundaries between launches are part of the key.
            let bytes = waiting.key.0.len() - begin;
            waiting.key.write(&bytes.to_ne_bytes());
            let submit = Box::new(move |stream: &Stream| submit(&what, stream));
            waiting.launches.push(Launch { name, submit });
            waiting.launches.len() == MAX_WAITING
        };
        if is_full { self.flush() } else { Ok(()) }
    }

    /// Submits the waiting launches.
    ///
    /// # Errors
    /// The error of the first launch that fails; the ones after it are dropped.
    pub fn flush(&self) -> Result<(), FailedLaunch> {
        let waiting = &mut *self.waiting.borrow_mut();
        if waiting.launches.is_empty() {
            return Ok(());
        }
        let mut launches = std::mem::replace(&mut waiting.launches, Vec::with_capacity(MAX_WAITING));
        let hash = waiting.key.finish();
        let done = if launches.len() < MIN_RECORDED {
            self.submit_each(&launches)
        } else {
            self.known.borrow_mut().submit(hash, &waiting.key.0, &mut launches, self)
        };
        waiting.key.0.clear();
        done
    }

    /// Drops the waiting launches, after a failure.
    pub fn drop_waiting(&self) {
        *self.waiting.borrow_mut() = Waiting::default();
    }

    /// Frees the memory of all graphs; the driver first finishes launches in flight.
    pub fn release(&self) {
        *self.known.borrow_mut() = Known::default();
    }

    /// Returns the number of launches in graphs.
    pub fn in_graphs(&self) -> usize {
        self.known.borrow().in_graphs
    }

    fn submit_each(&self, launches: &[Launch]) -> Result<(), FailedLaunch> {
        launches.iter().try_for_each(|launch| {
            (launch.submit)(&self.stream).map_err(|error| FailedLaunch { name: launch.name, error })
        })
    }
}

impl Known {
    /// Submits a sequence, as a graph if there is one or it is time to record one. A recorded graph keeps its launches.
    fn submit(
        &mut self,
        hash: u64,
        key: &[u8],
        launches: &mut Vec<Launch>,
        repeats: &Repeats,
    ) -> Result<(), FailedLaunch> {
        self.now += 1;
        if self.by_hash.len() > self.graphs + MAX_SEEN {
            self.by_hash.retain(|_, sequence| matches!(sequence, Sequence::Recorded(_)));
        }
        let is_due = match self.by_hash.entry(hash).or_insert(Sequence::Seen(0)) {
            Sequence::Recorded(recorded) if *recorded.key == *key => {
                recorded.used = self.now;
                return recorded.launch(&repeats.stream);
            }
            Sequence::Recorded(_) => false,
            Sequence::Seen(times) => {
                *times += 1;
                *times >= DUE
            }
            Sequence::Refused(times) => *times < MAX_REFUSALS,
        };
        if is_due && self.has_room(launches.len()) {
            self.record(hash, key, launches, repeats)
        } else {
            repeats.submit_each(launches)
        }
    }

    fn record(
        &mut self,
        hash: u64,
        key: &[u8],
        launches: &mut Vec<Launch>,
        repeats: &Repeats,
    ) -> Result<(), FailedLaunch> {
        let stream = &repeats.stream;
        let recorded = stream.record_graph(|| launches.iter().try_for_each(|launch| (launch.submit)(stream)));
        let graph = match recorded {
            Ok(graph) => graph,
            Err(error) => {
                tracing::warn!("launches from {} on are submitted one by one: {error}", launches[0].name);
                let earlier = match self.by_hash.get(&hash) {
                    Some(Sequence::Refused(times)) => *times,
                    _ => 0,
                };
                self.by_hash.insert(hash, Sequence::Refused(earlier + 1));
                return repeats.submit_each(launches);
            }
        };
        let recorded = Recorded { graph, launches: std::mem::take(launches), key: key.into(), used: self.now };
        recorded.launch(stream)?;
        self.in_graphs += recorded.launches.len();
        self.graphs += 1;
        self.by_hash.insert(hash, Sequence::Recorded(recorded));
        Ok(())
    }

    /// Returns whether a graph of this many launches may be added, if necessary by removing graphs that were not used for as long as
    /// it takes to use all of them a few times. Such a search is rare, since it takes as long as submitting many launches.
    fn has_room(&mut self, launches: usize) -> bool {
        let is_full = |known: &Self| known.in_graphs + launches > MAX_IN_GRAPHS || known.graphs == MAX_GRAPHS;
        if is_full(self) && self.now >= self.next_search {
            let window = UNUSED * self.graphs as u64;
            self.next_search = self.now + window / 2;
            let now = self.now;
            let is_unused = |recorded: &Recorded| recorded.used + window < now;
            self.by_hash.retain(|_, sequence| !matches!(sequence, Sequence::Recorded(recorded) if is_unused(recorded)));
            let left = self.by_hash.values().filter_map(|sequence| match sequence {
                Sequence::Recorded(recorded) => Some(recorded.launches.len()),
                Sequence::Seen(_) | Sequence::Refused(_) => None,
            });
            (self.graphs, self.in_graphs) = left.fold((0, 0), |(graphs, all), launches| (graphs + 1, all + launches));
        }
        !is_full(self)
    }
}

impl Recorded {
    fn launch(&self, stream: &Stream) -> Result<(), FailedLaunch> {
        // SAFETY: launches were requested just now that are those of the graph, with the same arguments, and their callers promised
        // what each of them needs.
        let launched = unsafe { self.graph.launch(stream) };
        launched.map_err(|error| FailedLaunch { name: self.launches[0].name, error })
    }
}
