//! Tests that all formats of the same rows give the same records, including files that `datasets` and `pyarrow` wrote (tests/golden/sources, with its
//! script).

use super::super::{FileFormat, TextDocument};
use super::*;

#[test]
fn csv_values_are_strings_with_quotes_and_line_ends() {
    let folder = Folder::new();
    folder.write("a.csv", "\u{feff}text,label\r\n\r\n\"one, \"\"two\"\"\nthree\",007\r\n,NA\r\n");
    folder.write("b.tsv", "text\tlabel\none, \"two\tx\n");
    let expected = [json!({"text": "one, \"two\"\nthree", "label": "007"}), json!({"text": "", "label": "NA"})];
    assert_eq!(fields(&folder.spec("a.csv")), expected);
    let places: Vec<usize> = read(&folder.spec("a.csv")).unwrap().iter().map(|record| record.place.line).collect();
    assert_eq!(places, [3, 5]);
    folder.write("c.csv", "\ntext\n\n\nx\ny");
    let places: Vec<usize> = read(&folder.spec("c.csv")).unwrap().iter().map(|record| record.place.line).collect();
    assert_eq!(places, [5, 6]);
    assert_eq!(fields(&folder.spec("b.tsv")), [json!({"text": "one, \"two", "label": "x"})]);
    folder.write("empty.csv", "");
    assert!(fields(&folder.spec("empty.csv")).is_empty());
}

#[test]
fn a_stray_quote_alone_costs_its_row() {
    let folder = Folder::new();
    let row = |index: usize| match index % 3 {
        0 => format!("\"two\nlines, \"\"{index}\"\"\",\"\"\r\n"),
        1 => format!("plain 5\" {index},\"x\"\n"),
        _ => format!("\"a\"b,{index}\n\n"),
    };
    let over_lines = ["\"no row,\n1,2\n\"", "\"three,\n1,2\nvalues\",\"\n\",3"];
    let in_one = ["\"open,1", "open,\"1", "open,\"", "\"a\",\"b", "\"\"\"a,b", "one", "1,2,3"];
    for stray in in_one.into_iter().chain(over_lines) {
        let rows: String = (0..100).map(|index| if index == 30 { format!("{stray}\n") } else { row(index) }).collect();
        folder.write("a.csv", format!("text,label\n{rows}"));
        let (good, bad): (Vec<_>, Vec<_>) =
            folder.spec("a.csv").resolve(&no_hub()).unwrap().records().partition(Result::is_ok);
        let error = bad[0].as_ref().unwrap_err();
        assert!(error.to_string().contains("a.csv:52: not a valid CSV row") && error.can_continue(), "{error}");
        assert_eq!((good.len(), bad.len()), (99, 1), "{stray}");
    }
    folder.write("b.csv", "text\n\"\"\n\nx\n\"\"");
    assert_eq!(texts(&read(&folder.spec("b.csv")).unwrap()), ["", "x", ""]);
}

#[test]
fn text_has_one_document_per_file_or_per_line() {
    let folder = Folder::new();
    folder.write("a.txt", "one\r\n\n  \ntwo\n");
    assert_eq!(fields(&folder.spec("a.txt")), [json!({"text": "one\r\n\n  \ntwo\n"})]);
    let by_line = SourceSpec { text_unit: TextDocument::Line, ..folder.spec("a.txt") };
    assert_eq!(texts(&read(&by_line).unwrap()), ["one", "two"]);
    assert_eq!(read(&by_line).unwrap()[1].place.line, 4);
}

#[test]
fn places_name_the_line_of_each_record() {
    let folder = Folder::new();
    let path = folder.write("a.jsonl", "\n{\"text\":\"x\"}\n\n{\"text\":\"y\"}");
    let records = read(&folder.spec("a.jsonl")).unwrap();
    assert_eq!(records[1].place.to_string(), format!("{}:4", path.display()));
    assert_eq!((records[1].source, records[1].file), (0, 0));
    folder.write("b.json", "[\n {\"text\":\n\"x\"},\n\n {\"text\":\"y\"}]");
    let lines: Vec<usize> = read(&folder.spec("b.json")).unwrap().iter().map(|record| record.place.line).collect();
    assert_eq!(lines, [2, 5]);
    folder.write("c.parquet", parquet_bytes(&rows()));
    let lines: Vec<usize> = read(&folder.spec("c.parquet")).unwrap().iter().map(|record| record.place.line).collect();
    assert_eq!(lines, [1, 2, 3, 4, 5, 6, 7]);
}

