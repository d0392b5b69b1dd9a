//! Access to the Hub: what a repository contains, and its files in the cache.
//!
//! What a branch stands for is requested once, so a process sees one commit of it from its beginning to its end. Where
//! nothing answers, it is the last commit that the cache knows, with a warning.
//! Of several processes of a job one asks the Hub, and the others learn from it ([`Hub::learn`]).
//! Trade-off: every process requests it again, so that it sees new commits; what a pinned commit contains is requested
//! once for all.

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

/// Watches transfers. Every method has a body, so that a watcher writes only what it shows.
pub trait Progress: Send + Sync {
    /// A transfer begins: what, and its bytes, of which some may be here already.
    fn begin(&self, _what: &str, _bytes: u64) {}
    /// So many more bytes are through.
    fn advance(&self, _bytes: u64) {}
    /// The transfer has ended, well or not.
    fn end(&self) {}
}

/// Shows nothing.
impl Progress for () {}

/// What was found out so far.
#[derive(Default)]
struct Known {
    listings: BTreeMap<HubId, Listing>,
    /// Why the Hub could not be reached.
    unreachable: Option<String>,
}

/// Access to the Hub with some settings. Clones share what they know of it.
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
    /// With the given settings; nothing watches.
    pub fn new(settings: HubSettings) -> Self {
        Self { settings: Arc::new(settings), progress: Arc::new(()), known: Arc::default() }
    }

    /// With the settings of this process's environment variables; the same for every caller.
    pub fn from_environment() -> Self {
        static OF_PROCESS: LazyLock<Hub> = LazyLock::new(|| Hub::new(HubSettings::from_environment()));
        OF_PROCESS.clone()
    }

    /// The same, watched.
    #[must_use]
    pub fn watched_by(self, progress: Arc<dyn Progress>) -> Self {
        Self { progress, ..self }
    }

    /// The settings.
    pub fn settings(&self) -> &HubSettings {
        &self.settings
    }

    pub(crate) fn cache(&self, id: &HubId) -> RepoCache {
        RepoCache::new(&self.settings.cache, id.kind, &id.name)
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The listing of a repository: from the Hub, or from the cache if offline, if the revision is a known commit, or,
    /// with a warning, if the Hub cannot be reached. The same at every call.
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
            // Nothing answered a moment ago, and waiting for it may take minutes.
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

    /// Writes down what the Hub said. A cache that cannot be written still gives what it holds; for a file that it
    /// lacks, the download says so.
    fn remember(&self, id: &HubId, listing: &Listing) {
        let cache = self.cache(id);
        if let Err(error) = cache.set_commit(&id.revision, &listing.commit) {
            tracing::warn!("{error}. Offline, {id} stays at the commit that this cache knows, not {}", listing.commit);
        }
        // Without it, the files in the cache are what is known of this commit offline.
        let _ = cache.set_listing(&listing.commit, &listing.to_json());
    }

    /// What is known of repositories so far, for [`Hub::learn`] in another process.
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

    /// Takes over what another process knows; none of it is requested any more. What that process has from the Hub is
    /// written into this one's cache, as if it had been requested here.
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

    /// The place of a file in the cache, and whether it is there.
    pub(crate) fn place(&self, file: &HubFile) -> (PathBuf, bool) {
        let cache = RepoCache::new(&self.settings.cache, file.kind, &file.name);
        let place = cache.file(&file.commit, &file.path);
        let is_there = place.is_file();
        (place, is_there)
    }

    /// Whether the cache must do.
    pub(crate) fn is_closed(&self, listing: &Listing) -> bool {
        self.settings.is_offline || listing.unreachable().is_some()
    }

    /// The error of something that the cache does not hold where [`Hub::is_closed`].
    pub(crate) fn absent(&self, listing: &Listing, what: String) -> HubError {
        match listing.unreachable() {
            Some(reason) => HubError::unreachable(&self.settings.cache, &what, reason),
            None => self.not_cached(what),
        }
    }

    /// Offline, or where the Hub cannot be reached, all files that will be read must be in the cache; with a row limit,
    /// at least the first.
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

/// An entry of [`Hub::to_share`].
fn shared_listing(entry: &Json) -> Option<(HubId, Listing)> {
    let text = |key: &str| entry[key].as_str();
    let kind = [RepoKind::Model, RepoKind::Dataset].into_iter().find(|kind| Some(kind.noun()) == text("kind"))?;
    Some((HubId::parse(kind, text("name")?, text("revision"))?, Listing::parse(&entry["listing"])?))
}
