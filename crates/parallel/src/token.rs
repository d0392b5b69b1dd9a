//! The secret of a job: ranks prove to each other that they know it, without sending it.
//!
//! A proof is a keyed hash (HMAC-SHA256) over the messages of both sides, with a random number from each, so that a recorded proof cannot be
//! replayed. Proofs are compared in constant time.
//! Trade-off: what ranks send each other afterwards is neither encrypted nor signed, as with NCCL: the token keeps strangers and other
//! jobs out, not an attacker who can change packets on the way. Use a network that you trust.

use std::fmt;

use ring::hmac;
use ring::rand::{SecureRandom, SystemRandom};

use crate::wire;

/// Bytes of a proof, and of the random numbers that go into it.
pub(crate) const PROOF: usize = 32;
/// Fewest characters of a token.
const MIN_CHARACTERS: usize = 16;

/// A secret that all ranks of a job know.
#[derive(Clone)]
pub struct JobToken {
    text: String,
    key: hmac::Key,
}

impl fmt::Debug for JobToken {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("JobToken(..)")
    }
}

impl JobToken {
    /// Creates a token from a user's or a launcher's text; `None` if it has fewer than 16 characters.
    pub fn from_text(text: &str) -> Option<Self> {
        let key = hmac::Key::new(hmac::HMAC_SHA256, text.as_bytes());
        (text.chars().count() >= MIN_CHARACTERS).then(|| Self { text: text.to_owned(), key })
    }

    /// Creates a new random token.
    ///
    /// # Panics
    /// If the system has no random numbers.
    pub fn random() -> Self {
        let text: String = random_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
        Self::from_text(&text).expect("64 characters are enough")
    }

    /// Returns the secret itself, to hand it to another rank.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Proves to know the token, over `parts`.
    pub(crate) fn prove(&self, parts: &[&[u8]]) -> [u8; PROOF] {
        let tag = hmac::sign(&self.key, &wire::join(parts));
        tag.as_ref().try_into().expect("a SHA-256 has 32 bytes")
    }

    /// Returns whether a proof over `parts` was made with this token.
    pub(crate) fn accepts(&self, parts: &[&[u8]], proof: &[u8]) -> bool {
        hmac::verify(&self.key, &wire::join(parts), proof).is_ok()
    }
}

/// Generates random bytes that an attacker cannot guess.
pub(crate) fn random_bytes() -> [u8; PROOF] {
    let mut bytes = [0; PROOF];
    SystemRandom::new().fill(&mut bytes).expect("the system has random numbers");
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_needs_the_same_token_and_parts() {
        let (token, other) = (JobToken::random(), JobToken::random());
        let proof = token.prove(&[b"rank", b"1"]);
        assert!(token.accepts(&[b"rank", b"1"], &proof));
        assert!(JobToken::from_text(token.text()).unwrap().accepts(&[b"rank", b"1"], &proof));
        assert!(!other.accepts(&[b"rank", b"1"], &proof));
        assert!(!token.accepts(&[b"rank", b"2"], &proof) && !token.accepts(&[b"rank1", b""], &proof));
        assert!(!token.accepts(&[b"rank", b"1"], &proof[..31]) && !token.accepts(&[b"rank", b"1"], &[]));
    }

    #[test]
    fn short_tokens_are_refused_and_no_token_is_printed() {
        assert!(JobToken::from_text("").is_none() && JobToken::from_text("fifteen letters").is_none());
        let token = JobToken::from_text("sixteen letters!").unwrap();
        assert_eq!(format!("{token:?}"), "JobToken(..)");
    }
}
