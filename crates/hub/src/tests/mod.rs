//! Tests against an imitation of the Hub.
//!
//! Trade-off: no TLS. `huggingface_hub` checks that the imitation answers as the Hub does (tests/golden/check_hub.py).

mod cache;
mod models;
mod pushes;

use firebrick_hub_imitation::ImitatedHub;
use tempfile::TempDir;

use crate::{Hub, HubId, HubSettings, RepoKind};

const TOKEN: &str = "hf_secret";
/// Nothing listens there.
const NOWHERE: &str = "http://127.0.0.1:9";

/// A client with a cache of its own.
struct Client {
    cache: TempDir,
    settings: HubSettings,
}

impl Client {
    fn new(hub: &ImitatedHub) -> Self {
        Self::of(&hub.server.address)
    }

    fn of(endpoint: &str) -> Self {
        let cache = tempfile::tempdir().unwrap();
        let path = cache.path().to_owned();
        let settings = HubSettings { endpoint: endpoint.to_owned(), cache: path, token: None, is_offline: false };
        Self { cache, settings }
    }

    fn with_token(mut self) -> Self {
        self.settings.token = Some(TOKEN.to_owned());
        self
    }

    fn offline(mut self) -> Self {
        self.settings.is_offline = true;
        self
    }

    fn hub(&self) -> Hub {
        Hub::new(self.settings.clone())
    }
}

fn id(text: &str) -> HubId {
    HubId::parse(RepoKind::Model, text, None).unwrap()
}
