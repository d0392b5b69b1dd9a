//! JSONL to examples: lines are tokenised on all cores, results and errors come in the order of the file.
//!
//! A bad line is an error with file and line, never skipped. A row longer than `max_seq_len` is cut and counted. Gives
//! up other file formats and several sources.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::thread::{available_parallelism, scope};

use serde::{Deserialize, Serialize};

use crate::dataset::{Dataset, ReadReport};
use crate::diagnose::FindingKind;
use crate::encoder::{EncodeOptions, Encoded, Encoder};
use crate::error::{DataError, Place};
use crate::mask::TrainOn;
use crate::row::parse_object;
use crate::shape::Shape;
use crate::tokenizer::Tokenizer;

/// Bytes that are read before they are tokenised together.
const BLOCK_BYTES: usize = 16 << 20;
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// What a row holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DatasetFormat {
    /// What the keys of the first row show; the messages win where both are there.
    #[default]
    Auto,
    /// `{"messages": [{"role": ..., "content": ...}, ...]}`, rendered with the tokenizer's chat template.
    Chat,
    /// `{"text": ...}`, closed by the end-of-text token.
    Text,
}

/// How to read a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadOptions {
    /// What rows hold.
    pub format: DatasetFormat,
    /// Which tokens are trained.
    pub train_on: TrainOn,
    /// Longer rows are cut to this many tokens.
    pub max_seq_len: usize,
    /// Key of the text, "text" unless said otherwise.
    pub text_field: String,
    /// Key of the messages, "messages" unless said otherwise.
    pub messages_field: String,
}

impl ReadOptions {
    /// The defaults with a length.
    pub fn new(max_seq_len: usize) -> Self {
        Self {
            format: DatasetFormat::default(),
            train_on: TrainOn::default(),
            max_seq_len,
            text_field: "text".to_owned(),
            messages_field: "messages".to_owned(),
        }
    }

    fn encode_options(&self) -> EncodeOptions {
        let mut options = EncodeOptions { train_on: self.train_on, ..EncodeOptions::new(self.max_seq_len) };
        options.shape = match self.format {
            DatasetFormat::Auto => Shape::Auto,
            DatasetFormat::Chat => Shape::Messages,
            DatasetFormat::Text => Shape::Text,
        };
        options.fields.text.clone_from(&self.text_field);
        options.fields.messages = (self.messages_field != "messages").then(|| self.messages_field.clone());
        options
    }
}

/// A line that is not blank.
struct Line {
    number: usize,
    bytes: Vec<u8>,
}

impl Dataset {
    /// Reads and tokenises a JSONL file; blank lines are skipped.
    ///
    /// Errors: the file cannot be read or has no rows; a line is not UTF-8, not JSON, or lacks what its format needs;
    /// the template refuses a conversation; a row has no trained token (unless a cut took them: then it is dropped and
    /// counted); nothing is left to train on.
    pub fn read_jsonl(path: &Path, tokenizer: &Tokenizer, options: &ReadOptions) -> Result<Self, DataError> {
        if options.max_seq_len < 2 {
            return Err(DataError::SequenceTooShort { max_seq_len: options.max_seq_len });
        }
        let io = |reason| DataError::Io { path: path.to_owned(), reason };
        let mut lines = Lines { reader: BufReader::new(File::open(path).map_err(io)?), number: 0 };
        let mut dataset = Self { examples: Vec::new(), report: ReadReport::default() };
        let mut encoder = None;
        loop {
            let block = lines.next_block().map_err(io)?;
            let Some(first) = block.first() else { break };
            let encoder = match &encoder {
                Some(encoder) => encoder,
                None => {
                    let place = Place { path: path.to_owned(), line: first.number };
                    let fields = parse_object(&first.bytes, &place)?;
                    &*encoder.insert(Encoder::new(tokenizer, options.encode_options(), &fields, &place)?)
                }
            };
            for outcome in (RowReader { path, encoder }).read_block(&block) {
                dataset.add(outcome?);
            }
        }
        if dataset.report.rows_read == 0 {
            return Err(DataError::EmptyDataset { path: path.to_owned() });
        }
        if dataset.examples.is_empty() {
            return Err(DataError::NothingToTrain { path: path.to_owned(), report: dataset.report.to_string() });
        }
        Ok(dataset)
    }

