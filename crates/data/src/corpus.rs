//! Turns sources into tokenized documents: records are read in order, encoded on all cores, checked, and stored in memory or in a cache.
//!
//! One type covers the way from files to tokens. Rows that cannot be read, and records that cannot be trained on, are counted and named, and refused
//! above a share. Trade-off: what shows that a file has another form than its name says, or is damaged, ends the run with file and line.

mod report;

use firebrick_arch::counted;

use crate::cache::{CacheKey, Origin, StoreWriter, TokenCache, TokenStore};
use crate::diagnose::Diagnosis;
use crate::encoder::{EncodeOptions, Encoded, Encoder};
use crate::error::DataError;
use crate::pipeline::Pipeline;
use crate::record_format::weight;
use crate::source::RecordPlace;
use crate::source::{ContentKeys, Mixture, Record, Source, SourceError};
use crate::tokenizer::Tokenizer;

/// Folder inside a cache that stores the hashes of large files.
const HASHES: &str = "hashes";
/// Default share of bad records that is accepted.
const MAX_BAD_SHARE: f64 = 0.1;

/// Sources with one encoder each. Tokenized data depends on nothing else.
#[derive(Debug)]
pub struct Corpus<'a> {
    /// The encoding threads, one per core by default. Their number does not change any token.
    pub pipeline: Pipeline,
    /// Maximum share (0 to 1) of a source's records that may be bad (see [`Diagnosis::check`]); 0.1 by default.
    pub max_bad_share: f64,
    /// The sources and how they are mixed.
    pub mixture: Mixture,
    /// One per source.
    pub encoders: Vec<Encoder<'a>>,
}

/// Tokenized documents and the findings in their records.
#[derive(Debug)]
pub struct Tokenized {
    /// The documents, in the order of the mixture. Each knows its source.
    pub store: TokenStore,
    /// Hashes of the records that gave no document ([`Encoded::record`](crate::Encoded::record)), for
    /// [`DocumentSet::split`](crate::DocumentSet::split).
    pub dropped: Vec<u64>,
    /// The findings in the records of each source. Places use the names of [`Source::file_names`], which may have changed since the documents were
    /// tokenized.
    pub diagnoses: Vec<Diagnosis>,
    /// Whether the documents were tokenized now rather than found in the cache.
    pub is_new: bool,
    /// A sentence for the log if a damaged cache was found and replaced.
    pub note: Option<String>,
}

impl<'a> Corpus<'a> {
    /// Combines the sources of a mixture with one set of options each. The first record of a source determines its format if the options do not name
    /// one. Errors: a source has no records, its first record cannot be read, or its format is not recognized; `max_seq_len` is less than 2. Panics
    /// if the number of options differs from the number of sources.
    pub fn new(tokenizer: &'a Tokenizer, mixture: Mixture, options: Vec<EncodeOptions>) -> Result<Self, DataError> {
        let (given, sources) = (options.len(), mixture.sources().len());
        assert_eq!(given, sources, "options for {given} sources, but there are {sources}");
        let encoder = |(source, options): (&Source, EncodeOptions)| match source.first_record()? {
            Some(first) => Encoder::new(tokenizer, options, &first),
            None => Err(DataError::EmptyDataset { path: source.spec().path.clone(), bytes: source.bytes() }),
        };
        let encoders = mixture.sources().iter().zip(options).map(encoder).collect::<Result<_, _>>()?;
        Ok(Self { pipeline: Pipeline::default(), max_bad_share: MAX_BAD_SHARE, mixture, encoders })
    }

    /// Identifies the documents and the findings of their records: content of the files, mixing, tokenizer, options and code. Paths and the number of
    /// threads do not matter. Errors: a file cannot be read.
    pub fn key(&self, keys: &ContentKeys) -> Result<CacheKey, DataError> {
        let data = self.mixture.content_key(keys)?.to_le_bytes();
        let encoders: Vec<Vec<u8>> = self.encoders.iter().map(Encoder::fingerprint).collect();
        let own = [("data", &data[..]), ("report", &report::VERSION[..])];
        Ok(CacheKey::from_parts(own.into_iter().chain(encoders.iter().map(|encoder| ("encoder", encoder.as_slice())))))
    }

