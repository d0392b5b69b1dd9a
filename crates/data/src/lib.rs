//! Turns data files into packed batches: records, chat templates, tokens, loss masks, a cache, packing, loading.
//!
//! Not supported: images and sound. The README below lists the other limits.
#![doc = include_str!("../README.md")]

mod batch;
mod cache;
mod catch_panic;
mod chat_template;
mod conversation;
mod corpus;
mod diagnose;
mod encoder;
mod error;
mod eval_prompt;
mod finding;
mod loader;
mod locate;
mod long_text;
mod new_tokens;
mod omissions;
mod pack;
mod pair;
mod pipeline;
mod record_format;
mod selection;
mod source;
mod text_marks;
mod tokenizer;

#[cfg(test)]
mod test_tokenizer;

#[cfg(test)]
#[global_allocator]
static ALLOCATOR: BoundedAllocator<std::alloc::System> = BoundedAllocator(std::alloc::System);

pub use batch::{Batch, BatchPairs, IGNORE_INDEX};
pub use cache::{
    CacheError, CacheKey, Cached, Document, DocumentEntry, DocumentSet, Example, Origin, StoreWriter, TokenCache,
    TokenStore,
};
pub use chat_template::{BoundedAllocator, ChatTemplate, TemplateChoice, TemplateDefaults};
pub use corpus::{Corpus, Tokenized};
pub use diagnose::{Diagnosis, FindingCount};
pub use encoder::{EncodeOptions, Encoded, Encoder, OverflowPolicy};
pub use error::DataError;
pub use eval_prompt::EvalPrompt;
pub use finding::{Finding, FindingKind};
/// The Hub's client, which reads datasets.
pub use firebrick_hub::{Hub, HubSettings};
pub use loader::{Cursor, Loader, LoaderConfig, RowOrder};
pub use pack::{LengthHistogram, LengthStep, PackOptions, PackReport, PackedDataset, PairRows};
pub use pipeline::{Pipeline, records_encoded};
pub use record_format::{Chat, Fields, RecordFormat, RecordFormatError, Row, Turn};
pub use selection::TrainOn;
pub use source::{
    ContentKeys, FileFormat, MAX_RECORD_BYTES, Mix, MixUntil, MixedRecords, Mixture, Record, RecordPlace, Records,
    Source, SourceError, SourceSpec, TextDocument,
};
pub use tokenizer::{NewToken, SpecialToken, Tokenizer};
