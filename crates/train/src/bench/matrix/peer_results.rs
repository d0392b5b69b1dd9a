//! What other programs needed for the cases of the matrix.
//!
//! Trade-off: only the spread of their samples is kept.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::super::spread::Spread;
use super::key::Key;

/// The name of the peak of memory traffic.
pub(super) const MEMORY: &str = "memory";

/// What other programs needed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PeerResults {
    /// Versions of what was found, by package.
    pub versions: BTreeMap<String, String>,
    /// The device that they used.
    pub device: String,
    /// PyTorch's peaks, measured as ours: operations per second of GEMMs by format, and bytes per second under `memory`.
    #[serde(default)]
    pub peaks: BTreeMap<String, f64>,
    /// What was left out, and why; in sentences.
    pub notes: Vec<String>,
    /// Times.
    pub rows: Vec<PeerRow>,
}

/// The time of another program on a case.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PeerRow {
    /// The case.
    pub key: Key,
    /// The program, such as `pytorch`.
    pub peer: String,
    /// Seconds per call.
    pub seconds: Spread,
}
