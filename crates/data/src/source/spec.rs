//! One source as a recipe describes it, and the checks that need no file.
//!
//! Not supported: slices like `train[:10%]`. `limit` counts rows, and the evaluation split is chosen by hash.

use serde::{Deserialize, Serialize};

use super::error::{SourceError, SourceResult};
use super::format::{FileFormat, TextDocument};

/// One source as a recipe describes it. Only `path` is required.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SourceSpec {
    /// A file, a pattern (`data/*.jsonl`; `**` crosses folders), a folder, or a Hub dataset (`owner/name`, also
    /// `owner/name@revision` and `hf://datasets/owner/name`). A local path takes precedence over the Hub.
    pub path: String,
    /// The file format, if file names do not show it.
    pub file_format: Option<FileFormat>,
    /// Split of a Hub dataset or of a folder laid out like one; "train" by default.
    pub split: Option<String>,
    /// Configuration (subset) of a Hub dataset.
    pub config: Option<String>,
    /// Branch, tag or commit of a Hub dataset; "main" by default.
    pub revision: Option<String>,
    /// Key of a JSON document that holds the list of rows.
    pub field: Option<String>,
    /// Only these columns or keys; the others are not even decoded if the format allows that.
    pub columns: Option<Vec<String>>,
    /// The unit that counts as one document of a text file.
    pub text_unit: TextDocument,
    /// Maximum number of rows, from the beginning.
    pub limit: Option<u64>,
    /// Share in a mixture by weight; 1 by default.
    pub weight: Option<f64>,
}

impl SourceSpec {
    /// Creates a source with only a path.
    pub fn new(path: impl Into<String>) -> Self {
        Self { path: path.into(), ..Self::default() }
    }

    /// Checks everything that needs no file. Error: a value that is invalid or has no effect.
    pub(super) fn check(&self) -> SourceResult<()> {
        let bad = |key, reason: String| Err(SourceError::BadSpec { key, reason });
        if self.path.trim().is_empty() {
            return bad("path", "give a file, a pattern, a folder or a Hub dataset".to_owned());
        }
        if let Some(weight) = self.weight
            && !(weight.is_finite() && weight > 0.0)
        {
            return bad("weight", format!("must be a number above 0, found {weight}; remove the source instead"));
        }
        if self.limit == Some(0) {
            return bad("limit", "0 rows are of no use: remove the source or the limit".to_owned());
        }
        if self.columns.as_ref().is_some_and(Vec::is_empty) {
            return bad("columns", "name at least one column, or remove the key to read all".to_owned());
        }
        if let Some(split) = &self.split
            && split.contains(['[', '+'])
        {
            let reason = format!(
                "{split:?} is not the name of a split; limit the rows with limit, and give several splits as \
                                  several sources"
            );
            return bad("split", reason);
        }
        Ok(())
    }
}
