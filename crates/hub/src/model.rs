//! Selects the files of a repository that make up a model or an adapter, and downloads nothing else.
//!
//! Only safetensors weights are used; copies in other formats, which many repositories also contain, are not downloaded. A commit that another
//! program downloaded needs no request if it is a whole model: config, tokenizer, all weights, and chat template and settings of generation, or that
//! program's note that the commit has none.
//! Trade-off: only the files in a repository's top folder count, not models in subfolders. If another program downloaded a commit without other
//! optional files, they are not noticed.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

use firebrick_arch::folder::{
    ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE, ADDITIONAL_TEMPLATES, CHAT_SETTINGS_FILE, CHAT_TEMPLATE_FILE,
    CHAT_TEMPLATE_JSON, CONFIG_FILE, GENERATION_CONFIG_FILE, INDEX_FILE, PREPROCESSOR_FILES, TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE, TOKENIZER_FILES, WEIGHTS_FILE, states_terms,
};
use serde_json::Value as Json;

use crate::error::HubError;
use crate::hub::Hub;
use crate::id::{HubId, is_commit};
use crate::listing::{HubFile, Listing, is_safe};

/// Files that describe a model, besides those of its tokenizer: sizes, template, settings of generation and of a run's chats.
const DESCRIPTION: [&str; 8] = [
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    ADAPTER_CONFIG_FILE,
    TOKENIZER_CONFIG_FILE,
    CHAT_TEMPLATE_FILE,
    CHAT_TEMPLATE_JSON,
    CHAT_SETTINGS_FILE,
    "hf_quant_config.json",
];

/// The required part of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// Everything but the weights.
    Description,
    /// The weights too.
    Weights,
}

/// A model in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelFolder {
    /// Its snapshot.
    pub folder: PathBuf,
    /// Bytes of the weights that were not downloaded, because only the description was needed.
    pub missing_bytes: u64,
}

impl Hub {
    /// Returns the snapshot of a model or an adapter, after downloading the files that are not in the cache.
    ///
    /// # Errors
    /// Those of [`Hub::listing`] and [`Hub::fetch`]; a repository without weights in safetensors.
    pub fn model(&self, id: &HubId, need: Need) -> Result<ModelFolder, HubError> {
        let listing = self.whole_snapshot(id).map_or_else(|| self.listing(id), Ok)?;
        let described: Vec<String> = listing.paths().filter(|path| is_description(path)).map(str::to_owned).collect();
        self.bring(&id.to_string(), id, &listing, &described)?;
        let weights = self.weights(id, &listing)?;
        if need == Need::Weights {
            self.bring(&format!("the weights of {id}"), id, &listing, &weights)?;
        }
        let missing = listing.files(id, &weights).filter(|file| !self.place(file).1).filter_map(|file| file.size);
        Ok(ModelFolder { folder: self.cache(id).snapshot(&listing.commit), missing_bytes: missing.sum() })
    }

    /// Lists the files of a commit in the cache without a stored listing, if they are a whole model or adapter.
    fn whole_snapshot(&self, id: &HubId) -> Option<Listing> {
        let cache = self.cache(id);
        if self.settings.is_offline || !is_commit(&id.revision) || cache.listing(&id.revision).is_some() {
            return None;
        }
        let listing = Listing::of_files(id.revision.clone(), cache.files(&id.revision));
        let has_config = listing.has(CONFIG_FILE) || listing.has(ADAPTER_CONFIG_FILE);
        let has_tokenizer = listing.has(TOKENIZER_FILE) && listing.has(TOKENIZER_CONFIG_FILE);
        // Without one of these a model silently renders chats or ends its texts differently.
        let is_settled = |file| listing.has(file) || cache.is_known_absent(&id.revision, file);
        let has_settings = [CHAT_TEMPLATE_FILE, GENERATION_CONFIG_FILE].into_iter().all(is_settled);
        (has_config && has_tokenizer && has_settings && self.weights(id, &listing).is_ok()).then_some(listing)
    }

    /// Downloads files that are not in the cache.
    fn bring(&self, what: &str, id: &HubId, listing: &Listing, paths: &[String]) -> Result<(), HubError> {
        self.check_cached(id, listing, paths, false)?;
        self.fetch_all(what, &listing.files(id, paths).collect::<Vec<HubFile>>())
    }

    /// Returns the paths of the weights, with the precedence of a model folder: one file before an index.
    fn weights(&self, id: &HubId, listing: &Listing) -> Result<Vec<String>, HubError> {
        let name = if listing.has(ADAPTER_CONFIG_FILE) { ADAPTER_WEIGHTS_FILE } else { WEIGHTS_FILE };
        if listing.has(name) {
            return Ok(vec![name.to_owned()]);
        }
        if listing.has(INDEX_FILE) {
            return self.shards(id, listing);
        }
        let others: Vec<&str> = listing.paths().filter(|path| !path.contains('/')).take(12).collect();
        let others = others.join(", ");
        let hint = if let Some(reason) = listing.unreachable() {
            format!("the cache holds {others}, and the Hub cannot be reached ({reason})")
        } else if self.settings.is_offline {
            format!("the cache holds {others}, and the Hub is off (HF_HUB_OFFLINE)")
        } else if listing.paths().any(|path| path.ends_with(".gguf")) {
            format!("it has {others}. GGUF files are for inference; take the repository that they were made from")
        } else {
            format!(
                "it has {others}. Convert pytorch_model.bin by loading it with transformers and calling save_pretrained, or take \
                 another revision (often refs/pr/1 holds a conversion)"
            )
        };
        Err(HubError::NotAModel { id: id.to_string(), missing: "weights in safetensors", hint })
    }

    /// Reads the names of the shards from the index.
    fn shards(&self, id: &HubId, listing: &Listing) -> Result<Vec<String>, HubError> {
        let index = [INDEX_FILE.to_owned()];
        self.check_cached(id, listing, &index, false)?;
        let path = self.fetch(&listing.files(id, &index).next().expect("one file was named"))?;
        let text = fs::read(&path).map_err(HubError::cache(&path))?;
        let json: Json = serde_json::from_slice(&text).unwrap_or_default();
        let shards = json["weight_map"].as_object().into_iter().flat_map(|map| map.values()).filter_map(Json::as_str);
        let shards: BTreeSet<String> = shards.filter(|path| is_safe(path)).map(str::to_owned).collect();
        let not_a_model = |hint| Err(HubError::NotAModel { id: id.to_string(), missing: "complete weights", hint });
        if shards.is_empty() {
            return not_a_model(format!("{INDEX_FILE} names no file"));
        }
        match shards.iter().find(|shard| !listing.has(shard)) {
            None => Ok(shards.into_iter().collect()),
            Some(shard) if self.is_closed(listing) => Err(self.absent(listing, format!("{shard} of {id}"))),
            Some(shard) => not_a_model(format!("{INDEX_FILE} names {shard}, which is not there")),
        }
    }
}

fn is_description(path: &str) -> bool {
    match path.split_once('/') {
        Some((folder, _)) => folder == ADDITIONAL_TEMPLATES,
        None => {
            let is_listed =
                DESCRIPTION.iter().chain(&TOKENIZER_FILES).chain(&PREPROCESSOR_FILES).any(|file| *file == path);
            is_listed || states_terms(path)
        }
    }
}
