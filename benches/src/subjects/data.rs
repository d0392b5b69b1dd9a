//! The data path from tokens to micro-batches: packing documents into rows, and the loader with its threads.
//!
//! It runs on the host and does not depend on the backend, so it appears once.
//! Trade-off: documents are synthetic and in memory: reading, templates and tokenizing are not timed.

use std::cell::RefCell;
use std::sync::Arc;

use firebrick_data::{Batch, Cursor, DocumentSet, Example, Loader, LoaderConfig, PackOptions, PackedDataset};
use firebrick_kernels::Kernels;

use super::Setting;
use crate::case::{Case, Comparison, Output, Prepared, key, work};

const ROW: usize = 2048;
const ROWS_PER_BATCH: usize = 8;

pub(super) fn cases<B: Kernels>(setting: &Setting<B>) -> Vec<Case<B>> {
    let documents = if setting.quick { 4_000 } else { 20_000 };
    let set = documents_of(documents);
    let tokens: usize = (0..set.len()).map(|index| set.document(index).len()).sum();
    let sizes = [("documents", documents), ("row", ROW)];
    let case = |pass: &str, units: usize, bytes, prepare| Case {
        key: key("data", pass, "documents of 16 to 1039 tokens", "tokens", &sizes),
        work: work(units as f64, "tokens", 0.0, bytes),
        axis: None,
        tolerance: 0.0,
        set_bytes: 0.0,
        prepare,
    };
    let to_pack = set.clone();
    let pack = case("packing", tokens, 8.0 * documents as f64, Box::new(move || packing(&to_pack)));
    let dataset = Arc::new(PackedDataset::new(set, PackOptions::new(ROW)));
    let batch = ROW * ROWS_PER_BATCH;
    // Read: ids and masks; written: ids, targets and positions.
    let load = case("loader", batch, (5 + 16) as f64 * batch as f64, Box::new(move || loading(&dataset)));
    vec![pack, load]
}

fn documents_of(count: usize) -> DocumentSet {
    let length = |index: usize| 16 + index * 7919 % 1024;
    let example = |index: usize| Example {
        tokens: (0..length(index)).map(|token| ((index + token) % 49_152) as u32).collect(),
        loss_mask: (0..length(index)).map(|token| token >= 8).collect(),
    };
    DocumentSet::from_examples(&(0..count).map(example).collect::<Vec<_>>())
}

/// Packs the documents and checks that none is lost or doubled.
fn packing<B: Kernels>(set: &DocumentSet) -> Prepared<B> {
    let (input, expected) = (set.clone(), set.len());
    let call = move || {
        let packed = PackedDataset::new(input.clone(), PackOptions::new(ROW));
        Output::Number((0..packed.rows()).map(|row| packed.row_documents(row).count()).sum::<usize>() as f64)
    };
    let check =
        move |output: Output<B>| vec![Comparison::of("documents", &[output.number() as f32], &[expected as f32])];
    Prepared::new(call, check)
}

/// Checks that the first batch has the sums of the dataset's rows without threads.
fn loading<B: Kernels>(dataset: &Arc<PackedDataset>) -> Prepared<B> {
    let config = LoaderConfig {
        rows_per_batch: ROWS_PER_BATCH,
        seed: 0,
        shuffle: false,
        epochs: None,
        rank: 0,
        world_size: 1,
        prefetch: 4,
        workers: 2,
    };
    let loader = RefCell::new(Loader::new(dataset.clone(), config, Cursor::default()));
    let call = move || {
        let (batch, _) = loader.borrow_mut().next_batch().expect("the loader repeats its epochs without end");
        Output::Number(checksum(&batch))
    };
    let rows: Vec<usize> = (0..ROWS_PER_BATCH).collect();
    let expected = checksum(&dataset.batch(&rows));
    let check = move |output: Output<B>| {
        vec![Comparison { what: "tokens of the first batch", error: (output.number() - expected).abs() }]
    };
    Prepared::new(call, check)
}

/// Computes a number that changes with ids, targets or their places; exact in f64.
fn checksum(batch: &Batch) -> f64 {
    let mix = |sum: u64, value: u64| (sum * 31 + value) % 1_000_000_007;
    let ids = batch.input_ids.iter().fold(1, |sum, &id| mix(sum, u64::from(id)));
    batch.targets.iter().fold(ids, |sum, &target| mix(sum, (target + 101) as u64)) as f64
}
