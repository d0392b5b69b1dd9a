//! The rendezvous of ranks: rank 0 listens on the master's address until all others have come, then the job begins for all at once.
//!
//! A connection must prove to know the job's token. All others are refused, recorded and otherwise ignored, so a port scan or a rank of another job
//! does no harm. Rank 0 waits for no single connection, and drops the oldest if there are too many. It listens on that address alone, and stops once
//! all ranks are there.
//! Trade-off: ranks cannot join later, and a lost rank is not replaced.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::mem;
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use firebrick_kernels::Communicator;

use crate::error::ParallelError;
use crate::handshake::{self, Candidate, Claim, Failure, Guest, PATIENCE, Progress};
use crate::links::Links;
use crate::patient::is_timeout;
use crate::placement::Placement;
use crate::socket::SocketTransport;
use crate::wire::{self, Message};

/// Time between two polls for a connection, and between two attempts to connect.
const PAUSE: Duration = Duration::from_millis(20);
/// Maximum number of connections in their handshake at a time, unless there are more ranks.
const MAX_GUESTS: usize = 128;
/// Connections that are accepted between two polls of all of them: a rank that answers at once has finished before it is the oldest.
const ACCEPTED_AT_ONCE: usize = 16;
/// Maximum number of different refusals of ranks that are remembered for a message: more than a job with a mistake has.
const MAX_REASONS: usize = 1000;
/// Operation name of the message that begins the job.
const BEGIN: &str = "begin";

/// Waits for all ranks of the job, and connects them.
pub(crate) fn join(placement: &Placement) -> Result<Communicator, ParallelError> {
    let &Placement { rank, world_size, .. } = placement;
    let connections = if rank == 0 { gather(placement)? } else { vec![(0, reach(placement)?)] };
    let links = Links::start(connections).map_err(|error| placement.listen_error(&error))?;
    Ok(Communicator::new(rank, world_size, Arc::new(SocketTransport::new(rank, world_size, links))))
}

impl Placement {
    fn listen_error(&self, error: &io::Error) -> ParallelError {
        ParallelError::Listen { address: self.master(), problem: error.to_string() }
    }

    fn refused(&self, reason: String) -> ParallelError {
        ParallelError::Refused { rank: self.rank, address: self.master(), reason }
    }
}

/// Listens on rank 0 until every other rank has come.
fn gather(placement: &Placement) -> Result<Vec<(usize, TcpStream)>, ParallelError> {
    let listener = TcpListener::bind((placement.master_host.as_str(), placement.master_port));
    let listener = listener.map_err(|error| placement.listen_error(&error))?;
    listener.set_nonblocking(true).map_err(|error| placement.listen_error(&error))?;
    let mut hall = Hall::new(placement);
    let deadline = Instant::now() + placement.timeout;
    while hall.joined.len() + 1 < placement.world_size {
        if Instant::now() >= deadline {
            return Err(hall.dismiss());
        }
        if !hall.accept(&listener) {
            thread::sleep(PAUSE);
        }
        hall.look();
    }
    Ok(hall.begin())
}

/// The ranks that wait on rank 0 until all have come.
struct Hall<'a> {
    placement: &'a Placement,
    /// Connections in their handshake with their addresses, the oldest first.
    guests: VecDeque<(String, Guest)>,
    joined: BTreeMap<usize, TcpStream>,
    refusals: Refusals,
}

impl<'a> Hall<'a> {
    fn new(placement: &'a Placement) -> Self {
        Self { placement, guests: VecDeque::new(), joined: BTreeMap::new(), refusals: Refusals::default() }
    }

    /// Greets new connections; returns whether there were any.
    fn accept(&mut self, listener: &TcpListener) -> bool {
        for count in 0..ACCEPTED_AT_ONCE {
            // There is nothing to accept, or the connection ended before it was accepted.
            let Ok((stream, address)) = listener.accept() else { return count > 0 };
            if self.guests.len() >= MAX_GUESTS.max(self.placement.world_size)
                && let Some((oldest, _)) = self.guests.pop_front()
            {
                self.refusals.add(&oldest, "it had not said who it is when many others came", false);
            }
            let address = address.ip().to_string();
            match Guest::greet(stream, Instant::now()) {
                Ok(guest) => self.guests.push_back((address, guest)),
                Err(error) => self.refusals.add(&address, &error.to_string(), false),
            }
        }
        true
    }

