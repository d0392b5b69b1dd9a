//! Peak memory of a process that tokenizes a file of many gigabytes into the cache, packs it and loads rows of it.
//!
//! Trade-off: memory is read from Linux (`VmHWM`, and `RssAnon` for the part without mapped files); other systems print none.

use std::fs::{File, read_to_string};
use std::io::{BufWriter, Write};
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use firebrick_data::{DocumentSet, PackOptions, PackedDataset, TemplateChoice, TokenCache, Tokenizer};

use crate::chats::Chats;
use crate::stages::{CHATML, MAX_SEQ_LEN, corpus};

/// Tokenizes files of a tenth of `gigabytes` and of `gigabytes`.
pub(crate) fn measure(chats: &Chats, gigabytes: f64, workers: NonZeroUsize) {
    let mut tokenizer = Tokenizer::from_folder(&chats.tokenizer).expect("a tokenizer's folder");
    tokenizer.choose_template(&TemplateChoice::Text(CHATML.to_owned())).expect("a template that parses");
    println!("{:>8} {:>9} {:>10} {:>9} {:>18}", "GB", "seconds", "M tokens", "M rows", "peak memory, MiB");
    for size in [gigabytes / 10.0, gigabytes] {
        let rows = chats.folder().join("many.jsonl");
        repeat(chats, size, &rows);
        let started = Instant::now();
        let cache = TokenCache::in_folder(chats.folder().join("cache"));
        let (peak, documents) = with_peak(|| {
            let tokenized = corpus(&rows, &tokenizer, workers).cached(&cache).expect("room for the tokens");
            assert!(tokenized.is_new, "another size is another file");
            DocumentSet::all(Arc::new(tokenized.store))
        });
        let seconds = started.elapsed().as_secs_f64();
        let (count, tokens) = (documents.len(), documents.store().tokens());
        let (packing, _) = with_peak(|| PackedDataset::new(documents, PackOptions::new(MAX_SEQ_LEN)));
        println!(
            "{size:>8.2} {seconds:>9.1} {:>10.1} {:>9.2} {:>18} ({} while packing)",
            tokens as f64 / 1e6,
            count as f64 / 1e6,
            peak >> 20,
            packing >> 20
        );
    }
}

/// Writes the conversations repeatedly, up to a size.
fn repeat(chats: &Chats, gigabytes: f64, path: &std::path::Path) {
    let text = read_to_string(&chats.rows).expect("the rows can be read");
    let mut file = BufWriter::new(File::create(path).expect("a file can be made"));
    let mut left = (gigabytes * 1e9) as usize;
    while left > 0 {
        file.write_all(text.as_bytes()).expect("room for the file");
        left = left.saturating_sub(text.len());
    }
    file.flush().expect("room for the file");
}

/// Runs `work` and returns its peak memory in bytes, without mapped files, sampled every 20 ms.
fn with_peak<T>(work: impl FnOnce() -> T) -> (u64, T) {
    let (is_over, peak) = (AtomicBool::new(false), AtomicU64::new(0));
    let result = scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                peak.fetch_max(anonymous_bytes(), Ordering::Relaxed);
                sleep(Duration::from_millis(20));
            }
        });
        let result = work();
        is_over.store(true, Ordering::Relaxed);
        result
    });
    (peak.into_inner(), result)
}

fn anonymous_bytes() -> u64 {
    let status = read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap_or("0");
    let kib = line.split_whitespace().next().and_then(|number| number.parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}
