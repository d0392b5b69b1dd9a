//! The queue between readers and consumer: pieces are claimed in order, within a bound in bytes, and taken in order.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, Scope};

use super::read::{Allocate, Job, Piece, Ready};
use crate::error::ModelError;

/// Bounds of reading ahead: threads, bytes and pieces.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) readers: usize,
    /// Bytes that are ready or being read; a single piece may be larger.
    pub(crate) bytes: usize,
    /// Bytes per piece of an unquantized tensor. Of these limits only this one affects hashes.
    pub(crate) piece: usize,
}

/// State shared by readers and consumer.
pub(super) struct Queue<'a> {
    pub(super) jobs: Vec<Job<'a>>,
    pub(super) pieces: Vec<Piece>,
    limits: Limits,
    allocate: Allocate<'a>,
    state: Mutex<State>,
    /// Readers wait here for room.
    room: Condvar,
    /// The consumer waits here for a piece.
    arrival: Condvar,
}

impl std::fmt::Debug for Queue<'_> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Queue({} pieces of {} tensors)", self.pieces.len(), self.jobs.len())
    }
}

#[derive(Default)]
struct State {
    /// The next piece to be claimed. Claims are in order, so every earlier one is ready, being read or taken.
    next: usize,
    /// Bytes claimed and not yet taken.
    ahead: usize,
    ready: BTreeMap<usize, Result<Ready, ModelError>>,
    /// Hashes of the pieces that were taken.
    hashes: Vec<u64>,
    /// No piece is claimed any more.
    closed: bool,
    /// A reader panicked.
    broken: bool,
}

/// Notifies the consumer when a reader panics, so that it does not wait for its piece.
struct Watch<'a>(&'a Queue<'a>);

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            let mut state = self.0.lock();
            (state.broken, state.closed) = (true, true);
            self.0.arrival.notify_all();
            self.0.room.notify_all();
        }
    }
}

impl<'a> Queue<'a> {
    pub(super) fn new(jobs: Vec<Job<'a>>, pieces: Vec<Piece>, limits: Limits, allocate: Allocate<'a>) -> Self {
        let (state, room, arrival) = (Mutex::default(), Condvar::new(), Condvar::new());
        Self { jobs, pieces, limits, allocate, state, room, arrival }
    }

    pub(super) fn start<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) {
        for reader in 0..self.limits.readers.clamp(1, self.pieces.len().max(1)) {
            let builder = thread::Builder::new().name(format!("weights {reader}"));
            builder.spawn_scoped(scope, || self.read()).expect("the system can start a few threads");
        }
    }

    /// Waits for the piece `index`, the next one that the consumer has not taken.
    pub(super) fn wait_for(&self, index: usize) -> Result<Ready, ModelError> {
        let mut state = self.lock();
        assert_eq!(index, state.hashes.len(), "tensors are taken whole, in the order in which they were requested");
        let ready = loop {
            assert!(!state.broken, "a thread that reads weights panicked; its message is above");
            if let Some(ready) = state.ready.remove(&index) {
                break ready?;
            }
            state = self.arrival.wait(state).unwrap_or_else(PoisonError::into_inner);
        };
        state.ahead -= self.pieces[index].bytes;
        state.hashes.push(ready.hash);
        self.room.notify_all();
        Ok(ready)
    }

    fn read(&self) {
        let _watch = Watch(self);
        while let Some(index) = self.claim() {
            let piece = &self.pieces[index];
            let ready = self.jobs[piece.job].read(piece, self.allocate);
            let mut state = self.lock();
            state.closed |= ready.is_err();
            state.ready.insert(index, ready);
            self.arrival.notify_one();
            if state.closed {
                self.room.notify_all();
            }
        }
    }

    /// Claims the next piece once there is room for it; `None` when there is nothing more to read.
    fn claim(&self) -> Option<usize> {
        let mut state = self.lock();
        loop {
            let index = state.next;
            let bytes = self.pieces.get(index).filter(|_| !state.closed)?.bytes;
            // If nothing is ahead, the consumer may be waiting for this piece.
            if state.ahead == 0 || state.ahead + bytes <= self.limits.bytes {
                (state.next, state.ahead) = (index + 1, state.ahead + bytes);
                return Some(index);
            }
            state = self.room.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Closes the queue; readers finish their current pieces and end.
    pub(super) fn close(&self) {
        self.lock().closed = true;
        self.room.notify_all();
    }

    /// Returns the hashes of the pieces that were taken, in their order.
    pub(super) fn hashes(&self) -> Vec<u64> {
        self.lock().hashes.clone()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No panic is possible between two assignments, so the state of a panicking thread is whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