    fn add(&mut self, encoded: Encoded) {
        let report = &mut self.report;
        report.rows_read += 1;
        for finding in &encoded.findings {
            report.dropped_empty += usize::from(finding.kind == FindingKind::Empty);
            report.dropped_by_truncation += usize::from(finding.kind == FindingKind::CutToNothing);
        }
        report.rows_truncated += usize::from(encoded.tokens_cut > 0);
        report.tokens_cut += encoded.tokens_cut;
        for example in encoded.examples {
            report.add_example(&example);
            self.examples.push(example);
        }
    }
}

/// The lines of a file, a block at a time.
struct Lines<R> {
    reader: R,
    number: usize,
}

impl<R: BufRead> Lines<R> {
    /// The next lines that are not blank, about [`BLOCK_BYTES`] of them; none at the end of the file.
    fn next_block(&mut self) -> std::io::Result<Vec<Line>> {
        let mut block = Vec::new();
        let mut size = 0;
        while size < BLOCK_BYTES {
            let mut bytes = Vec::new();
            if self.reader.read_until(b'\n', &mut bytes)? == 0 {
                break;
            }
            self.number += 1;
            if self.number == 1 && bytes.starts_with(BYTE_ORDER_MARK) {
                bytes.drain(..BYTE_ORDER_MARK.len());
            }
            size += bytes.len();
            bytes.truncate(bytes.trim_ascii_end().len());
            if !bytes.is_empty() {
                block.push(Line { number: self.number, bytes });
            }
        }
        Ok(block)
    }
}

/// What every line of a file is read with.
struct RowReader<'a> {
    path: &'a Path,
    encoder: &'a Encoder<'a>,
}

