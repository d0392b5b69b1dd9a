//! Tests invariants for arbitrary bytes: no panic, bounded memory, an error that names the file and the line.

use super::super::FileFormat;
use super::*;

/// Checks that the error names the file and contains `expected`.
fn refused(name: &str, bytes: impl AsRef<[u8]>, expected: &str) {
    let folder = Folder::new();
    folder.write(name, bytes);
    refuses(&folder.spec(name), &[name, expected]);
}

#[test]
fn every_damaged_text_names_file_line_and_column() {
    refused("a.jsonl", "{\"text\":\"x\"}\n{\"text\" \"y\"}\n", "a.jsonl:2:9: not valid JSON");
    refused("b.jsonl", b"\n{\"text\":\"\xff\"}\n", "b.jsonl:2:10: not valid UTF-8");
    refused("c.jsonl", "{\"text\":\"\0\"}", "c.jsonl:1:10: a NUL");
    refused("d.jsonl", "[{\"text\":\"x\"}]\n", "file_format = \"json\"");
    refused("h.jsonl", "[\n  {\n    \"text\": \"x\"\n  }\n]\n", "file_format = \"json\"");
    refused("e.jsonl", "\"text\"\n", "e.jsonl:1: a row must be a JSON object");
    refused("f.jsonl", "[".repeat(100_000), "f.jsonl:1:");
    refused("g.jsonl", "{\"text\":\"x", "g.jsonl:1:");
    refused("a.json", "[{\"text\":\"x\"},\n{\"text\":}]", "a.json:2:9: not valid JSON");
    refused("b.json", "[{\"text\":\"x\"}\n{\"text\":\"y\"}]", "b.json:2:1: not valid JSON: expected ',' or ']'");
    refused("c.json", "[{\"text\":\"x\"},\n", "c.json:2:1: not valid JSON: the file ends");
    refused("d.json", "[{\"text\":\"x\"}]\n]", "d.json:2:1: not valid JSON: expected the end");
    refused("e.json", b"[\n{\"text\":\"\xff\"}]", "e.json:2:10: not valid UTF-8");
    refused("f.json", "[".repeat(100_000), "f.json:1");
    refused("g.json", "[\n1]", "g.json:2: a row must be a JSON object");
    refused("h.json", "{\"a\":\n", "h.json:2");
    refused("i.json", "hello", "i.json:1:1: not valid JSON");
    refused("a.csv", "text,label\nx\n", "a.csv:2: not a valid CSV row: 1 value, but");
    refused("b.csv", b"text\nx\n\xff\n", "b.csv:3:1: not valid UTF-8");
    refused("c.csv", "text,text\nx,y\n", "twice");
    refused("d.csv", "text\na\0b\n", "d.csv:2:2: a NUL");
    refused("a.txt", b"one\ntwo \xff", "a.txt:2:5: not valid UTF-8. If it is Latin-1, convert it: `iconv -f LATIN1");
    refused("k.jsonl", b"\xff\xfe{\0}\0", "`iconv -f UTF-16 -t UTF-8 FILE > NEW`");
    refused("l.jsonl", "{'text': 'x'}\n", "This is a Python dict");
    refused("m.jsonl", "<!DOCTYPE html>\n<html>\n", "it is a page of a website");
    refused("n.jsonl", "[{\"role\":\"user\",\"content\":\"x\"}]\n", "a list of 1 message: `jq -c '{messages: .}'");
    refused("e.csv", b"\xfe\xff\0a\0\n", "`iconv -f UTF-16 -t UTF-8 FILE > NEW`");
}

#[test]
fn a_wrong_file_name_is_detected_by_the_first_bytes() {
    let rows = rows();
    refused("a.jsonl", parquet_bytes(&rows), "file_format = \"parquet\"");
    refused("b.json", arrow_bytes(&rows, true), "file_format = \"arrow\"");
    refused("c.jsonl", gzip(b"{}"), ".jsonl.gz");
    refused("d.csv", zstandard(b"a,b"), "Zstandard");
    refused("e.jsonl", "version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull");
    refused("g.arrow", parquet_bytes(&rows), "file_format = \"parquet\"");
    refused("h.arrow", "{\"text\":\"x\"}", "neither");
    refused("i.parquet.gz", gzip(b"x"), "Unpack it");
    refused("j.jsonl.gz", "{\"text\":\"x\"}", "j.jsonl.gz:1");
}

