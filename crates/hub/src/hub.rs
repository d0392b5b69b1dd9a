//! Access to the Hub: listings of repositories, and their files in the cache.
//!
//! The commit of a branch is requested once, so a process sees the same commit from beginning to end. If the Hub does not respond, the last commit in
//! the cache is used, with a warning. If a job has several processes, one asks the Hub, and the others learn from it ([`Hub::learn`]).
//! Trade-off: every new process requests the commit again, so that it sees new ones; the listing of a pinned commit is requested only once.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use serde_json::{Value as Json, json};

use crate::cache::RepoCache;
use crate::error::HubError;
use crate::http;
use crate::id::{HubId, RepoKind};
use crate::listing::{HubFile, Listing, Origin};
use crate::settings::HubSettings;

/// Watches transfers. Every method has a default body, so that a watcher implements only what it shows.
pub trait Progress: Send + Sync {
    /// Called when a transfer begins, with its name and its bytes, some of which may be here already.
    fn begin(&self, _what: &str, _bytes: u64) {}
    /// Called when this many more bytes are transferred.
    fn advance(&self, _bytes: u64) {}
    /// Called when the transfer has ended, whether it succeeded or not.
    fn end(&self) {}
}

impl Progress for () {}

/// The answers of the Hub so far.
#[derive(Default)]
struct Known {
    listings: BTreeMap<HubId, Listing>,
    /// The reason why the Hub could not be reached.
    unreachable: Option<String>,
}

/// Access to the Hub with some settings. Clones share the answers so far.
#[derive(Clone)]
pub struct Hub {
    pub(crate) settings: Arc<HubSettings>,
    pub(crate) progress: Arc<dyn Progress>,
    known: Arc<Mutex<Known>>,
}

impl std::fmt::Debug for Hub {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Hub").field("settings", &self.settings).finish_non_exhaustive()
    }
}

impl Hub {
    /// Creates a client with the given settings and without a watcher.
    pub fn new(settings: HubSettings) -> Self {
        Self { settings: Arc::new(settings), progress: Arc::new(()), known: Arc::default() }
    }

    /// Creates a client with the settings of this process's environment variables; the same for every caller.
    pub fn from_environment() -> Self {
        static OF_PROCESS: LazyLock<Hub> = LazyLock::new(|| Hub::new(HubSettings::from_environment()));
        OF_PROCESS.clone()
    }

    /// Sets the watcher of transfers.
    #[must_use]
    pub fn watched_by(self, progress: Arc<dyn Progress>) -> Self {
        Self { progress, ..self }
    }

    /// Returns the settings.
    pub fn settings(&self) -> &HubSettings {
        &self.settings
    }

    /// Asks the Hub for its start page, once and for at most three seconds. Any answer will do.
    ///
    /// # Errors
    /// The reason why there is none, with the address.
    pub fn reach(&self) -> Result<(), String> {
        http::reach(&self.settings.endpoint)
    }

