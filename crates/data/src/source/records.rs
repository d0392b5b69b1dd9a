//! A source whose files are known, and the stream of its records.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use firebrick_hub::Hub;

use super::arrow::open_arrow;
use super::content::{ContentKeys, SourceFile};
use super::csv::CsvRecords;
use super::error::{SourceError, SourceResult};
use super::format::{FileFormat, TextDocument};
use super::json::open_json;
use super::lines::{TOO_LONG, json_lines, text_records};
use super::open::{FileRecords, Lines, Progress, open_bytes, open_text};
use super::parquet::open_parquet;
use super::record::Record;
use super::spec::SourceSpec;

/// A source whose files are known: the result of [`SourceSpec::resolve`].
#[derive(Debug, Clone)]
pub struct Source {
    pub(super) spec: Arc<SourceSpec>,
    pub(super) files: Arc<[SourceFile]>,
    pub(super) format: FileFormat,
    pub(super) unread_splits: Arc<[String]>,
    pub(super) hub: Hub,
}

impl Source {
    /// Creates a source of the lines of one file, which is opened when it is read: one record, or one text, per line.
    pub fn of_lines(path: &Path, format: FileFormat) -> Self {
        let spec = SourceSpec { text_unit: TextDocument::Line, ..SourceSpec::new(path.display().to_string()) };
        let files = Arc::new([SourceFile::Local { path: path.to_owned(), size: 0 }]);
        Self { spec: spec.into(), files, format, unread_splits: Arc::new([]), hub: Hub::from_environment() }
    }

    /// Returns the description in the recipe.
    pub fn spec(&self) -> &SourceSpec {
        &self.spec
    }

    /// Returns the format of all its files.
    pub fn format(&self) -> FileFormat {
        self.format
    }

    /// Splits next to "train" in a folder that are not read, because the description names none.
    pub fn unread_splits(&self) -> &[String] {
        &self.unread_splits
    }

    /// Returns the names of its files in reading order: paths, or `owner/name@commit/path` on the Hub.
    pub fn file_names(&self) -> Vec<String> {
        let name = |file: &SourceFile| match file {
            SourceFile::Local { path, .. } => path.display().to_string(),
            SourceFile::Hub(file) => file.to_string(),
        };
        self.files.iter().map(name).collect()
    }

    /// Returns the size of all its files in bytes, before decompression.
    pub fn bytes(&self) -> u64 {
        let size = |file: &SourceFile| match file {
            SourceFile::Local { size, .. } => *size,
            SourceFile::Hub(file) => file.size.unwrap_or(0),
        };
        self.files.iter().map(size).sum()
    }

    /// Returns a 128-bit hash of everything that determines the records: the content of the files in order, and how they are read. Names and
    /// locations of local files do not matter; a Hub file counts by dataset, commit and path, whose content never changes. `weight` does not matter
    /// (a mixture's key includes it). Errors: a file cannot be read.
    pub fn content_key(&self, keys: &ContentKeys) -> Result<u128, SourceError> {
        keys.of_source(&self.spec, self.format, &self.files)
    }

    /// Returns the records, starting with the first.
    pub fn records(&self) -> Records {
        let left = self.spec.limit.unwrap_or(u64::MAX);
        Records {
            source: self.clone(),
            next_file: 0,
            current: None,
            left,
            progress: Progress::default(),
            has_failed: false,
        }
    }

    /// Returns the first record that can be read. Errors: none can; or one after which reading ends comes before.
    pub fn first_record(&self) -> Result<Option<Record>, SourceError> {
        let mut first_error = None;
        for record in self.records() {
            match record {
                Err(error) if error.can_continue() => first_error = first_error.or(Some(error)),
                record => return record.map(Some),
            }
        }
        first_error.map_or(Ok(None), Err)
    }

    fn open(&self, file: &SourceFile, progress: &Progress) -> SourceResult<FileRecords> {
        match file {
            SourceFile::Local { path, .. } => self.open_path(path, progress),
            SourceFile::Hub(file) => self.open_path(&self.hub.fetch(file)?, progress),
        }
    }

    fn open_path(&self, path: &Path, progress: &Progress) -> SourceResult<FileRecords> {
        let columns = self.spec.columns.as_deref();
        let text = || open_text(path, self.format, progress);
        Ok(match self.format {
            FileFormat::Parquet => open_parquet(path, columns, progress)?,
            FileFormat::Arrow => open_arrow(open_bytes(path, progress)?, path, columns)?,
            FileFormat::Jsonl => json_lines(Lines::after(0, text()?, path, TOO_LONG), true),
            FileFormat::Json => open_json(text()?, path, self.spec.field.as_deref())?,
            FileFormat::Csv | FileFormat::Tsv => {
                let delimiter = if self.format == FileFormat::Csv { b',' } else { b'\t' };
                Box::new(CsvRecords::new(text()?, path, delimiter, columns)?)
            }
            FileFormat::Text => text_records(text()?, path, self.spec.text_unit),
        })
    }
}

/// The records of a source, file after file.
///
/// An error names file and line. After a bad row ([`SourceError::can_continue`]) the next call continues with the next
/// one; after any other error the stream ends.
pub struct Records {
    source: Source,
    next_file: usize,
    current: Option<FileRecords>,
    left: u64,
    progress: Progress,
    /// Whether an error occurred after which nothing more can be read.
    pub(super) has_failed: bool,
}

impl Records {
    /// Returns how many bytes of the source's files were read so far, out of [`Source::bytes`].
    pub(super) fn bytes_read(&self) -> u64 {
        self.progress.load(Ordering::Relaxed)
    }

    fn next_record(&mut self) -> Option<Result<Record, SourceError>> {
        loop {
            if let Some(records) = &mut self.current {
                match records.next() {
                    Some(Ok(record)) => return Some(Ok(record)),
                    Some(Err(error)) => {
                        self.has_failed = !error.can_continue();
                        return Some(Err(error));
                    }
                    None => self.current = None,
                }
            }
            let file = self.source.files.get(self.next_file)?;
            self.next_file += 1;
            match self.source.open(file, &self.progress) {
                Ok(records) => self.current = Some(records),
                Err(error) => {
                    self.has_failed = true;
                    return Some(Err(error));
                }
            }
        }
    }
}

impl Iterator for Records {
    type Item = Result<Record, SourceError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.left == 0 || self.has_failed {
            return None;
        }
        let mut record = self.next_record()?;
        let file_index = (self.next_file - 1) as u32;
        self.left -= 1;
        match &mut record {
            Ok(record) => {
                record.file = file_index;
                if let Some(columns) = &self.source.spec.columns {
                    record.fields.retain(|name, _| columns.contains(name));
                }
            }
            Err(SourceError::BadRecord { origin, .. }) => origin.1 = file_index,
            Err(_) => {}
        }
        Some(record)
    }
}
