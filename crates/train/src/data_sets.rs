//! From the recipe's sources to tokenised documents: found, read, encoded on all cores, kept for the next run.
//!
//! Small data is tokenised anew each time, as that takes a second and leaves nothing behind. Gives up places that follow
//! moved files: what is found in the cache names the rows by the paths they had when they were tokenised.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use firebrick_data::{
    CacheError, CacheKey, ContentKeys, DataError, Diagnosis, DocumentSet, EncodeOptions, Encoder, Holdout, Hub,
    MixOrder, Mixture, Pipeline, Record, Source, SourceError, StoreWriter, TemplateChoice, TokenCache, TokenStore,
    Tokenizer,
};
use serde_json::Value;

use crate::config::{RunConfig, SourceConfig, TrainOn};
use crate::data_report::{self, SourceReport};

/// Data of up to this many bytes is tokenised anew by each run, unless the recipe names a folder.
const SMALL_BYTES: u64 = 8_000_000;
/// Data of up to this many bytes is kept in memory where the cache cannot be written.
const MEMORY_BYTES: u64 = 1 << 30;
/// Folder below the cache that remembers the hashes of large files.
const HASHES: &str = "hashes";

/// Tokenised documents, and what was found in the rows that they came from.
#[derive(Debug)]
pub struct ReadSet {
    /// The documents, in the order of the data.
    pub documents: DocumentSet,
    /// What each source held.
    pub sources: Vec<SourceReport>,
    /// Where the tokens are, in a sentence.
    pub kept: String,
}

/// What a recipe trains and evaluates on.
#[derive(Debug)]
pub struct DataSets {
    /// Documents to train on.
    pub train: ReadSet,
    /// Documents to evaluate on.
    pub held_out: Option<DocumentSet>,
    /// What was found in the held-out rows, where they are a set of their own.
    pub held_out_sources: Vec<SourceReport>,
}

/// The model's tokenizer, with the chat template that the recipe names.
///
/// # Errors
/// A folder without a tokenizer, or a template that is not there or does not parse.
pub fn tokenizer(config: &RunConfig, folder: &Path) -> Result<Tokenizer, DataError> {
    let mut tokenizer = Tokenizer::from_folder(folder)?;
    if let Some(template) = &config.data.chat_template {
        let is_file = Path::new(template).is_file() || template.contains(['/', '\\']) || template.ends_with(".jinja");
        tokenizer.choose_template(&match is_file {
            true => TemplateChoice::File(PathBuf::from(template)),
            false => TemplateChoice::Named(template.clone()),
        })?;
    }
    Ok(tokenizer)
}

/// Reads everything that a recipe trains and evaluates on.
///
/// # Errors
/// Data that cannot be found, read or understood; too many rows that teach nothing; nothing to train on.
pub fn read(config: &RunConfig, tokenizer: &Tokenizer) -> Result<DataSets, DataError> {
    let mut train = read_set(config, tokenizer, &config.data.training_sources(), config.data.mix.into())?;
    let own = config.data.held_out_sources();
    if !own.is_empty() {
        let held_out = read_set(config, tokenizer, &own, MixOrder::Concatenate)?;
        return Ok(DataSets { train, held_out: Some(held_out.documents), held_out_sources: held_out.sources });
    }
    let Some(fraction) = config.data.eval_fraction else {
        return Ok(DataSets { train, held_out: None, held_out_sources: Vec::new() });
    };
    let (documents, held_out) = train.documents.split(Holdout::Fraction(fraction))?;
    train.documents = documents;
    Ok(DataSets { train, held_out: Some(held_out), held_out_sources: Vec::new() })
}

impl DataSets {
    /// Sentences about the data, to print before a run.
    #[must_use]
    pub fn notes(&self) -> Vec<String> {
        let mut notes: Vec<String> =
            self.train.sources.iter().map(|source| format!("training data: {source}")).collect();
        notes.push(self.train.kept.clone());
        notes.extend(self.held_out_sources.iter().map(|source| format!("held-out data: {source}")));
        if let (Some(documents), true) = (&self.held_out, self.held_out_sources.is_empty()) {
            let tokens: usize = (0..documents.len()).map(|index| documents.document_tokens(index)).sum();
            notes.push(format!("held out of it: {} examples, {tokens} tokens", documents.len()));
        }
        notes
    }
}

fn read_set(
    config: &RunConfig,
    tokenizer: &Tokenizer,
    sources: &[SourceConfig],
    order: MixOrder,
) -> Result<ReadSet, DataError> {
    let reader = Reader::new(config, tokenizer, sources, order)?;
    let (store, kept) = reader.store(config)?;
    let reports = match data_report::from_bytes(store.metadata()) {
        Some(reports) => reports,
        // Our own file with a checksum: only a change of its layout without a change of version comes here.
        None => panic!("the report beside tokenised data cannot be read; delete the cache and tell us"),
    };
    // Where everything is trained, the end of a turn is too, and nobody looks for it.
    let ends_matter = config.data.train_end_of_turn && config.train_on() != TrainOn::All;
    for report in &reports {
        report.diagnosis.check(config.data.max_bad_share, ends_matter)?;
    }
    Ok(ReadSet { documents: DocumentSet::all(Arc::new(store)), sources: reports, kept })
}

/// Sources with an encoder each.
struct Reader<'a> {
    mixture: Mixture,
    encoders: Vec<Encoder<'a>>,
    pipeline: Pipeline,
    tokenizer: &'a Tokenizer,
    max_bad_share: f64,
}

