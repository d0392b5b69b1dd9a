//! The results of the matrix as data: the schema of `matrix.json`.
//!
//! Trade-off: names and not types, so that files of other versions stay readable. A renamed or removed field needs a new [`VERSION`], a new field a
//! default.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use anyhow::Context;
use firebrick_hwprofile::nvidia::CardConditions;
use firebrick_train::bench::Spread;
use serde::{Deserialize, Serialize};

pub(crate) const SCHEMA: &str = "firebrick-bench-matrix";
pub(crate) const VERSION: u32 = 1;

/// Identifies the measured work: equal keys of two runs are the same work.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Key {
    pub(crate) backend: String,
    /// The kind of work, such as `gemm`.
    pub(crate) subject: String,
    /// The measured part, such as `forward`.
    pub(crate) pass: String,
    /// The model and module whose sizes these are.
    pub(crate) what: String,
    /// Number format.
    pub(crate) format: String,
    pub(crate) sizes: BTreeMap<String, u64>,
}

/// A run of the matrix.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct MatrixResults {
    pub(crate) schema: String,
    pub(crate) version: u32,
    /// Version of this program.
    pub(crate) program: String,
    /// UTC date and time of the start.
    pub(crate) date: String,
    pub(crate) quick: bool,
    /// Whether the build was optimized: times of other builds mean nothing.
    pub(crate) optimized: bool,
    pub(crate) seconds: f64,
    /// Processor, memory and accelerators in words.
    pub(crate) machine: Vec<String>,
    pub(crate) backends: Vec<BackendResults>,
    pub(crate) rows: Vec<Row>,
    pub(crate) peers: Option<PeerResults>,
    /// Skipped parts and disturbances of the numbers, in sentences.
    pub(crate) notes: Vec<String>,
}

/// A backend on its device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct BackendResults {
    pub(crate) backend: String,
    /// The device in words.
    pub(crate) device: String,
    /// Whether it computes on the CPU, a Vulkan driver in software included.
    pub(crate) on_cpu: bool,
    /// Bytes per second of a streaming pass, measured in this run.
    pub(crate) bytes_per_s: f64,
    /// Operations per second of the fastest GEMM of each format, measured in this run.
    pub(crate) flops_per_s: BTreeMap<String, f64>,
    /// Seconds that its cases took.
    pub(crate) seconds: f64,
}

/// One case.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Row {
    pub(crate) key: Key,
    pub(crate) work: Work,
    /// The size that a sweep varies.
    pub(crate) axis: Option<Axis>,
    pub(crate) outcome: Outcome,
}

/// Work of one call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Work {
    /// Floating-point operations; approximate outside of GEMMs.
    pub(crate) flops: f64,
    /// Bytes that must be read or written, each once.
    pub(crate) bytes: f64,
    /// The number of units that throughput counts, and their name, such as `tokens`.
    pub(crate) units: f64,
    pub(crate) unit: String,
}

/// A place in a sweep: `tokens`, `row length`, `parameters` or `model size`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Axis {
    pub(crate) name: String,
    pub(crate) value: f64,
}

/// The result of a case.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Outcome {
    /// The result was right, and this is its time.
    Timed(Timing),
    /// This part of the result differs from the reference by more than rounding explains; its time means nothing and is dropped.
    Wrong { what: String, error: f64, tolerance: f64 },
    /// The device refused or failed.
    Failed { message: String },
    /// Not tried.
    Skipped { reason: String },
}

/// The time of a case whose result was right.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Timing {
    /// Seconds per call.
    pub(crate) seconds: Spread,
    /// Samples; each ends with a synchronization of the device.
    pub(crate) samples: usize,
    /// Calls per sample.
    pub(crate) calls: usize,
    /// Sets of inputs that the calls take in turn.
    pub(crate) input_sets: usize,
    /// Largest relative error against the reference, and the largest that would pass.
    pub(crate) error: f64,
    pub(crate) tolerance: f64,
    /// The card's report at the end of the samples.
    pub(crate) conditions: Option<CardConditions>,
}

