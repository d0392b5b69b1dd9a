//! Tests of files, patterns and folders, and the order of their content.

use super::super::FileFormat;
use super::*;

#[test]
fn a_folder_is_read_in_the_order_of_its_names() {
    let folder = Folder::new();
    for name in ["d/c.jsonl", "d/a.jsonl.gz", "d/sub/b.jsonl", "d/.hidden.jsonl", "d/README.md", "d/dataset_info.json"]
    {
        let text = text_rows(name, 1);
        folder.write(name, if name.ends_with("gz") { gzip(text.as_bytes()) } else { text.into_bytes() });
    }
    let records = read(&folder.spec("d")).unwrap();
    assert_eq!(texts(&records), ["d/a.jsonl.gz0", "d/c.jsonl0", "d/sub/b.jsonl0"]);
    assert!(records[2].place.path.ends_with("sub/b.jsonl"));
}

#[test]
fn a_pattern_is_read_in_the_order_of_its_matches() {
    let folder = Folder::new();
    for name in ["d/part-10.jsonl", "d/part-2.jsonl", "d/x/part-1.jsonl", "d/other.jsonl", "d/part-3.csv"] {
        folder.write(name, text_rows(name, 1));
    }
    assert_eq!(texts(&read(&folder.spec("d/part-*.jsonl")).unwrap()), ["d/part-10.jsonl0", "d/part-2.jsonl0"]);
    assert_eq!(read(&folder.spec("d/**/*.jsonl")).unwrap().len(), 4);
}

#[test]
fn a_pattern_without_a_match_lists_the_content_of_the_folder() {
    let folder = Folder::new();
    folder.write("d/rows.json", "[]");
    refuses(&folder.spec("d/*.jsonl"), &["d/*.jsonl", "rows.json"]);
    refuses(&folder.spec("no/such/*.jsonl"), &["no folder"]);
    refuses(&folder.spec("d/[.jsonl"), &["not a pattern"]);
}

#[test]
fn several_formats_in_a_folder_need_a_named_one() {
    let folder = Folder::new();
    folder.write("d/a.jsonl", text_rows("a", 1));
    folder.write("d/b.csv", "text\nb\n");
    refuses(&folder.spec("d"), &["jsonl: 1", "csv: 1"]);
    let csv = SourceSpec { file_format: Some(FileFormat::Csv), ..folder.spec("d") };
    assert_eq!(texts(&read(&csv).unwrap()), ["b"]);
    folder.write("e/a.bin", "");
    assert!(error_of(&folder.spec("e")).contains("a.bin"));
}

#[test]
fn the_splits_of_a_folder_are_never_combined() {
    let folder = Folder::new();
    folder.write("d/train-00000-of-00002.jsonl", text_rows("a", 1));
    folder.write("d/train-00001-of-00002.jsonl", text_rows("b", 1));
    folder.write("d/test-00000-of-00001.jsonl", text_rows("c", 1));
    let split = |name: &str| SourceSpec { split: Some(name.to_owned()), ..folder.spec("d") };
    assert_eq!(texts(&read(&folder.spec("d")).unwrap()), ["a0", "b0"], "train, as in a Hub dataset");
    let unread = |spec: &SourceSpec| spec.resolve(&Hub::from_environment()).unwrap().unread_splits().to_vec();
    assert_eq!(unread(&folder.spec("d")), ["test"]);
    assert!(unread(&split("train")).is_empty(), "the recipe names it");
    assert_eq!(texts(&read(&split("train")).unwrap()), ["a0", "b0"]);
    assert_eq!(texts(&read(&split("test")).unwrap()), ["c0"]);
    refuses(&split("validation"), &["\"validation\"", "test, train"]);
    folder.write("no_train/dev.jsonl", text_rows("a", 1));
    folder.write("no_train/test.jsonl", text_rows("a", 1));
    refuses(&folder.spec("no_train"), &["test, validation", "split = "]);
    // A single split needs no choice.
    folder.write("one/train.jsonl", text_rows("x", 1));
    assert_eq!(texts(&read(&folder.spec("one")).unwrap()), ["x0"]);
}

#[test]
fn keys_without_effect_are_refused() {
    let folder = Folder::new();
    folder.write("a.jsonl", text_rows("a", 1));
    let spec = || folder.spec("a.jsonl");
    let some = || Some("x".to_owned());
    for (bad, key) in [
        (SourceSpec { split: some(), ..spec() }, "split"),
        (SourceSpec { config: some(), ..spec() }, "config"),
        (SourceSpec { revision: some(), ..spec() }, "revision"),
        (SourceSpec { field: some(), ..spec() }, "field"),
        (SourceSpec { columns: Some(Vec::new()), ..spec() }, "columns"),
        (SourceSpec { weight: Some(f64::NAN), ..spec() }, "weight"),
        (SourceSpec { split: Some("train[:10%]".to_owned()), ..spec() }, "split"),
        (SourceSpec::new(" "), "path"),
    ] {
        let error = error_of(&bad);
        assert!(error.starts_with(&format!("{key}: ")), "{key}: {error}");
    }
}

#[test]
fn a_local_path_takes_precedence_over_the_hub() {
    let folder = Folder::new();
    folder.write("owner/name/a.jsonl", text_rows("a", 1));
    assert_eq!(texts(&read(&folder.spec("owner/name")).unwrap()), ["a0"]);
    // If the folder of the path exists, the name is a misspelled path, and no request is sent to the Hub.
    refuses(&folder.spec("owner/nam"), &["contains name"]);
}
