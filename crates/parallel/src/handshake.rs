//! How a rank and rank 0 recognize each other: both prove to know the job's token before anything else is read.
//!
//! ```text
//! rank 0 -> rank   magic, version, random number
//! rank -> rank 0   magic, version, random number, rank, world size, proof over all of that
//! rank 0 -> rank   accepted or refused, a reason, proof over all of that
//! ```
//!
//! All lengths are fixed, so a stranger can make rank 0 read some 90 bytes, and wait for them for [`PATIENCE`].
//! Trade-off: another version is refused, never translated.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use crate::token::{JobToken, PROOF, random_bytes};

/// How long a side waits for the bytes of the other.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);
/// First bytes of each side.
const MAGIC: [u8; 8] = *b"FBRANKS\n";
/// Of what ranks say to each other: raised whenever that changes.
const VERSION: u16 = 1;
/// Bytes of magic, version and random number.
const GREETING: usize = 8 + 2 + PROOF;
/// Bytes of rank and world size.
const CLAIM: usize = 4 + 4;
/// Longest reason of a refusal.
const MAX_REASON: usize = 512;

/// Why a handshake did not succeed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The connection failed; it may work the next time.
    Connection(io::Error),
    /// The other side is not what was expected, or does not accept this one.
    Refused(String),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Connection(error)
    }
}

/// Rank and world size, as a rank claims them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Claim {
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
}

/// A connection to a rank that knows the token, and waits for an answer.
pub(crate) struct Candidate {
    pub(crate) stream: TcpStream,
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

fn check_greeting(bytes: &[u8; GREETING], other: &str) -> Result<(), Failure> {
    if bytes[..8] != MAGIC {
        return Err(Failure::Refused(format!("{other} is another program")));
    }
    let version = u16::from_le_bytes([bytes[8], bytes[9]]);
    if version != VERSION {
        let same = "run the same program on all ranks";
        return Err(Failure::Refused(format!("{other} speaks version {version}, this one version {VERSION}: {same}")));
    }
    Ok(())
}

fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))
}

/// On rank 0: reads what a connection claims to be.
pub(crate) fn receive(mut stream: TcpStream, token: &JobToken) -> Result<Candidate, Failure> {
    prepare(&stream)?;
    let own = greeting();
    stream.write_all(&own)?;
    let mut theirs = [0; GREETING];
    stream.read_exact(&mut theirs)?;
    check_greeting(&theirs, "what connected")?;
    let (mut claim, mut proof) = ([0; CLAIM], [0; PROOF]);
    stream.read_exact(&mut claim)?;
    stream.read_exact(&mut proof)?;
    let transcript = [&own[..], &theirs, &claim].concat();
    if !token.accepts(&[b"rank", &transcript], &proof) {
        let reason = "its FIREBRICK_JOB_TOKEN is not the one of this job";
        answer(&mut stream, token, &transcript, Err(reason))?;
        return Err(Failure::Refused(reason.to_owned()));
    }
    let number = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().expect("four bytes")) as usize;
    let claim = Claim { rank: number(&claim[..4]), world_size: number(&claim[4..]) };
    Ok(Candidate { stream, claim, transcript })
}

impl Candidate {
    /// On rank 0: accepts the rank, or says why not.
    pub(crate) fn answer(mut self, token: &JobToken, verdict: Result<(), &str>) -> io::Result<TcpStream> {
        answer(&mut self.stream, token, &self.transcript, verdict)?;
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

/// On another rank: says who it is, and waits for the answer.
pub(crate) fn present(mut stream: TcpStream, token: &JobToken, claim: Claim) -> Result<TcpStream, Failure> {
    prepare(&stream)?;
    let mut theirs = [0; GREETING];
    stream.read_exact(&mut theirs)?;
    check_greeting(&theirs, "what listens there")?;
    let own = greeting();
    let claim = [(claim.rank as u32).to_le_bytes(), (claim.world_size as u32).to_le_bytes()].concat();
    let transcript = [&theirs[..], &own, &claim].concat();
    let proof = token.prove(&[b"rank", &transcript]);
    stream.write_all(&[&own[..], &claim, &proof].concat())?;

    let mut head = [0; 1 + PROOF + 2];
    stream.read_exact(&mut head)?;
    let (is_refused, proof) = (head[0], &head[1..=PROOF]);
    let length = usize::from(u16::from_le_bytes([head[1 + PROOF], head[2 + PROOF]]));
    let mut reason = vec![0; length.min(MAX_REASON)];
    stream.read_exact(&mut reason)?;
    if is_refused != 0 {
        let reason = String::from_utf8_lossy(&reason).replace(char::is_control, " ");
        return Err(Failure::Refused(reason));
    }
    if !token.accepts(&[b"rank 0", &transcript, &[0]], proof) {
        return Err(Failure::Refused("what listens there does not know the job's token".to_owned()));
    }
    Ok(stream)
}
