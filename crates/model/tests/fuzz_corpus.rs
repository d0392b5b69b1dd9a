//! Runs the inputs of the fuzz corpus, and variants with one changed byte, through their targets: no panic, bounded time, meaningful errors. `cargo
//! xtask test --slow` runs all inputs, otherwise about ten per target with fewer changes. `fuzz/README.md` explains how inputs are found.

#[path = "../../trainer/src/hostile_json.rs"]
mod hostile_json;
#[path = "../fuzz/src/targets.rs"]
mod targets;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{env, fs};

use targets::{TARGETS, Target};

/// Time limit per input. Test builds are several times slower than fuzzing builds, which have a limit of one second.
const MAX_TIME: Duration = Duration::from_secs(10);
/// Changes per input, and changes per input in a slow run.
const CHANGES: [usize; 2] = [8, 25];
/// Inputs per target outside of slow runs.
const INPUTS: usize = 10;

/// Returns whether `cargo xtask test --slow` started this.
fn is_slow() -> bool {
    env::var_os("FIREBRICK_SLOW_TESTS").is_some()
}

fn run(target: Target, name: &str, bytes: &[u8]) {
    let started = Instant::now();
    let messages = target(bytes);
    assert!(started.elapsed() < MAX_TIME, "{name} took {:?}", started.elapsed());
    assert!(messages.iter().all(|message| !message.is_empty()), "{name}: an empty error message");
}

/// Generates versions of an input: cut, and with one byte changed, at places spread over it.
fn changed(bytes: &[u8]) -> impl Iterator<Item = Vec<u8>> {
    (0..bytes.len()).step_by((bytes.len() / CHANGES[usize::from(is_slow())]).max(1)).flat_map(move |at| {
        let mut flipped = bytes.to_vec();
        flipped[at] ^= 1 << (at % 7);
        let without = [&bytes[..at], &bytes[at + 1..]].concat();
        [bytes[..at].to_vec(), flipped, without]
    })
}

#[test]
fn the_corpus_is_handled_in_bounded_time() {
    for (name, target) in TARGETS {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(name);
        let mut paths: Vec<PathBuf> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        let step = if is_slow() { 1 } else { paths.len().div_ceil(INPUTS).max(1) };
        let mut seen = 0;
        for path in paths.into_iter().step_by(step) {
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
fn the_corpus_has_accepted_and_refused_inputs() {
    for (name, target) in TARGETS {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(name);
        let entries = fs::read_dir(&folder).unwrap();
        let outcomes: Vec<bool> =
            entries.map(|entry| target(&fs::read(entry.unwrap().path()).unwrap()).is_empty()).collect();
        assert!(outcomes.contains(&true) && outcomes.contains(&false), "{name}: {outcomes:?}");
    }
}

#[test]
fn hostile_adapter_settings_are_read_or_refused() {
    let settings = serde_json::json!({
        "peft_type": "LORA", "r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "target_modules": ["q_proj"], "use_dora": false,
        "use_rslora": true, "exclude_modules": ["v_proj"], "layers_to_transform": [0], "rank_pattern": { "q_proj": 4 },
        "alpha_pattern": { "q_proj": 8 }, "modules_to_save": ["lm_head"], "trainable_token_indices": { "embed_tokens": [1] },
        "target_parameters": ["mlp.experts.down_proj"], "layers_pattern": "layers", "init_lora_weights": true, "bias": "none",
    });
    let (_, target) = TARGETS[0];
    hostile_json::each_hostile(&settings, |json| run(target, "settings", json.to_string().as_bytes()));
}
