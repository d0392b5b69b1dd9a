//! Work of a stream that repeats, submitted as CUDA graphs.
//!
//! Every step of a run launches what the step before launched, mostly with the same arguments: buffers are used again in the same order.
//! Submitting a launch costs the host several microseconds in the driver and the libraries, which for short rows is longer than the kernel
//! runs. So launches wait here until there are [`MAX_WAITING`] of them, or until something else is about to happen in the stream. If the same ones
//! came before, with the same arguments byte by byte, one call launches the graph that was recorded of them; otherwise each is submitted.
//! The third time, they are recorded.
//!
//! A graph is launched only in the place of launches that were requested with its very arguments. So what their callers promised about
//! addresses holds for the graph as well, and nothing has to be known about where memory comes from.
//!
//! Trade-off: the host still computes the arguments of every launch, and the device starts a few launches later. One argument that differs,
//! such as a learning rate, and the launches around it are submitted one by one.

use std::cell::{Cell, RefCell};
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use rustc_hash::FxHashMap;
use xxhash_rust::xxh3::xxh3_64;

use crate::error::CudaError;
use crate::graph::Graph;
use crate::stream::Stream;

/// Launches that wait at most. Steps took as long with any number from 16 to 512, and the fewer there are in a graph, the fewer are submitted
/// one by one where an argument differs.
const MAX_WAITING: usize = 32;
/// Fewer than these are not worth a graph.
const MIN_RECORDED: usize = 3;
/// The time at which launches that come again are recorded.
const DUE: u32 = 3;
/// How often recording a sequence may fail.
const MAX_REFUSALS: u32 = 3;
/// Maximum number of launches in all graphs together, and of graphs. Beyond it, graphs that were not used lately make room for others. On an
/// H100, graphs with 4 launches each take 120 KiB of memory: 2,048 of them took 242 MiB. A training step of a 1B model uses about 30 graphs.
const MAX_IN_GRAPHS: usize = 1 << 13;
const MAX_GRAPHS: usize = 1 << 9;
/// A graph is unused after this many times as many sequences as there are graphs.
const UNUSED: u64 = 8;
/// Sequences that are remembered without a graph; beyond this they are forgotten: those of batches of which no two are alike.
const MAX_SEEN: usize = 1 << 16;

/// A stream, and launches for it that wait.
pub struct Repeats {
    stream: Arc<Stream>,
    is_on: Cell<bool>,
    waiting: RefCell<Waiting>,
    known: RefCell<Known>,
}

/// Launches that were requested and not submitted.
#[derive(Default)]
struct Waiting {
    launches: Vec<Launch>,
    /// What distinguishes them from any others.
    key: Key,
}

struct Launch {
    name: &'static str,
    submit: Box<Submit>,
}

/// Submits a launch to the stream.
type Submit = dyn Fn(&Stream) -> Result<(), CudaError>;

/// Sequences of launches that came before, by the hash of their key.
#[derive(Default)]
struct Known {
    by_hash: FxHashMap<u64, Sequence>,
    graphs: usize,
    /// Launches in graphs.
    in_graphs: usize,
    /// Sequences so far.
    now: u64,
    /// When graphs that are not used are looked for again.
    next_search: u64,
}

enum Sequence {
    /// Came this often.
    Seen(u32),
    Recorded(Recorded),
    /// The driver did not record it, this often.
    Refused(u32),
}

struct Recorded {
    // Dropped before the launches, which keep what it refers to.
    graph: Graph,
    launches: Vec<Launch>,
    key: Box<[u8]>,
    /// When it was launched last.
    used: u64,
}

/// The bytes that values write when they are hashed.
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

/// A launch that the driver or a library refused, or the first of a graph that was.
#[derive(Debug)]
pub struct FailedLaunch {
    /// The launch.
    pub name: &'static str,
    /// Why.
    pub error: CudaError,
}

impl Repeats {
    /// Nothing waits for the stream, and nothing is known.
    pub fn new(stream: Arc<Stream>) -> Self {
        Self { stream, is_on: Cell::new(true), waiting: RefCell::default(), known: RefCell::default() }
    }

    /// Whether launches wait and are repeated as graphs; otherwise each is submitted at once, and graphs are given back. On at first.
    pub fn turn(&self, on: bool) {
        assert!(self.waiting.borrow().launches.is_empty(), "this is decided where nothing waits");
        self.is_on.set(on);
        if !on {
            self.release();
        }
    }

    /// The stream, which work that is submitted to it directly follows what waits here only after [`Self::flush`].
    pub fn stream(&self) -> &Arc<Stream> {
        &self.stream
    }

    /// Has `submit` called for the stream: later, to record what it submits, or not at all if a graph does the same.
    ///
    /// # Errors
    /// Of this launch or of one that waited.
    ///
    /// # Safety
    /// `submit` only submits to the stream. Where two `what` write the same bytes when they are hashed, the same work is submitted, with the
    /// same arguments.
    /// What it promises about addresses holds until the stream has done the work, where memory that is freed earlier may be given to work
    /// that is submitted to this stream later.
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
            // Where one ends and the next begins is part of the key.
            let bytes = waiting.key.0.len() - begin;
            waiting.key.write(&bytes.to_ne_bytes());
            let submit = Box::new(move |stream: &Stream| submit(&what, stream));
            waiting.launches.push(Launch { name, submit });
            waiting.launches.len() == MAX_WAITING
        };
        if is_full { self.flush() } else { Ok(()) }
    }

    /// Submits what waits.
    ///
    /// # Errors
    /// Of the first launch that fails; the ones after it are dropped.
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

    /// Forgets what waits, after a failure.
    pub fn drop_waiting(&self) {
        *self.waiting.borrow_mut() = Waiting::default();
    }

    /// Returns the memory of all graphs; the driver finishes launches that are under way first.
    pub fn release(&self) {
        *self.known.borrow_mut() = Known::default();
    }

    /// Launches in graphs.
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
    /// Submits a sequence, as a graph if there is one or it is time to record one. What is recorded keeps the launches.
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

    /// Whether a graph of this many launches may be added, perhaps in the place of some that were not used for as long as it takes to use
    /// all of them a few times. That is looked up seldom, since it takes as long as submitting many launches.
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
