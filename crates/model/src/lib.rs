#![doc = include_str!("../README.md")]

mod adapter;
pub mod checkpoint;
mod decoder;
mod division;
pub mod error;
pub mod experts;
mod generate;
mod gguf;
mod host_table;
pub mod layer;
mod layer_inputs;
pub mod linear;
mod load;
mod merge;
pub mod mixer;
pub mod norm;
mod parameters;
mod pass;
pub mod peft;
pub mod per_layer;
mod policy;
mod preference;
pub mod sampling;
mod score;
pub mod shared_expert;
mod snapshot;

#[cfg(test)]
mod test_config;
mod tile;
mod tiled_layer;
mod token_rows;

pub use checkpoint::description::read_config;
pub use checkpoint::experts::StoredParts;
pub use checkpoint::write::companions::{CHAT_SETTINGS_FILE, CHAT_TEMPLATE_FILE, Companions};
pub use checkpoint::write::save::CollectedWeights;
pub use checkpoint::{Bnb4bit, HfFolder, float_type_of};
pub use decoder::{Decoder, Loss, LossOptions, MicroBatch, Tape};
pub use division::Division;
pub use error::ModelError;
pub use firebrick_arch::{LoraConfig, ModelConfig, ModelSpec, TargetModules};
pub use firebrick_kernels::{BaseStorage, Recompute};
pub use generate::{BatchLimits, Completion, Conversation, GenerateOptions};
pub use gguf::{GgufEnds, GgufType, check_gguf, write_gguf};
pub use linear::DropoutMasks;
pub use load::BuildOptions;
pub use merge::noise::Mxfp4Noise;
pub use merge::{Merge, MergeReport, merge_adapter, quantize_folder};
pub use pass::PassOptions;
pub use preference::{PairBatch, PairReference};
pub use sampling::{FolderSampling, Sampler, Sampling};
pub use score::Score;
pub use snapshot::WriteWeights;
