//! From the description of a source to its files.
//!
//! Trade-off: the files of a local source are listed once; files that are added later are not seen.

use super::error::SourceError;
use super::files::{Found, resolve_files};
use super::format::FileFormat;
use super::hub::Hub;
use super::records::Source;
use super::spec::SourceSpec;

impl SourceSpec {
    /// Finds the files (for a Hub dataset their names; they are downloaded when read). Errors: see [`SourceError`].
    pub fn resolve(&self, hub: &Hub) -> Result<Source, SourceError> {
        self.check()?;
        let Found { files, format, unread_splits } = resolve_files(self, hub)?;
        if format != FileFormat::Json && self.field.is_some() {
            let reason = format!("names the list in a JSON document, but the format is {format}; remove it");
            return Err(SourceError::BadSpec { key: "field", reason });
        }
        Ok(Source::new(self.clone(), files, format, unread_splits, hub.clone()))
    }
}
