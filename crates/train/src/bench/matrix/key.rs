//! What identifies a case in every run.
//!
//! Trade-off: names and not types, so that results of earlier versions stay readable.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

/// What was measured: equal keys of two runs are the same work.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Key {
    /// The backend.
    pub backend: String,
    /// The kind of work, such as `gemm`.
    pub subject: String,
    /// Which part of it, such as `forward`.
    pub pass: String,
    /// The model and module whose sizes these are.
    pub what: String,
    /// Number format.
    pub format: String,
    /// Sizes by name.
    pub sizes: BTreeMap<String, u64>,
}

impl fmt::Display for Key {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { backend, subject, pass, what, format, sizes } = self;
        let sizes: Vec<String> = sizes.iter().map(|(name, size)| format!("{name}={size}")).collect();
        write!(out, "{backend}/{subject}/{pass}/{what}/{format}/{}", sizes.join(","))
    }
}
