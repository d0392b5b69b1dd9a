//! The Hugging Face Hub: ids of models and datasets become local files, and folders become repositories.
//!
//! Trade-off: files are transferred over plain HTTPS, one connection each; the optional Xet protocol is not supported.
#![doc = include_str!("../README.md")]

mod address;
mod cache;
mod commit;
mod digest;
mod download;
mod error;
mod http;
mod hub;
mod id;
mod listing;
mod model;
mod push;
mod send;
mod settings;
#[cfg(test)]
mod tests;
mod upload;

pub use address::{has_secrets, without_secrets};
pub use cache::snapshot_of;
pub use error::HubError;
pub use http::http_agent;
pub use hub::{Hub, Progress};
pub use id::{HubId, RepoKind};
pub use listing::{HubFile, Listing};
pub use model::{ModelFolder, Need};
pub use push::{Push, Pushed};
pub use settings::HubSettings;
