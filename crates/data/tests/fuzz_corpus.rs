//! Runs the inputs of the fuzz corpus, and generated inputs that are too large to store, through their targets. Checks for panics, time and memory
//! limits, and errors that name the file and the line. Runs all inputs with `cargo xtask test --slow`, otherwise about ten of each corpus and one
//! that is generated.
//!
//! The inputs of a target run in a separate process, so that its peak memory is theirs and a crash is detected. Trade-off: memory is measured only if
//! there is a `/proc`. `fuzz/README.md` explains how inputs are found.

#[path = "../fuzz/src/hostile/mod.rs"]
mod hostile;
#[path = "../../trainer/src/hostile_json.rs"]
mod hostile_json;
#[path = "../fuzz/src/targets/mod.rs"]
mod targets;

use std::collections::BTreeMap;
use std::env;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use firebrick_data::BoundedAllocator;
use hostile::Hostile;
use targets::{Outcome, TARGETS, Target};

// As in the program.
#[global_allocator]
static ALLOCATOR: BoundedAllocator<std::alloc::System> = BoundedAllocator(std::alloc::System);

/// Time limit per input. Test builds are several times slower than fuzzing builds, which have a limit of one second.
const MAX_SECONDS: f64 = 20.0;
/// Time limit for all inputs of a target together.
const MAX_PROCESS: Duration = Duration::from_secs(400);
/// Peak memory of a process over the small inputs of the corpus.
const MAX_CORPUS_BYTES: u64 = 700 << 20;
/// Peak memory if one record takes all the memory that a record may take.
const MAX_HOSTILE_BYTES: u64 = 1 << 30;
const CHILD: &str = "FIREBRICK_FUZZ_CHILD";
const LOG: &str = "FIREBRICK_FUZZ_LOG";
/// Set by `cargo xtask test --slow`.
const SLOW: &str = "FIREBRICK_SLOW_TESTS";

/// Returns all of them in a slow run, otherwise at most this many, spread evenly.
fn chosen<T>(all: impl IntoIterator<Item = T>, most: usize) -> impl Iterator<Item = T> {
    let all: Vec<T> = all.into_iter().collect();
    let step = if env::var_os(SLOW).is_some() { 1 } else { all.len().div_ceil(most).max(1) };
    all.into_iter().step_by(step)
}

/// Returns the peak resident size of this process, in bytes.
fn peak_bytes() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok().map(|kib| kib << 10)
}

fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus")
}

fn inputs(target: &str) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(corpus().join(target)).unwrap();
    let read = |path: PathBuf| (path.file_name().unwrap().to_str().unwrap().to_owned(), fs::read(path).unwrap());
    entries.map(|entry| read(entry.unwrap().path())).collect()
}

fn target(name: &str) -> Target {
    TARGETS.iter().find(|(known, _)| *known == name).unwrap().1
}

/// Runs one input, within the limits.
fn run(target: Target, name: &str, bytes: &[u8], max_bytes: u64, log: &mut File) -> Outcome {
    write!(log, "{name}: ").unwrap();
    let start = Instant::now();
    let outcome = target(bytes);
    let seconds = start.elapsed().as_secs_f64();
    let peak = peak_bytes();
    let words = outcome.messages.first().map_or("", String::as_str);
    let shown = words.char_indices().nth(300).map_or(words, |(end, _)| &words[..end]);
    writeln!(log, "{seconds:.2} s, {} MiB, {}: {shown}", peak.unwrap_or(0) >> 20, outcome.read).unwrap();
    assert!(seconds < MAX_SECONDS, "{name} took {seconds:.1} s");
    assert!(peak.is_none_or(|peak| peak < max_bytes), "{name}: the process grew to {:?} bytes", peak);
    assert!(outcome.messages.iter().all(|message| !message.is_empty()), "{name}: an empty error message");
    outcome
}

/// Runs the test of this name again in a child process, for one target.
fn in_process(test: &str, target: &str) {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env(CHILD, target).env("RUST_BACKTRACE", "0");
    let output = File::create(folder.path().join("output")).unwrap();
    command.stdout(output.try_clone().unwrap()).stderr(output).env(LOG, &log);
    let mut child = command.spawn().unwrap();
    let start = Instant::now();
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break Some(status),
            None if start.elapsed() > MAX_PROCESS => {
                child.kill().unwrap();
                child.wait().unwrap();
                break None;
            }
            None => sleep(Duration::from_millis(20)),
        }
    };
    let log_text = fs::read_to_string(&log).unwrap_or_default();
    let output = fs::read(folder.path().join("output")).unwrap();
    let output = String::from_utf8_lossy(&output);
    let end = output.char_indices().rev().nth(2000).map_or(0, |(at, _)| at);
    assert!(
        status.is_some_and(|status| status.success()),
        "{target}: {status:?} at {:?}\n{}",
        log_text.lines().last().unwrap_or_default(),
        &output[end..]
    );
}

