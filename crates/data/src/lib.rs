//! From JSONL to packed rows: chat templates, tokens, masks, packing, loading.
#![doc = include_str!("../README.md")]

mod batch;
mod chat_template;
mod conversation;
mod dataset;
mod error;
mod loader;
mod pack;
mod python;
mod question;
mod read;
mod row;
mod stable_hash;
mod tokenizer;

#[cfg(test)]
mod test_tokenizer;

pub use batch::{Batch, IGNORE_INDEX};
pub use chat_template::{ChatTemplate, Message};
pub use dataset::{Dataset, Example, Holdout, ReadReport};
pub use error::{DataError, Place};
pub use loader::{Cursor, Loader, LoaderConfig};
pub use pack::{PackReport, PackedDataset};
pub use question::Question;
pub use read::{DatasetFormat, ReadOptions, TrainOn};
pub use tokenizer::Tokenizer;
