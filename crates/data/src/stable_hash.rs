//! A hash that is the same on every machine, in every build, for ever: splits and fingerprints are stored by it.
//!
//! FNV-1a over bytes, then a mixing step, because FNV alone leaves the high bits of short inputs poor and splits order
//! by them. Gives up speed and any resistance against crafted collisions.

const PRIME: u64 = 0x0000_0100_0000_01b3;

/// 64-bit FNV-1a with a final mix.
pub(crate) struct StableHash(u64);

impl StableHash {
    /// The hash of nothing yet.
    pub(crate) fn new() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }

    /// Adds an integer, little end first.
    pub(crate) fn add(&mut self, value: u64) {
        let bytes = value.to_le_bytes();
        // A zero byte only multiplies, and token ids have five or more of them.
        if value < 1 << 24 {
            self.add_bytes(&bytes[..3]);
            self.0 = self.0.wrapping_mul(const { PRIME.wrapping_pow(5) });
        } else {
            self.add_bytes(&bytes);
        }
    }

    fn add_bytes(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(PRIME);
        }
    }

    /// Adds the tokens of a document and which of them are trained, and its end.
    pub(crate) fn add_document(&mut self, tokens: &[u32], trained: &[bool]) {
        self.add(tokens.len() as u64);
        for (&token, &is_trained) in tokens.iter().zip(trained) {
            self.add(u64::from(token) << 1 | u64::from(is_trained));
        }
    }

    /// The hash of all that was added: every input bit reaches every output bit.
    pub(crate) fn finish(&self) -> u64 {
        let mut mixed = self.0;
        for _ in 0..2 {
            mixed ^= mixed >> 32;
            mixed = mixed.wrapping_mul(0xd6e8_feb8_6659_fd93);
        }
        mixed ^ mixed >> 32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Computed by hand in another language. Stored splits and fingerprints depend on it.
    const FROZEN: u64 = 6672884683725045927;

    #[test]
    fn hash_never_changes() {
        let mut hash = StableHash::new();
        hash.add_document(&[1, 2, 3], &[false, true, true]);
        assert_eq!(hash.finish(), FROZEN);
    }

    #[test]
    fn small_and_large_integers_are_hashed_alike() {
        for value in [0, 1, 255, 1 << 16, (1 << 24) - 1, 1 << 24, u64::MAX] {
            let (mut added, mut by_bytes) = (StableHash::new(), StableHash::new());
            added.add(value);
            by_bytes.add_bytes(&value.to_le_bytes());
            assert_eq!(added.finish(), by_bytes.finish());
        }
    }
}
