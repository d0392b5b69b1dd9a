//! W&B's transaction log: a run's records in one growing file, framed as LevelDB frames its logs.
//!
//! The file begins with 7 bytes: `:W&B`, a magic number, a version. Records follow in blocks of 32 KiB, which the 7 bytes belong to: checksum
//! (CRC-32 of type and data, u32), length (u16), type (u8) and data, little-endian. A record that does not fit into its block is cut into pieces, and
//! fewer than 7 bytes at the end of a block are zeros. W&B's own program reads the file while it grows, so each record is one write.

use std::fs::{self, File};
use std::path::Path;

use crate::metrics::appended::AppendedFile;
use crate::storage::StorageError;

const FILE_HEADER: [u8; 7] = *b":W&B\xe1\xbe\x00";
const BLOCK: usize = 32_768;
const RECORD_HEADER: usize = 7;
/// Types of pieces: a whole record, and the first, a middle and the last piece of one.
const FULL: u8 = 1;
const FIRST: u8 = 2;
const MIDDLE: u8 = 3;
const LAST: u8 = 4;

#[derive(Debug)]
pub(super) struct TransactionLog {
    file: AppendedFile,
}

impl TransactionLog {
    /// Creates a log, which must not exist.
    pub(super) fn create(path: &Path) -> Result<Self, StorageError> {
        let file = File::create_new(path).map_err(|source| StorageError::io("create", path, source))?;
        let mut file = AppendedFile::new(file, path.to_path_buf());
        file.append(&FILE_HEADER)?;
        Ok(Self { file })
    }

    /// Opens a log to append to it. A piece of a record at its end is cut off.
    pub(super) fn reopen(path: &Path) -> Result<Self, StorageError> {
        let end = read(path)?.1;
        let open = |path| {
            let file = File::options().append(true).open(path)?;
            file.set_len(end as u64)?;
            Ok(file)
        };
        let file = open(path).map_err(|source| StorageError::io("open", path, source))?;
        Ok(Self { file: AppendedFile::new(file, path.to_path_buf()) })
    }

    pub(super) fn append(&mut self, record: &[u8]) -> Result<(), StorageError> {
        let mut position = self.file.length as usize;
        let (mut out, mut rest, mut is_first) = (Vec::with_capacity(record.len() + 2 * RECORD_HEADER), record, true);
        // In pieces for a position of the file.
        loop {
            let mut left = BLOCK - position % BLOCK;
            if left < RECORD_HEADER {
                out.resize(out.len() + left, 0);
                position += left;
                left = BLOCK;
            }
            let (data, after) = rest.split_at(rest.len().min(left - RECORD_HEADER));
            let kind = match (is_first, after.is_empty()) {
                (true, true) => FULL,
                (true, false) => FIRST,
                (false, false) => MIDDLE,
                (false, true) => LAST,
            };
            out.extend(checksum(kind, data).to_le_bytes());
            // Invariant: a piece is shorter than a block of 2^15 bytes.
            out.extend((data.len() as u16).to_le_bytes());
            out.push(kind);
            out.extend(data);
            if after.is_empty() {
                return self.file.append(&out);
            }
            (rest, is_first) = (after, false);
            position += RECORD_HEADER + data.len();
        }
    }

    /// Waits until all records are on the disk.
    pub(super) fn flush(&mut self) -> Result<(), StorageError> {
        self.file.flush()
    }
}

/// Returns the whole records of a log, and the length of the file up to the end of the last one.
pub(super) fn read(path: &Path) -> Result<(Vec<Vec<u8>>, usize), StorageError> {
    let file = fs::read(path).map_err(|source| StorageError::io("read", path, source))?;
    let (mut records, mut record, mut end) = (Vec::new(), Vec::new(), FILE_HEADER.len());
    if !file.starts_with(&FILE_HEADER) {
        let problem = "is no transaction log of W&B".to_owned();
        return Err(StorageError::Damaged { path: path.to_path_buf(), problem });
    }
    let mut at = end;
    while let Some((kind, data)) = piece(&file, &mut at) {
        record.extend_from_slice(data);
        if [FULL, LAST].contains(&kind) {
            records.push(std::mem::take(&mut record));
            end = at;
        }
    }
    Ok((records, end))
}

/// Reads the piece at a position of a file, which moves to its end; `None` at the end, and where the checksum is wrong.
fn piece<'a>(file: &'a [u8], at: &mut usize) -> Option<(u8, &'a [u8])> {
    let left = BLOCK - *at % BLOCK;
    let begin = if left < RECORD_HEADER { *at + left } else { *at };
    let header = file.get(begin..begin + RECORD_HEADER)?;
    let length = usize::from(u16::from_le_bytes([header[4], header[5]]));
    let end = begin + RECORD_HEADER + length;
    let (kind, data) = (header[6], file.get(begin + RECORD_HEADER..end)?);
    *at = end;
    (header[..4] == checksum(kind, data).to_le_bytes()).then_some((kind, data))
}

/// Returns the CRC-32 of a piece's type and data.
fn checksum(kind: u8, data: &[u8]) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    [&[kind], data].into_iter().for_each(|part| crc.update(part));
    crc.finalize()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lengths end records exactly at, and up to 8 bytes before, the ends of blocks, and span several blocks.
    #[test]
    fn records_around_ends_of_blocks_are_read_again() {
        let folder = tempfile::tempdir().unwrap();
        for before_end in 0..16 {
            let path = folder.path().join(format!("{before_end}.wandb"));
            let mut log = TransactionLog::create(&path).unwrap();
            let first = BLOCK - FILE_HEADER.len() - RECORD_HEADER - before_end;
            let records = [vec![1; first], vec![2; 5], vec![], vec![3; 3 * BLOCK], vec![4; 9]];
            records.iter().for_each(|record| log.append(record).unwrap());
            let (read, end) = read(&path).unwrap();
            assert_eq!(read, records, "{before_end} bytes before the end of a block");
            assert_eq!(end as u64, fs::metadata(&path).unwrap().len());
        }
    }

    #[test]
    fn a_torn_record_is_cut_off_before_others_follow() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.wandb");
        let mut log = TransactionLog::create(&path).unwrap();
        log.append(b"whole").unwrap();
        log.append(&[7; 2 * BLOCK]).unwrap();
        let file = fs::read(&path).unwrap();
        fs::write(&path, &file[..file.len() - 1]).unwrap();
        let mut log = TransactionLog::reopen(&path).unwrap();
        log.append(b"after").unwrap();
        assert_eq!(read(&path).unwrap().0, [b"whole", b"after"]);
    }
}