    /// Reads the received bytes of all connections, and accepts the ranks whose handshake is done.
    fn look(&mut self) {
        let now = Instant::now();
        for (address, guest) in mem::take(&mut self.guests) {
            match guest.look(now, &self.placement.token) {
                Ok(Progress::Waits(guest)) => self.guests.push_back((address, guest)),
                Ok(Progress::Proved(candidate)) => self.settle(candidate, &address),
                Err(failure) => {
                    let is_rank = matches!(failure, Failure::Refused(_));
                    self.refusals.add(&address, &failure.reason(), is_rank);
                }
            }
        }
    }

    fn settle(&mut self, candidate: Candidate, address: &str) {
        let Claim { rank, world_size } = candidate.claim;
        let verdict = self.verdict(candidate.claim);
        if let Err(reason) = &verdict {
            self.refusals.add(address, &format!("rank {rank} of {world_size}: {reason}"), true);
        }
        let answered = candidate.answer(&self.placement.token, verdict.as_ref().copied().map_err(String::as_str));
        if let (Ok(()), Ok(stream)) = (verdict, answered) {
            self.joined.insert(rank, stream);
        }
    }

    fn verdict(&self, claim: Claim) -> Result<(), String> {
        let Claim { rank, world_size } = claim;
        let expected = self.placement.world_size;
        if world_size != expected || rank == 0 || rank >= expected {
            return Err(format!(
                "it says it is rank {rank} of {world_size}, and rank 0 waits for ranks 1 to {} of {expected}",
                expected - 1
            ));
        }
        match self.joined.get(&rank) {
            Some(other) if is_open(other) => Err(format!("there is another process that is rank {rank}")),
            _ => Ok(()),
        }
    }

    /// Begins the job once all ranks are there.
    fn begin(self) -> Vec<(usize, TcpStream)> {
        if self.refusals.count > 1 {
            tracing::warn!("rendezvous: {} connections were refused in all", self.refusals.count);
        }
        let joined = self.joined.into_iter().map(|(rank, mut stream)| {
            // The first exchange with a rank will notice if it is gone by now.
            let _ = wire::write(&mut stream, &Message::Part { operation: BEGIN.to_owned(), bytes: Vec::new() });
            (rank, stream)
        });
        joined.collect()
    }

    /// Ends the rendezvous after the time limit, and tells the ranks that came.
    fn dismiss(self) -> ParallelError {
        let Placement { world_size, timeout, .. } = *self.placement;
        let missing: Vec<usize> = (1..world_size).filter(|rank| !self.joined.contains_key(rank)).collect();
        let reasons: Vec<&str> = self.refusals.reasons().collect();
        let refused = match self.refusals.count {
            0 => String::new(),
            count => format!("connections were refused, {count} in all ({}); ", reasons.join("; ")),
        };
        let address = self.placement.master();
        let error =
            ParallelError::Missing { missing: in_words(&missing), world_size, address, waited: timeout, refused };
        for mut stream in self.joined.into_values() {
            // It may be gone by now.
            let _ = wire::write(&mut stream, &Message::Failed(error.to_string()));
        }
        error
    }
}

/// Refused connections, for the message if a rank is missing in the end. The first is logged.
#[derive(Default)]
struct Refusals {
    count: usize,
    /// The distinct refusals of ranks, stored separately so that any number of strangers hides none.
    of_ranks: Vec<String>,
    /// The first of the others.
    of_strangers: Option<String>,
}

impl Refusals {
    fn add(&mut self, address: &str, reason: &str, is_rank: bool) {
        self.count += 1;
        if self.count == 1 {
            tracing::warn!("rendezvous: a connection from {address} was refused: {reason}; others are counted");
        }
        let text = format!("{address}: {reason}");
        if !is_rank {
            self.of_strangers.get_or_insert(text);
        } else if self.of_ranks.len() < MAX_REASONS && !self.of_ranks.contains(&text) {
            self.of_ranks.push(text);
        }
    }

