//! Reads a JSONL file (chats, texts, instructions, ...), tokenizes it, and packs the documents into sequences of one length.
//!
//! Usage: `pack_jsonl [<data.jsonl> <folder with tokenizer.json> <tokens per sequence>]`; without arguments, the quickstart's data.
//! Trade-off: the tokens stay in memory. `Corpus::cached` keeps them in a file for the next run.
#![expect(clippy::print_stdout, reason = "the report is the output of this program")]

use std::error::Error;
use std::path::Path;
use std::sync::Arc;

use firebrick_data::{
    Corpus, Cursor, DocumentSet, EncodeOptions, Hub, Loader, LoaderConfig, Mix, MixUntil, Mixture, PackOptions,
    PackedDataset, SourceSpec, Tokenizer,
};

const QUICKSTART: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../assets/quickstart");

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let argument = |index: usize, default: String| arguments.get(index).cloned().unwrap_or(default);
    let data = argument(0, format!("{QUICKSTART}/train.jsonl"));
    let tokenizer = Tokenizer::from_folder(Path::new(&argument(1, format!("{QUICKSTART}/base"))))?;
    let max_seq_len = argument(2, "256".to_owned()).parse()?;

    // A source is a file, a pattern, a folder or a Hub dataset. Its first record tells which format the records have.
    let source = SourceSpec::new(data).resolve(&Hub::from_environment())?;
    let mixture = Mixture::new(vec![source], Mix::Concatenate, MixUntil::First, 0)?;
    let corpus = Corpus::new(&tokenizer, mixture, vec![EncodeOptions::new(max_seq_len)])?;

    // Records become documents: tokens, and a mask of the tokens that count in the loss (of a chat, what the assistant says).
    let tokenized = corpus.in_memory()?;
    println!("{}", tokenized.diagnoses[0]);

    // Documents become sequences. None is cut, and none sees its neighbors: positions restart at 0 in each.
    let documents = DocumentSet::all(Arc::new(tokenized.store));
    let packed = Arc::new(PackedDataset::new(documents, PackOptions::new(max_seq_len)));
    let report = packed.report();
    println!("{} documents in {} sequences, {:.1} % filled", report.documents, report.rows, 100.0 * report.efficiency);

    // The loader yields micro-batches in a shuffled order that can be resumed at any cursor.
    let config = LoaderConfig {
        rows_per_batch: 2,
        seed: 0,
        shuffle: true,
        epochs: Some(1),
        rank: 0,
        world_size: 1,
        prefetch: 2,
        workers: 1,
    };
    let mut loader = Loader::new(packed, config, Cursor::default());
    let (batch, cursor) = loader.next_batch().ok_or("the data has no sequences")?;
    let (tokens, loss_tokens) = (batch.tokens(), batch.loss_tokens());
    println!("first micro-batch: {} x {} tokens, {} of padding", batch.rows, batch.row_len, batch.padding);
    println!("{tokens} tokens of documents, {loss_tokens} of them count in the loss");
    println!("documents end at {:?}", &batch.cu_seqlens[1..]);
    println!("the next micro-batch begins at {cursor:?}");
    Ok(())
}
