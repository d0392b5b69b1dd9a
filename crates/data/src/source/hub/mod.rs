//! Datasets of the Hugging Face Hub: listed, selected, and downloaded into the cache that `huggingface_hub` also uses.
//!
//! Written against the Hub's HTTP interface rather than with the `hf-hub` crate: version 1.0 brings an asynchronous
//! runtime, its own storage protocol and a C library for cryptography; version 0.5 supports neither offline use nor
//! dataset listings by commit. Not supported: uploads and the Xet protocol (the Hub serves all files without it).

mod cache;
mod client;
mod listing;
mod settings;
#[cfg(test)]
mod tests;

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::error::SourceError;
use cache::DatasetCache;
use client::Content;
pub use client::http_agent;
pub(super) use listing::{HubFile, HubId, Listing};
pub use settings::HubSettings;

const CHUNK_BYTES: usize = 1 << 20;
const ATTEMPTS: u32 = 5;

/// Access to the Hub with some settings.
#[derive(Debug, Clone)]
pub struct Hub {
    settings: Arc<HubSettings>,
}

impl Hub {
    /// With the given settings.
    pub fn new(settings: HubSettings) -> Self {
        Self { settings: Arc::new(settings) }
    }

    /// With the settings of this process's environment variables.
    pub fn from_environment() -> Self {
        Self::new(HubSettings::from_environment())
    }

    fn cache(&self, name: &str) -> DatasetCache {
        DatasetCache::new(&self.settings.cache, name)
    }

    /// The listing of a dataset: from the Hub, or from the cache if offline or if the revision is a known commit.
    pub(super) fn listing(&self, id: &HubId) -> Result<Listing, SourceError> {
        let cache = self.cache(&id.name);
        let known = cache.commit(&id.revision);
        if self.settings.is_offline {
            let commit = known.ok_or_else(|| self.not_cached(id.to_string()))?;
            let stored = cache.listing(&commit).and_then(|json| Listing::parse(&json));
            return Ok(stored.unwrap_or_else(|| Listing::of_files(commit.clone(), cache.files(&commit))));
        }
        if known.as_deref() == Some(&id.revision)
            && let Some(listing) = cache.listing(&id.revision).and_then(|json| Listing::parse(&json))
        {
            return Ok(listing);
        }
        let json = client::listing(&self.settings, id)?;
        let listing = Listing::parse(&json).ok_or_else(|| {
            client::failed(&format!("{}/api/datasets/{}", self.settings.endpoint, id.name), "not a listing".to_owned())
        })?;
        cache.set_commit(&id.revision, &listing.commit)?;
        cache.set_listing(&listing.commit, &Listing::offline_part(&json))?;
        Ok(listing)
    }

    fn not_cached(&self, what: String) -> SourceError {
        SourceError::Hub(format!(
            "{what} is not in the cache {} and the Hub is off (HF_HUB_OFFLINE): unset HF_HUB_OFFLINE for one run that \
             fetches it, or copy the cache of a machine that has it",
            self.settings.cache.display()
        ))
    }

    /// Offline, all files that will be read must be in the cache; with a row limit, at least the first.
    pub(super) fn check_cached(
        &self,
        id: &HubId,
        listing: &Listing,
        paths: &[String],
        is_limited: bool,
    ) -> Result<(), SourceError> {
        if !self.settings.is_offline {
            return Ok(());
        }
        let cache = self.cache(&id.name);
        let needed = if is_limited { &paths[..paths.len().min(1)] } else { paths };
        match needed.iter().find(|path| !cache.file(&listing.commit, path).is_file()) {
            Some(missing) => Err(self.not_cached(format!("{missing} of {id}"))),
            None => Ok(()),
        }
    }

    /// The path of a file in the cache; downloaded if it is not there.
    pub(super) fn fetch(&self, file: &HubFile) -> Result<PathBuf, SourceError> {
        let cache = self.cache(&file.id);
        let place = cache.file(&file.commit, &file.path);
        if place.is_file() {
            return Ok(place);
        }
        if self.settings.is_offline {
            return Err(self.not_cached(file.to_string()));
        }
        let content = client::content(&self.settings, &file.id, &file.commit, &file.path, 0)?;
        let etag = content.etag.clone();
        let _lock = cache.lock(&etag)?;
        if !cache.blob(&etag).is_file() {
            self.download(file, content, &cache.blob(&etag))?;
        }
        cache.link(&etag, &file.commit, &file.path)
    }

    /// Downloads content into the cache and resumes an interrupted download.
    fn download(&self, file: &HubFile, first: Content, blob: &Path) -> Result<(), SourceError> {
        let partial = blob.with_extension("incomplete");
        let failed = |reason: std::io::Error| cache::failed(&partial, &reason);
        fs::create_dir_all(blob.parent().expect("inside the cache")).map_err(failed)?;
        let (etag, size) = (first.etag.clone(), first.size);
        let mut output = File::options().create(true).append(true).open(&partial).map_err(failed)?;
        let mut done = output.metadata().map_err(failed)?.len();
        if size.is_some_and(|size| done > size) {
            output.set_len(0).map_err(failed)?;
            done = 0;
        }
        let mut content = (done == 0).then_some(first);
        let (mut attempt, mut chunk) = (0, vec![0; CHUNK_BYTES]);
        while size != Some(done) {
            let next = match content.take() {
                Some(content) => content,
                None => client::content(&self.settings, &file.id, &file.commit, &file.path, done)?,
            };
            // Other content, or the content from its beginning: the partial file cannot be continued.
            if next.etag != etag || next.begins_at != done {
                output.set_len(0).map_err(failed)?;
                done = 0;
                if next.etag != etag || next.begins_at != 0 {
                    attempt = self.retry_after(attempt, file, "the file changed while it was downloaded")?;
                    continue;
                }
            }
            let (mut body, before) = (next.body, done);
            let reason = loop {
                match body.read(&mut chunk) {
                    Ok(0) if size.is_none_or(|size| size == done) => break None,
                    Ok(0) => break Some("the connection ended early".to_owned()),
                    Ok(count) => {
                        output.write_all(&chunk[..count]).map_err(failed)?;
                        done += count as u64;
                    }
                    Err(reason) => break Some(reason.to_string()),
                }
            };
            let Some(reason) = reason else { break };
            // What was resumed and went on may be interrupted any number of times.
            let is_resumed = before > 0 && done > before;
            attempt = self.retry_after(if is_resumed { 0 } else { attempt }, file, &reason)?;
        }
        output.sync_all().map_err(failed)?;
        fs::rename(&partial, blob).map_err(failed)
    }

    fn retry_after(&self, attempt: u32, file: &HubFile, reason: &str) -> Result<u32, SourceError> {
        if attempt + 1 >= ATTEMPTS {
            return Err(client::failed(&format!("{}/datasets/{file}", self.settings.endpoint), reason.to_owned()));
        }
        Ok(attempt + 1)
    }
}
