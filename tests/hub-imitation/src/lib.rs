//! A Hub on this machine, for tests: repositories, commits, large-file storage, gates, and connections that break.
//!
//! It answers both `huggingface_hub` and `firebrick-hub` (tests/golden/check_hub.py), so that neither is tested against itself alone.
//! Trade-off: no TLS, no Xet, and no pages; lists have one page.

mod answers;
mod server;
mod store;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ring::digest::{Algorithm, SHA1_FOR_LEGACY_USE_ONLY, SHA256, digest};

pub use server::{Answer, Request, Server};
pub use store::{Repo, Store};

/// A Hub and the server that speaks for it.
#[derive(Debug)]
pub struct ImitatedHub {
    /// The server.
    pub server: Server,
    store: Arc<Mutex<Store>>,
}

impl ImitatedHub {
    /// Creates a Hub without repositories, at a free port. Writing needs this token.
    pub fn new(token: &str) -> Self {
        Self::at("127.0.0.1:0", token)
    }

    /// Creates a Hub at this address.
    pub fn at(address: &str, token: &str) -> Self {
        let store = Arc::new(Mutex::new(Store { token: token.to_owned(), ..Store::default() }));
        let answering = Arc::clone(&store);
        let server = Server::at(address, move |request| {
            let mut store = answering.lock().unwrap_or_else(PoisonError::into_inner);
            answers::answer(&mut store, request)
        });
        Self { server, store }
    }

    /// Locks and returns the contents.
    pub fn store(&self) -> MutexGuard<'_, Store> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a repository with these files as its only commit.
    pub fn add(&self, id: &str, files: &[(&str, &[u8])]) {
        let files: BTreeMap<_, _> = files.iter().map(|(path, bytes)| ((*path).to_owned(), bytes.to_vec())).collect();
        self.store().repos.entry(id.to_owned()).or_default().commit(files);
    }
}

/// Computes git's hash of a file with these bytes.
pub fn git_blob(bytes: &[u8]) -> String {
    hashed(&SHA1_FOR_LEGACY_USE_ONLY, &[format!("blob {}\0", bytes.len()).as_bytes(), bytes].concat())
}

/// Computes the SHA-256 of bytes.
pub fn sha256(bytes: &[u8]) -> String {
    hashed(&SHA256, bytes)
}

fn hashed(algorithm: &'static Algorithm, bytes: &[u8]) -> String {
    digest(algorithm, bytes).as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}
