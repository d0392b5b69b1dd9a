//! Tests from files to documents: order, counts, refusals and their places, and the cache.

use std::fs::{rename, write};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use firebrick_data::{
    Corpus, DataError, DocumentSet, EncodeOptions, Example, Hub, Mix, MixUntil, Mixture, OverflowPolicy, Pipeline,
    RecordFormat, SourceSpec, TokenCache, Tokenized, Tokenizer, TrainOn,
};
use serde_json::{Value as Json, json};
use tempfile::TempDir;

use crate::TEMPLATE;

const CHAT: &str = r#"{"messages":[{"role":"user","content":"q"},{"role":"assistant","content":"a"}]}"#;
const NO_ASSISTANT: &str = r#"{"messages":[{"role":"user","content":"q"}]}"#;

fn tokenizer_with(template: Option<&str>, config: &Json) -> Tokenizer {
    crate::tokenizer("byte_level", template, config)
}

fn tokenizer() -> Tokenizer {
    tokenizer_with(Some(TEMPLATE), &crate::config())
}

pub(crate) fn file(folder: &TempDir, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
    let path = folder.path().join(name);
    write(&path, content).unwrap();
    path
}

pub(crate) fn corpus<'a>(
    tokenizer: &'a Tokenizer,
    paths: &[&Path],
    options: &EncodeOptions,
) -> Result<Corpus<'a>, DataError> {
    let source = |path: &&Path| SourceSpec::new(path.display().to_string()).resolve(&Hub::from_environment());
    let sources: Vec<_> = paths.iter().map(source).collect::<Result<_, _>>()?;
    let mixture = Mixture::new(sources, Mix::Concatenate, MixUntil::First, 0)?;
    Corpus::new(tokenizer, mixture, vec![options.clone(); paths.len()])
}

fn read_with(
    content: impl AsRef<[u8]>,
    tokenizer: &Tokenizer,
    change: impl Fn(&mut EncodeOptions),
) -> Result<Tokenized, DataError> {
    let folder = TempDir::new().unwrap();
    let mut options = EncodeOptions::new(64);
    change(&mut options);
    corpus(tokenizer, &[&file(&folder, "rows.jsonl", content)], &options)?.in_memory()
}

fn read(content: impl AsRef<[u8]>) -> Result<Tokenized, DataError> {
    read_with(content, &tokenizer(), |_| {})
}

fn examples(tokenized: Tokenized) -> Vec<Example> {
    DocumentSet::all(tokenized.store.into()).examples().collect()
}

/// Returns the error of a file, which must contain all the words.
fn refuses(content: impl AsRef<[u8]>, words: &[&str]) -> DataError {
    let error = read(content).unwrap_err();
    let message = error.to_string();
    assert!(words.iter().all(|word| message.contains(word)), "{message}");
    error
}

#[test]
fn a_text_has_one_bos_as_configured_and_one_eos() {
    let tokenizer = tokenizer();
    for text in ["ab", "<s>ab", "ab</s>", "<s>ab</s>"] {
        let found = examples(read_with(json!({ "text": text }).to_string(), &tokenizer, |_| {}).unwrap());
        assert_eq!(found.len(), 1);
        assert_eq!(tokenizer.decode(&found[0].tokens, false).unwrap(), "<s>ab</s>", "{text}");
        assert!(!found[0].loss_mask[0] && found[0].loss_mask[1..].iter().all(|&counts| counts));
    }
}

