//! Rates of the whole pipeline and of the bare tokenizer, by template.

use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use firebrick_data::{
    Chat, ContentKeys, Corpus, Cursor, Diagnosis, DocumentSet, EncodeOptions, Hub, Loader, LoaderConfig, Mix, MixUntil,
    Mixture, PackOptions, PackedDataset, Pipeline, SourceSpec, TemplateChoice, Tokenizer, TrainOn,
};
use serde_json::Value;

use crate::chats::Chats;

pub(crate) const MAX_SEQ_LEN: usize = 4096;
pub(crate) const CHATML: &str = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}\
                      {% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
/// Templates of the goldens; generation blocks are removed for the last one.
const PUBLISHED: [&str; 2] = ["llama3", "qwen3"];

pub(crate) fn measure(chats: &Chats, workers: NonZeroUsize, turns: usize) {
    let published = PUBLISHED.map(|name| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/golden/templates/{name}.jinja"));
        (name, std::fs::read_to_string(path).expect("a template of the goldens"))
    });
    let open = |(name, source): &(&'static str, String)| {
        let source = source.replace("{%- generation %}", "").replace("{%- endgeneration %}", "");
        (*name, source.replace("{% generation %}", "").replace("{% endgeneration %}", ""))
    };
    let cases = [("chatml", CHATML.to_owned())].into_iter().chain(published.iter().map(open));
    println!("{workers} threads; M tokens/s, best of {turns}; copies: encode_fast with a tokenizer for each thread");
    println!(
        "{:<9} {:>11} {:>7} {:>9} {:>14} {:>9} {:>7} {:>7}",
        "template", "encode_fast", "copies", "pipeline", "of encode_fast", "of copies", "render", "packed"
    );
    let mut last = None;
    for (name, source) in cases {
        last = Some(case(chats, name, source, workers, turns));
    }
    reading(&chats.rows, turns);
    if let Some(packed) = last {
        loader(packed);
    }
}

/// Prints the rate at which the reading thread parses rows, and the rate at which their content is hashed for the cache's key.
fn reading(rows: &Path, turns: usize) {
    let path = rows.to_str().expect("a plain path");
    let source = SourceSpec::new(path).resolve(&Hub::from_environment()).expect("the rows are there");
    let mut best = [f64::INFINITY; 2];
    for _ in 0..turns {
        keep(&mut best[0], || source.records().map(|record| record.expect("a good row").fields.len()).sum::<usize>());
        keep(&mut best[1], || source.content_key(&ContentKeys::default()).expect("a file that can be read"));
    }
    let [records, hash] = best.map(|seconds| source.bytes() as f64 / seconds / 1e6);
    println!("one thread: {records:.0} MB/s of JSONL read and parsed, {hash:.0} MB/s hashed");
}

fn case(chats: &Chats, name: &str, template: String, workers: NonZeroUsize, turns: usize) -> PackedDataset {
    let mut tokenizer = Tokenizer::from_folder(&chats.tokenizer).expect("a tokenizer's folder");
    tokenizer.choose_template(&TemplateChoice::Text(template)).expect("a template that parses");
    let bare = tokenizers::Tokenizer::from_file(chats.tokenizer.join("tokenizer.json")).expect("a tokenizer");
    let conversations = conversations(chats);
    let texts = rendered(&conversations, &tokenizer);
    let [mut fast, mut copies, mut pipeline, mut render] = [f64::INFINITY; 4];
    let mut made = None;
    for _ in 0..turns {
        keep(&mut fast, || on_threads(&texts, workers, || |text| bare.encode_fast(text, false)));
        made = Some(keep(&mut pipeline, || whole(chats, &tokenizer, workers)));
        let copy = || {
            let own = bare.clone();
            move |text: &str| own.encode_fast(text, false)
        };
        keep(&mut copies, || on_threads(&texts, workers, copy));
        keep(&mut render, || rendered(&conversations, &tokenizer));
    }
    let (packed, diagnosis) = made.expect("at least one turn");
    let tokens = packed.documents().store().tokens() + diagnosis.tokens_cut;
    assert_eq!(on_threads(&texts, workers, || |text| bare.encode_fast(text, false)) as u64, tokens, "{diagnosis}");
    let rate = |seconds: f64| tokens as f64 / seconds / 1e6;
    println!(
        "{name:<9} {:>11.2} {:>7.2} {:>9.2} {:>12.1} % {:>7.1} % {:>5.1} % {:>5.2} %",
        rate(fast),
        rate(copies),
        rate(pipeline),
        100.0 * fast / pipeline,
        100.0 * copies / pipeline,
        // Rendering runs on one thread here.
        100.0 * render / (fast * workers.get() as f64),
        100.0 * packed.report().efficiency
    );
    packed
}