#[test]
fn a_model_and_a_program_are_no_data() {
    let folder = Folder::new();
    folder.write("model/config.json", "{}");
    folder.write("model/tokenizer.json", "{}");
    folder.write("adapter/adapter_config.json", "{}");
    for (name, part) in
        [("model", "it is the folder of a model, not of data"), ("adapter", "name it as lora.init_from")]
    {
        refuses(&folder.spec(name), &[part]);
    }
    for (name, part) in
        [("a.zip", "unpack it"), ("a.xlsx", "save it as CSV"), ("a.py", "never run"), ("a.xyz", "file_format")]
    {
        refused(name, "x", part);
    }
}

/// The commands that messages advise for other encodings, run on what they are for.
#[cfg(unix)]
#[test]
fn advised_conversions_give_utf8() {
    let folder = Folder::new();
    for (bytes, from) in [(&b"\xff\xfeh\0\xe9\0"[..], "UTF-16"), (b"h\xe9", "LATIN1")] {
        folder.write("a.jsonl", bytes);
        let message = error_of(&folder.spec("a.jsonl"));
        let command = message.split('`').nth(1).unwrap().replace("FILE", "a.jsonl").replace("NEW", "new");
        assert!(command.contains(from), "{message}");
        let Ok(status) = std::process::Command::new("sh").args(["-c", &command]).current_dir(folder.0.path()).status()
        else {
            return;
        };
        // 127: there is no iconv here.
        if status.code() != Some(127) {
            assert!(status.success(), "{command}");
            assert_eq!(fs::read_to_string(folder.path("new")).unwrap(), "h\u{e9}");
        }
    }
}

#[test]
fn truncated_compressed_files_are_refused_with_the_line() {
    let folder = Folder::new();
    let mut text = String::new();
    for index in 0..50_000_u64 {
        text.push_str(&format!("{{\"text\":\"{:x}\"}}\n", index.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
    }
    for (name, packed) in [("a.jsonl.gz", gzip(text.as_bytes())), ("a.jsonl.zst", zstandard(text.as_bytes()))] {
        folder.write(name, &packed[..packed.len() / 2]);
        let results: Vec<_> = folder.spec(name).resolve(&no_hub()).unwrap().records().collect();
        let (last, rest) = results.split_last().unwrap();
        assert!(rest.len() > 1000 && rest.iter().all(Result::is_ok));
        let error = last.as_ref().unwrap_err().to_string();
        assert!(error.contains(&format!("{name}:{}", results.len())) && error.contains("cut short"), "{error}");
    }
}

#[test]
fn a_damaged_parquet_or_arrow_file_causes_no_panic() {
    let (folder, rows) = (Folder::new(), rows());
    let tables = [parquet_bytes(&rows), arrow_bytes(&rows, true), arrow_bytes(&rows, false)];
    for (name, bytes) in ["a.parquet", "a.arrow", "b.arrow"].into_iter().zip(tables) {
        let is_refused = |at: &usize| {
            let mut damaged = bytes.clone();
            damaged[*at] ^= [0xff_u8, 0x01, 0x80][at % 3];
            folder.write(name, damaged);
            let source = folder.spec(name).resolve(&no_hub());
            source.is_ok_and(|source| source.records().take(10_000).any(|record| record.is_err()))
        };
        assert!((0..bytes.len()).step_by(2).filter(is_refused).count() > 0, "{name}");
    }
}

#[test]
fn a_truncated_arrow_file_is_never_read_as_complete() {
    let (folder, rows) = (Folder::new(), rows());
    let bytes = arrow_bytes(&rows, true);
    let end = bytes.windows(8).rposition(|window| window == [0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0]).unwrap();
    for at in (8..end).step_by(8) {
        folder.write("a.arrow", &bytes[..at]);
        assert!(read(&folder.spec("a.arrow")).is_err(), "cut at {at} of {}", bytes.len());
    }
}

#[test]
fn a_missing_file_is_named_with_the_content_of_its_folder() {
    let folder = Folder::new();
    folder.write("train.jsonl", "");
    refuses(&folder.spec("trian.jsonl"), &["trian.jsonl", "contains train.jsonl"]);
    let spec = SourceSpec { file_format: Some(FileFormat::Jsonl), ..folder.spec("no/such") };
    assert!(error_of(&spec).contains("no folder"));
}