    pub(crate) fn cache(&self, id: &HubId) -> RepoCache {
        RepoCache::new(&self.settings.cache, id.kind, &id.name)
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the listing of a repository: from the Hub, or from the cache if offline, if the revision is a known commit, or, with a warning, if the
    /// Hub cannot be reached. Every call returns the same.
    ///
    /// # Errors
    /// No access; a failed request; offline, or the Hub cannot be reached, and not in the cache.
    pub fn listing(&self, id: &HubId) -> Result<Listing, HubError> {
        // Locked during the request, so that threads do not send the same one.
        let mut known = self.known();
        if let Some(listing) = known.listings.get(id) {
            return Ok(listing.clone());
        }
        let listing = self.resolve(id, &mut known.unreachable)?;
        known.listings.insert(id.clone(), listing.clone());
        Ok(listing)
    }

    fn resolve(&self, id: &HubId, unreachable: &mut Option<String>) -> Result<Listing, HubError> {
        let cache = self.cache(id);
        let commit = cache.commit(&id.revision);
        let stored = commit.as_ref().and_then(|commit| Listing::parse(&cache.listing(commit)?));
        let of_files = || {
            let commit = commit.filter(|commit| cache.snapshot(commit).is_dir())?;
            let files = cache.files(&commit);
            Some(Listing::of_files(commit, files))
        };
        if let Some(listing) = stored.as_ref().filter(|listing| listing.commit == id.revision) {
            return Ok(listing.clone());
        }
        let cached = stored.or_else(of_files);
        if self.settings.is_offline {
            return cached.ok_or_else(|| self.not_cached(id.to_string()));
        }
        let answer = match (unreachable.as_ref(), &cached) {
            // The Hub did not respond a moment ago, and waiting for it may take minutes.
            (Some(reason), Some(_)) => Err(HubError::unreachable(&self.settings.cache, &id.to_string(), reason)),
            _ => http::listing(&self.settings, id),
        };
        let json = match (answer, cached) {
            (Err(HubError::Unreachable { reason, .. }), Some(listing)) => {
                tracing::warn!(
                    "the Hub cannot be reached ({reason}): {id} is taken from the cache, as of commit {}. \
                     HF_HUB_OFFLINE=1 saves the attempt",
                    listing.commit
                );
                *unreachable = Some(reason.clone());
                return Ok(listing.with_origin(Origin::InsteadOfTheHub(reason)));
            }
            (answer, _) => answer?,
        };
        let listing = Listing::parse(&json).ok_or_else(|| {
            let url = format!("{}/api/{}/{}", self.settings.endpoint, id.kind.plural(), id.name);
            HubError::request(&url, "the answer is not a listing")
        })?;
        let listing = listing.with_origin(Origin::Hub);
        self.remember(id, &listing);
        Ok(listing)
    }

    /// Stores the Hub's answer in the cache. A cache that cannot be written can still be read; if it lacks a file, the download reports the error.
    fn remember(&self, id: &HubId, listing: &Listing) {
        let cache = self.cache(id);
        if let Err(error) = cache.set_commit(&id.revision, &listing.commit) {
            tracing::warn!("{error}. Offline, {id} stays at the commit that this cache knows, not {}", listing.commit);
        }
        // Without the listing, only the files in the cache are known of this commit offline.
        let _ = cache.set_listing(&listing.commit, &listing.to_json());
    }

    /// Returns the answers so far, for [`Hub::learn`] in another process.
    pub fn to_share(&self) -> Vec<u8> {
        let entry = |(id, listing): (&HubId, &Listing)| {
            json!({
                "kind": id.kind.noun(), "name": id.name, "revision": id.revision,
                "is_new": listing.origin == Origin::Hub, "listing": listing.to_json(),
            })
        };
        let entries: Vec<Json> = self.known().listings.iter().map(entry).collect();
        Json::from(entries).to_string().into_bytes()
    }

    /// Adopts the answers of another process, which are then not requested again. Those that it got from the Hub are also written into this process's
    /// cache.
    pub fn learn(&self, shared: &[u8]) {
        let entries: Vec<Json> = serde_json::from_slice(shared).unwrap_or_default();
        for entry in &entries {
            let Some((id, listing)) = shared_listing(entry) else { continue };
            if entry["is_new"] == true {
                self.remember(&id, &listing);
            }
            self.known().listings.insert(id, listing);
        }
    }

    pub(crate) fn not_cached(&self, what: String) -> HubError {
        HubError::NotCached { what, cache: self.settings.cache.clone() }
    }

    /// Returns the place of a file in the cache, and whether it is there.
    pub(crate) fn place(&self, file: &HubFile) -> (PathBuf, bool) {
        let cache = RepoCache::new(&self.settings.cache, file.kind, &file.name);
        let place = cache.file(&file.commit, &file.path);
        let is_there = place.is_file();
        (place, is_there)
    }

    /// Returns whether only the cache may be used.
    pub(crate) fn is_closed(&self, listing: &Listing) -> bool {
        self.settings.is_offline || listing.unreachable().is_some()
    }

    /// Builds the error for a file that the cache lacks if [`Hub::is_closed`].
    pub(crate) fn absent(&self, listing: &Listing, what: String) -> HubError {
        match listing.unreachable() {
            Some(reason) => HubError::unreachable(&self.settings.cache, &what, reason),
            None => self.not_cached(what),
        }
    }

    /// Checks that all files to be read are in the cache, if offline or without a connection to the Hub; with a row limit, at least the first.
    ///
    /// # Errors
    /// The first that is missing.
    pub fn check_cached(
        &self,
        id: &HubId,
        listing: &Listing,
        paths: &[String],
        is_limited: bool,
    ) -> Result<(), HubError> {
        if !self.is_closed(listing) {
            return Ok(());
        }
        let needed = if is_limited { &paths[..paths.len().min(1)] } else { paths };
        let missing = listing.files(id, needed).find(|file| !self.place(file).1);
        missing.map_or(Ok(()), |file| Err(self.absent(listing, file.to_string())))
    }
}

/// Parses an entry of [`Hub::to_share`].
fn shared_listing(entry: &Json) -> Option<(HubId, Listing)> {
    let text = |key: &str| entry[key].as_str();
    let kind = [RepoKind::Model, RepoKind::Dataset].into_iter().find(|kind| Some(kind.noun()) == text("kind"))?;
    Some((HubId::parse(kind, text("name")?, text("revision"))?, Listing::parse(&entry["listing"])?))
}
