//! Huge lines and records, deep nesting, decompression bombs, small Parquet and Arrow files that decompress to much.
//!
//! Trade-off: sizes just above the limits, so that the tests stay fast. Not covered: single Parquet pages that decompress to much, which the reader
//! does not bound.

use std::io::{Read, Write};
use std::sync::Arc;

use arrow_array::{ArrayRef, RecordBatch, StringArray};
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::WriterProperties;

use super::Hostile;

const MIB: usize = 1 << 20;
const TOO_LARGE: &[&str] = &["rows.", ":1", "larger than 64 MiB"];

pub(crate) fn all() -> Vec<Hostile> {
    vec![
        Hostile::new("jsonl", "line_of_100_mib", &["rows.jsonl:2", "larger than 64 MiB"], || {
            [&b"{\"text\":\"a\"}\n{\"text\":\""[..], &vec![b'x'; 100 * MIB]].concat()
        }),
        Hostile::new("jsonl", "string_of_60_mib", &[], || [&b"\""[..], &vec![b'x'; 60 * MIB], b"\""].concat()),
        Hostile::new("jsonl", "record_of_30_million_numbers", &["rows.jsonl:1", "values"], || {
            [&b"{\"a\":["[..], &b"0,".repeat(30 * MIB), b"0]}\n"].concat()
        }),
        Hostile::new("jsonl", "record_of_20_million_lists", &["rows.jsonl:1", "values"], || {
            [&b"{\"a\":["[..], &b"[],".repeat(20 * MIB), b"0]}\n"].concat()
        }),
        Hostile::new("jsonl", "million_brackets", &["rows.jsonl:1:128", "recursion limit"], || b"[".repeat(MIB)),
        Hostile::new("jsonl", "million_bad_lines", &["rows.jsonl:1:"], || b"x\n".repeat(MIB)),
        Hostile::new("json", "million_brackets", &["rows.json:1"], || b"[".repeat(MIB)),
        Hostile::new("json", "million_objects", &["rows.json:1"], || b"{\"a\":".repeat(MIB)),
        Hostile::new("json", "record_of_30_million_numbers", &["rows.json:1", "values"], || {
            [&b"[{\"a\":["[..], &b"0,".repeat(30 * MIB), b"0]}]"].concat()
        }),
        Hostile::new("json", "key_of_100_mib", &["rows.json:1", "larger than 64 MiB"], || {
            [&b"{\""[..], &vec![b'k'; 100 * MIB], b"\":[{}]}"].concat()
        }),
        Hostile::new("csv", "quote_never_closed", &["rows.csv:2", "larger than 64 MiB", "quote"], || {
            [&b"\0text\n\""[..], &b"a,b\n".repeat(20 * MIB)].concat()
        }),
        Hostile::new("csv", "row_of_60_million_commas", &["rows.csv:2", "values"], || {
            [&b"\0a,b\n"[..], &vec![b','; 60 * MIB], b"\n"].concat()
        }),
        Hostile::new("csv", "header_of_millions_of_columns", &["rows.csv:1", "columns"], || {
            let mut header = b"\0".to_vec();
            (0..4_000_000).for_each(|number| header.extend_from_slice(format!("{number:x},").as_bytes()));
            header
        }),
        Hostile::new("text", "line_of_100_mib", &["rows.txt:1", "larger than 64 MiB"], || {
            [&b"\x01"[..], &vec![b'x'; 100 * MIB]].concat()
        }),
        Hostile::new("text", "file_of_100_mib", &["rows.txt:1", "larger than 64 MiB"], || {
            [&b"\0"[..], &vec![b'x'; 100 * MIB]].concat()
        }),
        Hostile::new("packed", "gz_bomb_jsonl", TOO_LARGE, || packed_with(0, b"", b'x', 300 * MIB)),
        Hostile::new("packed", "zst_bomb_jsonl", TOO_LARGE, || zstandard(1, b'x', 300 * MIB)),
        Hostile::new("packed", "gz_bomb_json", TOO_LARGE, || packed_with(2, b"[{\"a\":\"", b'x', 300 * MIB)),
        Hostile::new("packed", "zst_bomb_json_of_blanks", &[], || zstandard(3, b' ', 300 * MIB)),
        Hostile::new("packed", "zst_bomb_json_of_brackets", TOO_LARGE, || zstandard(3, b'[', 300 * MIB)),
        Hostile::new("packed", "zst_bomb_jsonl_of_blanks", &[], || zstandard(1, b'\n', 300 * MIB)),
        Hostile::new("packed", "gz_bomb_csv", TOO_LARGE, || packed_with(4, b"\"", b'x', 300 * MIB)),
        Hostile::new("packed", "zst_bomb_text", TOO_LARGE, || zstandard(9, b'x', 300 * MIB)),
        Hostile::new("packed", "zst_bomb_arrow", &["rows.arrow.zst"], || zstandard(11, 0xff, 300 * MIB)),
        Hostile::new("packed", "zst_in_zst", &["rows.jsonl.zst", "Zstandard"], || {
            let inner = zstandard(0, b'x', 300 * MIB);
            let mut encoder = zstd::Encoder::new(vec![1], 3).expect("an encoder");
            encoder.write_all(&inner[1..]).expect("memory has no write errors");
            encoder.finish().expect("memory has no write errors")
        }),
        Hostile::new("saved_folder", "million_files", &[], || {
            let file = b"{\"filename\":\"rows.jsonl\"},".repeat(50_000);
            [&b"{\"_data_files\":["[..], &file, b"{}]}"].concat()
        }),
        Hostile::new("hub_listing", "pattern_that_backtracks", &["owner/name"], || {
            let (path, pattern) = ("a/".repeat(200), "**/".repeat(100));
            listing(&format!("{path}train.jsonl"), &format!("{pattern}b"))
        }),
        Hostile::new("hub_listing", "pattern_of_stars", &["owner/name"], || {
            listing(&format!("{}.jsonl", "a".repeat(2000)), &format!("{}b", "*a".repeat(1000)))
        }),
        Hostile::new("rows", "string_of_brackets", &["not JSON"], || {
            format!("\0{{\"text\":\"a\",\"messages\":[],\"tools\":\"{}\"}}", "[".repeat(MIB)).into_bytes()
        }),
        Hostile::new("rows", "text_of_a_mib", &[], || format!("\0{{\"text\":\"{}\"}}", "ab ".repeat(MIB / 3)).into()),
        Hostile::new("rows", "text_without_a_space", &[], || {
            format!("\0{{\"text\":\"{}\"}}", "a".repeat(MIB)).into_bytes()
        }),
        Hostile::new("rows", "two_thousand_turns", &[], two_thousand_turns),
        Hostile::new("messages", "two_thousand_turns", &[], two_thousand_turns),
        Hostile::new("parquet", "one_text_many_times", &[], || parquet(&vec!["x".repeat(MIB).as_str(); 4000], 4 * MIB)),
        Hostile::new("parquet", "text_of_100_mib", &["rows.parquet:1", "larger than 64 MiB"], || {
            parquet(&["x".repeat(100 * MIB).as_str()], 4 * MIB)
        }),
        Hostile::new("arrow", "text_of_100_mib", &["rows.arrow:1", "larger than 64 MiB"], || {
            arrow(&["x".repeat(100 * MIB).as_str()])
        }),
    ]
}

