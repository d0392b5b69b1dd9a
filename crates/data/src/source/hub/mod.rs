//! Datasets of the Hugging Face Hub: listed, chosen, fetched into the cache that `huggingface_hub` uses too.
//!
//! Written against the Hub's interface rather than with the `hf-hub` crate: 1.0 brings an asynchronous runtime, its own
//! storage protocol and a C library for cryptography; 0.5 knows neither offline work nor datasets' listings by commit.
//! Gives up uploads and the Xet protocol (the Hub serves all files without it).

mod cache;
mod client;
mod listing;
mod settings;
#[cfg(test)]
mod tests;

use std::fmt::{Debug, Display, Formatter, Result as FormatResult};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::error::SourceError;
use cache::DatasetCache;
use client::Content;
pub(super) use listing::Listing;
pub use settings::HubSettings;

const CHUNK_BYTES: usize = 1 << 20;
const ATTEMPTS: u32 = 5;

/// A dataset as it is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct HubId {
    /// `owner/name`.
    name: String,
    /// Branch, tag or commit.
    revision: String,
}

impl HubId {
    /// Of `owner/name`, `owner/name@revision` or `hf://datasets/...`; none if it is neither. A `revision` besides wins.
    pub(super) fn parse(text: &str, revision: Option<&str>) -> Option<Self> {
        let text = text.strip_prefix("hf://datasets/").unwrap_or(text).trim_end_matches('/');
        let (name, inside) = text.split_once('@').map_or((text, None), |(name, revision)| (name, Some(revision)));
        let (owner, dataset) = name.split_once('/')?;
        let is_part = |part: &str| {
            let is_letter = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
            (1..=96).contains(&part.len()) && part.bytes().all(is_letter) && !part.starts_with('.')
        };
        let revision = revision.or(inside).unwrap_or("main");
        let is_revision = revision.split('/').all(|part| !part.is_empty() && !part.starts_with('.'))
            && !revision.contains(['\\', ':', '\0']);
        (is_part(owner) && is_part(dataset) && is_revision)
            .then(|| Self { name: name.to_owned(), revision: revision.to_owned() })
    }
}

impl Display for HubId {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> FormatResult {
        match self.revision.as_str() {
            "main" => formatter.write_str(&self.name),
            revision => write!(formatter, "{}@{revision}", self.name),
        }
    }
}

/// A file of a dataset at a commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct HubFile {
    id: String,
    commit: String,
    path: String,
    /// Bytes, 0 where unknown.
    pub(super) size: u64,
}

impl Display for HubFile {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> FormatResult {
        write!(formatter, "{}@{}/{}", self.id, self.commit, self.path)
    }
}

/// How far the download of a file is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Download<'a> {
    /// `owner/name@commit/path`.
    pub file: &'a str,
    /// Bytes that are there.
    pub done: u64,
    /// Bytes of the whole file, if the server said so.
    pub size: Option<u64>,
}

