//! What the pages of a Parquet file claim to unpack to, read from their headers before any is unpacked.
//!
//! The description at the end of the file says nothing binding about its pages, and the decoder takes their headers at
//! their word. Gives up reading ahead: each header is a small read of its own, some microseconds.
//! Source: the Parquet format's `parquet.thrift` (`PageHeader`), Thrift's compact protocol.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};

use parquet::arrow::ProjectionMask;
use parquet::file::metadata::{ColumnChunkMetaData, ParquetMetaData};

/// First read of a header; most have some tens of bytes. Statistics can make one large.
const HEADER_BYTES: u64 = 256;
const MAX_HEADER_BYTES: u64 = 16 << 20;
/// Values of a column of lists for each byte of it, beyond which it is no data: only nulls take no room.
const VALUES_PER_BYTE: u64 = 64;
/// So many are fine in any case.
const VALUES: u64 = 4_000_000;
/// Depth of a header's structs.
const MAX_DEPTH: usize = 8;

/// What one page says of itself.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Page {
    /// Bytes behind the header, as they lie in the file.
    packed: u64,
    /// Bytes when unpacked.
    pub(super) unpacked: u64,
    /// Values, nulls included; 0 for a dictionary.
    pub(super) values: u64,
}

/// Checks the wanted columns of all row groups; `allowed` is what the largest pages of a row group's columns may unpack
/// to together. Error: what is wrong, in words.
pub(super) fn check(
    file: &mut File,
    metadata: &ParquetMetaData,
    mask: &ProjectionMask,
    allowed: u64,
) -> Result<(), String> {
    let size = file.metadata().map_err(|reason| reason.to_string())?.len();
    for (number, group) in metadata.row_groups().iter().enumerate() {
        let mut together = 0_u64;
        for (_, column) in group.columns().iter().enumerate().filter(|(leaf, _)| mask.leaf_included(*leaf)) {
            let name = column.column_path().string();
            let wrong = |what: String| format!("row group {}, column {name:?}: {what}", number + 1);
            let (start, length) = range(column, size).map_err(wrong)?;
            let found = pages(file, start, length).map_err(wrong)?;
            together = together.saturating_add(found.largest);
            if together > allowed {
                return Err(wrong(format!(
                    "its pages claim to unpack to {together} bytes at once, far more than the file's {size} bytes can \
                     need; write it with smaller pages"
                )));
            }
            let most = found.unpacked.saturating_mul(VALUES_PER_BYTE).max(VALUES);
            if column.column_descr().max_rep_level() > 0 && found.values > most {
                return Err(wrong(format!("{} bytes claim {} values", found.unpacked, found.values)));
            }
        }
    }
    Ok(())
}

/// Where the pages of a column lie.
fn range(column: &ColumnChunkMetaData, size: u64) -> Result<(u64, u64), String> {
    let (start, length) =
        (column.dictionary_page_offset().unwrap_or(column.data_page_offset()), column.compressed_size());
    let outside = || format!("its {length} bytes from {start} on are not in the file of {size} bytes");
    let (Ok(start), Ok(length)) = (u64::try_from(start), u64::try_from(length)) else { return Err(outside()) };
    if start.checked_add(length).is_none_or(|end| end > size) { Err(outside()) } else { Ok((start, length)) }
}

/// What the pages of a column come to.
#[derive(Debug, Default)]
struct Pages {
    /// The dictionary and the largest other page.
    largest: u64,
    unpacked: u64,
    values: u64,
}

fn pages(file: &mut File, start: u64, length: u64) -> Result<Pages, String> {
    let (mut found, mut dictionary, mut largest) = (Pages::default(), 0, 0);
    let mut done = 0;
    while done < length {
        let (page, header) = header(file, start + done, length - done)?;
        let is_dictionary = page.values == 0;
        let place = if is_dictionary { &mut dictionary } else { &mut largest };
        *place = page.unpacked.max(*place);
        found.unpacked = found.unpacked.saturating_add(page.unpacked);
        found.values = found.values.saturating_add(page.values);
        done = done.saturating_add(header).saturating_add(page.packed);
    }
    found.largest = dictionary + largest;
    Ok(found)
}

/// The header at a place, and its bytes.
fn header(file: &mut File, at: u64, left: u64) -> Result<(Page, u64), String> {
    let mut bytes = Vec::new();
    let mut wanted = HEADER_BYTES;
    loop {
        bytes.clear();
        file.seek(SeekFrom::Start(at)).map_err(|reason| reason.to_string())?;
        file.take(wanted.min(left)).read_to_end(&mut bytes).map_err(|reason| reason.to_string())?;
        let mut reader = Compact { bytes: &bytes, at: 0 };
        if let Some(page) = reader.page() {
            return Ok((page, reader.at as u64));
        }
        if wanted >= left || wanted >= MAX_HEADER_BYTES {
            return Err(format!("there is no header of a page at byte {at}: the file is damaged"));
        }
        wanted *= 16;
    }
}

