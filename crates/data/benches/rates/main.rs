//! The rate of the whole pipeline (reading, rendering, tokenizing, masking, storing, packing) relative to the bare
//! tokenizer, the rate of the loader, and the memory that data larger than memory needs.
//!
//! `cargo bench -p firebrick-data` measures rates, `... -- --gigabytes 5` memory. Both sides of a ratio run in the same
//! process, on the same texts and threads, alternately, and the best of several turns counts. Trade-off: without `--rows`
//! and `--tokenizer`, text and vocabulary come from the files of this repository, not from real conversations.

#![allow(clippy::print_stdout, clippy::print_stderr)]

mod chats;
mod memory;
mod stages;

use std::num::NonZeroUsize;
use std::path::PathBuf;

use firebrick_data::BoundedAllocator;
use mimalloc::MiMalloc;

// As in the trainer.
#[global_allocator]
static ALLOCATOR: BoundedAllocator<MiMalloc> = BoundedAllocator(MiMalloc);

struct Options {
    workers: NonZeroUsize,
    turns: usize,
    rows: Option<PathBuf>,
    tokenizer: Option<PathBuf>,
    gigabytes: Option<f64>,
}

const USAGE: &str = "[--workers N] [--turns N] [--rows CHATS.jsonl] [--tokenizer FOLDER] [--gigabytes SIZE]";

fn main() {
    let options = match Options::read(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(problem) => {
            eprintln!("{problem}\nusage: cargo bench -p firebrick-data -- {USAGE}");
            std::process::exit(2);
        }
    };
    let chats = chats::Chats::new(options.rows.as_deref(), options.tokenizer.as_deref());
    match options.gigabytes {
        Some(gigabytes) => memory::measure(&chats, gigabytes, options.workers),
        None => stages::measure(&chats, options.workers, options.turns),
    }
}

impl Options {
    fn read(mut arguments: impl Iterator<Item = String>) -> Result<Self, String> {
        let workers = std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
        let mut options = Self { workers, turns: 5, rows: None, tokenizer: None, gigabytes: None };
        while let Some(name) = arguments.next() {
            // Cargo adds this argument.
            if name == "--bench" {
                continue;
            }
            let value = arguments.next().ok_or_else(|| format!("{name} needs a value"))?;
            let bad = || format!("{name} {value} is invalid");
            match name.as_str() {
                "--workers" => options.workers = value.parse().map_err(|_| bad())?,
                "--turns" => options.turns = value.parse().map_err(|_| bad())?,
                "--rows" => options.rows = Some(value.into()),
                "--tokenizer" => options.tokenizer = Some(value.into()),
                "--gigabytes" => options.gigabytes = Some(value.parse().map_err(|_| bad())?),
                _ => return Err(format!("unknown option {name}")),
            }
        }
        Ok(options)
    }
}
