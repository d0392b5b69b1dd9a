//! Messages between ranks as bytes of a stream: kind, operation, length, and then the content.
//!
//! Trade-off: lengths are trusted up to a limit, because only ranks that know the job's token send messages.

use std::io::{self, Read, Write};

const MAX_BYTES: u64 = 1 << 36;

/// Messages between ranks that have joined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    /// A part of an exchange, or its result.
    Part { operation: String, bytes: Vec<u8> },
    /// The sender lives.
    Heartbeat,
    /// The job cannot go on, and why.
    Failed(String),
    /// The sender has nothing more to exchange, and closes the connection.
    Leaving,
}

pub(crate) fn write(stream: &mut impl Write, message: &Message) -> io::Result<()> {
    let (kind, name, bytes): (u8, &str, &[u8]) = match message {
        Message::Part { operation, bytes } => (1, operation, bytes),
        Message::Heartbeat => (2, "", &[]),
        Message::Failed(problem) => (3, "", problem.as_bytes()),
        Message::Leaving => (4, "", &[]),
    };
    let mut header = vec![kind, u8::try_from(name.len()).map_err(io::Error::other)?];
    header.extend((bytes.len() as u64).to_le_bytes());
    header.extend_from_slice(name.as_bytes());
    if bytes.len() < 1 << 14 {
        // One packet for a small message.
        header.extend_from_slice(bytes);
        return stream.write_all(&header);
    }
    stream.write_all(&header)?;
    stream.write_all(bytes)
}

pub(crate) fn read(stream: &mut impl Read) -> io::Result<Message> {
    let mut header = [0; 10];
    stream.read_exact(&mut header)?;
    let [kind, name_length, length @ ..] = header;
    let length = u64::from_le_bytes(length);
    if length > MAX_BYTES {
        return Err(invalid(format!("a message of {length} bytes")));
    }
    let name = exactly(stream, name_length.into())?;
    let bytes = exactly(stream, length)?;
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    match kind {
        1 => Ok(Message::Part { operation: text(name), bytes }),
        2 => Ok(Message::Heartbeat),
        3 => Ok(Message::Failed(text(bytes))),
        4 => Ok(Message::Leaving),
        other => Err(invalid(format!("a message of kind {other}"))),
    }
}

fn invalid(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// Reads `length` bytes. Memory grows as bytes arrive, not as a length promises.
fn exactly(stream: &mut impl Read, length: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(length.min(1 << 20) as usize);
    let got = stream.take(length).read_to_end(&mut bytes)?;
    if got as u64 == length { Ok(bytes) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

/// Joins parts with their lengths, so that different lists of parts never give the same bytes.
pub(crate) fn join(parts: &[impl AsRef<[u8]>]) -> Vec<u8> {
    let mut joined = Vec::with_capacity(parts.iter().map(|part| part.as_ref().len() + 8).sum());
    for part in parts {
        joined.extend((part.as_ref().len() as u64).to_le_bytes());
        joined.extend_from_slice(part.as_ref());
    }
    joined
}

/// Reverses [`join`]; `None` if the content is something else.
pub(crate) fn split(mut joined: &[u8]) -> Option<Vec<&[u8]>> {
    let mut parts = Vec::new();
    while !joined.is_empty() {
        let (length, rest) = joined.split_first_chunk()?;
        let (part, rest) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
        parts.push(part);
        joined = rest;
    }
    Some(parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_read_as_they_were_written() {
        let part = |length| Message::Part { operation: "all_reduce_sum".to_owned(), bytes: vec![7; length] };
        let all = [part(0), part(5), part(1 << 20), Message::Heartbeat, Message::Failed("é".into()), Message::Leaving];
        let mut stream = Vec::new();
        all.iter().for_each(|message| write(&mut stream, message).unwrap());
        let mut rest = stream.as_slice();
        for message in all {
            assert_eq!(read(&mut rest).unwrap(), message);
        }
        assert!(read(&mut rest).is_err());
    }

    #[test]
    fn garbage_and_messages_that_end_early_are_errors() {
        let mut stream = Vec::new();
        write(&mut stream, &Message::Failed("a reason".to_owned())).unwrap();
        for end in 0..stream.len() {
            assert!(read(&mut &stream[..end]).is_err(), "{end}");
        }
        assert!(read(&mut &[9u8; 64][..]).is_err());
        assert!(read(&mut &b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"[..]).is_err());
    }

    #[test]
    fn joined_parts_are_split_again_and_garbage_is_not() {
        let parts: [&[u8]; 4] = [b"", b"one", b"", b"three"];
        assert_eq!(split(&join(&parts)).unwrap(), parts);
        assert_eq!(split(&[]).unwrap(), Vec::<&[u8]>::new());
        assert!(split(&[1, 2, 3]).is_none() && split(&[255; 20]).is_none());
    }
}
