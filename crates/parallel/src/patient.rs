//! A connection whose other side may be silent for a while: silence is counted in short waits, not by a clock.
//!
//! After a pause of the whole job, a clock would show a long silence of all other ranks. A wait counts once however long this process was suspended
//! in it, so the others have time to show that they are there again.

use std::io::{self, Read, Write};

/// A stream with read and write timeouts that is retried several times.
pub(crate) struct Patient<S> {
    stream: S,
    /// Consecutive waits without a byte after which it fails.
    pub(crate) waits: u32,
}

impl<S> Patient<S> {
    pub(crate) fn new(stream: S, waits: u32) -> Self {
        Self { stream, waits }
    }

    fn attempt<T>(&mut self, mut attempt: impl FnMut(&mut S) -> io::Result<T>) -> io::Result<T> {
        let mut waited = 0;
        loop {
            match attempt(&mut self.stream) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if is_timeout(&error) && waited + 1 < self.waits => waited += 1,
                result => return result,
            }
        }
    }
}

/// Returns whether the error is a timeout: nothing was received or sent during the wait.
pub(crate) fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

impl<S: Read> Read for Patient<S> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.attempt(|stream| stream.read(buffer))
    }
}

impl<S: Write> Write for Patient<S> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.attempt(|stream| stream.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.attempt(Write::flush)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Times out, or is interrupted, this many times before each byte.
    struct Slow {
        kinds: Vec<io::ErrorKind>,
        next: usize,
    }

    impl Read for Slow {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let kind = self.kinds.get(self.next).copied();
            self.next = if kind.is_some() { self.next + 1 } else { 0 };
            kind.map_or_else(|| io::repeat(7).take(1).read(buffer), |kind| Err(kind.into()))
        }
    }

    #[test]
    fn waits_in_a_row_are_counted() {
        let waits = |count, waits| {
            let kinds = [vec![io::ErrorKind::WouldBlock; count], vec![io::ErrorKind::Interrupted; 9]].concat();
            let mut found = [0; 3];
            Patient::new(Slow { kinds, next: 0 }, waits).read_exact(&mut found).map(|()| found)
        };
        assert_eq!(waits(14, 15).unwrap(), [7; 3]);
        assert_eq!(waits(15, 15).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        assert_eq!(waits(0, 1).unwrap(), [7; 3]);
        assert!(waits(1, 1).is_err());
    }
}
