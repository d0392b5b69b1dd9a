//! `train bench-matrix`: the operations of training and whole steps on every backend that is there, each checked against its reference
//! in the run that times it, next to peaks that are measured in the same run.
//!
//! The order is: peaks, then cases, backend by backend; then other programs on the same work, if requested; then the files. Every
//! backend has a share of the time, and what does not fit into it is named.
//! Trade-off: one process for all backends, so a driver that aborts takes the run with it; results are written after each backend.

mod case;
mod clock;
mod compare;
mod key;
mod models;
mod numbers;
mod options;
mod page;
mod peer_results;
mod peer_text;
mod peers;
mod plot;
mod results;
mod run_backend;
mod subjects;
mod text;

use std::path::Path;
use std::time::{Duration, Instant};

use firebrick_hwprofile::HardwareProfile;
use firebrick_kernels::BackendKind;
use firebrick_trainer::RunError;
use firebrick_trainer::config::BackendChoice;
use firebrick_trainer::plan::choose_backend;
use firebrick_trainer::with_backend;

pub use compare::{Change, Comparison, compare};
pub use key::Key;
pub use options::MatrixOptions;
pub use peer_results::{PeerResults, PeerRow};
pub use results::{MatrixResults, Outcome, ResultsError, Row};
use run_backend::{Request, run_backend};
use subjects::StepReference;

/// Seconds of the short run and of the whole one without other programs: cases that have begun and the files still end below 2 and
/// 10 minutes.
const QUICK_S: u64 = 95;
const WHOLE_S: u64 = 540;

/// A backend with less time than this would spend it on its peaks.
const LEAST_OF_A_BACKEND: Duration = Duration::from_secs(10);

/// What a matrix ended as.
pub struct MatrixRun {
    /// The results.
    pub results: MatrixResults,
    /// The table for a terminal, and the comparison with an earlier run.
    pub text: String,
    /// Files that were written.
    pub written: Vec<std::path::PathBuf>,
}

/// What can stop the matrix.
#[derive(Debug, thiserror::Error)]
pub enum MatrixError {
    /// No backend, or one that is named and not there.
    #[error(transparent)]
    Run(#[from] RunError),
    /// The file of `--compare`.
    #[error(transparent)]
    Compared(#[from] ResultsError),
    /// The folder of `--out`.
    #[error("the results cannot be written to {folder}: {problem}")]
    Write {
        /// The folder.
        folder: String,
        /// What the system says.
        problem: std::io::Error,
    },
}

/// Runs the matrix. `print` gets lines about the progress.
///
/// # Errors
/// [`MatrixError`]. A case that is wrong or fails is a row of the results, not an error.
pub fn bench_matrix(options: &MatrixOptions, print: &dyn Fn(&str)) -> Result<MatrixRun, MatrixError> {
    let earlier = options.compare.as_deref().map(MatrixResults::read).transpose()?;
    let (started, profile) = (Instant::now(), HardwareProfile::detect_with_adapters());
    let mut results = text::begin(options, &profile);
    let backends = backends(options, &profile, &mut results.notes)?;
    let load = |when: &str| text::load_note(when, &profile);
    results.notes.extend(load("at the start"));
    let reference = needs_reference(&backends).then(StepReference::compute).transpose()?;
    let budget = Duration::from_secs(if options.quick { QUICK_S } else { WHOLE_S });
    for (index, &kind) in backends.iter().enumerate() {
        let left = budget.saturating_sub(started.elapsed());
        if left < LEAST_OF_A_BACKEND {
            results.notes.push(format!("{kind} was left out: the time of the run was spent by those before it"));
            continue;
        }
        let request = Request {
            kind,
            options,
            profile: &profile,
            reference: reference.filter(|_| kind != BackendKind::Flex),
            // What one backend does not need is the next one's.
            deadline: Instant::now() + left.mul_f64(share(&backends[index..])),
            print,
        };
        with_backend!(kind, B => run_backend::<B>(&request, &mut results))?;
        results.seconds = started.elapsed().as_secs_f64();
        write(options.out.as_deref(), &results)?;
    }
    results.notes.extend(load("at the end"));
    if options.peers {
        results.peers = Some(peers::run(options, &results, print));
    }
    results.seconds = started.elapsed().as_secs_f64();
    let written = write(options.out.as_deref(), &results)?;
    let mut text = text::terminal(&results);
    if let Some(earlier) = &earlier {
        text.push_str(&format!("\n{}", compare(earlier, &results)));
    }
    Ok(MatrixRun { results, text, written })
}

/// The backends that are requested, or all that are compiled in and find a device.
fn backends(
    options: &MatrixOptions,
    profile: &HardwareProfile,
    notes: &mut Vec<String>,
) -> Result<Vec<BackendKind>, RunError> {
    // CUDA first: it has the most cases.
    let order = [BackendKind::Cuda, BackendKind::Flex, BackendKind::Candle, BackendKind::Wgpu];
    let mut usable = Vec::new();
    for kind in order {
        let is_named = options.backends.contains(&kind);
        if !is_named && (!options.backends.is_empty() || !kind.is_compiled()) {
            continue;
        }
        match choose_backend(BackendChoice::Named(kind), profile) {
            Ok(_) => usable.push(kind),
            Err(error) if is_named => return Err(error),
            Err(error) => notes.push(format!("{kind} was left out: {error}")),
        }
    }
    Ok(usable)
}

/// The part of the time that the first of these backends gets: as its cases are many and important.
fn share(backends: &[BackendKind]) -> f64 {
    let weight = |kind: &BackendKind| match kind {
        BackendKind::Cuda => 4.0,
        BackendKind::Flex => 2.0,
        BackendKind::Candle | BackendKind::Wgpu => 1.0,
    };
    weight(&backends[0]) / backends.iter().map(weight).sum::<f64>()
}

/// Whether a backend's step is compared with flex's.
fn needs_reference(backends: &[BackendKind]) -> bool {
    backends.iter().any(|&kind| kind != BackendKind::Flex)
}

/// Writes all files of the results, where a folder was given.
fn write(folder: Option<&Path>, results: &MatrixResults) -> Result<Vec<std::path::PathBuf>, MatrixError> {
    let Some(folder) = folder else { return Ok(Vec::new()) };
    let failed = |problem| MatrixError::Write { folder: folder.display().to_string(), problem };
    std::fs::create_dir_all(folder).map_err(failed)?;
    let json = serde_json::to_string_pretty(results).expect("plain data");
    let mut files = vec![
        ("matrix.json".to_owned(), json + "\n"),
        ("matrix.md".to_owned(), text::markdown(results)),
        ("matrix.html".to_owned(), page::render(results)),
    ];
    for backend in &results.backends {
        files.push((format!("roofline-{}.svg", backend.backend), plot::roofline_file(results, backend)));
    }
    let mut written = Vec::new();
    for (name, text) in files {
        let path = folder.join(name);
        std::fs::write(&path, text).map_err(failed)?;
        written.push(path);
    }
    Ok(written)
}