#[test]
fn every_hostile_input_takes_bounded_time_and_memory() {
    if let Ok(name) = env::var(CHILD) {
        let mut log = File::create(env::var_os(LOG).unwrap()).unwrap();
        for (input, bytes) in chosen(inputs(&name), 10) {
            run(target(&name), &input, &bytes, MAX_CORPUS_BYTES, &mut log);
        }
        let generated = hostile::files::all().into_iter().filter(|hostile| hostile.target == name);
        for hostile in chosen(generated, 1) {
            let Hostile { name: input, make, expected, .. } = hostile;
            let outcome = run(target(&name), input, &make(), MAX_HOSTILE_BYTES, &mut log);
            let all = outcome.messages.join("\n");
            assert!(expected.iter().all(|words| all.contains(words)), "{input}: {expected:?} is not in {all:.2000}");
        }
        return;
    }
    let test = "every_hostile_input_takes_bounded_time_and_memory";
    for (name, _) in TARGETS {
        in_process(test, name);
    }
}

/// Checks the errors that some inputs of the corpus must cause; other tests have those of plain data files and templates.
#[test]
fn errors_name_the_file_and_the_line_and_what_is_wrong() {
    let cases = [
        ("jsonl", "nul_outside_of_a_string", "rows.jsonl:1:13: a NUL character"),
        ("packed", "zst_window_of_terabytes", "rows.jsonl.zst:1"),
        ("parquet", "no_end", "rows.parquet"),
        ("parquet", "footer_of_gigabytes", "rows.parquet"),
        ("arrow", "metadata_of_gigabytes", "rows.arrow: cannot decode this Arrow file at row 1"),
        ("arrow", "cut", "cut short"),
        ("token_store", "rubbish", "its header is not what was written"),
        ("token_store", "checksums_differ", "checksum"),
        ("tokenizer_config", "not_utf8_template", "chat_template.jinja"),
        ("tokenizer_config", "deep", "tokenizer_config.json"),
        ("tokenizer_json", "not_json", "tokenizer.json"),
    ];
    for (name, input, words) in cases {
        let bytes = fs::read(corpus().join(name).join(input)).unwrap();
        let messages = target(name)(&bytes).messages.join("\n");
        assert!(messages.contains(words), "{name}/{input}: expected {words:?} in {messages}");
    }
}

/// Runs templates from seeds, some in a process: 96, or as many as `FIREBRICK_FUZZ_EXECUTIONS` in a slow run.
#[test]
fn hostile_templates_end_in_bounded_time_and_memory() {
    const IN_PROCESS: u64 = 16;
    let test = "hostile_templates_end_in_bounded_time_and_memory";
    if let Some(first) = env::var(CHILD).ok().and_then(|first| first.parse::<u64>().ok()) {
        let mut log = File::create(env::var_os(LOG).unwrap()).unwrap();
        for seed in first..first + IN_PROCESS {
            let source = hostile::templates::random(seed);
            let start: String = source.chars().take(300).collect();
            run(target("template"), &format!("seed {seed}: {start}"), source.as_bytes(), 2 << 30, &mut log);
        }
        return;
    }
    let executions = env::var("FIREBRICK_FUZZ_EXECUTIONS").ok().and_then(|count| count.parse().ok()).unwrap_or(96);
    let first = env::var("FIREBRICK_FUZZ_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0);
    let executions = if env::var_os(SLOW).is_some() { executions } else { IN_PROCESS };
    (first..first + executions).step_by(IN_PROCESS as usize).for_each(|seed| in_process(test, &seed.to_string()));
}

#[test]
fn the_corpus_is_small_and_every_target_has_one() {
    let (mut files, mut bytes) = (0, 0);
    for (name, _) in TARGETS {
        let inputs = inputs(name);
        assert!(!inputs.is_empty(), "{name}");
        files += inputs.len();
        bytes += inputs.values().map(Vec::len).sum::<usize>();
    }
    assert!(files < 330 && bytes < 1 << 20, "{files} files, {bytes} bytes: generate large inputs in code");
    assert_eq!(fs::read_dir(corpus()).unwrap().count(), TARGETS.len(), "a corpus without a target");
}

#[test]
fn hostile_tokenizer_files_are_read_or_refused() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/bytes/tokenizer.json");
    let mut tokenizer: serde_json::Value = serde_json::from_slice(&fs::read(golden).unwrap()).unwrap();
    tokenizer["normalizer"] = serde_json::json!({ "type": "Sequence", "normalizers": [
        { "type": "Replace", "pattern": { "String": " " }, "content": "_" }, { "type": "Prepend", "prepend": "_" }
    ] });
    let described = serde_json::json!({ "content": "<tool>", "special": true, "lstrip": false, "normalized": false });
    let files = serde_json::json!({
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {
            "bos_token": "<s>", "eos_token": described, "add_bos_token": true, "tool_token": "<tool>",
            "extra_special_tokens": ["<a>", described], "added_tokens_decoder": { "262": described },
        },
        "special_tokens_map.json": { "pad_token": "<pad>", "additional_special_tokens": ["<b>"] },
        "added_tokens.json": { "<tool>": 262, "<c>": 263 },
    });
    hostile_json::each_hostile(&files, |files| {
        let folder = tempfile::tempdir().unwrap();
        for (name, content) in files.as_object().into_iter().flatten() {
            fs::write(folder.path().join(name), content.to_string()).unwrap();
        }
        targets::tokenizer::load(folder.path());
    });
}
