//! Generated records mean the same in every kind of file: the same tokens, masks and counts.
//!
//! Trade-off: a table has null where a text has a line that is no row, and a text with a lone surrogate. Runs more sets with `cargo xtask test --slow`.

use firebrick_arch::python_json::{LONE_SURROGATE, NUMBER, unmarked};
use firebrick_data::{DocumentSet, EncodeOptions, Example};
use serde_json::{Value as Json, json};
use tempfile::TempDir;

use crate::corpus::{corpus, file};
use crate::tables::{arrow_bytes, gzip, parquet_bytes, zstandard};

const TEMPLATE: &str = "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}<|{{ message.role }}|>\n\
    {{ message.content }}{% for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor %}{{ eos_token }}\n{% endfor %}\
    {% if add_generation_prompt %}<|assistant|>\n{% endif %}";

/// Numbers that depend on the seed alone.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % end
    }

    fn text(&mut self) -> Json {
        let long = "word ".repeat(200);
        let texts =
            ["", "a", "é 😀", "two\nlines\r\nthree", "a \"quote\", a comma\t", "1", "null", " x ", "\u{feff}b", &long];
        format!("{}{}", texts[self.below(texts.len())], ["", "!", "?\""][self.below(3)]).into()
    }

    /// Leaves out keys of an object and of what is inside, or sets them to null.
    fn thin(&mut self, value: &mut Json) {
        if let Json::Object(fields) = value {
            fields.retain(|_, _| self.below(4) > 0);
            for value in fields.values_mut() {
                self.thin(value);
                *value = if self.below(4) == 0 { Json::Null } else { value.take() };
            }
        }
    }

    /// Returns a conversation. The first one has all keys, which gives columns their order and type.
    fn chat(&mut self, is_first: bool, has_texts: bool) -> Json {
        let mut arguments = json!({ "city": self.text(), "n": 3, "share": 0.5, "list": [1, null], "deep": { "a": "x", "b": { "c": 1 } } });
        let mut tool = json!({ "city": { "type": "string", "enum": ["a"] }, "n": { "type": "integer" } });
        let [flag, mask] = [self.below(2) == 0, self.below(2) == 0];
        let (mut question, mut answer) = (self.text(), self.text());
        if !is_first {
            self.thin(&mut arguments);
            self.thin(&mut tool);
            match self.below(12) {
                0 => answer = Json::Null,
                1 => question = LONE_SURROGATE.to_string().into(),
                2 => arguments["share"] = format!("{NUMBER}NaN").into(),
                _ => {}
            }
        }
        if has_texts {
            let large = "{\"large\":123456789012345678901234,";
            arguments = unmarked(&arguments.to_string()).replacen('{', large, self.below(2)).into();
        }
        let call = json!({ "type": "function", "function": { "name": "f", "arguments": arguments } });
        let mut row = json!({
            "id": self.below(9), "score": if self.below(3) == 0 { json!(format!("{NUMBER}NaN")) } else { json!(0.5) },
            "messages": [
                { "role": "user", "content": question, "name": "n", "loss": true },
                { "role": "assistant", "content": null, "tool_calls": [call], "loss": flag, "mask": mask },
                { "role": "tool", "content": "18", "loss_scale": 0.5 },
                { "role": "assistant", "content": answer },
            ],
            "tools": [{ "type": "function", "function": { "name": "f", "parameters": { "properties": tool } } }],
        });
        for key in ["name", "loss", "mask", "loss_scale"].into_iter().filter(|_| !is_first) {
            row["messages"][self.below(3)].as_object_mut().unwrap().shift_remove(key);
        }
        if !is_first && self.below(3) == 0 {
            row["tools"] = Json::Null;
        }
        row
    }
}