/// Reads Thrift's compact protocol. None: the bytes end, or are none of it.
struct Compact<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Compact<'_> {
    fn byte(&mut self) -> Option<u8> {
        let byte = self.bytes.get(self.at).copied();
        self.at += 1;
        byte
    }

    fn unsigned(&mut self) -> Option<u64> {
        let mut number = 0_u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            number |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some(number);
            }
        }
        None
    }

    /// A whole number that must not be negative.
    fn size(&mut self) -> Option<u64> {
        let zigzag = self.unsigned()?;
        (zigzag & 1 == 0).then_some(zigzag >> 1)
    }

    fn skip_bytes(&mut self, count: u64) -> Option<()> {
        self.at = self.at.checked_add(usize::try_from(count).ok()?)?;
        (self.at <= self.bytes.len()).then_some(())
    }

    /// The next field of a struct whose last one was `field`: its number and type; type 0 at the end.
    fn field(&mut self, field: u64) -> Option<(u64, u8)> {
        let head = self.byte()?;
        let delta = u64::from(head >> 4);
        let number = if head == 0 || delta > 0 { field + delta } else { self.size()? };
        Some((number, head & 0x0f))
    }

    fn skip(&mut self, kind: u8, depth: usize) -> Option<()> {
        if depth > MAX_DEPTH {
            return None;
        }
        match kind {
            1 | 2 => Some(()),
            3 => self.skip_bytes(1),
            4..=6 => self.unsigned().map(drop),
            7 => self.skip_bytes(8),
            8 => {
                let length = self.unsigned()?;
                self.skip_bytes(length)
            }
            9 | 10 => {
                let head = self.byte()?;
                let count = if head >> 4 == 15 { self.unsigned()? } else { u64::from(head >> 4) };
                // Booleans in a list have a byte each.
                let kind = if matches!(head & 0x0f, 1 | 2) { 3 } else { head & 0x0f };
                (0..count).try_for_each(|_| self.skip(kind, depth + 1))
            }
            12 => {
                let mut field = 0;
                loop {
                    let kind;
                    (field, kind) = self.field(field)?;
                    if kind == 0 {
                        return Some(());
                    }
                    self.skip(kind, depth + 1)?;
                }
            }
            _ => None,
        }
    }

    fn page(&mut self) -> Option<Page> {
        let (mut page, mut field) = (Page::default(), 0);
        loop {
            let kind;
            (field, kind) = self.field(field)?;
            match (field, kind) {
                (_, 0) => return Some(page),
                (2, 5) => page.unpacked = self.size()?,
                (3, 5) => page.packed = self.size()?,
                // The headers of data pages, whose first field counts their values.
                (5 | 8, 12) => page.values = self.data_page()?,
                _ => self.skip(kind, 0)?,
            }
        }
    }

    fn data_page(&mut self) -> Option<u64> {
        let (mut values, mut field) = (0, 0);
        loop {
            let kind;
            (field, kind) = self.field(field)?;
            match (field, kind) {
                (_, 0) => return Some(values),
                (1, 5) => values = self.size()?,
                _ => self.skip(kind, 1)?,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_read_and_half_of_one_is_not() {
        // type 0, unpacked 300, packed 20, data_page_header { num_values 7, encoding 0, a list of two, a text "ab" }.
        let bytes =
            [0x15, 0, 0x15, 0xd8, 4, 0x15, 40, 0x2c, 0x15, 14, 0x15, 0, 0x19, 0x25, 2, 4, 0x18, 2, 97, 98, 0, 0];
        let page = Page { unpacked: 300, packed: 20, values: 7 };
        let mut reader = Compact { bytes: &bytes, at: 0 };
        assert_eq!((reader.page(), reader.at), (Some(page), bytes.len()));
        for length in 0..bytes.len() {
            assert_eq!(Compact { bytes: &bytes[..length], at: 0 }.page(), None, "{length}");
        }
    }

    #[test]
    fn headers_that_nest_or_never_end_are_none() {
        for bytes in [vec![0x1c; 1000], vec![0xff; 1000], vec![0x19, 0xfc, 0xff, 0xff, 0xff, 0xff, 0x7f]] {
            assert_eq!(Compact { bytes: &bytes, at: 0 }.page(), None);
        }
    }
}
