//! Parquet and Arrow files that are small and decompress to much.
//!
//! Not covered: single Parquet pages that decompress to much, which the reader does not bound.

use std::sync::Arc;

use arrow_array::{ArrayRef, RecordBatch, StringArray};
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::WriterProperties;

use super::Hostile;

const MIB: usize = 1 << 20;

pub(super) fn all() -> Vec<Hostile> {
    vec![
        Hostile::new("parquet", "one_text_many_times", &[], || parquet(&vec!["x".repeat(MIB).as_str(); 4000], 4 * MIB)),
        Hostile::new("parquet", "text_of_100_mib", &["rows.parquet:1", "larger than 64 MiB"], || {
            parquet(&["x".repeat(100 * MIB).as_str()], 4 * MIB)
        }),
        Hostile::new("arrow", "text_of_100_mib", &["rows.arrow:1", "larger than 64 MiB"], || {
            arrow(&["x".repeat(100 * MIB).as_str()])
        }),
    ]
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
    // Row by row, because one batch of all rows would be larger than what is tested here.
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
