//! The same work by other programs: a Python script gets the cases as JSON and returns seconds.
//!
//! The script lies in benches/peers.py and in this binary, so that one file is enough on a machine with a GPU.
//! Trade-off: what Python lacks is named and left out; it is not installed.

use std::collections::BTreeMap;
use std::io::Write;
use std::process::{Command, Stdio};

use serde::Deserialize;
use serde_json::json;

use super::super::spread::Spread;
use super::models::{LLAMA_1B, LLAMA_8B, Model, SMOLLM2_135M, SMOLLM2_360M};
use super::options::MatrixOptions;
use super::peer_results::{PeerResults, PeerRow};
use super::results::{MatrixResults, Row};

const SCRIPT: &str = include_str!("../../../../../benches/peers.py");

/// What the script returns.
#[derive(Deserialize)]
struct Answer {
    versions: BTreeMap<String, String>,
    device: String,
    notes: Vec<String>,
    rows: Vec<AnswerRow>,
}

#[derive(Deserialize)]
struct AnswerRow {
    index: usize,
    peer: String,
    samples: Vec<f64>,
}

/// Runs the script on the cases of the fastest backend per kind of device; the reason is a note where it cannot run.
pub(super) fn run(options: &MatrixOptions, results: &MatrixResults, print: &dyn Fn(&str)) -> PeerResults {
    let rows = compared(results);
    if rows.is_empty() {
        return PeerResults { notes: vec!["no case of cuda or flex was timed".to_owned()], ..PeerResults::default() };
    }
    print(&format!("peers: {} cases through {}", rows.len(), options.python.display()));
    match ask(options, &rows) {
        Ok(answer) => PeerResults {
            versions: answer.versions,
            device: answer.device,
            notes: answer.notes,
            rows: answer
                .rows
                .into_iter()
                .filter(|row| row.index < rows.len() && !row.samples.is_empty())
                .map(|AnswerRow { index, peer, samples }| PeerRow {
                    key: rows[index].key.clone(),
                    peer,
                    seconds: Spread::of(samples),
                })
                .collect(),
        },
        Err(problem) => PeerResults { notes: vec![problem], ..PeerResults::default() },
    }
}

/// The rows that other programs are compared with: those of CUDA if it ran, else those of flex.
fn compared(results: &MatrixResults) -> Vec<&Row> {
    let name = if results.backend("cuda").is_some() { "cuda" } else { "flex" };
    let is_elsewhere = |row: &&Row| !matches!(row.key.subject.as_str(), "data" | "collective");
    results.rows.iter().filter(|row| row.key.backend == name && row.timing().is_some()).filter(is_elsewhere).collect()
}

fn ask(options: &MatrixOptions, rows: &[&Row]) -> Result<Answer, String> {
    let cases: Vec<_> = rows
        .iter()
        .enumerate()
        .map(|(index, row)| json!({ "index": index, "key": row.key, "config": config_of(&row.key.what) }))
        .collect();
    let on_gpu = rows[0].key.backend == "cuda";
    let request = json!({ "cases": cases, "quick": options.quick, "on_gpu": on_gpu }).to_string();
    let python = options.python.display();
    let mut script =
        tempfile::NamedTempFile::with_suffix(".py").map_err(|error| format!("no temporary file: {error}"))?;
    script.write_all(SCRIPT.as_bytes()).map_err(|error| format!("no temporary file: {error}"))?;
    let mut input = tempfile::NamedTempFile::new().map_err(|error| format!("no temporary file: {error}"))?;
    input.write_all(request.as_bytes()).map_err(|error| format!("no temporary file: {error}"))?;
    let output = Command::new(&options.python)
        .args([script.path(), input.path()])
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .map_err(|error| format!("{python} could not be started, so no other program was timed: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let answer = text.lines().rev().find(|line| line.starts_with('{')).unwrap_or_default();
    serde_json::from_str(answer).map_err(|error| {
        format!("{python} ended with {} and returned no result: {error}. Its messages are above", output.status)
    })
}

/// The config.json of the model that a case names, for programs that build it.
fn config_of(what: &str) -> Option<String> {
    let models = [SMOLLM2_135M, SMOLLM2_360M, LLAMA_1B, LLAMA_8B];
    let cut = |model: Model| (1..=model.layers).map(move |layers| model.first_layers(layers));
    models.into_iter().flat_map(cut).find(|model| model.name() == what).map(|model| model.config_json())
}

#[cfg(test)]
mod tests {
    use super::super::results::tests::results;
    use super::*;

    #[test]
    fn a_python_that_is_not_there_is_a_note() {
        let options = MatrixOptions { python: "no/such/python".into(), ..MatrixOptions::default() };
        let peers = run(&options, &results(), &|_| ());
        assert!(peers.rows.is_empty() && peers.notes[0].contains("no/such/python"), "{:?}", peers.notes);
    }

    #[test]
    fn models_are_found_by_the_names_of_cases_whole_and_cut() {
        assert!(config_of("llama-3.1-8b (4 of 32 layers)").unwrap().contains("\"num_hidden_layers\":4"));
        assert!(config_of("smollm2-360m").unwrap().contains("\"num_hidden_layers\":32"));
        assert_eq!(config_of("one flat parameter"), None);
    }
}
