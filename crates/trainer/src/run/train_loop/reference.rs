//! Computes the log-probabilities of a preference loss's reference before training, if the model cannot be its own reference later: every weight
//! trains, or the adapter did not start at zero.
//!
//! They are cached next to the tokens, under a key of everything that they depend on: the documents, the content of the weights, the description of
//! the model, and the fields of `state/reference_identity.rs`. All ranks take turns at the batches.
//! Trade-off: for a model with random weights, and for data too small to be cached, every run computes them.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn_tensor::{Tensor, TensorData};
use firebrick_data::PackedDataset;
use firebrick_kernels::{Hint, Kernels};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::console::Console;
use crate::error::RunError;
use crate::plan::Plan;
use crate::run::prepare::Prepared;
use crate::run::step::Trainer;
use crate::run::step::assemble::loader_once;
use crate::run::step::preference::Reference;
use crate::state::reference_identity::ReferenceIdentity;
use crate::storage::{StorageError, write_atomically};

/// Incremented when the same inputs give other log-probabilities.
const VERSION: u64 = 2;
const MAGIC: &[u8; 8] = b"FBREFLP1";

/// Computes the log-probabilities for the rows to train on and those to evaluate on, if the reference needs them. Returns the file in which those of
/// the training rows were found, if they were.
///
/// # Errors
/// The adapter to start from cannot be read, the cache cannot be written, or a rank is gone.
pub(super) fn prepare<B: Kernels>(
    prepared: &mut Prepared,
    trainer: &mut Trainer<B>,
    identity: Option<&ReferenceIdentity>,
    console: Console,
) -> Result<Option<PathBuf>, RunError> {
    let Some(identity) = identity else { return Ok(None) };
    let plan = &prepared.plan;
    let cache = match (&prepared.cache, trainer.model.base_hash()) {
        (Some(folder), Some(weights)) => Some((folder.as_path(), key_of_model(prepared, identity, weights))),
        _ => None,
    };
    let mut pass = ReferencePass { trainer, plan, cache, is_adapter_loaded: false, console };
    let (train, found_in) = pass.of(&prepared.train, plan.micro_batch_size.value)?;
    let held_out = prepared.evaluation.rows().next().cloned();
    if let Some(rows) = held_out {
        let (held_out, _) = pass.of(&rows, plan.eval_micro_batch_size.value)?;
        prepared.evaluation.set_reference(Reference::Cached(held_out));
    }
    if let Some(pairs) = &mut trainer.settings.pairs {
        pairs.reference = Reference::Cached(train);
    }
    Ok(found_in)
}

/// Log-probabilities of a set, and the file in which they were found.
type FoundSums = (Arc<Vec<f32>>, Option<PathBuf>);

/// A pass that computes a set's log-probabilities.
struct ReferencePass<'a, B: Kernels> {
    trainer: &'a mut Trainer<B>,
    /// Names the adapter that the run starts from.
    plan: &'a Plan,
    /// The cache folder, and the hash of the model that the sums come from; `None` if they are not cached.
    cache: Option<(&'a Path, Xxh3)>,
    /// Whether the trainer has loaded the matrices of the adapter that the run starts from.
    is_adapter_loaded: bool,
    console: Console,
}

