//! Sources to tokenised documents: records read in order, encoded on all cores, diagnosed, kept in memory or in a cache.
//!
//! The whole way from files to tokens in one type. Gives up going on after a bad line: the first record that cannot be
//! read or understood ends it, with file and line; what a record lacks to be trained on is counted instead.

mod report;

use std::path::PathBuf;

use serde_json::Value as Json;

use crate::cache::{CacheKey, StoreWriter, TokenCache, TokenStore};
use crate::diagnose::Diagnosis;
use crate::encoder::{EncodeOptions, Encoder};
use crate::error::DataError;
use crate::pipeline::Pipeline;
use crate::source::{ContentKeys, Mixture, Record, Source};
use crate::tokenizer::Tokenizer;

/// Folder below a cache that remembers the hashes of large files.
const HASHES: &str = "hashes";
/// The share of bad rows that is let pass unless said otherwise.
const MAX_BAD_SHARE: f64 = 0.1;

/// Sources with an encoder each: everything that tokenised data depends on.
///
/// ```
/// use std::sync::Arc;
///
/// use firebrick_data::{
///     Corpus, DataError, DocumentSet, EncodeOptions, Exhausted, Hub, MixOrder, Mixture, PackedDataset, PackOptions,
///     SourceSpec, Tokenizer,
/// };
///
/// /// Rows of 4,096 tokens, from a folder of files in any format.
/// fn rows(model_folder: &std::path::Path, data: &str) -> Result<PackedDataset, DataError> {
///     let tokenizer = Tokenizer::from_folder(model_folder)?;
///     let source = SourceSpec::new(data).resolve(&Hub::from_environment())?;
///     let mixture = Mixture::new(vec![source], MixOrder::Concatenate, Exhausted::First, 0)?;
///     let corpus = Corpus::new(&tokenizer, mixture, vec![EncodeOptions::new(4096)])?;
///     let tokenised = corpus.in_memory()?;
///     let documents = DocumentSet::all(Arc::new(tokenised.store));
///     Ok(PackedDataset::new(documents, PackOptions::new(4096)))
/// }
/// # let _ = rows;
/// ```
#[derive(Debug)]
pub struct Corpus<'a> {
    /// The threads that encode: one for each core unless said otherwise. Their number changes no token.
    pub pipeline: Pipeline,
    /// The largest share (0 to 1) of a source's rows that may be bad (see [`Diagnosis::check`]): 0.1 unless said otherwise.
    pub max_bad_share: f64,
    mixture: Mixture,
    encoders: Vec<Encoder<'a>>,
}

/// Tokenised documents and what was found in the records that they came from.
#[derive(Debug)]
pub struct Tokenised {
    /// The documents, in the order of the mixture; each knows its source.
    pub store: TokenStore,
    /// What was found in the records of each source. Places are named by [`Source::file_names`], as they are now.
    pub diagnoses: Vec<Diagnosis>,
    /// They were tokenised now; otherwise they were in the cache.
    pub is_new: bool,
    /// A sentence for the log: a damaged cache was found and replaced.
    pub note: Option<String>,
}

impl<'a> Corpus<'a> {
    /// The sources of a mixture, each with its options; the first record of a source decides its shape where the options
    /// name none.
    ///
    /// # Errors
    /// A source has no records, the first cannot be read, or its shape is not recognised; `max_seq_len` is less than 2.
    ///
    /// # Panics
    /// If there are not as many options as sources.
    pub fn new(tokenizer: &'a Tokenizer, mixture: Mixture, options: Vec<EncodeOptions>) -> Result<Self, DataError> {
        let (given, sources) = (options.len(), mixture.sources().len());
        assert_eq!(given, sources, "options for {given} sources, and there are {sources}");
        let encoders =
            mixture.sources().iter().zip(options).map(|(source, options)| encoder(tokenizer, source, options));
        let encoders = encoders.collect::<Result<_, _>>()?;
        Ok(Self { pipeline: Pipeline::default(), max_bad_share: MAX_BAD_SHARE, mixture, encoders })
    }

    /// The sources and how they are mixed.
    pub fn mixture(&self) -> &Mixture {
        &self.mixture
    }

    /// The encoders, one for each source.
    pub fn encoders(&self) -> &[Encoder<'a>] {
        &self.encoders
    }