#[test]
fn a_choice_among_lists_needs_a_named_field() {
    let folder = Folder::new();
    folder.write("a.json", r#"{"train": [{"text": "x"}], "test": [{"text": "y"}], "tags": ["a"]}"#);
    let field = |name: &str| SourceSpec { field: Some(name.to_owned()), ..folder.spec("a.json") };
    assert_eq!(fields(&field("train")), [json!({"text": "x"})]);
    assert_eq!(fields(&field("test")), [json!({"text": "y"})]);
    for (spec, expected) in
        [(folder.spec("a.json"), "hold lists of objects"), (field("tags"), "not of objects"), (field("no"), "no key")]
    {
        refuses(&spec, &[expected, "field = "]);
    }
}

#[test]
fn an_object_without_rows_is_one_record() {
    let folder = Folder::new();
    let chat = json!({ "messages": [{ "role": "user", "content": "x" }], "tools": [{ "name": "f" }] });
    for record in
        [json!({ "text": "x", "tags": ["a"] }), json!({ "conversations": [{ "from": "a", "value": "b" }] }), chat]
    {
        let pretty = serde_json::to_string_pretty(&record).unwrap();
        for text in [record.to_string(), format!("\u{feff}\n{pretty}\r\n\n")] {
            folder.write("a.json", text);
            assert_eq!(fields(&folder.spec("a.json")), std::slice::from_ref(&record));
        }
        for (name, advice) in
            [("b.json", "several documents follow each other"), ("b.jsonl", "jq -c . FILE > NEW.jsonl")]
        {
            folder.write(name, format!("{pretty}\n{pretty}"));
            let error = error_of(&folder.spec(name));
            assert!(error.contains(advice) && !error.contains("fields"), "{error}");
        }
    }
}

#[test]
fn named_columns_are_read_alone_and_missing_ones_are_refused() {
    let (folder, rows) = (Folder::new(), rows());
    folder.write("a.parquet", parquet_bytes(&rows));
    folder.write("b.arrow", arrow_bytes(&rows, false));
    folder.write("c.jsonl", lines(&rows));
    let named = |name: &str, columns: &[&str]| {
        let columns = Some(columns.iter().map(|&name| name.to_owned()).collect());
        SourceSpec { columns, ..folder.spec(name) }
    };
    for name in ["a.parquet", "b.arrow", "c.jsonl"] {
        let expected: Vec<Json> = rows.iter().map(|row| json!({"text": row["text"], "note": row["note"]})).collect();
        assert_eq!(fields(&named(name, &["note", "text"])), expected, "{name}");
    }
    for name in ["a.parquet", "b.arrow"] {
        refuses(&named(name, &["txt"]), &["\"txt\"", "\"messages\""]);
    }
}

#[test]
fn a_read_column_without_a_json_form_is_refused() {
    let folder = Folder::new();
    let columns: [(&str, ArrayRef); 2] = [
        ("text", Arc::new(StringArray::from(vec!["x"]))),
        ("image", Arc::new(arrow_array::BinaryArray::from(vec![b"\xff".as_slice()]))),
    ];
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let mut writer = parquet::arrow::ArrowWriter::try_new(Vec::new(), batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    folder.write("a.parquet", writer.into_inner().unwrap());
    refuses(&folder.spec("a.parquet"), &["\"image\"", "Binary", "columns ="]);
    let spec = SourceSpec { columns: Some(vec!["text".to_owned()]), ..folder.spec("a.parquet") };
    assert_eq!(fields(&spec), [json!({"text": "x"})]);
}

#[test]
fn limit_takes_the_first_rows_over_all_files() {
    let folder = Folder::new();
    folder.write("d/b.jsonl", text_rows("b", 3));
    folder.write("d/a.jsonl", text_rows("a", 3));
    let limited = |limit| SourceSpec { limit: Some(limit), ..folder.spec("d") };
    assert_eq!(texts(&read(&limited(4)).unwrap()), ["a0", "a1", "a2", "b0"]);
    assert_eq!(read(&limited(99)).unwrap().len(), 6);
    assert!(read(&limited(0)).is_err());
}

#[test]
fn a_named_format_takes_precedence_over_the_file_name() {
    let folder = Folder::new();
    folder.write("rows.data", text_rows("a", 2));
    refuses(&folder.spec("rows.data"), &[".jsonl", "format = "]);
    let spec = SourceSpec { file_format: Some(FileFormat::Jsonl), ..folder.spec("rows.data") };
    assert_eq!(texts(&read(&spec).unwrap()), ["a0", "a1"]);
}

#[test]
fn the_content_key_ignores_the_path() {
    let folder = Folder::new();
    let keys = super::super::ContentKeys::default();
    let key = |spec: &SourceSpec| spec.resolve(&no_hub()).unwrap().content_key(&keys).unwrap();
    folder.write("a.jsonl", text_rows("a", 2));
    folder.write("elsewhere/b.jsonl", text_rows("a", 2));
    folder.write("c.jsonl", text_rows("c", 2));
    let one = key(&folder.spec("a.jsonl"));
    assert_eq!(one, key(&folder.spec("elsewhere/b.jsonl")));
    assert_ne!(one, key(&folder.spec("c.jsonl")));
    assert_ne!(one, key(&SourceSpec { limit: Some(1), ..folder.spec("a.jsonl") }));
    assert_ne!(one, key(&SourceSpec { columns: Some(vec!["text".into()]), ..folder.spec("a.jsonl") }));
}

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
    refuses(&split("dev"), &["train, test"]);
}
