//! Downloads files of a repository into the cache.
//!
//! When a connection breaks, the bytes received so far stay, and the next attempt requests the rest. The whole file is checked against the hash that
//! is its name before it appears in the cache. If files cannot be locked, each process that needs the same content writes a separate temporary file.
//! Trade-off: the check reads a large file once more, from the page cache.

use std::fs::{self, File};
use std::io::{Read, Result as IoResult, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::cache::RepoCache;
use crate::digest;
use crate::error::HubError;
use crate::http::{self, Content};
use crate::hub::Hub;
use crate::listing::HubFile;

const CHUNK_BYTES: usize = 1 << 20;
/// Tries in a row that each bring less than [`CHUNK_BYTES`].
const ATTEMPTS: u32 = 5;
/// Most bytes of a file whose size neither the listing nor the answer has; files of weights are smaller.
const MAX_UNKNOWN_BYTES: u64 = if cfg!(test) { 4 << 20 } else { 64 << 30 };
/// Files that travel at a time.
const CONNECTIONS: usize = 4;

impl Hub {
    /// Returns the path of a file in the cache, after downloading it if it is not there.
    ///
    /// # Errors
    /// No access; requests that keep failing; content that does not match its hash; a cache that cannot be written; offline and not in the cache.
    pub fn fetch(&self, file: &HubFile) -> Result<PathBuf, HubError> {
        let (place, is_there) = self.place(file);
        if is_there {
            return Ok(place);
        }
        if self.settings.is_offline {
            return Err(self.not_cached(file.to_string()));
        }
        let cache = RepoCache::new(&self.settings.cache, file.kind, &file.name);
        let content = http::content(&self.settings, file, 0)?;
        let etag = content.etag.clone();
        let lock = cache.lock(&etag)?;
        if cache.blob(&etag).is_file() {
            self.progress.advance(file.size.unwrap_or(0));
        } else {
            self.download(file, content, &cache.blob(&etag), lock.is_some())?;
        }
        cache.link(&etag, &file.commit, &file.path)
    }

    /// Fetches files that are not in the cache, several at a time.
    pub(crate) fn fetch_all(&self, what: &str, files: &[HubFile]) -> Result<(), HubError> {
        let missing: Vec<&HubFile> = files.iter().filter(|file| !self.place(file).1).collect();
        if missing.is_empty() {
            return Ok(());
        }
        self.progress.begin(what, missing.iter().filter_map(|file| file.size).sum());
        let next = AtomicUsize::new(0);
        let work = || {
            while let Some(file) = missing.get(next.fetch_add(1, Ordering::Relaxed)) {
                if let Err(error) = self.fetch(file) {
                    // The others finish the file they are at.
                    next.store(missing.len(), Ordering::Relaxed);
                    return Err(error);
                }
            }
            Ok(())
        };
        let result = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..CONNECTIONS.min(missing.len())).map(|_| scope.spawn(work)).collect();
            threads.into_iter().try_for_each(|thread| thread.join().expect("downloading does not panic"))
        });
        self.progress.end();
        result
    }

    /// Downloads content into the cache and resumes an interrupted download. `is_locked`: this process has the lock, so no other one downloads it
    /// now.
    fn download(&self, file: &HubFile, first: Content, blob: &Path, is_locked: bool) -> Result<(), HubError> {
        let folder = blob.parent().expect("inside the cache");
        fs::create_dir_all(folder).map_err(HubError::cache(folder))?;
        let of_this_process = match is_locked {
            true => None,
            // Removed when this value is dropped. Nothing says whose file it is, so that of a killed process stays in the cache for good.
            false => Some(
                firebrick_files::temporary_in(folder, &format!("{}.", first.etag), ".incomplete")
                    .map_err(HubError::cache(folder))?
                    .into_temp_path(),
            ),
        };
        let partial = of_this_process.as_deref().map_or_else(|| blob.with_extension("incomplete"), Path::to_path_buf);
        let failed = HubError::cache(&partial);
        let (etag, size) = (first.etag.clone(), file.size.or(first.size));
        let most = size.unwrap_or(MAX_UNKNOWN_BYTES);
        let refused = |reason: String| {
            HubError::request(&format!("{}/{}{file}", self.settings.endpoint, file.kind.prefix()), reason)
        };
        if let Some(got) = first.size.filter(|got| *got != most) {
            return Err(refused(format!("the answer has {got} bytes, and the file has {most} in the listing")));
        }
        let mut output = File::options().create(true).append(true).open(&partial).map_err(&failed)?;
        let mut done = output.metadata().map_err(&failed)?.len();
        // Of a file of unknown size, nothing says whether it is whole.
        if size.is_none_or(|size| done > size) {
            output.set_len(0).map_err(&failed)?;
            done = 0;
        }
        self.progress.advance(done);
        let mut content = (done == 0).then_some(first);
        let mut attempt = 0;
        while size != Some(done) {
            let next = match content.take() {
                Some(content) => content,
                None => http::content(&self.settings, file, done)?,
            };
            // The content is another one, or starts at its beginning: the partial file cannot be continued.
            if next.etag != etag || next.begins_at != done {
                output.set_len(0).map_err(&failed)?;
                done = 0;
                if next.etag != etag || next.begins_at != 0 {
                    attempt = retry_after(attempt, "the file changed while it was downloaded").map_err(refused)?;
                    continue;
                }
            }
            let before = done;
            let ended = self.receive(next.body, &mut output, &mut done, size).map_err(&failed)?;
            if done > most {
                drop(output);
                fs::remove_file(&partial).map_err(&failed)?;
                let reason = if size.is_some() { "of the file" } else { "that a file of unknown size may have" };
                return Err(refused(format!("the server sends more than the {most} bytes {reason}")));
            }
            let Some(reason) = ended else { break };
            // A download that makes progress may be interrupted any number of times.
            let progressed = done - before >= CHUNK_BYTES as u64;
            attempt = retry_after(if progressed { 0 } else { attempt }, &reason).map_err(refused)?;
        }
        output.sync_all().map_err(&failed)?;
        if let Err(error) = digest::check(&partial, &etag, &file.to_string()) {
            fs::remove_file(&partial).map_err(&failed)?;
            return Err(error);
        }
        fs::rename(&partial, blob).map_err(&failed)
    }

    /// Appends content to a file that has `done` bytes, until it has `size` of them or more. Returns why the content ended before that; an error is
    /// one of the file.
    fn receive(
        &self,
        mut content: impl Read,
        file: &mut File,
        done: &mut u64,
        size: Option<u64>,
    ) -> IoResult<Option<String>> {
        let mut chunk = vec![0; CHUNK_BYTES];
        while *done <= size.unwrap_or(MAX_UNKNOWN_BYTES) {
            match content.read(&mut chunk) {
                Ok(0) if size.is_none_or(|size| size == *done) => return Ok(None),
                Ok(0) => return Ok(Some("the connection ended early".to_owned())),
                Ok(count) => {
                    file.write_all(&chunk[..count])?;
                    *done += count as u64;
                    self.progress.advance(count as u64);
                }
                Err(reason) => return Ok(Some(reason.to_string())),
            }
        }
        Ok(None)
    }
}