impl RowReader<'_> {
    /// Reads the lines on all cores; results in order. A core stops at its first error.
    fn read_block(&self, block: &[Line]) -> Vec<Result<Encoded, DataError>> {
        let workers = available_parallelism().map_or(1, usize::from);
        let share = block.len().div_ceil(workers).max(1);
        scope(|scope| {
            let read = |lines: &[Line]| {
                let mut results = Vec::with_capacity(lines.len());
                for line in lines {
                    results.push(self.read_line(line));
                    if matches!(results.last(), Some(Err(_))) {
                        break;
                    }
                }
                results
            };
            let workers: Vec<_> = block.chunks(share).map(|lines| scope.spawn(move || read(lines))).collect();
            // A worker that panicked found a bug of ours: the panic goes on here.
            workers
                .into_iter()
                .flat_map(|worker| worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
                .collect()
        })
    }

    /// A row that teaches nothing is an error here, unless it is empty or was cut.
    fn read_line(&self, line: &Line) -> Result<Encoded, DataError> {
        let place = Place { path: self.path.to_owned(), line: line.number };
        let object = parse_object(&line.bytes, &place)?;
        let encoded = self.encoder.encode_fields(&object, &place)?;
        let excused = |kind| matches!(kind, FindingKind::Empty | FindingKind::CutToNothing);
        match encoded.findings.iter().find(|finding| finding.kind.is_bad() && !excused(finding.kind)) {
            Some(finding) if encoded.examples.is_empty() => match finding.kind {
                FindingKind::NothingToTrain => {
                    Err(DataError::NothingTrainedInRow { place, why: finding.detail.clone() })
                }
                _ => Err(DataError::BadRow { place, reason: finding.detail.clone() }),
            },
            _ => Ok(encoded),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::write;

    use serde_json::json;
    use tempfile::TempDir;

    use super::*;
    use crate::dataset::Example;
    use crate::test_tokenizer::{BOS, EOS, TestTokenizer};

    fn read_with(
        content: &[u8],
        tokenizer: &Tokenizer,
        change: impl Fn(&mut ReadOptions),
    ) -> Result<Dataset, DataError> {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("rows.jsonl");
        write(&path, content).unwrap();
        let mut options = ReadOptions::new(64);
        change(&mut options);
        Dataset::read_jsonl(&path, tokenizer, &options)
    }

    fn read(content: impl AsRef<[u8]>) -> Result<Dataset, DataError> {
        read_with(content.as_ref(), &TestTokenizer::default().load(), |_| {})
    }

    /// The error of a file, which must hold all the words.
    fn refuses(content: impl AsRef<[u8]>, words: &[&str]) -> DataError {
        let error = read(content).unwrap_err();
        let message = error.to_string();
        assert!(words.iter().all(|word| message.contains(word)), "{message}");
        error
    }

    const CHAT: &str = r#"{"messages":[{"role":"user","content":"q"},{"role":"assistant","content":"a"}]}"#;
    const NO_ASSISTANT: &str = r#"{"messages":[{"role":"user","content":"q"}]}"#;

    #[test]
    fn text_has_one_bos_and_one_trained_eos() {
        let ab = [BOS, u32::from(b'a'), u32::from(b'b'), EOS];
        for text in ["ab", "<s>ab", "ab</s>", "<s>ab</s>"] {
            let dataset = read(json!({ "text": text }).to_string()).unwrap();
            assert_eq!(dataset.examples, [Example { tokens: ab.to_vec(), trained: vec![false, true, true, true] }]);
        }
    }

    #[test]
    fn bos_is_added_only_where_the_tokenizer_says_so() {
        let mut tokenizer = TestTokenizer { adds_bos: false, ..TestTokenizer::default() };
        let first = |tokenizer: &TestTokenizer| {
            read_with(br#"{"text":"ab"}"#, &tokenizer.load(), |_| {}).unwrap().examples[0].tokens[0]
        };
        assert_eq!(first(&tokenizer), u32::from(b'a'));
        tokenizer.config["add_bos_token"] = true.into();
        assert_eq!(first(&tokenizer), BOS);
    }

    #[test]
    fn every_row_comes_in_the_order_of_the_file() {
        let rows: String = (0..500).map(|index| format!("{{\"text\":\"{index}\"}}\r\n\n")).collect();
        let dataset =
            read_with(format!("\u{feff}{rows}").as_bytes(), &TestTokenizer::default().load(), |_| {}).unwrap();
        assert_eq!((dataset.report.rows_read, dataset.report.examples), (500, 500));
        let tokenizer = TestTokenizer::default().load();
        for (index, example) in dataset.examples.iter().enumerate() {
            assert_eq!(tokenizer.decode(&example.tokens, true).unwrap(), index.to_string());
        }
    }

    #[test]
    fn truncation_is_counted_and_a_row_cut_to_nothing_is_dropped() {
        let long = "x".repeat(100);
        let late = CHAT.replace("\"q\"", &format!("{long:?}"));
        let rows = format!("{CHAT}\n{late}\n{}\n", CHAT.replace("\"a\"", &format!("{long:?}")));
        let report = read(rows).unwrap().report;
        assert_eq!((report.rows_read, report.examples, report.rows_truncated), (3, 2, 2));
        assert_eq!((report.dropped_by_truncation, report.longest), (1, 64));
        let error = refuses(late, &["nothing to train on", "1 dropped because the cut", "max_seq_len"]);
        assert!(matches!(error, DataError::NothingToTrain { .. }));
    }

    #[test]
    fn empty_rows_are_dropped_and_counted() {
        let report = read(format!("{CHAT}\n{{\"messages\":[]}}")).unwrap().report;
        assert_eq!((report.rows_read, report.examples, report.dropped_empty), (2, 1, 1));
        assert!(matches!(read(r#"{"text":" "}"#), Err(DataError::NothingToTrain { .. })));
    }

    #[test]
    fn row_whose_every_target_is_masked_is_refused_with_its_line() {
        refuses(format!("{CHAT}\n\n{NO_ASSISTANT}\n"), &["rows.jsonl:3:", "no token of this row", "roles: user"]);
        let all = |options: &mut ReadOptions| options.train_on = TrainOn::All;
        assert!(read_with(NO_ASSISTANT.as_bytes(), &TestTokenizer::default().load(), all).is_ok());
    }

    #[test]
    fn empty_file_is_refused() {
        for content in ["", "\n \r\n"] {
            assert!(matches!(refuses(content, &["rows.jsonl has no rows"]), DataError::EmptyDataset { .. }));
        }
    }

    #[test]
    fn corrupt_line_is_refused_with_line_and_column() {
        refuses(format!("{CHAT}\n{{\"messages\": [}}\n"), &["rows.jsonl:2:15:", "not valid JSON", "expected value"]);
        refuses("{\"text\": \"a\"} {}", &["rows.jsonl:1:15:", "trailing characters"]);
        refuses("[1]", &["rows.jsonl:1:", "must be a JSON object", "a list of 1"]);
    }

    #[test]
    fn first_of_several_corrupt_lines_is_named() {
        let rows: String = (1..=300).map(|line| if line > 100 { "{\n" } else { "{\"text\":\"a\"}\n" }).collect();
        refuses(rows, &["rows.jsonl:101:"]);
    }

    #[test]
    fn bytes_that_are_not_text_are_refused_with_line() {
        let bad_utf8 = refuses(b"{\"text\":\"a\"}\n{\"text\":\"\xff\"}", &["rows.jsonl:2:10:", "UTF-8", "iconv"]);
        assert!(matches!(bad_utf8, DataError::NotUtf8 { column: 10, .. }));
        refuses(b"{\"text\":\"a\0\"}", &["rows.jsonl:1:", "NUL", "byte 11"]);
        refuses(r#"{"text":"a\u0000"}"#, &["rows.jsonl:1:", "NUL", "in text"]);
    }

    #[test]
    fn missing_keys_are_refused_with_those_expected_and_those_found() {
        refuses(r#"{"talks":[],"id":1}"#, &["rows.jsonl:1:", "\"messages\"", "\"text\"", "\"talks\", \"id\""]);
        refuses(
            format!("{CHAT}\n{{\"text\":\"a\"}}"),
            &["rows.jsonl:2:", "expected the key \"messages\", found \"text\""],
        );
        refuses(
            r#"{"messages":[{"who":"user","content":"q"}]}"#,
            &["\"role\" in messages[0]", "found \"who\", \"content\""],
        );
        refuses("{}", &["found no key"]);
    }

    #[test]
    fn values_of_the_wrong_type_are_refused() {
        refuses(r#"{"text":3}"#, &["rows.jsonl:1:", "text must be a string, found the number 3"]);
        refuses(r#"{"messages":"hi"}"#, &["messages must be a list of messages, found a string"]);
        refuses(
            r#"{"messages":[{"role":"user","content":null}]}"#,
            &["messages[0].content must be a string, found null"],
        );
        refuses(r#"{"messages":["hi"]}"#, &["messages[0] must be an object"]);
    }

    #[test]
    fn chat_rows_without_a_template_are_refused_with_the_row() {
        let tokenizer = TestTokenizer { template: None, ..TestTokenizer::default() }.load();
        let error = read_with(CHAT.as_bytes(), &tokenizer, |_| {}).unwrap_err().to_string();
        assert!(error.contains("rows.jsonl:1:") && error.contains("no chat template"), "{error}");
    }

    #[test]
    fn text_rows_without_an_end_of_text_token_are_refused() {
        let tokenizer = TestTokenizer { config: json!({}), ..TestTokenizer::default() }.load();
        let error = read_with(br#"{"text":"a"}"#, &tokenizer, |_| {}).unwrap_err().to_string();
        assert!(error.contains("no eos_token") && error.contains("tokenizer_config.json"), "{error}");
    }

    #[test]
    fn fields_can_be_renamed() {
        let rename = |options: &mut ReadOptions| options.text_field = "body".to_owned();
        assert!(read_with(br#"{"body":"a"}"#, &TestTokenizer::default().load(), rename).is_ok());
    }

    #[test]
    fn one_token_is_too_short() {
        let one = |options: &mut ReadOptions| options.max_seq_len = 1;
        let error = read_with(CHAT.as_bytes(), &TestTokenizer::default().load(), one).unwrap_err();
        assert!(matches!(error, DataError::SequenceTooShort { max_seq_len: 1 }));
    }
}
