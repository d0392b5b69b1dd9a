//! What model a folder holds: its config.json, and what its tensors say against that.
//!
//! A tensor that is left out because config.json, or the way of old checkpoints, has something else in its place is compared with that. transformers
//! does the same with a head that config.json ties to the embedding.
//! Trade-off: a tied folder that stores its head as well is read once more, up to the first difference.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use firebrick_arch::{EMBEDDING, HEAD, ModelConfig, Rope, RopeScaling, counted};
use firebrick_precision::difference::{is_within, relative_difference};

use crate::checkpoint::{HfFolder, OLD_BUFFER};
use crate::error::ModelError;

/// Largest relative difference that rounding to a half format explains.
const ROUNDING: f64 = 1e-2;

/// Reads the config.json of a model folder as [`HfFolder::read_config`] does; without weights, or with damaged ones, config.json alone.
pub fn read_config(dir: &Path) -> Result<ModelConfig, ModelError> {
    match HfFolder::open(dir) {
        Ok(folder) => folder.read_config(),
        Err(_) => Ok(ModelConfig::read(dir)?),
    }
}

impl HfFolder {
    /// Reads the folder's config.json. A head in the folder that differs from the embedding is the model's, even if config.json says that they are one
    /// table; that is a warning, as is any other tensor that is left out without being equal to what replaces it, once per folder.
    pub fn read_config(&self) -> Result<ModelConfig, ModelError> {
        let mut config = ModelConfig::read(self.dir())?;
        let notes = self.correct(&mut config)?;
        static WARNED: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());
        if !notes.is_empty() && WARNED.lock().unwrap_or_else(PoisonError::into_inner).insert(self.dir().to_path_buf()) {
            notes.iter().for_each(|note| tracing::warn!("{}: {note}", self.dir().display()));
        }
        Ok(config)
    }

    /// Corrects a description by the folder's tensors, and returns what a user has to know, in sentences.
    fn correct(&self, config: &mut ModelConfig) -> Result<Vec<String>, ModelError> {
        let mut notes = Vec::new();
        if config.ties_without_head && !config.spec.tie_word_embeddings && !self.contains(HEAD) {
            config.set_tied(true);
        }
        if config.spec.tie_word_embeddings && self.contains(HEAD) && !self.same_values(HEAD, EMBEDDING)? {
            config.set_tied(false);
            notes.push(format!(
                "`{HEAD}` differs from `{EMBEDDING}`, although config.json ties them: the model has the head of its own \
                 that is stored. Set tie_word_embeddings to false there to say so"
            ));
        }
        config.unquantized = self.unquantized(&config.spec);
        let skipped = self.names().filter(|name| config.skips(name)).count();
        if skipped > 0 {
            let (tensors, layers) = (counted(skipped, "tensor"), counted(config.skipped_layers.len(), "layer"));
            notes.push(format!(
                "{tensors} of {layers}, which predict more tokens than the next, are neither used nor written"
            ));
        }
        let mut buffers = self.names().filter(|name| name.ends_with(OLD_BUFFER));
        if let Some(name) = buffers.find(|name| !self.is_computed(name, &config.spec.ropes)) {
            notes
                .push(format!("the rotary frequencies in `{name}` are not those of config.json, which the model uses"));
        }
        Ok(notes)
    }

    /// Returns whether a buffer of an old checkpoint holds frequencies that the model computes: scaled, or as they are before.
    fn is_computed(&self, name: &str, ropes: &[Rope]) -> bool {
        let stored = self.info(name).and_then(|info| self.read_f32(name, &info.shape)).unwrap_or_default();
        let is = |rope: &Rope| {
            let plain = Rope { scaling: RopeScaling::Default, ..rope.clone() };
            let computed = [rope, &plain].map(|rope| rope.inverse_frequencies(0).0);
            computed.iter().any(|computed| is_within(relative_difference(&stored, computed, 0.0), ROUNDING))
        };
        ropes.iter().any(is)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;
    use tempfile::tempdir;

    use super::*;
    use crate::checkpoint::{TensorF32, WEIGHTS_FILE, write_safetensors_f32};
    use crate::test_config::{shapes, tiny};

    /// Writes the tiny model with a tied config.json and these further tensors.
    fn folder(dir: &Path, more: &[(&str, TensorF32)]) -> ModelConfig {
        let config = tiny(&[("tie_word_embeddings", json!(true))]).unwrap();
        std::fs::write(dir.join("config.json"), config.text()).unwrap();
        let mut tensors: BTreeMap<String, TensorF32> =
            shapes(&config).into_iter().map(|(name, shape)| (name, counted_up(shape))).collect();
        tensors.extend(more.iter().map(|(name, tensor)| ((*name).to_owned(), tensor.clone())));
        write_safetensors_f32(&dir.join(WEIGHTS_FILE), &tensors).unwrap();
        config
    }

    fn counted_up(shape: Vec<usize>) -> TensorF32 {
        let values = (0..shape.iter().product()).map(|at: usize| at as f32 / 64.0).collect();
        TensorF32 { shape, values }
    }

    #[test]
    fn a_stored_head_is_used_unless_it_is_the_embedding() {
        let equal = counted_up(vec![11, 8]);
        let mut other = equal.clone();
        other.values[87] += 1e-6;
        for (head, is_tied) in [(None, true), (Some(equal), true), (Some(other), false)] {
            let temp = tempdir().unwrap();
            let mut config = folder(temp.path(), &head.map(|head| (HEAD, head)).into_iter().collect::<Vec<_>>());
            let opened = HfFolder::open(temp.path()).unwrap();
            assert_eq!(opened.correct(&mut config).unwrap().len(), usize::from(!is_tied));
            assert_eq!(config.spec.tie_word_embeddings, is_tied);
            assert_eq!(read_config(temp.path()).unwrap(), config);
            opened.check_complete(&config).unwrap();
            assert_eq!(config.text().contains("\"tie_word_embeddings\": false"), !is_tied);
        }
    }

    #[test]
    fn stored_frequencies_are_compared_with_the_model() {
        let (computed, _) = tiny(&[]).unwrap().spec.ropes[0].inverse_frequencies(0);
        for (factor, notes) in [(1.0, 0), (1.002, 0), (2.0, 1)] {
            let temp = tempdir().unwrap();
            let values: Vec<f32> = computed.iter().map(|value| value * factor).collect();
            let buffer = TensorF32 { shape: vec![values.len()], values };
            let mut config = folder(temp.path(), &[("model.layers.0.self_attn.rotary_emb.inv_freq", buffer)]);
            let found = HfFolder::open(temp.path()).unwrap().correct(&mut config).unwrap();
            assert_eq!(found.len(), notes, "{factor}: {found:?}");
        }
    }
}
