#![doc = include_str!("../README.md")]

mod adapter;
pub mod block;
pub mod config;
pub mod error;
mod generate;
mod json;
pub mod linear;
mod llama;
mod load;
pub mod peft;
pub mod rope;
pub mod sampling;
mod save;
pub mod weights;

pub use block::Recompute;
pub use config::LlamaConfig;
pub use error::ModelError;
pub use generate::GenerateOptions;
pub use llama::{Llama, MicroBatch, PassOptions};
pub use load::{BaseStorage, BuildOptions};
pub use peft::LoraConfig;
pub use sampling::Sampler;
pub use weights::{HfFolder, SavedDtype};