    fn reasons(&self) -> impl Iterator<Item = &str> {
        self.of_ranks.iter().chain(&self.of_strangers).map(String::as_str)
    }
}

/// Returns whether the other side has not closed the connection. It sends nothing while it waits.
fn is_open(stream: &TcpStream) -> bool {
    let looked = stream.set_nonblocking(true).and_then(|()| stream.peek(&mut [0]));
    let is_open = matches!(looked, Err(error) if error.kind() == io::ErrorKind::WouldBlock);
    is_open && stream.set_nonblocking(false).is_ok()
}

/// Formats `rank 3` or `ranks 1, 2 and 5`.
fn in_words(ranks: &[usize]) -> String {
    let numbers: Vec<String> = ranks.iter().map(ToString::to_string).collect();
    match numbers.as_slice() {
        [one] => format!("rank {one}"),
        [first @ .., last] => format!("ranks {} and {last}", first.join(", ")),
        [] => "no rank".to_owned(),
    }
}

/// Connects to rank 0, which may start later, and waits until the job begins; on all other ranks.
fn reach(placement: &Placement) -> Result<TcpStream, ParallelError> {
    let started = Instant::now();
    let mut problem = "nothing listens there".to_owned();
    while started.elapsed() < placement.timeout {
        match connect(placement, started) {
            Ok(stream) => return wait_for_begin(placement, stream),
            Err(Failure::Stranger(reason) | Failure::Refused(reason)) => return Err(placement.refused(reason)),
            Err(Failure::Connection(error)) => problem = error.to_string(),
        }
        thread::sleep(PAUSE * 5);
    }
    let (rank, address, waited) = (placement.rank, placement.master(), placement.timeout);
    Err(ParallelError::Unreachable { rank, address, waited, problem })
}

fn connect(placement: &Placement, started: Instant) -> Result<TcpStream, Failure> {
    // The name is resolved on every attempt: that of a container that starts later is not known at first.
    let addresses = (placement.master_host.as_str(), placement.master_port).to_socket_addrs()?;
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name of the host has no address");
    for address in addresses {
        let left = placement.timeout.saturating_sub(started.elapsed()).clamp(PAUSE, PATIENCE);
        match TcpStream::connect_timeout(&address, left) {
            Ok(stream) => {
                let claim = Claim { rank: placement.rank, world_size: placement.world_size };
                return handshake::present(stream, &placement.token, claim);
            }
            Err(error) => last = error,
        }
    }
    Err(last.into())
}

/// Waits for the other ranks, for as long as rank 0 waits for them.
fn wait_for_begin(placement: &Placement, mut stream: TcpStream) -> Result<TcpStream, ParallelError> {
    let patience = placement.timeout + 2 * PATIENCE;
    let wait = stream.set_read_timeout(Some(patience)).and_then(|()| wire::read(&mut stream));
    match wait {
        Ok(Message::Part { operation, .. }) if operation == BEGIN => Ok(stream),
        Ok(Message::Failed(problem)) => Err(placement.refused(problem)),
        Ok(_) => Err(placement.refused("rank 0 sent something else than the beginning of the job".to_owned())),
        Err(error) if is_timeout(&error) => {
            Err(placement.refused(format!("rank 0 sent nothing for {} s", patience.as_secs())))
        }
        Err(error) => Err(placement.refused(format!("rank 0 left while the other ranks were waited for ({error})"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strangers_hide_no_rank_that_was_refused() {
        let mut refusals = Refusals::default();
        for host in 0..9 {
            refusals.add(&format!("10.0.0.{host}"), "it is another program", false);
        }
        refusals.add("10.0.1.1", "it speaks version 2", true);
        for _ in 0..2 {
            refusals.add("10.0.1.2", "rank 3 of 4: there is another process that is rank 3", true);
        }
        let reasons: Vec<&str> = refusals.reasons().collect();
        assert!(reasons[0].contains("version 2") && reasons[1].starts_with("10.0.1.2: rank 3 of 4"), "{reasons:?}");
        assert_eq!((&reasons[2..], refusals.count), (&["10.0.0.0: it is another program"][..], 12));
    }
}