    /// Encodes all records, writes their examples in the mixture's order, and returns the findings of each source and the hashes of the records that
    /// gave nothing.
    ///
    /// Does not check the result ([`Corpus::checked`] does), but stops early if half of the first thousand records are
    /// bad. Errors: a record cannot be read or does not have its source's format; too many records are bad, or none can
    /// be trained on; the writer's errors.
    fn tokenize(&self, writer: &mut StoreWriter) -> Result<(Vec<Diagnosis>, Vec<u64>), DataError> {
        let mut found = vec![Diagnosis::default(); self.encoders.len()];
        let files = self.file_names();
        let (mut documents, mut dropped) = (0, Vec::new());
        let records = self.mixture.records().map(|record| match record {
            Err(SourceError::BadRecord { place, column, problem, can_continue: true, origin }) => {
                let column = column.map_or_else(String::new, |column| format!("column {column}: "));
                Ok(Err((place, column + &problem, origin)))
            }
            record => record.map(Ok),
        });
        self.pipeline.run(
            records,
            |record: &Result<Record, _>| record.as_ref().map_or(0, |record| record.fields.values().map(weight).sum()),
            || {
                // One tokenizer per thread: threads that share one wait for each other in its regular expressions.
                let tokenizer = self.encoders[0].tokenizer().clone();
                move |record: Result<Record, (RecordPlace, String, (u32, u32))>| {
                    let (encoded, place, (source, file)) = match record {
                        Ok(record) => {
                            let encoder = self.encoders[record.source as usize].with_tokenizer(&tokenizer);
                            (encoder.encode(&record)?, record.place, (record.source, record.file))
                        }
                        Err((place, problem, origin)) => (Encoded::unreadable(place.line, &problem), place, origin),
                    };
                    let line = u32::try_from(place.line).unwrap_or(u32::MAX);
                    let origin = Origin { source, record: encoded.record, file, line };
                    Ok::<_, DataError>((encoded, place.line, origin))
                }
            },
            |(encoded, line, origin)| {
                for example in &encoded.examples {
                    writer.push(example, origin)?;
                }
                documents += encoded.examples.len();
                dropped.extend(encoded.examples.is_empty().then_some(encoded.record));
                let diagnosis = &mut found[origin.source as usize];
                let path = files[origin.source as usize][origin.file as usize].as_str().into();
                diagnosis.add(&encoded, &RecordPlace { path, line });
                diagnosis.check_early(self.max_bad_share)
            },
        )?;
        if documents == 0 {
            found.iter().try_for_each(|diagnosis| diagnosis.check(self.max_bad_share, false))?;
            let reports: Vec<String> = found.iter().map(Diagnosis::to_string).collect();
            let path = self.mixture.sources()[0].spec().path.clone();
            let too_long = found.iter().map(Diagnosis::rows_too_long).sum::<u64>();
            let remedy = match too_long {
                0 => "No record is longer than max_seq_len: correct what dropped them".to_owned(),
                _ => format!("Raise max_seq_len for {}", counted(too_long, "record")),
            };
            return Err(DataError::NothingToTrain { path, report: reports.join("\n"), remedy });
        }
        Ok((found, dropped))
    }

    /// Tokenizes into memory. Errors: a record that cannot be read or tokenized, and data with more bad records than the recipe allows.
    pub fn in_memory(&self) -> Result<Tokenized, DataError> {
        let mut writer = StoreWriter::in_memory(self.vocab_size());
        let metadata = self.tokenize_with_report(&mut writer)?;
        self.checked(writer.into_store(&metadata), true, None)
    }

    /// Returns the documents from a cache, tokenizing them first if they are not there. Errors: those of [`Corpus::in_memory`]; the cache cannot be
    /// written.
    pub fn cached(&self, cache: &TokenCache) -> Result<Tokenized, DataError> {
        let key = self.key(&ContentKeys::cached_in(cache.folder().join(HASHES)))?;
        let cached = cache.get_or_build(key, self.vocab_size(), |writer| self.tokenize_with_report(writer))?;
        self.checked(cached.store, cached.is_new, cached.note)
    }

    fn tokenize_with_report(&self, writer: &mut StoreWriter) -> Result<Vec<u8>, DataError> {
        let (diagnoses, dropped) = self.tokenize(writer)?;
        Ok(report::to_bytes(diagnoses, dropped, &self.file_names()))
    }

    fn checked(&self, store: TokenStore, is_new: bool, note: Option<String>) -> Result<Tokenized, DataError> {
        let (diagnoses, dropped) = match report::from_bytes(store.metadata(), &self.file_names()) {
            Some(found) => found,
            // Our own file with a checksum: only a layout change without a version change can cause this.
            None => panic!("the report stored with the tokenized data cannot be read; delete the cache"),
        };
        for (encoder, diagnosis) in self.encoders.iter().zip(&diagnoses) {
            diagnosis.check(self.max_bad_share, encoder.options().train_end_of_turn)?;
        }
        Ok(Tokenized { store, dropped, diagnoses, is_new, note })
    }

    fn file_names(&self) -> Vec<Vec<String>> {
        self.mixture.sources().iter().map(Source::file_names).collect()
    }

    fn vocab_size(&self) -> usize {
        self.encoders[0].tokenizer().vocab_size()
    }
}