impl<B: Kernels> ReferencePass<'_, B> {
    /// Returns one sum per document, over the targets of its answer, and the file in which the sums were found, if they were.
    fn of(&mut self, rows: &Arc<PackedDataset>, rows_per_batch: usize) -> Result<FoundSums, RunError> {
        let file = self.file(rows);
        let documents = rows.documents().len();
        let found = file.as_deref().and_then(|file| read(file, documents));
        // Either all ranks compute or none: they may see different folders.
        let missing = self.trainer.ranks.all_reduce_count(u64::from(found.is_none()))?;
        if let (Some(sums), 0) = (found, missing) {
            let shown = file.as_deref().unwrap_or(Path::new("")).display();
            self.console.print(&format!("reference: log-probabilities of {documents} answers, found in {shown}"));
            return Ok((Arc::new(sums), file));
        }
        if let (Some(adapter), false) = (&self.plan.lora_init_from.value, self.is_adapter_loaded) {
            self.trainer.model.load_adapter(adapter)?;
            self.is_adapter_loaded = true;
        }
        let sums = self.compute(rows, rows_per_batch)?;
        let how = match &file {
            Some(file) if self.trainer.ranks.is_main() => {
                write(file, &sums)?;
                format!("computed now, stored in {}", file.display())
            }
            _ => "computed now".to_owned(),
        };
        self.console.print(&format!("reference: log-probabilities of {documents} answers, {how}"));
        Ok((Arc::new(sums), None))
    }

    /// Returns the cache file of these rows; `None` if nothing is cached.
    fn file(&self, rows: &PackedDataset) -> Option<PathBuf> {
        let (folder, mut key) = self.cache.clone()?;
        let documents = rows.documents();
        (0..documents.len()).for_each(|document| key.update(&documents.entry(document).hash.to_le_bytes()));
        Some(folder.join(format!("{:032x}.reference", key.digest128())))
    }

    fn compute(&self, rows: &Arc<PackedDataset>, rows_per_batch: usize) -> Result<Vec<f32>, RunError> {
        let Trainer { model, ranks, settings, .. } = &*self.trainer;
        let mut sums = vec![0.0; rows.documents().len()];
        let batches = rows.rows().div_ceil(rows_per_batch * ranks.world_size());
        let mut loader = loader_once(rows, rows_per_batch, ranks.rank(), ranks.world_size());
        let done = Arc::new(AtomicUsize::new(0));
        let shown = Arc::clone(&done);
        let _shown =
            self.console.activity(move || format!("reference: batch {} of {batches}", shown.load(Ordering::Relaxed)));
        while let Some((batch, _)) = loader.next_batch() {
            let tokens = model.upload(&batch.input_ids, &batch.targets, &batch.positions, &batch.cu_seqlens)?;
            let is_answer = batch.pairs.as_ref().and_then(|pairs| pairs.is_answer.as_deref());
            let targets = model.upload_pairs(&batch.targets, is_answer, &batch.cu_seqlens);
            // The adapter takes part, as it is before the first step.
            let found = model.answer_log_probs(&tokens, targets.as_ref(), true, settings.loss_chunk_tokens);
            if let (Some(found), Some(pairs)) = (found, &batch.pairs) {
                for (value, &document) in found.into_data().iter::<f32>().zip(&pairs.documents) {
                    sums[document as usize] = value;
                }
            }
            done.fetch_add(1, Ordering::Relaxed);
        }
        B::hint(model.device(), Hint::NewSizes);
        if ranks.world_size() == 1 {
            return Ok(sums);
        }
        // Each rank has the sums of its own documents, and zeros for the others.
        let count = sums.len();
        let sums = Tensor::<B, 1>::from_data(TensorData::new(sums, [count]), model.device());
        Ok(ranks.all_reduce_scalar(sums)?.into_data().iter::<f32>().collect())
    }
}

/// Hashes the model before its first step and the backend; the hash of the documents is added to it.
fn key_of_model(prepared: &Prepared, identity: &ReferenceIdentity, weights: u64) -> Xxh3 {
    let identity = serde_json::to_vec(identity).expect("an identity of plain fields is expressible as JSON");
    let model = format!("{:?} {}", prepared.model_config.spec, prepared.plan.backend.value);
    let mut key = Xxh3::new();
    [VERSION, weights].into_iter().for_each(|part| key.update(&part.to_le_bytes()));
    key.update(&identity);
    key.update(model.as_bytes());
    key
}

/// Reads the stored sums; `None` if the file is missing or belongs to something else.
fn read(file: &Path, documents: usize) -> Option<Vec<f32>> {
    let bytes = fs::read(file).ok()?;
    let (magic, rest) = bytes.split_at_checked(MAGIC.len())?;
    let (hash, values) = rest.split_at_checked(8)?;
    let is_whole = magic == MAGIC && values.len() == 4 * documents && hash == xxh3_64(values).to_le_bytes();
    is_whole.then(|| values.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
}

fn write(file: &Path, sums: &[f32]) -> Result<(), RunError> {
    let values: Vec<u8> = sums.iter().flat_map(|value| value.to_le_bytes()).collect();
    let bytes = [&MAGIC[..], &xxh3_64(&values).to_le_bytes(), &values].concat();
    if let Some(folder) = file.parent() {
        fs::create_dir_all(folder).map_err(|source| StorageError::io("create", folder, source))?;
    }
    Ok(write_atomically(file, &bytes)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stored_sums_come_back_unless_the_file_is_damaged_or_of_other_documents() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("new/1.reference");
        let sums = vec![-1.5, 0.0, -1e-7];
        assert_eq!(read(&file, 3), None);
        write(&file, &sums).unwrap();
        assert_eq!((read(&file, 3), read(&file, 2)), (Some(sums), None));
        let mut bytes = fs::read(&file).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&file, bytes).unwrap();
        assert_eq!(read(&file, 3), None);
    }
}
