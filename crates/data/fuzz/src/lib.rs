//! The entry point of the fuzz targets. Each target is a function of bytes in `targets`, which libFuzzer and the stable test
//! `tests/fuzz_corpus.rs` both run; `README.md` explains how.
//!
//! Trade-off: no sanitizers by default. The crate is safe Rust except for one memory map, and runs several times faster
//! without them.

mod targets;

/// Runs a target. A violated invariant is a panic. Panics if there is no such target, or an invariant is violated.
pub fn run(name: &str, bytes: &[u8]) {
    let (_, target) = targets::TARGETS.iter().find(|(known, _)| *known == name).expect("a known target");
    let outcome = target(bytes);
    assert!(outcome.messages.iter().all(|message| !message.is_empty()), "{name}: an empty error message");
}

/// Allows panics of decoders that the crate catches and reports; libFuzzer's hook would end the process.
pub fn quiet() {
    // A panic that is not caught still ends the process.
    std::panic::set_hook(Box::new(|_| {}));
}