    /// Identifies the documents and what is found in their records: the content of the files, the mixing, tokenizer,
    /// options and code. Where files lie, and how many threads encode, does not count.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn key(&self, keys: &ContentKeys) -> Result<CacheKey, DataError> {
        let data = self.mixture.content_key(keys)?.to_le_bytes();
        let encoders: Vec<Vec<u8>> = self.encoders.iter().map(Encoder::fingerprint).collect();
        let own = [("data", &data[..]), ("report", &report::VERSION[..])];
        Ok(CacheKey::of(own.into_iter().chain(encoders.iter().map(|encoder| ("encoder", encoder.as_slice())))))
    }

    /// Encodes all records and writes their examples, in the mixture's order; gives what was found in each source.
    ///
    /// Does not judge the whole ([`Corpus::check`] does), but stops early where half of the first thousand rows are bad.
    ///
    /// # Errors
    /// A record cannot be read or lacks what its shape asks for; too many rows are bad, or no row can be trained on; what
    /// the writer refuses.
    pub fn tokenise(&self, writer: &mut StoreWriter) -> Result<Vec<Diagnosis>, DataError> {
        let mut found = vec![Diagnosis::default(); self.encoders.len()];
        let mut documents = 0;
        self.pipeline.run(
            self.mixture.records(),
            |record: &Record| record.fields.values().map(weight).sum(),
            || {
                // A tokenizer of its own, because threads that share one wait for each other in its regular expressions.
                let tokenizer = self.encoders[0].tokenizer().clone();
                move |record: Record| {
                    let encoder = self.encoders[record.source as usize].with_tokenizer(&tokenizer);
                    Ok::<_, DataError>((encoder.encode(&record)?, record.place, record.source))
                }
            },
            |(encoded, place, source)| {
                for example in &encoded.examples {
                    writer.push(example, source)?;
                }
                documents += encoded.examples.len();
                let diagnosis = &mut found[source as usize];
                diagnosis.add(&encoded, &place);
                diagnosis.check_early(self.max_bad_share)
            },
        )?;
        if documents == 0 {
            found.iter().try_for_each(|diagnosis| diagnosis.check(self.max_bad_share, false))?;
            let reports: Vec<String> = found.iter().map(Diagnosis::to_string).collect();
            let path = PathBuf::from(&self.mixture.sources()[0].spec().path);
            return Err(DataError::NothingToTrain { path, report: reports.join("\n") });
        }
        Ok(found)
    }

    /// Judges what was found in each source.
    ///
    /// # Errors
    /// As [`Diagnosis::check`], of the first source that is refused.
    pub fn check(&self, diagnoses: &[Diagnosis]) -> Result<(), DataError> {
        let mut sources = self.encoders.iter().zip(diagnoses);
        sources.try_for_each(|(encoder, diagnosis)| {
            diagnosis.check(self.max_bad_share, encoder.options().train_end_of_turn)
        })
    }

    /// Tokenises into memory.
    ///
    /// # Errors
    /// As [`Corpus::tokenise`] and [`Corpus::check`].
    pub fn in_memory(&self) -> Result<Tokenised, DataError> {
        let mut writer = StoreWriter::in_memory(self.vocab_size());
        let metadata = self.tokenise_with_report(&mut writer)?;
        self.judged(writer.into_store(metadata), true, None)
    }

    /// The documents from a cache, where they are tokenised first if they are not there.
    ///
    /// # Errors
    /// As [`Corpus::tokenise`] and [`Corpus::check`]; the cache cannot be written.
    pub fn cached(&self, cache: &TokenCache) -> Result<Tokenised, DataError> {
        let key = self.key(&ContentKeys::remembered_in(cache.folder().join(HASHES)))?;
        let cached = cache.get_or_build(key, self.vocab_size(), |writer| self.tokenise_with_report(writer))?;
        self.judged(cached.store, cached.is_new, cached.note)
    }

    fn tokenise_with_report(&self, writer: &mut StoreWriter) -> Result<Vec<u8>, DataError> {
        let diagnoses = self.tokenise(writer)?;
        Ok(report::to_bytes(diagnoses, &self.file_names()))
    }

    fn judged(&self, store: TokenStore, is_new: bool, note: Option<String>) -> Result<Tokenised, DataError> {
        let diagnoses = match report::from_bytes(store.metadata(), &self.file_names()) {
            Some(diagnoses) => diagnoses,
            // Our own file with a checksum: only a change of its layout without a change of version comes here.
            None => panic!("the report beside tokenised data cannot be read; delete the cache"),
        };
        self.check(&diagnoses)?;
        Ok(Tokenised { store, diagnoses, is_new, note })
    }

    fn file_names(&self) -> Vec<Vec<String>> {
        self.mixture.sources().iter().map(Source::file_names).collect()
    }

    fn vocab_size(&self) -> usize {
        self.encoders[0].tokenizer().vocab_size()
    }
}

fn encoder<'a>(tokenizer: &'a Tokenizer, source: &Source, options: EncodeOptions) -> Result<Encoder<'a>, DataError> {
    let Some(first) = source.records().next().transpose()? else {
        return Err(DataError::EmptyDataset { path: PathBuf::from(&source.spec().path) });
    };
    Encoder::new(tokenizer, options, &first.fields, &first.place)
}

/// About the bytes of a value in memory.
fn weight(value: &Json) -> usize {
    match value {
        Json::String(text) => text.len(),
        Json::Array(values) => values.iter().map(weight).sum(),
        Json::Object(map) => map.iter().map(|(key, value)| key.len() + weight(value)).sum(),
        _ => 8,
    }
}