#[test]
fn documents_keep_the_order_of_rows_on_any_threads() {
    let folder = TempDir::new().unwrap();
    let rows = |numbers: std::ops::Range<usize>| numbers.map(|number| format!("{{\"text\":\"{number}\"}}\r\n\n"));
    let first = file(&folder, "b.jsonl", format!("\u{feff}{}", rows(0..700).collect::<String>()));
    let second = file(&folder, "a.jsonl", rows(700..1000).collect::<String>());
    let tokenizer = tokenizer();
    let mut corpus = corpus(&tokenizer, &[&first, &second], &EncodeOptions::new(64)).unwrap();
    for workers in 1..=3 {
        corpus.pipeline = Pipeline { workers: NonZeroUsize::new(workers).unwrap() };
        let found = corpus.in_memory().unwrap();
        let counts: Vec<_> =
            found.diagnoses.iter().map(|found| (found.rows, found.rows_kept, found.bad_rows)).collect();
        assert_eq!(counts, [(700, 700, 0), (300, 300, 0)]);
        assert_eq!((found.store.entry(699).origin.source, found.store.entry(700).origin.source), (0, 1));
        for (number, example) in examples(found).iter().enumerate() {
            assert_eq!(tokenizer.decode(&example.tokens, true).unwrap(), number.to_string());
        }
    }
}

#[test]
fn bad_records_are_counted_and_the_rest_is_kept() {
    let late = CHAT.replace("\"q\"", &format!("{:?}", "x".repeat(100)));
    let long = CHAT.replace("\"a\"", &format!("{:?}", "x".repeat(100)));
    let plain = format!("{CHAT}\n").repeat(20);
    let found = &read(format!("{plain}{late}\n{long}\n{{\"messages\":[]}}\n{NO_ASSISTANT}\n")).unwrap().diagnoses[0];
    assert_eq!((found.rows, found.rows_kept, found.bad_rows, found.longest), (24, 21, 2, 64));
    let report = found.to_string();
    for line in [
        "1 record dropped, empty; first ",
        "1 record dropped, every loss token is after max_seq_len",
        "1 record cut at max_seq_len",
        "rows.jsonl:24: no selected message has the role \"assistant\" (roles: user)",
    ] {
        assert!(report.contains(line), "{line:?} is not in {report}");
    }
}

