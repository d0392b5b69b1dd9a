//! The formats of data files, and the format that a file name implies.
//!
//! Trade-off: no guessing from content. The first bytes only detect a wrong name; they never choose a format.

use std::fmt::{Display, Formatter, Result as FormatResult};
use std::path::Path;

use serde::{Deserialize, Serialize};

/// The format of a data file. A Hub dataset with several is read in the first of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum FileFormat {
    /// Apache Parquet, one record per row.
    Parquet,
    /// Apache Arrow IPC, file or stream (also Feather version 2, and what `datasets.save_to_disk` writes).
    Arrow,
    /// One JSON object per line. Blank lines are skipped.
    Jsonl,
    /// A JSON list of objects, or an object with one such list (`field` names it), or one object per line as in JSONL,
    /// because many files called `.json` contain that.
    Json,
    /// Comma-separated values with a header row; every value is a string.
    Csv,
    /// Tab-separated values with a header row; every value is a string.
    Tsv,
    /// Plain text, one document per file or per line.
    Text,
}

/// The compression of a whole file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Compression {
    None,
    /// gzip (RFC 1952), one or several members.
    Gzip,
    /// Zstandard (RFC 8878), one or several frames, windows up to 128 MiB.
    Zstandard,
}

/// What counts as one document of a text file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum TextDocument {
    /// The whole file.
    #[default]
    File,
    /// Each line that is not blank.
    Line,
}

const ENDINGS: [(&str, FileFormat); 13] = [
    ("parquet", FileFormat::Parquet),
    ("pq", FileFormat::Parquet),
    ("arrow", FileFormat::Arrow),
    ("feather", FileFormat::Arrow),
    ("ipc", FileFormat::Arrow),
    ("jsonl", FileFormat::Jsonl),
    ("ndjson", FileFormat::Jsonl),
    ("json", FileFormat::Json),
    ("csv", FileFormat::Csv),
    ("tsv", FileFormat::Tsv),
    ("txt", FileFormat::Text),
    ("text", FileFormat::Text),
    ("md", FileFormat::Text),
];
const PACKED_ENDINGS: [(&str, Compression); 4] = [
    ("gz", Compression::Gzip),
    ("gzip", Compression::Gzip),
    ("zst", Compression::Zstandard),
    ("zstd", Compression::Zstandard),
];

/// Returns the file extensions of known formats, for messages.
pub(super) fn known_endings() -> String {
    let list = |endings: Vec<&str>| endings.iter().map(|end| format!(".{end}")).collect::<Vec<_>>().join(", ");
    let packed = list(PACKED_ENDINGS.iter().map(|(end, _)| *end).collect());
    format!("{} (then also {packed})", list(ENDINGS.iter().map(|(end, _)| *end).collect()))
}

/// Returns the name without its compression extension, and the compression.
fn unpacked_name(path: &Path) -> (String, Compression) {
    let name = path.file_name().map(|name| name.to_string_lossy().to_ascii_lowercase()).unwrap_or_default();
    for (end, compression) in PACKED_ENDINGS {
        if let Some(rest) = name.strip_suffix(end).and_then(|rest| rest.strip_suffix('.')) {
            return (rest.to_owned(), compression);
        }
    }
    (name, Compression::None)
}

impl Compression {
    pub(super) fn of_name(path: &Path) -> Self {
        unpacked_name(path).1
    }
}

impl FileFormat {
    /// Returns the format that a file name implies, with or without a compression extension.
    pub fn of_name(path: &Path) -> Option<Self> {
        let (name, _) = unpacked_name(path);
        let (_, end) = name.rsplit_once('.')?;
        ENDINGS.iter().find(|(known, _)| *known == end).map(|(_, format)| *format)
    }

    /// Returns the name as recipes spell it.
    pub fn name(self) -> String {
        format!("{self:?}").to_ascii_lowercase()
    }
}

impl Display for FileFormat {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> FormatResult {
        formatter.write_str(&self.name())
    }
}

/// Recognizes a binary file by its first bytes; returns what it is and what to do about it.
pub(super) fn magic(start: &[u8]) -> Option<(&'static str, &'static str)> {
    const NAME_PARQUET: &str = "Name it with file_format = \"parquet\"";
    const NAME_ARROW: &str = "Name it with file_format = \"arrow\"";
    const GIVE_ENDING: &str = "Give the file's name the ending of its compression, like .jsonl.gz or .jsonl.zst";
    const UNPACK: &str = "Unpack it first, or pack it as .gz or .zst";
    const LFS: &str = "Get the file itself with `git lfs pull`";
    const SIGNATURES: [(&[u8], &str, &str); 9] = [
        (b"PAR1", "a Parquet file", NAME_PARQUET),
        (b"ARROW1", "an Arrow file", NAME_ARROW),
        (b"\xff\xff\xff\xff", "an Arrow stream", NAME_ARROW),
        (b"\x1f\x8b", "packed with gzip", GIVE_ENDING),
        (b"\x28\xb5\x2f\xfd", "packed with Zstandard", GIVE_ENDING),
        (b"PK\x03\x04", "a ZIP archive", UNPACK),
        (b"\xfd7zXZ", "packed with xz", UNPACK),
        (b"BZh91AY&SY", "packed with bzip2", UNPACK),
        (b"version https://git-lfs", "a Git LFS pointer, not the data", LFS),
    ];
    SIGNATURES.iter().find(|(bytes, _, _)| start.starts_with(bytes)).map(|(_, found, hint)| (*found, *hint))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_show_format_and_compression() {
        let shown = |name: &str| (FileFormat::of_name(Path::new(name)), Compression::of_name(Path::new(name)));
        assert_eq!(shown("a/b.JSONL"), (Some(FileFormat::Jsonl), Compression::None));
        assert_eq!(shown("b.json.gz"), (Some(FileFormat::Json), Compression::Gzip));
        assert_eq!(shown("train-00000-of-00002.parquet"), (Some(FileFormat::Parquet), Compression::None));
        assert_eq!(shown("x.csv.zst"), (Some(FileFormat::Csv), Compression::Zstandard));
        assert_eq!(shown("jsonl"), (None, Compression::None));
        assert_eq!(shown("rows.gz"), (None, Compression::Gzip));
        assert_eq!(shown("model.safetensors"), (None, Compression::None));
    }
}