/// The times of other programs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct PeerResults {
    /// Versions of what was found, by package.
    pub(crate) versions: BTreeMap<String, String>,
    pub(crate) device: String,
    /// PyTorch's peaks, measured as ours: operations per second of GEMMs by format, and bytes per second under `memory`.
    #[serde(default)]
    pub(crate) peaks: BTreeMap<String, f64>,
    /// Skipped parts with their reasons, in sentences.
    pub(crate) notes: Vec<String>,
    pub(crate) rows: Vec<PeerRow>,
}

/// The time of another program on a case.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct PeerRow {
    pub(crate) key: Key,
    /// The program, such as `pytorch`.
    pub(crate) peer: String,
    /// Seconds per call.
    pub(crate) seconds: Spread,
}

impl fmt::Display for Key {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { backend, subject, pass, what, format, sizes } = self;
        let sizes: Vec<String> = sizes.iter().map(|(name, size)| format!("{name}={size}")).collect();
        write!(out, "{backend}/{subject}/{pass}/{what}/{format}/{}", sizes.join(","))
    }
}

impl Row {
    pub(crate) fn timing(&self) -> Option<&Timing> {
        match &self.outcome {
            Outcome::Timed(timing) => Some(timing),
            _ => None,
        }
    }

    pub(crate) fn flops_per_s(&self) -> Option<f64> {
        self.timing().map(|timing| self.work.flops / timing.seconds.median)
    }

    /// Returns whether the device's peaks bound it: not work on the host or between ranks.
    pub(crate) fn has_roofline(&self) -> bool {
        !matches!(self.key.subject.as_str(), "data" | "collective" | "generation") && self.work.flops > 0.0
    }
}

impl MatrixResults {
    pub(crate) fn backend(&self, name: &str) -> Option<&BackendResults> {
        self.backends.iter().find(|backend| backend.backend == name)
    }

    /// Returns the backend to compare with other programs: CUDA if it ran, else flex.
    pub(crate) fn compared_backend(&self) -> Option<&BackendResults> {
        self.backend("cuda").or_else(|| self.backend("flex"))
    }

    /// Returns the time of a row at the measured peaks over its median: 1 is on the roofline.
    pub(crate) fn roofline_share(&self, row: &Row) -> Option<f64> {
        let (backend, timing) = (self.backend(&row.key.backend)?, row.timing()?);
        let of_format = backend.flops_per_s.get(&row.key.format).copied();
        let peak = of_format.unwrap_or_else(|| backend.flops_per_s.values().copied().fold(f64::NAN, f64::max));
        Some((row.work.flops / peak).max(row.work.bytes / backend.bytes_per_s) / timing.seconds.median)
    }

    /// Counts the rows: timed, wrong, failed, skipped.
    pub(crate) fn counts(&self) -> [usize; 4] {
        let mut counts = [0; 4];
        for row in &self.rows {
            counts[match row.outcome {
                Outcome::Timed(_) => 0,
                Outcome::Wrong { .. } => 1,
                Outcome::Failed { .. } => 2,
                Outcome::Skipped { .. } => 3,
            }] += 1;
        }
        counts
    }

    /// Reads a file of results. Fails if it cannot be read, is no result of the matrix, or has another version.
    pub(crate) fn read(path: &Path) -> anyhow::Result<Self> {
        let text = std::fs::read_to_string(path).map_err(anyhow::Error::from);
        let parsed = text.and_then(|text| Self::parse(&text));
        parsed.with_context(|| format!("{}: give a matrix.json that `bench-matrix --out DIR` wrote", path.display()))
    }

