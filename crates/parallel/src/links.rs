//! The connections of one rank: received parts, heartbeats, and the one reason why the job cannot go on.
//!
//! Each connection has a reader thread, so that no rank waits for another to read. Another thread sends a heartbeat every two seconds. A rank is lost
//! if its connection ends or is silent for [`SILENCE`] waits; rank 0 then sends the reason to all others. A job that is suspended as a whole and
//! continues loses no rank.
//! Trade-off: a rank that lives but computes forever is not noticed here.

use std::collections::VecDeque;
use std::io;
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::patient::{Patient, is_timeout};
use crate::wire::{self, Message};

/// One wait for a rank.
const WAIT: Duration = Duration::from_secs(1);
/// A rank that sends nothing for this many waits is lost.
const SILENCE: u32 = 15;
/// Time between two signs of life.
const HEARTBEAT: Duration = Duration::from_secs(2);
/// Waits for a rank that may be gone.
const LAST_WORDS: u32 = 2;

/// Called with the reason once the job is lost.
pub(crate) type Watcher = Box<dyn FnOnce(&str) + Send>;

pub(crate) struct Links {
    peers: Vec<Peer>,
    state: Mutex<State>,
    changed: Condvar,
}

struct Peer {
    rank: usize,
    address: String,
    writer: Mutex<Patient<TcpStream>>,
    stream: TcpStream,
}

#[derive(Default)]
struct State {
    /// Parts that arrived from each peer, oldest first.
    inbox: Vec<VecDeque<(String, Vec<u8>)>>,
    /// Peers that have nothing more to exchange.
    has_left: Vec<bool>,
    lost: Option<String>,
    is_closed: bool,
    watchers: Vec<Watcher>,
    /// The thread that sends the reason to the other ranks.
    telling: Option<JoinHandle<()>>,
}

