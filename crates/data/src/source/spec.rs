//! What a recipe says about one source, and the checks that need no file.
//!
//! Gives up slices like `train[:10%]`: `limit` counts rows, and the validation split is made by hash elsewhere.

use serde::{Deserialize, Serialize};

use super::error::SourceError;
use super::files::resolve_files;
use super::format::{Format, TextUnit};
use super::hub::Hub;
use super::records::Source;

/// One source as a recipe names it. Only `path` is needed.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SourceSpec {
    /// A file, a pattern (`data/*.jsonl`, `**` crosses folders), a folder, or a Hub dataset (`owner/name`, also
    /// `owner/name@revision` and `hf://datasets/owner/name`). What exists locally wins over the Hub.
    pub path: String,
    /// The format, if names do not show it.
    pub format: Option<Format>,
    /// Which split of a Hub dataset or of a folder laid out like one; "train" unless said otherwise.
    pub split: Option<String>,
    /// Which configuration (subset) of a Hub dataset.
    pub config: Option<String>,
    /// Branch, tag or commit of a Hub dataset; "main" unless said otherwise.
    pub revision: Option<String>,
    /// The key of a JSON document that holds the list of rows.
    pub field: Option<String>,
    /// Only these columns or keys; the others are not even decoded where the format allows it.
    pub columns: Option<Vec<String>>,
    /// What is one document of a text file.
    pub text_unit: TextUnit,
    /// At most this many rows, from the beginning.
    pub limit: Option<u64>,
    /// Share in a mixture by weight; 1 unless said otherwise.
    pub weight: Option<f64>,
}

impl SourceSpec {
    /// A source with nothing but a path.
    pub fn new(path: impl Into<String>) -> Self {
        Self { path: path.into(), ..Self::default() }
    }

    /// Finds the files (for a Hub dataset: their names; they are fetched when read). Errors: see [`SourceError`].
    pub fn resolve(&self, hub: &Hub) -> Result<Source, SourceError> {
        self.check()?;
        let (files, format) = resolve_files(self, hub)?;
        if format != Format::Json && self.field.is_some() {
            let reason = format!("names the list in a JSON document, but the format is {format}; remove it");
            return Err(SourceError::BadSpec { key: "field", reason });
        }
        Ok(Source::new(self.clone(), files, format, hub.clone()))
    }

    fn check(&self) -> Result<(), SourceError> {
        let bad = |key, reason: String| Err(SourceError::BadSpec { key, reason });
        if self.path.trim().is_empty() {
            return bad("path", "name a file, a pattern, a folder or a Hub dataset".to_owned());
        }
        if let Some(weight) = self.weight
            && !(weight.is_finite() && weight > 0.0)
        {
            return bad("weight", format!("must be a number above 0, found {weight}; leave the source out instead"));
        }
        if self.limit == Some(0) {
            return bad("limit", "0 rows teach nothing: leave the source out, or the limit".to_owned());
        }
        if self.columns.as_ref().is_some_and(Vec::is_empty) {
            return bad("columns", "name at least one column, or leave the key out for all of them".to_owned());
        }
        if let Some(split) = &self.split
            && split.contains(['[', '+'])
        {
            let reason = format!(
                "{split:?} is not the name of a split; take fewer rows with limit, several splits as \
                                  several sources"
            );
            return bad("split", reason);
        }
        Ok(())
    }
}
