//! Runs the same work in other programs: a Python script gets the cases as JSON and writes a line of JSON for each result.
//!
//! The script is in peers/peers.py and in this binary, so that one file is enough on a machine with a GPU. It has its own time limit between cases; a
//! program that hangs inside one is ended here, and earlier results count.
//! Trade-off: missing Python packages are named and skipped, not installed.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use firebrick_train::bench::Spread;
use firebrick_trainer::run::peaks::Probe;
use serde::Deserialize;
use serde_json::json;

use crate::models::{LLAMA_1B, LLAMA_8B, Model, SMOLLM2_135M, SMOLLM2_360M};
use crate::options::MatrixOptions;
use crate::results::{BackendResults, MatrixResults, PeerResults, PeerRow, Row};
use crate::show::peer_progress;

const SCRIPT: &str = include_str!("../peers/peers.py");

/// Seconds for the cases of the short run and of the whole one.
const QUICK_S: u64 = 60;
const WHOLE_S: u64 = 300;
/// Additional seconds before a program is ended: for imports, the last case, and Unsloth's separate process.
const GRACE_S: u64 = 180;

/// A line of what the script writes.
#[derive(Debug, PartialEq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Line {
    /// A package that was found, and its version.
    Version([String; 2]),
    /// The device it runs on.
    Device(String),
    /// Something that was left out, and why.
    Note(String),
    /// A peak rate of PyTorch, under the name of ours.
    Peak { name: String, rate: f64 },
    /// Seconds of a case.
    Row { index: usize, peer: String, samples: Vec<f64> },
    /// Everything has been written.
    End,
}

/// Runs the script on the cases of the fastest backend per kind of device; a note gives the reason if it cannot run.
pub(crate) fn run(options: &MatrixOptions, results: &MatrixResults, print: &dyn Fn(&str)) -> PeerResults {
    let rows = compared(results);
    let mut peers = PeerResults::default();
    let Some(backend) = results.compared_backend().filter(|_| !rows.is_empty()) else {
        peers.notes.push("no case of cuda or flex was timed".to_owned());
        return peers;
    };
    print(&format!("peers: {} cases through {}", rows.len(), options.python.display()));
    let limit = if options.quick { QUICK_S } else { WHOLE_S };
    if let Err(problem) = ask(options, &rows, backend, limit, &mut |line| add(&mut peers, &rows, line, print)) {
        peers.notes.push(problem);
    }
    peers
}

/// Adds a line to the results.
fn add(peers: &mut PeerResults, rows: &[&Row], line: Line, print: &dyn Fn(&str)) {
    match line {
        Line::Version([name, version]) => drop(peers.versions.insert(name, version)),
        Line::Device(device) => peers.device = device,
        Line::Note(note) => peers.notes.push(note),
        Line::Peak { name, rate } => drop(peers.peaks.insert(name, rate)),
        Line::Row { index, peer, samples } if index < rows.len() && !samples.is_empty() => {
            let row = PeerRow { key: rows[index].key.clone(), peer, seconds: Spread::of(samples) };
            print(&peer_progress(&row));
            peers.rows.push(row);
        }
        Line::Row { .. } | Line::End => (),
    }
}

/// Returns the rows to compare with other programs: those of CUDA if it ran, else those of flex.
fn compared(results: &MatrixResults) -> Vec<&Row> {
    let Some(backend) = results.compared_backend() else { return Vec::new() };
    let name = &backend.backend;
    let is_elsewhere = |row: &&Row| !matches!(row.key.subject.as_str(), "data" | "collective");
    results.rows.iter().filter(|row| row.key.backend == *name && row.timing().is_some()).filter(is_elsewhere).collect()
}

/// Runs the script and hands on its lines.
fn ask(
    options: &MatrixOptions,
    rows: &[&Row],
    backend: &BackendResults,
    limit_s: u64,
    take: &mut dyn FnMut(Line),
) -> Result<(), String> {
    let cases: Vec<_> = rows
        .iter()
        .enumerate()
        .map(|(index, row)| json!({ "index": index, "key": row.key, "config": config_of(&row.key.what) }))
        .collect();
    let on_gpu = !backend.on_cpu;
    let Probe { gemm_size, copy_bytes, launches } = if on_gpu { Probe::LARGE } else { Probe::SMALL };
    let formats: Vec<&String> = backend.flops_per_s.keys().collect();
    let peaks = json!({ "gemm_size": gemm_size, "copy_bytes": copy_bytes, "launches": launches, "formats": formats });
    let request =
        json!({ "cases": cases, "peaks": peaks, "quick": options.quick, "on_gpu": on_gpu, "seconds": limit_s })
            .to_string();
    let python = options.python.display();
    let no_file = |error: std::io::Error| format!("no temporary file: {error}");
    let mut script = tempfile::NamedTempFile::with_suffix(".py").map_err(no_file)?;
    script.write_all(SCRIPT.as_bytes()).map_err(no_file)?;
    let mut input = tempfile::NamedTempFile::new().map_err(no_file)?;
    input.write_all(request.as_bytes()).map_err(no_file)?;
    let mut program = Command::new(&options.python)
        .args([script.path(), input.path()])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .map_err(|error| format!("{python} could not be started, so no other program was timed: {error}"))?;
    let deadline = Instant::now() + Duration::from_secs(limit_s + GRACE_S);
    let ended = hand_on(&lines_of(&mut program), deadline, take);
    // It has finished, or hangs: nothing is lost with it.
    let killed = program.kill();
    let status = program.wait().map_or_else(|error| error.to_string(), |status| status.to_string());
    match ended {
        Ended::Said => Ok(()),
        Ended::Silent => Err(format!("{python} ended with {status} before its last case; its messages are above")),
        Ended::Late => {
            let how = if killed.is_ok() { "was ended" } else { "could not be ended" };
            Err(format!("{python} {how} after {} s: its last case took too long", limit_s + GRACE_S))
        }
    }
}

