//! Mutual authentication of a rank and rank 0: both prove to know the job's token before anything else is read.
//!
//! ```text
//! rank 0 -> rank   magic, version, random number
//! rank -> rank 0   magic, version, random number, rank, world size, proof over all of that
//! rank 0 -> rank   accepted or refused, a reason, proof over all of that
//! ```
//!
//! All lengths are fixed, so a stranger can make rank 0 read at most 82 bytes. Rank 0 waits for no connection: it polls each one, and refuses a
//! handshake that takes longer than [`PATIENCE`].

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::patient::is_timeout;
use crate::token::{JobToken, PROOF, random_bytes};

pub(crate) const PATIENCE: Duration = Duration::from_secs(5);
/// First bytes of each side.
const MAGIC: [u8; 8] = *b"FBRANKS\n";
/// Version of the protocol between ranks: increase it with every change.
const VERSION: u16 = 1;
/// Bytes of magic, version and random number.
const GREETING: usize = 8 + 2 + PROOF;
/// Bytes of rank and world size.
const CLAIM: usize = 4 + 4;
/// Bytes that a rank sends.
const INTRODUCTION: usize = GREETING + CLAIM + PROOF;
/// Name of the other side in messages, until it has proved to be rank 0.
const LISTENER: &str = "what listens there";
const MAX_REASON: usize = 512;

#[derive(Debug)]
pub(crate) enum Failure {
    /// The connection failed; a retry may succeed.
    Connection(io::Error),
    /// The other side does not speak the protocol.
    Stranger(String),
    /// The other side speaks the protocol, but is not the expected one or does not accept this one.
    Refused(String),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Connection(error)
    }
}

impl Failure {
    pub(crate) fn reason(self) -> String {
        match self {
            Self::Connection(error) => error.to_string(),
            Self::Stranger(reason) | Self::Refused(reason) => reason,
        }
    }
}

/// Rank and world size that a rank claims.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Claim {
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
}

/// A connection to rank 0 in its handshake.
pub(crate) struct Guest {
    stream: TcpStream,
    came: Instant,
    greeting: [u8; GREETING],
    received: [u8; INTRODUCTION],
    /// Number of bytes that have arrived.
    length: usize,
}

pub(crate) enum Progress {
    /// Not all bytes have arrived.
    Waits(Guest),
    /// The rank knows the token.
    Proved(Candidate),
}

/// A connection to a rank that knows the token and waits for an answer.
pub(crate) struct Candidate {
    stream: TcpStream,
    pub(crate) claim: Claim,
    transcript: Vec<u8>,
}

fn greeting() -> [u8; GREETING] {
    let mut bytes = [0; GREETING];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..10].copy_from_slice(&VERSION.to_le_bytes());
    bytes[10..].copy_from_slice(&random_bytes());
    bytes
}

/// Checks a greeting, or the part of it that has arrived.
fn check_greeting(bytes: &[u8], other: &str) -> Result<(), Failure> {
    let magic = bytes.len().min(MAGIC.len());
    if bytes[..magic] != MAGIC[..magic] {
        return Err(Failure::Stranger(format!("{other} is another program")));
    }
    let version = bytes.get(8..10).map_or(VERSION, |version| u16::from_le_bytes([version[0], version[1]]));
    if version != VERSION {
        let same = "run the same program on all ranks";
        return Err(Failure::Refused(format!("{other} speaks version {version}, this one version {VERSION}: {same}")));
    }
    Ok(())
}

/// Builds the error for a handshake that takes too long.
fn too_slow(other: &str, is_silent: bool) -> Failure {
    let seconds = PATIENCE.as_secs();
    let problem = match is_silent {
        true => format!("{other} sent nothing for {seconds} s"),
        false => format!("{other} did not finish its handshake within {seconds} s"),
    };
    Failure::Connection(io::Error::new(io::ErrorKind::TimedOut, problem))
}

fn closed(other: &str) -> Failure {
    Failure::Connection(io::Error::new(io::ErrorKind::UnexpectedEof, format!("{other} closed the connection")))
}

impl Guest {
    /// Greets a new connection, on rank 0. Does not wait.
    pub(crate) fn greet(mut stream: TcpStream, now: Instant) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        let greeting = greeting();
        // A new connection has room for it.
        stream.write_all(&greeting)?;
        Ok(Self { stream, came: now, greeting, received: [0; INTRODUCTION], length: 0 })
    }

    /// Reads what has arrived. Does not wait.
    pub(crate) fn look(mut self, now: Instant, token: &JobToken) -> Result<Progress, Failure> {
        while self.length < INTRODUCTION {
            match self.stream.read(&mut self.received[self.length..]) {
                Ok(0) => return Err(closed("it")),
                Ok(count) => self.length += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if is_timeout(&error) => {
                    let is_late = now.saturating_duration_since(self.came) >= PATIENCE;
                    return if is_late { Err(too_slow("it", self.length == 0)) } else { Ok(Progress::Waits(self)) };
                }
                Err(error) => return Err(error.into()),
            }
            check_greeting(&self.received[..self.length.min(GREETING)], "it")?;
        }
        self.prove(token)
    }

    /// Checks that all received bytes come from a rank that knows the token.
    fn prove(mut self, token: &JobToken) -> Result<Progress, Failure> {
        let (theirs, rest) = self.received.split_at(GREETING);
        let (claim, proof) = rest.split_at(CLAIM);
        let transcript = [&self.greeting[..], theirs, claim].concat();
        if !token.accepts(&[b"rank", &transcript], proof) {
            let reason = "its FIREBRICK_JOB_TOKEN is not the one of this job";
            answer(&mut self.stream, token, &transcript, Err(reason))?;
            return Err(Failure::Refused(reason.to_owned()));
        }
        let number = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().expect("four bytes")) as usize;
        let claim = Claim { rank: number(&claim[..4]), world_size: number(&claim[4..]) };
        Ok(Progress::Proved(Candidate { stream: self.stream, claim, transcript }))
    }
}