/// Returns the files that hold these rows, and in their middle one that cannot be read.
fn files(rows: &[Json]) -> Vec<(String, Vec<u8>)> {
    let middle = rows.len() / 2;
    let with = |bad: &str, row: &dyn Fn(&Json) -> String| {
        let mut rows: Vec<String> = rows.iter().map(row).collect();
        rows.insert(middle, bad.to_owned());
        rows
    };
    let texts = with("{\"id\": nope}", &|row| unmarked(&row.to_string()).replace(LONE_SURROGATE, "\\ud83d"));
    let table = with("{\"id\": null}", &|row| row.to_string().replace(&format!("\"{LONE_SURROGATE}\""), "null"));
    let table: Vec<Json> = table.iter().map(|row| serde_json::from_str(row).unwrap()).collect();
    let lines = format!("\u{feff}{}\r\n", texts.join("\r\n \r\n")).into_bytes();
    let mut files = vec![
        ("a.jsonl".to_owned(), lines.clone()),
        ("b.json".to_owned(), lines),
        ("c.json".to_owned(), format!("\u{feff}[{}\n]", texts.join(",\r\n")).into_bytes()),
        ("d.json".to_owned(), format!("{{\"n\": [1], \"rows\": [{}]}}\n", texts.join(", ")).into_bytes()),
        ("e.arrow".to_owned(), arrow_bytes(&table, true)),
        ("f.arrow".to_owned(), arrow_bytes(&table, false)),
    ];
    if rows[0].get("text").is_some() {
        let quoted = |row: &Json| row["text"].as_str().unwrap().replace('"', "\"\"");
        let rows = with("7,\"a stray quote", &|row| format!("{},\"{}\"", row["id"], quoted(row)));
        files.push(("g.csv".to_owned(), format!("\u{feff}id,text\r\n\r\n{}", rows.join("\r\n")).into_bytes()));
    }
    // Packed files have two parts.
    let packed = |(name, bytes): &(String, Vec<u8>)| {
        let (first, second) = bytes.split_at(bytes.len() / 2);
        let of_parts = |pack: fn(&[u8]) -> Vec<u8>| [pack(first), pack(second)].concat();
        [(format!("{name}.gz"), of_parts(gzip)), (format!("{name}.zst"), of_parts(zstandard))]
    };
    let packed: Vec<_> = files.iter().flat_map(packed).collect();
    files.into_iter().chain(packed).chain([("h.parquet".to_owned(), parquet_bytes(&table))]).collect()
}

#[test]
fn every_file_of_the_same_records_gives_the_same() {
    let tokenizer = crate::tokenizer("byte_level", Some(TEMPLATE), &crate::config());
    let sets = if std::env::var_os("FIREBRICK_SLOW_TESTS").is_some() { 300 } else { 6 };
    for seed in 0..sets {
        let mut random = Random(seed);
        let row = |index| match seed % 3 {
            0 => json!({ "id": index, "text": random.text() }),
            form => random.chat(index == 0, form == 1),
        };
        let rows: Vec<Json> = (0..40).map(row).collect();
        let mut first: Option<(Vec<Example>, Json)> = None;
        for (name, bytes) in files(&rows) {
            let folder = TempDir::new().unwrap();
            let options = EncodeOptions::new(100_000);
            let mut corpus = corpus(&tokenizer, &[&file(&folder, &name, bytes)], &options).unwrap();
            corpus.max_bad_share = 1.0;
            let found = corpus.in_memory().unwrap_or_else(|error| panic!("seed {seed}, {name}: {error}"));
            let counts = &found.diagnoses[0];
            let kept = [counts.rows, counts.rows_kept, counts.bad_rows, counts.tokens, counts.loss_tokens];
            let counts = json!([kept, counts.unread_keys]);
            let examples: Vec<Example> = DocumentSet::all(found.store.into()).examples().collect();
            let (expected, expected_counts) = first.get_or_insert_with(|| (examples.clone(), counts.clone()));
            assert_eq!(counts, *expected_counts, "seed {seed}, {name}");
            assert_eq!(examples, *expected, "seed {seed}, {name}");
        }
        let (examples, counts) = first.unwrap();
        let mut texts = examples.iter().map(|example| tokenizer.decode(&example.tokens, false).unwrap());
        let has_digits = texts.any(|text| text.contains("\"large\": 123456789012345678901234, \"city\""));
        assert_eq!(has_digits, seed % 3 == 1);
        assert!(!examples.is_empty() && counts[0][0] == 41 && counts[0][2].as_u64() > Some(0), "{counts}");
    }
}