/// The end of a program's lines.
#[derive(Debug, PartialEq)]
enum Ended {
    /// With [`Line::End`].
    Said,
    /// Without it.
    Silent,
    /// Not before the deadline.
    Late,
}

/// Reads the lines of a program on a thread; lines that are not our JSON are other output.
fn lines_of(program: &mut Child) -> Receiver<Line> {
    let (send, lines) = mpsc::channel();
    let output = BufReader::new(program.stdout.take().expect("its output is piped"));
    thread::spawn(move || {
        let ours = output.lines().map_while(Result::ok).filter_map(|line| serde_json::from_str::<Line>(&line).ok());
        ours.map_while(|line| send.send(line).ok()).for_each(drop);
    });
    lines
}

fn hand_on(lines: &Receiver<Line>, deadline: Instant, take: &mut dyn FnMut(Line)) -> Ended {
    loop {
        match lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(Line::End) => return Ended::Said,
            Ok(line) => take(line),
            Err(RecvTimeoutError::Disconnected) => return Ended::Silent,
            Err(RecvTimeoutError::Timeout) => return Ended::Late,
        }
    }
}

/// Returns the config.json of a case's model, for programs that build it.
fn config_of(what: &str) -> Option<String> {
    let models = [SMOLLM2_135M, SMOLLM2_360M, LLAMA_1B, LLAMA_8B];
    let cut = |model: Model| (1..=model.layers).map(move |layers| model.first_layers(layers));
    models.into_iter().flat_map(cut).find(|model| model.name() == what).map(|model| model.config_json())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::tests::results;

    #[test]
    fn a_python_that_is_not_there_is_a_note() {
        let options = MatrixOptions { python: "no/such/python".into(), ..MatrixOptions::default() };
        let peers = run(&options, &results(), &|_| ());
        assert!(peers.rows.is_empty() && peers.notes[0].contains("no/such/python"), "{:?}", peers.notes);
    }

    #[test]
    fn lines_before_the_end_of_a_program_that_fails_or_hangs_count() {
        let soon = || Instant::now() + Duration::from_millis(50);
        let (send, lines) = mpsc::channel();
        send.send(Line::Note("a".to_owned())).unwrap();
        let mut taken = Vec::new();
        assert_eq!(hand_on(&lines, soon(), &mut |line| taken.push(line)), Ended::Late);
        send.send(Line::Row { index: 0, peer: "p".to_owned(), samples: vec![1.0] }).unwrap();
        drop(send);
        assert_eq!(hand_on(&lines, soon(), &mut |line| taken.push(line)), Ended::Silent);
        assert_eq!(taken.len(), 2);
        let (send, lines) = mpsc::channel();
        send.send(Line::End).unwrap();
        assert_eq!(hand_on(&lines, soon(), &mut |_| ()), Ended::Said);
    }

    #[test]
    fn lines_of_the_script_are_read_into_results() {
        let all = results();
        let rows: Vec<&Row> = all.rows.iter().collect();
        let mut peers = PeerResults::default();
        for text in [
            r#"{"version": ["torch", "2.9"]}"#,
            r#"{"device": "a card"}"#,
            r#"{"note": "no unsloth"}"#,
            r#"{"peak": {"name": "bf16", "rate": 7.9e14}}"#,
            r#"{"row": {"index": 1, "peer": "pytorch", "samples": [1.0, 3.0, 2.0]}}"#,
            r#"{"row": {"index": 99, "peer": "pytorch", "samples": [1.0]}}"#,
        ] {
            add(&mut peers, &rows, serde_json::from_str(text).unwrap(), &|_| ());
        }
        assert_eq!((peers.versions["torch"].as_str(), peers.device.as_str()), ("2.9", "a card"));
        assert_eq!(peers.notes, ["no unsloth"]);
        assert_eq!(peers.peaks["bf16"], 7.9e14);
        assert_eq!(peers.rows.len(), 1, "a case that does not exist");
        assert_eq!((&peers.rows[0].key, peers.rows[0].seconds.median), (&all.rows[1].key, 2.0));
        assert_eq!(serde_json::from_str::<Line>(r#""end""#).unwrap(), Line::End);
    }

    #[test]
    fn models_are_found_by_the_names_of_cases_whole_and_cut() {
        assert!(config_of("llama-3.1-8b (4 of 32 layers)").unwrap().contains("\"num_hidden_layers\":4"));
        assert!(config_of("smollm2-360m").unwrap().contains("\"num_hidden_layers\":32"));
        assert_eq!(config_of("one flat parameter"), None);
    }
}
