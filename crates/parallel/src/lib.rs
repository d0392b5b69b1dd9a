#![doc = include_str!("../README.md")]

mod agreement;
mod error;
mod flat;
mod handshake;
mod links;
mod owners;
mod patient;
mod placement;
mod ranks;
mod reducing;
mod rendezvous;
mod sharding;
mod socket;
pub mod supervisor;
mod token;
mod watchdog;
mod wire;

pub use agreement::Facts;
pub use error::ParallelError;
pub use owners::owners;
pub use placement::Placement;
pub use ranks::Ranks;
pub use reducing::{BUCKET_BYTES, ReducingSink};
pub use sharding::ShardingSink;
pub use token::JobToken;
pub use watchdog::{Limits, Watchdog};
