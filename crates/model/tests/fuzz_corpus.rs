//! Runs every input of the fuzz corpus, and every input that differs from one of them by a byte, through its target: no panic, bounded
//! time, errors that say something. `fuzz/README.md` explains how inputs are found.
//!
//! Trade-off: long inputs are changed at some of their bytes only.

#[path = "../fuzz/src/targets.rs"]
mod targets;

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use targets::{TARGETS, Target};

/// Time limit per input. Test builds are several times slower than fuzzing builds, which have a limit of one second.
const MAX_TIME: Duration = Duration::from_secs(10);
/// Changed versions of each input.
const CHANGES: usize = 25;

fn run(target: Target, name: &str, bytes: &[u8]) {
    let started = Instant::now();
    let messages = target(bytes);
    assert!(started.elapsed() < MAX_TIME, "{name} took {:?}", started.elapsed());
    assert!(messages.iter().all(|message| !message.is_empty()), "{name}: an empty error message");
}

/// Versions of an input: cut, and with one byte changed, at places spread over it.
fn changed(bytes: &[u8]) -> impl Iterator<Item = Vec<u8>> {
    (0..bytes.len()).step_by((bytes.len() / CHANGES).max(1)).flat_map(move |at| {
        let mut flipped = bytes.to_vec();
        flipped[at] ^= 1 << (at % 7);
        let without = [&bytes[..at], &bytes[at + 1..]].concat();
        [bytes[..at].to_vec(), flipped, without]
    })
}

#[test]
fn every_input_of_the_corpus_and_its_neighbors_are_handled_in_bounded_time() {
    for (name, target) in TARGETS {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(name);
        let mut seen = 0;
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let bytes = fs::read(&path).unwrap();
            let place = path.display().to_string();
            run(target, &place, &bytes);
            changed(&bytes).for_each(|bytes| run(target, &place, &bytes));
            seen += 1;
        }
        assert!(seen >= 5, "only {seen} inputs in {}", folder.display());
    }
}

#[test]
fn the_corpus_holds_inputs_that_are_accepted_and_inputs_that_are_refused() {
    for (name, target) in TARGETS {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(name);
        let entries = fs::read_dir(&folder).unwrap();
        let outcomes: Vec<bool> =
            entries.map(|entry| target(&fs::read(entry.unwrap().path()).unwrap()).is_empty()).collect();
        assert!(outcomes.contains(&true) && outcomes.contains(&false), "{name}: {outcomes:?}");
    }
}
