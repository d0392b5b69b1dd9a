//! From data files to packed rows: records, chat templates, tokens, masks, a cache, packing, loading.
#![doc = include_str!("../README.md")]

mod batch;
mod cache;
mod chat_template;
mod conversation;
mod corpus;
mod dataset;
mod diagnose;
mod encoder;
mod error;
mod guarded;
mod loader;
mod locate;
mod long_text;
mod mask;
mod pack;
mod pipeline;
mod python;
mod question;
mod shape;
mod source;
mod stable_hash;
mod tokenizer;

#[cfg(test)]
mod test_tokenizer;

pub use batch::{Batch, IGNORE_INDEX};
pub use cache::{CacheError, CacheKey, Cached, Document, DocumentSet, StoreWriter, TokenCache, TokenStore};
pub use chat_template::{ChatTemplate, Message, TemplateChoice, TemplateInput};
pub use corpus::{Corpus, Tokenised};
pub use dataset::{Dataset, Example, Holdout, ReadReport};
pub use diagnose::{Diagnosis, Finding, FindingKind, Seen};
pub use encoder::{EncodeOptions, Encoded, Encoder, Overflow};
pub use error::{DataError, Place};
pub use loader::{Cursor, Loader, LoaderConfig, LoaderRate};
pub use mask::TrainOn;
pub use pack::{LengthHistogram, LengthStep, PackOptions, PackReport, PackedDataset};
pub use pipeline::Pipeline;
pub use question::Question;
pub use shape::{Chat, Fields, Percent, Row, Shape, ShapeError, Turn};
pub use source::{
    Compression, ContentKeys, Download, Exhausted, Format, Hub, HubSettings, MAX_RECORD_BYTES, MixOrder, MixedRecords,
    Mixture, Record, Records, Source, SourceError, SourceSpec, TextUnit,
};
pub use tokenizer::Tokenizer;
