//! From the recipe's sources to tokenised documents: found, tokenised by the data crate's [`Corpus`], kept for the next run.
//!
//! Here stands what only a recipe knows: which folder keeps tokens, and the names of what is reported. Small data is
//! tokenised anew each time, as that takes a second and leaves nothing behind.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use firebrick_data::{
    CacheError, Corpus, DataError, Diagnosis, DocumentSet, EncodeOptions, Encoder, Holdout, Hub, MixOrder, Mixture,
    Pipeline, Source, TemplateChoice, TokenCache, Tokenised, Tokenizer,
};

use crate::config::{RunConfig, SourceConfig};
use crate::data_report::{self, SourceReport};

/// Data of up to this many bytes is tokenised anew by each run, unless the recipe names a folder.
const SMALL_BYTES: u64 = 8_000_000;
/// Data of up to this many bytes is kept in memory where the cache cannot be written.
const MEMORY_BYTES: u64 = 1 << 30;
const SECONDS_PER_DAY: i64 = 86_400;

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

/// The model's tokenizer, with the chat template that the recipe names. Templates that ask for the date see the beginning
/// of the UTC day of `date` (seconds since 1970), so that all runs that begin on one day see the same.
///
/// # Errors
/// A folder without a tokenizer, or a template that is not there or does not parse.
pub fn tokenizer(config: &RunConfig, folder: &Path, date: i64) -> Result<Tokenizer, DataError> {
    let mut tokenizer = Tokenizer::from_folder(folder)?;
    if let Some(template) = &config.data.chat_template {
        let is_file = Path::new(template).is_file() || template.contains(['/', '\\']) || template.ends_with(".jinja");
        tokenizer.choose_template(&match is_file {
            true => TemplateChoice::File(PathBuf::from(template)),
            false => TemplateChoice::Named(template.clone()),
        })?;
    }
    tokenizer.set_date(date - date.rem_euclid(SECONDS_PER_DAY));
    Ok(tokenizer)
}

/// Reads everything that a recipe trains and evaluates on; tokenises on the threads of `pipeline`.
///
/// # Errors
/// Data that cannot be found, read or understood; too many rows that teach nothing; nothing to train on.
pub fn read(config: &RunConfig, tokenizer: &Tokenizer, pipeline: Pipeline) -> Result<DataSets, DataError> {
    let mut train = read_set(config, tokenizer, &config.data.training_sources(), config.data.mix.into(), pipeline)?;
    let own = config.data.held_out_sources();
    if !own.is_empty() {
        let held_out = read_set(config, tokenizer, &own, MixOrder::Concatenate, pipeline)?;
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
    pipeline: Pipeline,
) -> Result<ReadSet, DataError> {
    let corpus = corpus(config, tokenizer, sources, order, pipeline)?;
    let (tokenised, kept) = tokenised(&corpus, config)?;
    let found = corpus.mixture().sources().iter().zip(corpus.encoders()).zip(tokenised.diagnoses);
    let report = |((source, encoder), diagnosis): ((&Source, &Encoder<'_>), Diagnosis)| SourceReport {
        name: source.spec().path.clone(),
        format: source.format().name().to_owned(),
        shape: data_report::shape_name(encoder.shape()),
        diagnosis,
    };
    let sources = found.map(report).collect();
    Ok(ReadSet { documents: DocumentSet::all(Arc::new(tokenised.store)), sources, kept })
}

fn corpus<'a>(
    config: &RunConfig,
    tokenizer: &'a Tokenizer,
    sources: &[SourceConfig],
    order: MixOrder,
    pipeline: Pipeline,
) -> Result<Corpus<'a>, DataError> {
    let hub = Hub::from_environment();
    let found: Vec<Source> = sources.iter().map(|source| source.spec().resolve(&hub)).collect::<Result<_, _>>()?;
    let mixture = Mixture::new(found, order, config.data.mix_until.into(), config.seed)?;
    let options = sources.iter().map(|source| encode_options(config, source)).collect();
    let mut corpus = Corpus::new(tokenizer, mixture, options)?;
    corpus.pipeline = pipeline;
    corpus.max_bad_share = config.data.max_bad_share;
    Ok(corpus)
}

fn encode_options(config: &RunConfig, source: &SourceConfig) -> EncodeOptions {
    EncodeOptions {
        shape: source.shape.into(),
        fields: source.field_names().expect("the recipe's check has seen the names"),
        train_on: config.train_on().into(),
        train_end_of_turn: config.data.train_end_of_turn,
        overflow: config.data.overflow.into(),
        ..EncodeOptions::new(config.max_seq_len)
    }
}

/// The tokens, from the cache or made now, with a sentence about where they are.
fn tokenised(corpus: &Corpus<'_>, config: &RunConfig) -> Result<(Tokenised, String), DataError> {
    let bytes = corpus.mixture().bytes();
    let cache = match &config.data.cache {
        Some(folder) => Ok(TokenCache::in_folder(folder)),
        None if bytes <= SMALL_BYTES => {
            return Ok((corpus.in_memory()?, "tokenised now, kept in memory".to_owned()));
        }
        None => TokenCache::in_default_folder(),
    };
    match cache.map_err(DataError::from).and_then(|cache| cached(corpus, &cache)) {
        Err(DataError::Cache(problem @ (CacheError::NoFolder | CacheError::Io { .. }))) if bytes <= MEMORY_BYTES => {
            Ok((corpus.in_memory()?, format!("tokenised now, kept in memory for this run: {problem}")))
        }
        result => result,
    }
}

fn cached(corpus: &Corpus<'_>, cache: &TokenCache) -> Result<(Tokenised, String), DataError> {
    let tokenised = corpus.cached(cache)?;
    let how = if tokenised.is_new { "tokenised now, kept" } else { "tokens of an earlier run, found" };
    let note = tokenised.note.as_ref().map_or_else(String::new, |note| format!("; {note}"));
    let kept = format!("{how} in {}{note}", cache.folder().display());
    Ok((tokenised, kept))
}
