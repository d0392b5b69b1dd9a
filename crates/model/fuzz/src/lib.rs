//! The entry point of the fuzz targets. Each target is a function of bytes in `targets`, which libFuzzer and the stable test
//! `tests/fuzz_corpus.rs` both run; `README.md` explains how.
//!
//! Trade-off: no sanitizers by default. The readers are safe Rust and run several times faster without them.

mod targets;

/// Runs a target.
///
/// # Panics
/// If there is no such target, or an invariant is violated.
pub fn run(name: &str, bytes: &[u8]) {
    let (_, target) = targets::TARGETS.iter().find(|(known, _)| *known == name).expect("a known target");
    assert!(target(bytes).iter().all(|message| !message.is_empty()), "{name}: an empty error message");
}