impl Links {
    pub(crate) fn start(connections: Vec<(usize, TcpStream)>) -> io::Result<Arc<Self>> {
        let peers =
            connections.into_iter().map(|(rank, stream)| Peer::new(rank, stream)).collect::<io::Result<Vec<_>>>()?;
        let state =
            State { inbox: vec![VecDeque::new(); peers.len()], has_left: vec![false; peers.len()], ..State::default() };
        let links = Arc::new(Self { peers, state: Mutex::new(state), changed: Condvar::new() });
        for (index, peer) in links.peers.iter().enumerate() {
            let (stream, links) = (peer.stream.try_clone()?, Arc::downgrade(&links));
            thread::Builder::new()
                .name(format!("rank-{}", peer.rank))
                .spawn(move || receive_all(stream, index, &links))?;
        }
        let beating = Arc::downgrade(&links);
        thread::Builder::new().name("heartbeat".to_owned()).spawn(move || while beat(&beating) {})?;
        Ok(links)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing that can panic happens under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn len(&self) -> usize {
        self.peers.len()
    }

    /// Sends a part of an exchange to peer number `index`.
    pub(crate) fn send(self: &Arc<Self>, index: usize, operation: &str, bytes: Vec<u8>) -> Result<(), String> {
        let message = Message::Part { operation: operation.to_owned(), bytes };
        let written = wire::write(&mut *self.peers[index].writer(), &message);
        written.map_err(|error| self.lose(self.peers[index].gone(&error)))
    }

    /// Waits for the next part of peer number `index`, which must belong to `operation`.
    pub(crate) fn receive(self: &Arc<Self>, index: usize, own_rank: usize, operation: &str) -> Result<Vec<u8>, String> {
        let mut state = self.state();
        loop {
            if let Some((found, bytes)) = state.inbox[index].pop_front() {
                if found == operation {
                    return Ok(bytes);
                }
                drop(state);
                let other = self.peers[index].rank;
                return Err(self.lose(format!("rank {other} called {found} while rank {own_rank} called {operation}")));
            }
            if let Some(problem) = &state.lost {
                return Err(problem.clone());
            }
            if state.has_left[index] {
                drop(state);
                let other = self.peers[index].rank;
                return Err(self.lose(format!("rank {other} has left while rank {own_rank} called {operation}")));
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Returns why the job cannot go on.
    pub(crate) fn lost(&self) -> Option<String> {
        self.state().lost.clone()
    }

    /// Records why the job cannot go on, and sends the reason to all others. The first reason stays; it is returned.
    pub(crate) fn lose(self: &Arc<Self>, problem: String) -> String {
        let watchers = {
            let mut state = self.state();
            if let Some(first) = &state.lost {
                return first.clone();
            }
            if state.is_closed {
                return problem;
            }
            let (links, message) = (Arc::clone(self), Message::Failed(problem.clone()));
            // The other ranks may be gone too, so the thread that noticed does not wait for them. The sending thread exists before anything sees the
            // loss, and closes the connections.
            let tell = move || links.peers.iter().for_each(|peer| peer.tell(&message));
            state.telling = thread::Builder::new().name("last-words".to_owned()).spawn(tell).ok();
            state.lost = Some(problem.clone());
            std::mem::take(&mut state.watchers)
        };
        self.changed.notify_all();
        watchers.into_iter().for_each(|watcher| call(watcher, problem.clone()));
        problem
    }

    pub(crate) fn when_lost(&self, watcher: Watcher) {
        let mut state = self.state();
        match state.lost.clone() {
            Some(problem) => call(watcher, problem),
            None => state.watchers.push(watcher),
        }
    }

    /// Tells the peers that this rank has nothing more to exchange.
    pub(crate) fn close(&self) {
        self.state().is_closed = true;
        self.state().watchers.clear();
        for peer in &self.peers {
            // A peer that is already gone has nothing more to exchange either.
            let _ = wire::write(&mut *peer.writer(), &Message::Leaving);
        }
        self.changed.notify_all();
    }

    /// Waits until the other ranks have the reason of a loss, then closes all connections.
    pub(crate) fn end(&self) {
        let telling = self.state().telling.take();
        if let Some(telling) = telling {
            // The thread cannot panic, and an error could not be handled here.
            let _ = telling.join();
        }
        self.state().is_closed = true;
        self.changed.notify_all();
        for peer in &self.peers {
            let _ = peer.stream.shutdown(Shutdown::Both);
        }
    }

    fn take(self: &Arc<Self>, index: usize, message: Message) -> bool {
        match message {
            Message::Part { operation, bytes } => {
                self.state().inbox[index].push_back((operation, bytes));
                self.changed.notify_all();
                true
            }
            Message::Heartbeat => true,
            Message::Failed(problem) => {
                self.lose(problem);
                false
            }
            Message::Leaving => {
                self.state().has_left[index] = true;
                self.changed.notify_all();
                false
            }
        }
    }
}

impl Peer {
    fn new(rank: usize, stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(WAIT))?;
        stream.set_write_timeout(Some(WAIT))?;
        let address = stream.peer_addr()?.ip().to_string();
        let writer = Mutex::new(Patient::new(stream.try_clone()?, SILENCE));
        Ok(Self { rank, address, writer, stream })
    }

    fn writer(&self) -> MutexGuard<'_, Patient<TcpStream>> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends the reason of a loss, unless the other rank does not read. Another thread may be in the middle of a message.
    fn tell(&self, message: &Message) {
        let started = Instant::now();
        while started.elapsed() < LAST_WORDS * WAIT {
            if let Ok(mut writer) = self.writer.try_lock() {
                writer.waits = LAST_WORDS;
                // This connection may be what was lost.
                let _ = wire::write(&mut *writer, message);
                return;
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Explains an error of the connection.
    fn gone(&self, error: &io::Error) -> String {
        let Self { rank, address, .. } = self;
        if is_timeout(error) {
            return format!("rank {rank} ({address}) gave no sign of life for {} s", (SILENCE * WAIT).as_secs());
        }
        match error.kind() {
            io::ErrorKind::InvalidData => format!("rank {rank} ({address}) sent {error}"),
            _ => format!("rank {rank} ({address}) closed its connection: it failed or was killed; its log may say why"),
        }
    }
}

fn call(watcher: Watcher, problem: String) {
    // Without a thread the watcher is not called: the next exchange fails all the same.
    let _ = thread::Builder::new().name("rank-lost".to_owned()).spawn(move || watcher(&problem));
}

/// Reads a connection until it ends.
fn receive_all(stream: TcpStream, index: usize, links: &Weak<Links>) {
    let mut reader = io::BufReader::with_capacity(1 << 16, Patient::new(stream, SILENCE));
    loop {
        let read = wire::read(&mut reader);
        let Some(links) = links.upgrade() else { return };
        match read {
            Ok(message) => {
                if !links.take(index, message) {
                    return;
                }
            }
            Err(error) => {
                let peer = &links.peers[index];
                links.lose(peer.gone(&error));
                // A thread that is writing to it must not wait.
                let _ = peer.stream.shutdown(Shutdown::Both);
                return;
            }
        }
    }
}

/// Sends a heartbeat to all peers; returns whether to go on.
fn beat(links: &Weak<Links>) -> bool {
    let Some(links) = links.upgrade() else { return false };
    let state = links.state();
    let over = |state: &State| state.is_closed || state.lost.is_some();
    let (state, _) = links
        .changed
        .wait_timeout_while(state, HEARTBEAT, |state| !over(state))
        .unwrap_or_else(PoisonError::into_inner);
    if over(&state) {
        return false;
    }
    drop(state);
    for peer in &links.peers {
        // If another thread is writing, its message serves as the heartbeat.
        if let Ok(mut writer) = peer.writer.try_lock()
            && let Err(error) = wire::write(&mut *writer, &Message::Heartbeat)
        {
            drop(writer);
            links.lose(peer.gone(&error));
        }
    }
    true
}
