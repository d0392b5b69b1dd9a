//! What the fuzz targets share. Each target is a plain function of bytes in `targets`, which libFuzzer and the stable
//! test `tests/fuzz_corpus.rs` both run; `README.md` says how.
//!
//! Gives up sanitizers by default: the crate is safe Rust but for one memory map, and runs several times faster without.

mod targets;

/// Runs a target. A wrong answer is a panic.
///
/// # Panics
/// If there is no such target, or the crate broke a promise.
pub fn run(name: &str, bytes: &[u8]) {
    let (_, target) = targets::TARGETS.iter().find(|(known, _)| *known == name).expect("a known target");
    let outcome = target(bytes);
    assert!(outcome.said.iter().all(|said| !said.is_empty()), "{name}: an error without words");
}

/// Lets the panics of decoders pass that the crate catches and reports; libFuzzer's own hook would end the process.
pub fn quiet() {
    // Silent: what is not caught ends the process with its message and a file all the same.
    std::panic::set_hook(Box::new(|_| {}));
}