/// Who is told of downloads.
type Watch = Arc<dyn Fn(Download<'_>) + Send + Sync>;

/// The Hub, as this run may use it.
#[derive(Clone)]
pub struct Hub {
    settings: Arc<HubSettings>,
    watch: Option<Watch>,
}

impl Debug for Hub {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> FormatResult {
        self.settings.fmt(formatter)
    }
}

impl Hub {
    /// With settings of one's own.
    pub fn new(settings: HubSettings) -> Self {
        Self { settings: Arc::new(settings), watch: None }
    }

    /// With the settings of this process's variables.
    pub fn from_environment() -> Self {
        Self::new(HubSettings::from_environment())
    }

    /// Calls `watch` about every MiB of a download.
    #[must_use]
    pub fn with_watch(self, watch: impl Fn(Download<'_>) + Send + Sync + 'static) -> Self {
        Self { watch: Some(Arc::new(watch)), ..self }
    }

    fn cache(&self, name: &str) -> DatasetCache {
        DatasetCache::new(&self.settings.cache, name)
    }

    /// What a dataset holds; asked of the Hub, or offline and for a known commit of the cache.
    pub(super) fn listing(&self, id: &HubId) -> Result<Listing, SourceError> {
        let cache = self.cache(&id.name);
        let known = cache.commit(&id.revision);
        if self.settings.is_offline {
            let commit = known.ok_or_else(|| self.not_cached(id.to_string()))?;
            let kept = cache.listing(&commit).and_then(|json| Listing::parse(&json));
            return Ok(kept.unwrap_or_else(|| Listing::of_files(commit.clone(), cache.files(&commit))));
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
        cache.set_listing(&listing.commit, &Listing::essence(&json))?;
        Ok(listing)
    }

    fn not_cached(&self, what: String) -> SourceError {
        let hint = "unset HF_HUB_OFFLINE for one run that fetches it, or copy the cache of a machine that has it";
        SourceError::HubOffline { what, cache: self.settings.cache.clone(), hint: hint.to_owned() }
    }

    /// Offline, all files that will be read must be there; with a row limit, at least the first.
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

    /// The place of a file in the cache; fetched if it is not there.
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

    /// Fetches a content into the cache, going on where an earlier attempt broke off.
    fn download(&self, file: &HubFile, first: Content, blob: &Path) -> Result<(), SourceError> {
        let half = blob.with_extension("incomplete");
        let failed = |reason: std::io::Error| cache::failed(&half, &reason);
        fs::create_dir_all(blob.parent().expect("inside the cache")).map_err(failed)?;
        let (etag, size) = (first.etag.clone(), first.size);
        let mut output = File::options().create(true).append(true).open(&half).map_err(failed)?;
        let mut done = output.metadata().map_err(failed)?.len();
        if size.is_some_and(|size| done > size) {
            output.set_len(0).map_err(failed)?;
            done = 0;
        }
        let mut content = (done == 0).then_some(first);
        let mut attempt = 0;
        while size != Some(done) {
            let next = match content.take() {
                Some(content) => content,
                None => client::content(&self.settings, &file.id, &file.commit, &file.path, done)?,
            };
            // Another content, or all of it again: what is there cannot be gone on with.
            if next.etag != etag || next.begins_at != done {
                output.set_len(0).map_err(failed)?;
                done = 0;
                if next.etag != etag || next.begins_at != 0 {
                    attempt = self.give_up_after(attempt, file, "the file changed while it was fetched")?;
                    continue;
                }
            }
            let before = done;
            let ended = self.copy(next.body, &mut output, &mut done, size, file)?;
            let is_whole = size.is_none_or(|size| size == done);
            if let Err(reason) = ended {
                attempt = self.give_up_after(if done > before { 0 } else { attempt }, file, &reason)?;
            } else if is_whole {
                break;
            } else {
                attempt = self.give_up_after(attempt, file, "the connection ended early")?;
            }
        }
        output.sync_all().map_err(failed)?;
        fs::rename(&half, blob).map_err(failed)
    }

    fn give_up_after(&self, attempt: u32, file: &HubFile, reason: &str) -> Result<u32, SourceError> {
        if attempt + 1 >= ATTEMPTS {
            return Err(client::failed(&format!("{}/datasets/{file}", self.settings.endpoint), reason.to_owned()));
        }
        Ok(attempt + 1)
    }

    /// Copies until the end or a failure of the network (the inner error); the outer error is one of the disk.
    fn copy(
        &self,
        mut body: Box<dyn Read + Send>,
        output: &mut File,
        done: &mut u64,
        size: Option<u64>,
        file: &HubFile,
    ) -> Result<Result<(), String>, SourceError> {
        let name = file.to_string();
        let mut chunk = vec![0; CHUNK_BYTES];
        loop {
            let count = match body.read(&mut chunk) {
                Ok(0) => return Ok(Ok(())),
                Ok(count) => count,
                Err(reason) => return Ok(Err(reason.to_string())),
            };
            let written = output.write_all(&chunk[..count]);
            written.map_err(|reason| cache::failed(&self.settings.cache, &reason))?;
            *done += count as u64;
            if let Some(watch) = &self.watch {
                watch(Download { file: &name, done: *done, size });
            }
        }
    }
}