    fn parse(text: &str) -> anyhow::Result<Self> {
        #[derive(Deserialize)]
        struct Header {
            schema: Option<String>,
            version: Option<u32>,
        }
        let Header { schema, version } = serde_json::from_str(text)?;
        let schema = schema.unwrap_or_else(|| "none".to_owned());
        anyhow::ensure!(schema == SCHEMA, "expected the schema {SCHEMA}, got {schema}");
        let got = version.map_or_else(|| "none".to_owned(), |version| version.to_string());
        anyhow::ensure!(version == Some(VERSION), "expected version {VERSION} of {SCHEMA}, got {got}");
        Ok(serde_json::from_str(text)?)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Creates a row of 1e9 operations and 1e8 bytes that took `seconds`, with quartiles 1 % to both sides.
    pub(crate) fn row(backend: &str, subject: &str, tokens: u64, seconds: f64) -> Row {
        let [backend, subject, pass, what, format] =
            [backend, subject, "forward", "a <b> & c", "f32"].map(str::to_owned);
        let sizes = BTreeMap::from([("tokens".to_owned(), tokens)]);
        Row {
            key: Key { backend, subject, pass, what, format, sizes },
            work: Work { flops: 1e9, bytes: 1e8, units: tokens as f64, unit: "tokens".to_owned() },
            axis: Some(Axis { name: "tokens".to_owned(), value: tokens as f64 }),
            outcome: Outcome::Timed(Timing {
                seconds: Spread::of([0.98, 0.99, 1.0, 1.01, 1.02].map(|factor| factor * seconds).into()),
                samples: 5,
                calls: 2,
                input_sets: 3,
                error: 1e-6,
                tolerance: 1e-3,
                conditions: None,
            }),
        }
    }

    /// Creates results of two backends, a sweep, and one row of each outcome.
    pub(crate) fn results() -> MatrixResults {
        let mut rows: Vec<Row> = [64, 128, 256].map(|tokens| row("flex", "gemm", tokens, 1e-2)).into();
        rows.push(row("wgpu", "gemm", 64, 0.1));
        let wrong = Outcome::Wrong { what: "the result".to_owned(), error: 0.5, tolerance: 1e-3 };
        let failed = Outcome::Failed { message: "no <memory>".to_owned() };
        let skipped = Outcome::Skipped { reason: "no time".to_owned() };
        for (backend, subject, outcome) in
            [("flex", "norm", wrong), ("wgpu", "norm", failed), ("flex", "loss", skipped)]
        {
            rows.push(Row { outcome, ..row(backend, subject, 64, 1.0) });
        }
        let backend = |name: &str| BackendResults {
            backend: name.to_owned(),
            device: "a processor & its <cores>".to_owned(),
            on_cpu: true,
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
            backends: vec![backend("flex"), backend("wgpu")],
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
        let refusal = |change: fn(&mut MatrixResults)| {
            let mut results = results();
            change(&mut results);
            MatrixResults::parse(&serde_json::to_string(&results).unwrap()).unwrap_err().to_string()
        };
        let message = refusal(|results| results.version = 99);
        assert!(message.contains("version 1") && message.contains("99"), "{message}");
        let message = refusal(|results| results.schema = "other".to_owned());
        assert!(message.contains(SCHEMA) && message.contains("other"), "{message}");
        assert!(MatrixResults::parse("{}").unwrap_err().to_string().contains("none"));
        assert!(MatrixResults::read(Path::new("no/such.json")).unwrap_err().to_string().contains("no/such.json"));
    }

    #[test]
    fn a_row_at_the_nearer_peak_is_on_the_roofline() {
        let results = results();
        // 1e9 operations at 1e11 and 1e8 bytes at 1e10: both need 10 ms.
        assert!((results.roofline_share(&results.rows[0]).unwrap() - 1.0).abs() < 1e-9);
        assert!((results.roofline_share(&results.rows[3]).unwrap() - 0.1).abs() < 1e-9);
        assert_eq!(results.roofline_share(&results.rows[4]), None);
        assert_eq!(results.counts(), [4, 1, 1, 1]);
    }
}
