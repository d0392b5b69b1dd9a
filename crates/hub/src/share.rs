//! What one process of a job found out about repositories, for the others: all see the same commits, and one asks the Hub.
//!
//! Trade-off: whole listings are passed on, of which a run reads a part; they are text of some hundred bytes per file.

use serde_json::{Value as Json, json};

use crate::hub::Hub;
use crate::id::{HubId, RepoKind};
use crate::listing::{Listing, Origin};

impl Hub {
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
            let Some((id, listing)) = read(entry) else { continue };
            if entry["is_new"] == true {
                self.remember(&id, &listing);
            }
            self.known().listings.insert(id, listing);
        }
    }
}

fn read(entry: &Json) -> Option<(HubId, Listing)> {
    let text = |key: &str| entry[key].as_str();
    let kind = [RepoKind::Model, RepoKind::Dataset].into_iter().find(|kind| Some(kind.noun()) == text("kind"))?;
    Some((HubId::parse(kind, text("name")?, text("revision"))?, Listing::parse(&entry["listing"])?))
}