/// Does some work and keeps the minimum of its seconds.
fn keep<T>(seconds: &mut f64, work: impl FnOnce() -> T) -> T {
    let started = Instant::now();
    let result = work();
    *seconds = seconds.min(started.elapsed().as_secs_f64());
    result
}

fn conversations(chats: &Chats) -> Vec<Chat> {
    let text = std::fs::read_to_string(&chats.rows).expect("the rows can be read");
    let chat = |line: &str| {
        let row: Value = serde_json::from_str(line).expect("a row is JSON");
        let messages = row["messages"].as_array().expect("a row has messages").iter();
        Chat::from_messages(messages.map(|message| message.as_object().expect("an object").clone()))
    };
    text.lines().map(chat).collect()
}

fn rendered(conversations: &[Chat], tokenizer: &Tokenizer) -> Vec<String> {
    let template = tokenizer.chat_template().expect("a template was chosen");
    conversations.iter().map(|chat| template.render(chat, false).expect("the template takes all rows")).collect()
}

/// Counts the tokens of all texts. Each thread takes the next text when it is free, and has its own encoding function.
fn on_threads<F: Fn(&str) -> tokenizers::Result<tokenizers::Encoding>>(
    texts: &[String],
    workers: NonZeroUsize,
    encoder: impl Fn() -> F + Sync,
) -> usize {
    let next = AtomicUsize::new(0);
    let count = || {
        let encode = encoder();
        let mut tokens = 0;
        while let Some(text) = texts.get(next.fetch_add(1, Ordering::Relaxed)) {
            tokens += encode(text).expect("a text").len();
        }
        tokens
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..workers.get()).map(|_| scope.spawn(count)).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).sum()
    })
}

/// Runs the pipeline from the file to packed rows.
fn whole(chats: &Chats, tokenizer: &Tokenizer, workers: NonZeroUsize) -> (PackedDataset, Diagnosis) {
    let mut tokenized = corpus(&chats.rows, tokenizer, workers).in_memory().expect("rows that can be trained on");
    let documents = DocumentSet::all(Arc::new(tokenized.store));
    (PackedDataset::new(documents, PackOptions::new(MAX_SEQ_LEN)), tokenized.diagnoses.remove(0))
}

/// Returns the conversations of a file, with the assistant's answers in the loss.
pub(crate) fn corpus<'a>(rows: &Path, tokenizer: &'a Tokenizer, workers: NonZeroUsize) -> Corpus<'a> {
    let path = rows.to_str().expect("a plain path");
    let source = SourceSpec::new(path).resolve(&Hub::from_environment()).expect("the rows are there");
    let mixture = Mixture::new(vec![source], Mix::default(), MixUntil::default(), 0).expect("one source");
    let options = EncodeOptions { train_on: TrainOn::Assistant, ..EncodeOptions::new(MAX_SEQ_LEN) };
    let mut corpus = Corpus::new(tokenizer, mixture, vec![options]).expect("rows of a known format");
    corpus.pipeline = Pipeline { workers };
    corpus
}

/// Prints the rate of packed rows from one thread.
fn loader(packed: PackedDataset) {
    let config = LoaderConfig {
        rows_per_batch: 8,
        seed: 0,
        shuffle: true,
        epochs: None,
        rank: 0,
        world_size: 1,
        prefetch: 2,
        workers: 1,
    };
    let mut loader = Loader::new(Arc::new(packed), config, Cursor::default());
    let (started, mut tokens) = (Instant::now(), 0);
    while started.elapsed() < Duration::from_secs(2) {
        tokens += loader.next_batch().expect("epochs without end").0.tokens();
    }
    println!("loader, one thread: {:.0} M tokens/s", tokens as f64 / started.elapsed().as_secs_f64() / 1e6);
}