/// Waits before the next try, each time longer; the error says why there is none.
fn retry_after(attempt: u32, reason: &str) -> Result<u32, String> {
    if attempt + 1 >= ATTEMPTS {
        return Err(format!("{reason}, {ATTEMPTS} tries in a row with almost nothing"));
    }
    http::wait_after(attempt + 1);
    Ok(attempt + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use firebrick_hub_imitation::{ImitatedHub, sha256};

    use crate::{HubId, HubSettings, RepoKind};

    #[test]
    fn downloads_of_the_same_content_without_locks_do_not_mix() {
        let hub = ImitatedHub::new("hf_secret");
        let bytes: Vec<u8> = (0..300_000u32).flat_map(u32::to_le_bytes).collect();
        hub.add("org/big", &[("model.safetensors", bytes.as_slice())]);
        let cache = tempfile::tempdir().unwrap();
        let (endpoint, path) = (hub.server.address.clone(), cache.path().to_owned());
        let client = Hub::new(HubSettings { endpoint, cache: path, token: None, is_offline: false });
        let id = HubId::parse(RepoKind::Model, "org/big", None).unwrap();
        let listing = client.listing(&id).unwrap();
        let file = listing.files(&id, &["model.safetensors".to_owned()]).next().unwrap();
        let blob = client.cache(&id).blob(&sha256(&bytes));
        // Both break once, at different places, and go on.
        hub.store().breaks = vec![100_000, 500_000];
        let contents = [0, 1].map(|_| http::content(&client.settings, &file, 0).unwrap());
        std::thread::scope(|scope| {
            for content in contents {
                scope.spawn(|| client.download(&file, content, &blob, false).unwrap());
            }
        });
        assert!(fs::read(&blob).unwrap() == bytes);
        assert_eq!(fs::read_dir(blob.parent().unwrap()).unwrap().count(), 1, "no partial file stays");
    }
}