#[test]
fn unread_keys_are_named_once_with_their_records() {
    let functions = CHAT.replacen('{', r#"{"functions":[{"name":"f"}],"#, 1);
    let empty = CHAT.replacen('{', r#"{"functions":[],"note":null,"#, 1);
    let alpaca = r#"{"instruction":"q","input":"i","output":"a","system":"s","history":[["b","c"]]}"#;
    let cases = [
        (format!("{functions}\n{functions}\n{empty}"), Some("keys not read: functions (2 rows)")),
        (empty, None),
        (CHAT.replacen('{', r#"{"system":"s","tools":[],"chat_template_kwargs":{"a":1},"#, 1), None),
        (
            CHAT.replacen('{', r#"{"conversations":[{"from":"gpt","value":"a"}],"#, 1),
            Some("not read: conversations (1"),
        ),
        (r#"{"prompt":"q","completion":"a","system":"s"}"#.to_owned(), Some("keys not read: system (1 row)")),
        (r#"{"instruction":"q","output":"a","text":"q a"}"#.to_owned(), Some("keys not read: text (1 row)")),
        (alpaca.to_owned(), None),
        (alpaca.replacen('{', r#"{"id":7,"topic":"t","#, 1), Some("keys not read: id (1 row), topic (1 row)")),
        (r#"{"text":"a","source":"b"}"#.to_owned(), Some("keys not read: source (1 row)")),
        (
            CHAT.replace("\"a\"", r#""a","mask":1,"loss":true"#)
                .replace("\"q\"", r#""q","mask":1,"loss":false,"learn":"""#),
            Some("keys not read: message.loss (1 row), message.mask (1 row)"),
        ),
        (
            r#"{"input_ids":[5,6],"labels":[5,6],"attention_mask":[1,1],"loss_mask":[0,1]}"#.to_owned(),
            Some("keys not read: loss_mask (1 row)"),
        ),
    ];
    for (rows, expected) in cases {
        let report = read(&rows).unwrap().diagnoses[0].to_string();
        let lines = report.matches("keys not read").count();
        assert_eq!(lines, usize::from(expected.is_some()), "{rows}: {report}");
        assert!(report.contains(expected.unwrap_or_default()), "{rows}: {report}");
    }
    let many: Vec<String> = (0..60).map(|index| format!(r#"{{"text":"a","key{index:02}":1,"all":1}}"#)).collect();
    let report = read(many.join("\n")).unwrap().diagnoses[0].to_string();
    assert!(
        report.contains("keys not read: all (60 rows), key00 (1 row), ") && report.contains(", and more"),
        "{report}"
    );
    assert!(!report.contains("key50"), "{report}");
}

#[test]
fn keys_of_pairs_and_named_keys_are_read() {
    let pair = r#"{"prompt":"q","chosen":"a","rejected":"b","instruction":"q","margin":2}"#;
    let preference = |options: &mut EncodeOptions| options.record_format = RecordFormat::Preference;
    let found = read_with(pair, &tokenizer(), preference).unwrap();
    let unread: Vec<&String> = found.diagnoses[0].unread_keys.keys().collect();
    assert_eq!(unread, ["instruction", "margin"]);
    let body = |options: &mut EncodeOptions| options.fields.text = "body".to_owned();
    let found = read_with(r#"{"body":"a","text":"b"}"#, &tokenizer(), body).unwrap();
    assert_eq!(found.diagnoses[0].unread_line().unwrap(), "keys not read: text (1 row)");
}

#[test]
fn data_with_too_little_to_train_on_is_refused() {
    let refused =
        refuses(format!("{CHAT}\n\n{NO_ASSISTANT}\n"), &["1 of 2 records (50.0 %)", "rows.jsonl:3:", "roles: user"]);
    assert!(matches!(refused, DataError::TooManyBadRows { .. }));
    let all = |options: &mut EncodeOptions| options.train_on = TrainOn::All;
    assert!(read_with(NO_ASSISTANT, &tokenizer(), all).is_ok());
    let reasons = ["nothing to train on", "1 record dropped, empty", "No record is longer than max_seq_len"];
    assert!(matches!(refuses(r#"{"text":" "}"#, &reasons), DataError::NothingToTrain { .. }));
    let flags = |options: &mut EncodeOptions| options.train_on = TrainOn::Flags;
    let unflagged = read_with(format!("{CHAT}\n").repeat(2000), &tokenizer(), flags).unwrap_err();
    assert!(matches!(unflagged, DataError::NoFlags(1000)), "{unflagged}");
}

#[test]
fn bad_cells_are_counted_wherever_they_are() {
    let null = CHAT.replace("\"a\"", "null");
    let plain = format!("{CHAT}\n").repeat(20);
    for (content, line) in [(format!("{plain}{null}\n"), 21), (format!("{null}\n{plain}"), 1)] {
        let found = &read(content).unwrap().diagnoses[0];
        assert_eq!((found.rows, found.rows_kept, found.bad_rows), (21, 20, 1));
        let (report, place) =
            (found.to_string(), format!("rows.jsonl:{line}: messages[1].content must be a string, found null"));
        for words in ["1 record dropped, a value is missing or does not fit; first ", place.as_str()] {
            assert!(report.contains(words), "{words:?} is not in {report}");
        }
    }
    let refused = refuses(format!("{CHAT}\n{null}\n"), &["1 of 2 records (50.0 %)", "found null"]);
    assert!(matches!(refused, DataError::TooManyBadRows { .. }));
}

#[test]
fn no_records_and_a_length_of_one_token_are_refused() {
    let one = |options: &mut EncodeOptions| options.max_seq_len = 1;
    assert!(matches!(read_with(CHAT, &tokenizer(), one).unwrap_err(), DataError::SequenceTooShort(1)));
    for (content, why) in [("", "it is empty (0 bytes)"), ("\n \r\n", "every line is blank")] {
        assert!(matches!(refuses(content, &["rows.jsonl has no records", why]), DataError::EmptyDataset { .. }));
    }
}

#[test]
fn a_row_that_cannot_be_read_is_counted_and_named() {
    let good = "{\"text\":\"a\",\"score\":NaN}\n";
    let texts =
        ["NaN", "\"\\ud83d\"", "\"\u{0}\"", "\"\\u0000\"", "\"a\"}}"].map(|text| format!("{{\"text\":{text}}}"));
    for bad in texts.iter().map(String::as_bytes).chain([&b"{"[..], b"[]", b"{\"id\":1}", b"{\"text\":\"\xe9\"}"]) {
        let rows = [good.repeat(10).as_bytes(), bad, b"\n", good.repeat(10).as_bytes()].concat();
        let found = &read(rows).unwrap().diagnoses[0];
        assert_eq!((found.rows, found.rows_kept, found.bad_rows), (21, 20, 1), "{found}");
        assert!(found.to_string().contains("rows.jsonl:11: "), "{found}");
    }
    let refused =
        refuses(good.repeat(1100) + &"{\n".repeat(1900), &["max_bad_share", "rows.jsonl:1101: column 1: not"]);
    assert!(matches!(refused, DataError::TooManyBadRows { .. }));
}

#[test]
fn errors_about_the_tokenizer_name_the_record_that_needs_it() {
    let bare = tokenizer_with(None, &json!({}));
    let error = |content: &str| read_with(content, &bare, |_| {}).unwrap_err().to_string();
    let chat = error(CHAT);
    for words in ["rows.jsonl:1:", "no chat template", "data.chat_template", "chat_template.jinja"] {
        assert!(chat.contains(words), "{words:?} is not in {chat}");
    }
    let text = error(r#"{"text":"a"}"#);
    assert!(text.contains("rows.jsonl:1:") && text.contains("no eos_token"), "{text}");
}

#[test]
fn cached_documents_equal_those_in_memory() {
    let folder = TempDir::new().unwrap();
    let with_functions = CHAT.replacen('{', r#"{"functions":[{"name":"f"}],"#, 1);
    let rows = format!("{CHAT}\n").repeat(19) + &with_functions + "\n" + NO_ASSISTANT;
    let old = file(&folder, "old.jsonl", rows);
    let cache = TokenCache::in_folder(folder.path().join("cache"));
    let tokenizer = tokenizer();
    let options = EncodeOptions::new(64);
    let built = corpus(&tokenizer, &[&old], &options).unwrap().cached(&cache).unwrap();
    assert!(built.is_new && built.diagnoses[0].to_string().contains("old.jsonl:21: "), "{}", built.diagnoses[0]);
    let new = folder.path().join("new.jsonl");
    rename(&old, &new).unwrap();
    let moved = corpus(&tokenizer, &[&new], &options).unwrap();
    let found = moved.cached(&cache).unwrap();
    assert!(!found.is_new && found.diagnoses[0].to_string().contains("new.jsonl:21: "), "{}", found.diagnoses[0]);
    assert_eq!(found.diagnoses[0].unread_line().unwrap(), "keys not read: functions (1 row)");
    let memory = moved.in_memory().unwrap();
    assert_eq!(found.diagnoses, memory.diagnoses);
    assert_eq!(examples(found), examples(memory));
    let mut strict = moved;
    strict.max_bad_share = 0.0;
    assert!(strict.cached(&cache).is_err(), "cached documents are checked like new ones");
}

#[test]
fn another_tokenizer_changes_the_key() {
    let folder = TempDir::new().unwrap();
    let path = file(&folder, "rows.jsonl", CHAT);
    let other = tokenizer_with(Some(&TEMPLATE.replace('\n', "")), &json!({ "eos_token": "</s>" }));
    let [one, other] = [tokenizer(), other].map(|tokenizer| {
        let corpus = corpus(&tokenizer, &[&path], &EncodeOptions::new(64)).unwrap();
        corpus.key(&firebrick_data::ContentKeys::default()).unwrap()
    });
    assert_ne!(one, other);
}

/// Returns the lines of the held-out records.
fn held_out_lines(tokenized: Tokenized) -> Vec<u32> {
    let (train, held_out) = DocumentSet::all(tokenized.store.into()).split(0.1, &tokenized.dropped).unwrap();
    let lines = |set: &DocumentSet| (0..set.len()).map(|index| set.entry(index).origin.line).collect::<Vec<_>>();
    let mut held_out = lines(&held_out);
    held_out.dedup();
    assert!(lines(&train).iter().all(|line| !held_out.contains(line)), "pieces of one record are on both sides");
    held_out
}

#[test]
fn the_same_records_are_held_out_under_any_option() {
    // Every tenth record is too long for 40 tokens, and others have no answer.
    let row = |index: usize| match index % 10 {
        0 => CHAT.replace("\"a\"", &format!("\"{}{index}\"", "long ".repeat(40))),
        1 => NO_ASSISTANT.replace("\"q\"", &format!("\"q{index}\"")),
        _ => CHAT.replace("\"q\"", &format!("\"q{index}\"")),
    };
    let rows: Vec<String> = (0..300).map(row).collect();
    let rows = rows.join("\n");
    let held_out = |tokenizer: &Tokenizer, change: &dyn Fn(&mut EncodeOptions)| {
        let folder = TempDir::new().unwrap();
        let mut options = EncodeOptions::new(1000);
        change(&mut options);
        let mut corpus = corpus(tokenizer, &[&file(&folder, "rows.jsonl", &rows)], &options).unwrap();
        corpus.max_bad_share = 1.0;
        held_out_lines(corpus.in_memory().unwrap())
    };
    let expected = held_out(&tokenizer(), &|options| options.train_on = TrainOn::All);
    assert_eq!(expected.len(), 30);
    let dated = TEMPLATE.replace("{{ bos_token }}", "{{ strftime_now('%d %b %Y') }}{{ bos_token }}");
    let mut other = tokenizer_with(Some(&dated), &json!({ "eos_token": "</s>" }));
    let of_kept = |options: &dyn Fn(usize) -> bool| -> Vec<u32> {
        expected.iter().copied().filter(|&line| options(line as usize - 1)).collect()
    };
    for days in 0..3 {
        other.set_date(days * 86_400);
        assert_eq!(held_out(&other, &|options| options.train_on = TrainOn::All), expected);
    }
    let answered = of_kept(&|index| index % 10 != 1);
    assert_eq!(held_out(&tokenizer(), &|_| {}), answered);
    assert_eq!(held_out(&tokenizer(), &|options| options.train_end_of_turn = false), answered);
    assert_eq!(held_out(&tokenizer(), &|options| options.max_seq_len = 40), answered);
    let split =
        |options: &mut EncodeOptions| (options.max_seq_len, options.overflow) = (20, Some(OverflowPolicy::Split));
    assert_eq!(held_out(&tokenizer(), &split), answered);
    let short = of_kept(&|index| index % 10 > 1);
    let drop = |options: &mut EncodeOptions| (options.max_seq_len, options.overflow) = (40, Some(OverflowPolicy::Drop));
    assert_eq!(held_out(&tokenizer(), &drop), short);
}

#[test]
fn by_default_texts_are_split_and_chats_are_cut() {
    let text = json!({ "text": "word ".repeat(100) }).to_string();
    let chat = CHAT.replace("\"a\"", &format!("\"{}\"", "word ".repeat(100)));
    let split = read(text).unwrap();
    assert_eq!((split.diagnoses[0].tokens_cut, split.diagnoses[0].rows_kept), (0, 1));
    assert!(split.store.documents() > 1);
    let cut = read(format!("{CHAT}\n{chat}")).unwrap();
    assert_eq!(cut.store.documents(), 2);
    assert!(cut.diagnoses[0].cut_share() > 0.5, "{}", cut.diagnoses[0]);
    assert!(cut.diagnoses[0].to_string().contains(" % of all tokens"), "{}", cut.diagnoses[0]);
}
