//! The results of the matrix as data: the schema of `matrix.json`.
//!
//! Trade-off: a renamed or removed field needs a new [`VERSION`], because files of results are compared across versions; a new field
//! needs a default.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use firebrick_hwprofile::nvidia::CardConditions;
use serde::{Deserialize, Serialize};

use super::super::spread::Spread;
use super::key::Key;
use super::peer_results::PeerResults;

/// Name of the schema.
pub(super) const SCHEMA: &str = "firebrick-bench-matrix";
/// Version of the schema.
pub(super) const VERSION: u32 = 1;

/// A run of the matrix.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MatrixResults {
    /// Name of the format of this file.
    pub schema: String,
    /// Its version.
    pub version: u32,
    /// Version of this program.
    pub program: String,
    /// UTC date and time of the start.
    pub date: String,
    /// Whether it was the short run.
    pub quick: bool,
    /// Whether the build was optimized: times of others mean nothing.
    pub optimized: bool,
    /// Seconds that the run took.
    pub seconds: f64,
    /// The machine in words: processor, memory, accelerators.
    pub machine: Vec<String>,
    /// The backends that ran, with their measured peaks.
    pub backends: Vec<BackendResults>,
    /// Every case.
    pub rows: Vec<Row>,
    /// The same work by other programs, if that was requested.
    pub peers: Option<PeerResults>,
    /// What was left out or disturbs the numbers, in sentences.
    pub notes: Vec<String>,
}

/// A backend on its device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BackendResults {
    /// Its name.
    pub backend: String,
    /// The device in words.
    pub device: String,
    /// Whether it computes on the CPU, a Vulkan driver in software included.
    pub on_cpu: bool,
    /// Bytes per second of a streaming pass, measured in this run.
    pub bytes_per_s: f64,
    /// Operations per second of the fastest GEMM of each format, measured in this run.
    pub flops_per_s: BTreeMap<String, f64>,
    /// Seconds that its cases took.
    pub seconds: f64,
}

/// One case.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// What was measured.
    pub key: Key,
    /// The amount of work.
    pub work: Work,
    /// The size that a sweep varies, and the sweep's name; `None` outside of sweeps.
    pub axis: Option<Axis>,
    /// What came of it.
    pub outcome: Outcome,
}

/// Work of one call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Work {
    /// Floating-point operations; about that many outside of GEMMs.
    pub flops: f64,
    /// Bytes that must be read or written, each once.
    pub bytes: f64,
    /// What throughput counts.
    pub units: f64,
    /// The name of the units, such as `tokens`.
    pub unit: String,
}

/// A place in a sweep.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Axis {
    /// `tokens`, `row length` or `model size`.
    pub name: String,
    /// The size.
    pub value: f64,
}

/// What came of a case.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The result was right, and this is its time.
    Timed(Timing),
    /// The result differs from the reference; its time means nothing and is not kept.
    Wrong {
        /// Which part of the result.
        what: String,
        /// Relative error.
        error: f64,
        /// The largest that rounding explains.
        tolerance: f64,
    },
    /// The device refused or failed.
    Failed {
        /// Its words.
        message: String,
    },
    /// Not tried.
    Skipped {
        /// Why.
        reason: String,
    },
}

/// The time of a case whose result was right.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Timing {
    /// Seconds per call.
    pub seconds: Spread,
    /// Samples; each ends with a synchronization of the device.
    pub samples: usize,
    /// Calls per sample.
    pub calls: usize,
    /// Sets of inputs that the calls take in turn.
    pub input_sets: usize,
    /// Largest relative error against the reference.
    pub error: f64,
    /// The largest that would pass.
    pub tolerance: f64,
    /// What the card reported at the end of the samples.
    pub conditions: Option<CardConditions>,
}

impl Row {
    /// The timing, if there is one.
    pub fn timing(&self) -> Option<&Timing> {
        match &self.outcome {
            Outcome::Timed(timing) => Some(timing),
            _ => None,
        }
    }

