//! Files that `datasets` and `pyarrow` wrote (tests/golden/sources, with its script) give the original rows.
//!
//! Trade-off: one version of each library.

use super::*;

fn golden(name: &str) -> SourceSpec {
    SourceSpec::new(format!("{}/tests/golden/sources/{name}", env!("CARGO_MANIFEST_DIR")))
}

#[test]
fn files_of_datasets_and_pyarrow_give_the_original_rows() {
    let rows = fields(&golden("rows.json"));
    assert_eq!(rows.len(), 40);
    let files = ["saved", "saved_dict", "datasets.parquet", "datasets.jsonl", "zstd.parquet", "gzip.parquet"];
    let more = ["lz4.parquet", "lz4.feather", "zstd.feather", "stream.arrow"];
    for name in files.into_iter().chain(more) {
        assert_eq!(fields(&golden(name)), rows, "{name}");
    }
}

#[test]
fn a_saved_dictionary_of_splits_is_read_by_split() {
    let split = |name: &str| SourceSpec { split: Some(name.to_owned()), ..golden("saved_dict") };
    assert_eq!(fields(&split("test")), fields(&golden("rows.json"))[..2]);
    let error = error_of(&split("dev"));
    assert!(error.contains("train, test"), "{error}");
}

#[test]
fn a_saved_dataset_keeps_the_order_of_its_rows_over_shards() {
    let records = read(&golden("saved")).unwrap();
    let names: Vec<String> = records.iter().map(|record| record.place.path.display().to_string()).collect();
    assert!(names.is_sorted() && names[0].ends_with("data-00000-of-00003.arrow"));
}
