#![doc = include_str!("../README.md")]

mod adapter;
mod atomic_file;
mod cache;
mod companions;
mod decoder;
mod division;
pub mod error;
mod generate;
mod generation_config;
mod gguf;
pub mod layer;
pub mod linear;
mod load;
mod merge;
pub mod norm;
pub mod peft;
pub mod sampling;
mod save;
mod score;
#[cfg(test)]
mod test_config;
pub mod weights;

pub use companions::{CHAT_SETTINGS_FILE, CHAT_TEMPLATE_FILE, Companions};
pub use decoder::{Decoder, Loss, LossOptions, MicroBatch, PassOptions, Tape};
pub use division::Division;
pub use error::ModelError;
pub use firebrick_arch::{LoraConfig, ModelConfig, ModelSpec, TargetModules};
pub use firebrick_kernels::{BaseStorage, Recompute};
pub use generate::{BatchLimits, Conversation, GenerateOptions};
pub use generation_config::FolderSampling;
pub use gguf::{GgufType, write_gguf};
pub use load::BuildOptions;
pub use merge::{Merge, MergeReport, merge_adapter};
pub use sampling::{Sampler, Sampling};
pub use save::CollectedWeights;
pub use score::Score;
pub use weights::{HfFolder, SavedDtype};