impl Candidate {
    /// Accepts the rank, or sends the reason for a refusal, on rank 0. Does not wait.
    pub(crate) fn answer(mut self, token: &JobToken, verdict: Result<(), &str>) -> io::Result<TcpStream> {
        answer(&mut self.stream, token, &self.transcript, verdict)?;
        self.stream.set_nonblocking(false)?;
        self.stream.set_write_timeout(Some(PATIENCE))?;
        Ok(self.stream)
    }
}

fn answer(stream: &mut TcpStream, token: &JobToken, transcript: &[u8], verdict: Result<(), &str>) -> io::Result<()> {
    let (is_refused, reason) = match verdict {
        Ok(()) => (0u8, ""),
        Err(reason) => (1, reason.get(..MAX_REASON).unwrap_or(reason)),
    };
    let proof = token.prove(&[b"rank 0", transcript, &[is_refused]]);
    let mut bytes = vec![is_refused];
    bytes.extend_from_slice(&proof);
    bytes.extend((reason.len() as u16).to_le_bytes());
    bytes.extend_from_slice(reason.as_bytes());
    stream.write_all(&bytes)
}

/// Introduces this rank to rank 0, and waits for the answer.
pub(crate) fn present(mut stream: TcpStream, token: &JobToken, claim: Claim) -> Result<TcpStream, Failure> {
    let deadline = Instant::now() + PATIENCE;
    stream.set_nodelay(true)?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let theirs = receive::<GREETING>(&mut stream, deadline)?;
    check_greeting(&theirs, LISTENER)?;
    let own = greeting();
    let claim = [(claim.rank as u32).to_le_bytes(), (claim.world_size as u32).to_le_bytes()].concat();
    let transcript = [&theirs[..], &own, &claim].concat();
    let proof = token.prove(&[b"rank", &transcript]);
    stream.write_all(&[&own[..], &claim, &proof].concat())?;

    let head = receive::<{ 1 + PROOF + 2 }>(&mut stream, deadline)?;
    let (is_refused, proof) = (head[0], &head[1..=PROOF]);
    let length = usize::from(u16::from_le_bytes([head[1 + PROOF], head[2 + PROOF]]));
    let mut reason = vec![0; length.min(MAX_REASON)];
    fill(&mut stream, deadline, &mut reason)?;
    if is_refused != 0 {
        let reason = String::from_utf8_lossy(&reason).replace(char::is_control, " ");
        return Err(Failure::Refused(reason));
    }
    if !token.accepts(&[b"rank 0", &transcript, &[0]], proof) {
        return Err(Failure::Refused(format!("{LISTENER} does not know the job's token")));
    }
    Ok(stream)
}

fn receive<const N: usize>(stream: &mut TcpStream, deadline: Instant) -> Result<[u8; N], Failure> {
    let mut bytes = [0; N];
    fill(stream, deadline, &mut bytes)?;
    Ok(bytes)
}

/// Waits for bytes until the deadline of the whole handshake.
fn fill(stream: &mut TcpStream, deadline: Instant, bytes: &mut [u8]) -> Result<(), Failure> {
    let mut length = 0;
    while length < bytes.len() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(too_slow(LISTENER, false));
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut bytes[length..]) {
            Ok(0) => return Err(closed(LISTENER)),
            Ok(count) => length += count,
            Err(error) if is_timeout(&error) || error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    /// Connects a peer that sends `bytes`; returns it with rank 0's progress after reading them.
    fn guest_that_sends(bytes: &[u8]) -> (TcpStream, Result<Progress, Failure>, Instant) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        stream.write_all(bytes).unwrap();
        let came = Instant::now();
        let mut progress = Ok(Progress::Waits(Guest::greet(listener.accept().unwrap().0, came).unwrap()));
        let token = JobToken::random();
        while let Ok(Progress::Waits(guest)) = progress {
            if guest.length == bytes.len() {
                return (stream, Ok(Progress::Waits(guest)), came);
            }
            thread::sleep(Duration::from_millis(1));
            progress = guest.look(came, &token);
        }
        (stream, progress, came)
    }

    #[test]
    fn a_handshake_takes_five_seconds_at_most() {
        let start = greeting();
        for (bytes, expected) in [
            (&start[..0], "it sent nothing for 5 s"),
            (&start[..3], "it did not finish its handshake within 5 s"),
            (&start[..], "it did not finish its handshake within 5 s"),
        ] {
            let (_stream, progress, came) = guest_that_sends(bytes);
            let Ok(Progress::Waits(guest)) = progress else { panic!("{} bytes are over", bytes.len()) };
            let token = JobToken::random();
            let Ok(Progress::Waits(guest)) = guest.look(came + PATIENCE - Duration::from_millis(1), &token) else {
                panic!("{} bytes are over before their time", bytes.len())
            };
            let failure = guest.look(came + PATIENCE, &token).err().unwrap();
            assert_eq!(failure.reason(), expected);
        }
    }

    #[test]
    fn garbage_is_refused_by_its_first_bytes() {
        for garbage in [&b"G"[..], b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"FBRANKs", &[0xff; 4096]] {
            let (_stream, progress, _) = guest_that_sends(garbage);
            assert_eq!(progress.err().unwrap().reason(), "it is another program");
        }
        let mut other = greeting();
        other[8] = 9;
        let (_stream, progress, _) = guest_that_sends(&other[..10]);
        assert!(progress.err().unwrap().reason().starts_with("it speaks version 9, this one version 1"));
    }
}