    /// Operations per second at the median.
    pub fn flops_per_s(&self) -> Option<f64> {
        self.timing().map(|timing| self.work.flops / timing.seconds.median)
    }

    /// Units per second at the median.
    pub fn units_per_s(&self) -> Option<f64> {
        self.timing().map(|timing| self.work.units / timing.seconds.median)
    }
}

impl MatrixResults {
    /// The measured peaks of a row's backend.
    pub fn backend(&self, name: &str) -> Option<&BackendResults> {
        self.backends.iter().find(|backend| backend.backend == name)
    }

    /// The backend that other programs are compared with: CUDA if it ran, else flex.
    pub(super) fn compared_backend(&self) -> Option<&BackendResults> {
        self.backend("cuda").or_else(|| self.backend("flex"))
    }

    /// The time that the measured peaks allow a row, over its median: 1 is on the roofline.
    pub fn roofline_share(&self, row: &Row) -> Option<f64> {
        let (backend, timing) = (self.backend(&row.key.backend)?, row.timing()?);
        let of_format = backend.flops_per_s.get(&row.key.format).copied();
        let peak = of_format.unwrap_or_else(|| backend.flops_per_s.values().copied().fold(f64::NAN, f64::max));
        Some((row.work.flops / peak).max(row.work.bytes / backend.bytes_per_s) / timing.seconds.median)
    }

    /// Rows whose result was wrong.
    pub fn wrong(&self) -> impl Iterator<Item = &Row> {
        self.rows.iter().filter(|row| matches!(row.outcome, Outcome::Wrong { .. }))
    }

    /// Rows whose device failed.
    pub fn failed(&self) -> impl Iterator<Item = &Row> {
        self.rows.iter().filter(|row| matches!(row.outcome, Outcome::Failed { .. }))
    }

    /// Reads a file of results.
    ///
    /// # Errors
    /// A file that cannot be read, is no result of the matrix, or has another version.
    pub fn read(path: &Path) -> Result<Self, ResultsError> {
        let refused = |problem: String| ResultsError { path: path.to_path_buf(), problem };
        let text = std::fs::read_to_string(path).map_err(|error| refused(error.to_string()))?;
        Self::parse(&text).map_err(refused)
    }

    /// Parses the text of a file of results; an error is the reason.
    fn parse(text: &str) -> Result<Self, String> {
        #[derive(Deserialize)]
        struct Header {
            schema: Option<String>,
            version: Option<u32>,
        }
        let header: Header = serde_json::from_str(text).map_err(|error| error.to_string())?;
        if header.schema.as_deref() != Some(SCHEMA) {
            return Err(format!("expected the schema {SCHEMA}, got {}", header.schema.as_deref().unwrap_or("none")));
        }
        if header.version != Some(VERSION) {
            let got = header.version.map_or_else(|| "none".to_owned(), |version| version.to_string());
            return Err(format!("expected version {VERSION} of {SCHEMA}, got {got}"));
        }
        serde_json::from_str(text).map_err(|error| error.to_string())
    }
}

/// A file that is no result of this matrix.
#[derive(Debug, thiserror::Error)]
#[error("{}: {problem}. Give a matrix.json that `bench-matrix --out DIR` wrote", path.display())]
pub struct ResultsError {
    /// The file.
    pub path: PathBuf,
    /// What is wrong with it.
    pub problem: String,
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A row of 1e9 operations and 1e8 bytes that took `seconds`, with quartiles 1 % to both sides.
    pub(in super::super) fn row(backend: &str, subject: &str, tokens: u64, seconds: f64) -> Row {
        let sizes = BTreeMap::from([("tokens".to_owned(), tokens)]);
        let spread = Spread::of(vec![0.98, 0.99, 1.0, 1.01, 1.02]).times(seconds);
        Row {
            key: Key {
                backend: backend.to_owned(),
                subject: subject.to_owned(),
                pass: "forward".to_owned(),
                what: "a <b> & c".to_owned(),
                format: "f32".to_owned(),
                sizes,
            },
            work: Work { flops: 1e9, bytes: 1e8, units: tokens as f64, unit: "tokens".to_owned() },
            axis: Some(Axis { name: "tokens".to_owned(), value: tokens as f64 }),
            outcome: Outcome::Timed(Timing {
                seconds: spread,
                samples: 5,
                calls: 2,
                input_sets: 3,
                error: 1e-6,
                tolerance: 1e-3,
                conditions: None,
            }),
        }
    }