fn two_thousand_turns() -> Vec<u8> {
    let turn = "{\"role\":\"user\",\"content\":\"a\"},{\"role\":\"assistant\",\"content\":\"a\"},";
    format!("\0{{\"messages\":[{}]}}", turn.repeat(1000).trim_end_matches(',')).into_bytes()
}

fn listing(path: &str, pattern: &str) -> Vec<u8> {
    let json = serde_json::json!({
        "sha": "0123456789abcdef0123456789abcdef01234567",
        "siblings": [{ "rfilename": path, "size": 1 }],
        "cardData": { "configs": [{ "config_name": "a", "data_files": pattern }] }
    });
    [vec![0], json.to_string().into_bytes()].concat()
}

/// Returns gzip data after the byte that selects the inner format.
fn packed_with(first: u8, start: &[u8], byte: u8, count: usize) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(vec![first], flate2::Compression::best());
    encoder.write_all(start).expect("memory has no write errors");
    std::io::copy(&mut std::io::repeat(byte).take(count as u64), &mut encoder).expect("memory has no write errors");
    encoder.finish().expect("memory has no write errors")
}

fn zstandard(first: u8, byte: u8, count: usize) -> Vec<u8> {
    let mut encoder = zstd::Encoder::new(vec![first], 3).expect("an encoder");
    std::io::copy(&mut std::io::repeat(byte).take(count as u64), &mut encoder).expect("memory has no write errors");
    encoder.finish().expect("memory has no write errors")
}

fn batch(texts: &[&str]) -> RecordBatch {
    let column: ArrayRef = Arc::new(StringArray::from(texts.to_vec()));
    RecordBatch::try_from_iter([("text", column)]).expect("one column")
}

fn parquet(texts: &[&str], page: usize) -> Vec<u8> {
    let properties = WriterProperties::builder()
        .set_compression(Compression::ZSTD(ZstdLevel::default()))
        .set_dictionary_page_size_limit(page)
        .build();
    let batch = batch(&texts[..1]);
    let mut writer = ArrowWriter::try_new(Vec::new(), batch.schema(), Some(properties)).expect("a writer");
    // Written row by row, because one batch of all rows would be larger than what is tested here.
    for text in texts {
        writer.write(&self::batch(&[*text])).expect("memory has no write errors");
    }
    writer.into_inner().expect("memory has no write errors")
}

fn arrow(texts: &[&str]) -> Vec<u8> {
    let batch = batch(texts);
    let mut writer = arrow_ipc::writer::StreamWriter::try_new(Vec::new(), &batch.schema()).expect("a writer");
    writer.write(&batch).expect("memory has no write errors");
    writer.into_inner().expect("memory has no write errors")
}