impl<'a> Reader<'a> {
    fn new(
        config: &RunConfig,
        tokenizer: &'a Tokenizer,
        sources: &[SourceConfig],
        order: MixOrder,
    ) -> Result<Self, DataError> {
        let hub = Hub::from_environment();
        let found: Vec<Source> = sources.iter().map(|source| source.spec().resolve(&hub)).collect::<Result<_, _>>()?;
        let encoders = sources.iter().zip(&found).map(|(source, found)| encoder(config, tokenizer, source, found));
        let encoders = encoders.collect::<Result<_, _>>()?;
        let mixture = Mixture::new(found, order, config.data.mix_until.into(), config.seed)?;
        let workers = config.data.workers.and_then(NonZeroUsize::new);
        let pipeline = workers.map_or_else(Pipeline::default, |workers| Pipeline { workers });
        Ok(Self { mixture, encoders, pipeline, tokenizer, max_bad_share: config.data.max_bad_share })
    }

    /// The tokens, from the cache or made now, with a sentence about where they are.
    fn store(&self, config: &RunConfig) -> Result<(TokenStore, String), DataError> {
        let bytes = self.mixture.bytes();
        let cache = match &config.data.cache {
            Some(folder) => Ok(TokenCache::in_folder(folder)),
            None if bytes <= SMALL_BYTES => {
                return Ok((self.in_memory()?, "tokenised now, kept in memory".to_owned()));
            }
            None => TokenCache::in_default_folder(),
        };
        match cache.map_err(DataError::from).and_then(|cache| self.cached(&cache)) {
            Err(DataError::Cache(problem @ (CacheError::NoFolder | CacheError::Io { .. })))
                if bytes <= MEMORY_BYTES =>
            {
                Ok((self.in_memory()?, format!("tokenised now, kept in memory for this run: {problem}")))
            }
            result => result,
        }
    }

    fn in_memory(&self) -> Result<TokenStore, DataError> {
        let mut writer = StoreWriter::in_memory(self.tokenizer.vocab_size());
        let metadata = self.tokenise(&mut writer)?;
        Ok(writer.into_store(metadata))
    }

    fn cached(&self, cache: &TokenCache) -> Result<(TokenStore, String), DataError> {
        let data = self.mixture.content_key(&ContentKeys::remembered_in(cache.folder().join(HASHES)))?;
        let encoders: Vec<Vec<u8>> = self.encoders.iter().map(Encoder::fingerprint).collect();
        let data = data.to_le_bytes();
        let parts = encoders.iter().map(|encoder| ("encoder", encoder.as_slice()));
        let own = [("data", &data[..]), ("report", &data_report::VERSION[..])];
        let key = CacheKey::of(own.into_iter().chain(parts));
        let vocabulary = self.tokenizer.vocab_size();
        let cached = cache.get_or_build(key, vocabulary, |writer| self.tokenise(writer))?;
        let how = if cached.is_new { "tokenised now, kept" } else { "tokens of an earlier run, found" };
        let note = cached.note.map_or_else(String::new, |note| format!("; {note}"));
        Ok((cached.store, format!("{how} in {}{note}", cache.folder().display())))
    }

    /// Encodes all records; gives the report as bytes.
    fn tokenise(&self, writer: &mut StoreWriter) -> Result<Vec<u8>, DataError> {
        let mut found = vec![Diagnosis::default(); self.encoders.len()];
        self.pipeline.run(
            self.mixture.records(),
            |record: &Record| record.fields.values().map(weight).sum(),
            |record: Record| {
                let encoded = self.encoders[record.source as usize].encode(&record)?;
                Ok::<_, DataError>((encoded, record.place, record.source))
            },
            |(encoded, place, source)| {
                for example in &encoded.examples {
                    writer.push(example, source)?;
                }
                let diagnosis = &mut found[source as usize];
                diagnosis.add(&encoded, &place);
                Ok(diagnosis.check_early(self.max_bad_share)?)
            },
        )?;
        let reports = self.mixture.sources().iter().zip(&self.encoders).zip(found);
        let report = |((source, encoder), diagnosis): ((&Source, &Encoder<'_>), Diagnosis)| SourceReport {
            name: source.spec().path.clone(),
            format: source.format().name().to_owned(),
            shape: data_report::shape_name(encoder.shape()),
            diagnosis,
        };
        let reports: Vec<SourceReport> = reports.map(report).collect();
        if writer.documents() == 0 {
            for report in &reports {
                report.diagnosis.check(self.max_bad_share, false)?;
            }
            let path = PathBuf::from(&reports[0].name);
            return Err(DataError::NothingToTrain { path, report: reports[0].diagnosis.to_string() });
        }
        Ok(data_report::to_bytes(&reports))
    }
}

/// The encoder of a source, whose first record may decide its shape.
fn encoder<'a>(
    config: &RunConfig,
    tokenizer: &'a Tokenizer,
    source: &SourceConfig,
    found: &Source,
) -> Result<Encoder<'a>, DataError> {
    let options = EncodeOptions {
        shape: source.shape.into(),
        fields: source.field_names().expect("the recipe's check has seen the names"),
        train_on: config.train_on().into(),
        train_end_of_turn: config.data.train_end_of_turn,
        overflow: config.data.overflow.into(),
        ..EncodeOptions::new(config.max_seq_len)
    };
    let first: Option<Result<Record, SourceError>> = found.records().next();
    let Some(first) = first.transpose()? else {
        return Err(DataError::EmptyDataset { path: PathBuf::from(&source.path) });
    };
    Encoder::new(tokenizer, options, &first.fields, &first.place)
}

/// About the bytes of a value in memory.
fn weight(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(values) => values.iter().map(weight).sum(),
        Value::Object(map) => map.iter().map(|(key, value)| key.len() + weight(value)).sum(),
        _ => 8,
    }
}