    /// Two backends, a sweep, and one row of each outcome.
    pub(in super::super) fn results() -> MatrixResults {
        let mut rows: Vec<Row> = [64, 128, 256].map(|tokens| row("flex", "gemm", tokens, 1e-2)).into();
        rows.push(row("wgpu", "gemm", 64, 0.1));
        let wrong = Outcome::Wrong { what: "the result".to_owned(), error: 0.5, tolerance: 1e-3 };
        rows.push(Row { outcome: wrong, ..row("flex", "norm", 64, 1.0) });
        rows.push(Row {
            outcome: Outcome::Failed { message: "no <memory>".to_owned() },
            ..row("wgpu", "norm", 64, 1.0)
        });
        rows.push(Row { outcome: Outcome::Skipped { reason: "no time".to_owned() }, ..row("flex", "loss", 64, 1.0) });
        let backend = |name: &str, on_cpu| BackendResults {
            backend: name.to_owned(),
            device: "a processor & its <cores>".to_owned(),
            on_cpu,
            bytes_per_s: 1e10,
            flops_per_s: BTreeMap::from([("f32".to_owned(), 1e11)]),
            seconds: 1.5,
        };
        MatrixResults {
            schema: SCHEMA.to_owned(),
            version: VERSION,
            program: "0.0.0".to_owned(),
            date: "2020-02-02 20:02 UTC".to_owned(),
            quick: true,
            optimized: true,
            seconds: 3.0,
            machine: vec!["a processor".to_owned()],
            backends: vec![backend("flex", true), backend("wgpu", true)],
            rows,
            peers: None,
            notes: vec!["a note".to_owned()],
        }
    }

    #[test]
    fn results_survive_their_file_bit_for_bit() {
        let results = results();
        let text = serde_json::to_string_pretty(&results).unwrap();
        assert_eq!(MatrixResults::parse(&text).unwrap(), results);
    }

    #[test]
    fn another_schema_or_version_is_refused_with_both_named() {
        let text = |change: fn(&mut MatrixResults)| {
            let mut results = results();
            change(&mut results);
            MatrixResults::parse(&serde_json::to_string(&results).unwrap()).unwrap_err()
        };
        let message = text(|results| results.version = 99);
        assert!(message.contains("version 1") && message.contains("99"), "{message}");
        let message = text(|results| results.schema = "other".to_owned());
        assert!(message.contains(SCHEMA) && message.contains("other"), "{message}");
        assert!(MatrixResults::parse("{}").unwrap_err().contains("none"));
        assert!(MatrixResults::read(Path::new("no/such.json")).unwrap_err().to_string().contains("no/such.json"));
    }

    #[test]
    fn a_row_at_the_nearer_peak_is_on_the_roofline() {
        let results = results();
        // 1e9 operations at 1e11 and 1e8 bytes at 1e10: both need 10 ms.
        assert!((results.roofline_share(&results.rows[0]).unwrap() - 1.0).abs() < 1e-9);
        assert!((results.roofline_share(&results.rows[3]).unwrap() - 0.1).abs() < 1e-9);
        assert_eq!(results.roofline_share(&results.rows[4]), None);
        assert_eq!((results.wrong().count(), results.failed().count()), (1, 1));
    }
}
