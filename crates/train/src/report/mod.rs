//! The report of a run: one self-contained HTML page with plots, built from the files of the run folder.
//!
//! A run writes it when it ends or is stopped, and `firebrick report` writes it again, also during a run. It is built only from `metrics.jsonl`,
//! `plan.toml`, `summary.json`, `config.toml` and `rounds/`, so a page never shows more than the folder contains.

mod page;
mod record;
mod samples;

use std::path::{Path, PathBuf};

use firebrick_trainer::RunError;
use firebrick_trainer::storage::write_atomically;

pub use record::RunRecord;
pub(crate) use record::folder_in;
pub use samples::Round;

/// Name of the page in a run folder.
pub const REPORT: &str = "report.html";

/// Renders the page of a run folder.
///
/// # Errors
/// There are no metrics, or they cannot be read.
pub fn page(run: &Path) -> Result<String, RunError> {
    Ok(page::render(&RunRecord::read(run)?))
}

/// Writes the page of a run folder into it, or to `out`. Returns its path.
pub fn write(run: &Path, out: Option<&Path>) -> Result<PathBuf, RunError> {
    let path = out.map_or_else(|| run.join(REPORT), Path::to_owned);
    save(path, &page(run)?)
}

/// Writes the page at the end of a run, as its [`ReportWriter`](firebrick_trainer::run::ReportWriter). Returns a line to print.
pub fn write_at_end(run: &Path, summary: Option<&str>) -> String {
    let written = RunRecord::read(run).and_then(|mut record| {
        // The summary will be the last file in the folder.
        if let Some(summary) = summary {
            record.summary = serde_json::from_str(summary).ok();
        }
        save(run.join(REPORT), &page::render(&record))
    });
    match written {
        Ok(path) => format!("  report: {}", path.display()),
        Err(error) => format!("warning: the report was not written: {error}"),
    }
}

fn save(path: PathBuf, page: &str) -> Result<PathBuf, RunError> {
    write_atomically(&path, page.as_bytes())?;
    Ok(path)
}
