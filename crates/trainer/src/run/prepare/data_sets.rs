//! Finds the recipe's sources, tokenizes them with the data crate's [`Corpus`], and stores the documents for the next run.
//!
//! This file adds what only a recipe knows: the folder that stores tokens, and the names in reports.
//! Trade-off: small data is tokenized by every run, which takes a second and leaves no files.

use std::collections::HashSet;
use std::fmt::{self, Display};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use firebrick_arch::counted;
use firebrick_data::{
    CacheError, Corpus, DataError, Diagnosis, DocumentSet, EncodeOptions, Encoder, Fields, FileFormat, Hub, Mix,
    Mixture, Origin, Pipeline, RecordFormat, Source, SpecialToken, TemplateChoice, TemplateDefaults, TokenCache,
    Tokenized, Tokenizer,
};

use crate::config::{Auto, RunConfig, Share, SourceConfig, to_name};
use crate::plan::size;

/// Data of up to this many bytes is tokenized by every run, unless the recipe names a folder.
const SMALL_BYTES: u64 = 8_000_000;
/// Data of up to this many bytes is kept in memory if the cache cannot be written.
const MEMORY_BYTES: u64 = 1 << 30;
/// Maximum share of a source's tokens that may be cut off without a remark.
const NOTABLE_CUT: f64 = 0.05;
/// One held-out record in this many that is trained on is warned of.
const TRAINED: usize = 20;
const SECONDS_PER_DAY: i64 = 86_400;

/// Tokenized documents, and the findings in their records.
#[derive(Debug)]
pub struct ReadSet {
    /// The documents, in the order of the data.
    pub documents: DocumentSet,
    /// Hashes of the records that gave no document.
    dropped: Vec<u64>,
    /// Reports on the contents of the sources.
    pub sources: Vec<SourceReport>,
    /// The sources, with the options by which their records were encoded.
    pub inputs: Vec<Input>,
    /// A sentence about where the tokens are.
    pub location: String,
    /// The folder of the cache; `None` where the tokens are in memory.
    pub cache: Option<PathBuf>,
}

/// A source and what its records contained.
#[derive(Debug, Clone, PartialEq)]
pub struct SourceReport {
    /// Its path as the recipe writes it.
    pub name: String,
    /// Its file format.
    pub file_format: String,
    /// The format of its records.
    pub record_format: String,
    /// The findings in its records.
    pub diagnosis: Diagnosis,
    /// Sentences about how it was read.
    pub remarks: Vec<String>,
}

impl Display for SourceReport {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} ({}, {}): {}", self.name, self.file_format, self.record_format, self.diagnosis)?;
        self.remarks.iter().try_for_each(|remark| write!(formatter, "\n  note: {remark}"))
    }
}

/// A source that was read.
#[derive(Clone, Debug)]
pub struct Input {
    /// Its files.
    pub source: Source,
    /// How its records became documents; the record format is resolved, never `Auto`.
    pub options: EncodeOptions,
}

/// Returns file and line of a document's record.
pub fn place(inputs: &[Input], origin: Origin) -> String {
    let files = inputs[origin.source as usize].source.file_names();
    format!("{}:{}", files[origin.file as usize], origin.line)
}

/// The data that a recipe trains and evaluates on.
#[derive(Debug)]
pub struct DataSets {
    /// Documents to train on.
    pub train: ReadSet,
    /// Documents to evaluate on; without reports if they are a part of the others.
    pub held_out: Option<ReadSet>,
}

/// Loads the model's tokenizer with the tokens that the recipe adds, the special tokens that it chooses and the chat template that it names.
/// Templates that use the date see the beginning of the UTC day of `date` (seconds since 1970), so all runs that begin on one day see the same date.
///
/// # Errors
/// A folder without a tokenizer, a new token that is none, a special token that is none, or a template that does not exist or does not parse.
pub fn tokenizer(config: &RunConfig, folder: &Path, date: i64) -> Result<Tokenizer, DataError> {
    let mut tokenizer = Tokenizer::from_folder(folder)?;
    tokenizer.add_tokens(&config.data.new_tokens, false)?;
    tokenizer.add_tokens(&config.data.new_special_tokens, true)?;
    for (role, token) in [(SpecialToken::Eos, &config.data.eos_token), (SpecialToken::Pad, &config.data.pad_token)] {
        token.iter().try_for_each(|token| tokenizer.set_special_token(role, token))?;
    }
    if let Some(template) = &config.data.chat_template {
        let is_file = Path::new(template).is_file() || template.contains(['/', '\\']) || template.ends_with(".jinja");
        tokenizer.choose_template(&match is_file {
            true => TemplateChoice::File(PathBuf::from(template)),
            false => TemplateChoice::Named(template.clone()),
        })?;
    }
    tokenizer.set_template_defaults(TemplateDefaults {
        arguments: config.data.chat_template_kwargs.clone().into_iter().collect(),
        system_prompt: config.data.system_prompt.clone(),
    });
    tokenizer.set_date(date - date.rem_euclid(SECONDS_PER_DAY));
    Ok(tokenizer)
}

/// Reads all data that a recipe trains and evaluates on; tokenizes on the threads of `pipeline`.
///
/// # Errors
/// Data that cannot be found, read or parsed; too many records that cannot be trained on; nothing to train on.
pub fn read(config: &RunConfig, tokenizer: &Tokenizer, pipeline: Pipeline) -> Result<DataSets, DataError> {
    let reader = Reader { config, tokenizer, pipeline };
    let mut train = reader.set(&config.data.training_sources(), config.data.mix)?;
    let separate = config.data.held_out_sources();
    let held_out = match config.data.eval_fraction {
        _ if !separate.is_empty() => Some(reader.set(&separate, Mix::Concatenate)?),
        Some(Auto::Given(Share(fraction))) => Some(train.hold_out(fraction)?),
        Some(Auto::Auto) => match size::held_out(train.records()) {
            Some(fraction) => Some(train.hold_out(fraction)?),
            None => {
                let fewest = size::FEWEST_TO_HOLD_OUT;
                train.location += &format!("; fewer than {fewest} records: all are trained on, and none is held out");
                None
            }
        },
        None => None,
    };
    Ok(DataSets { train, held_out })
}

impl ReadSet {
    /// Returns the number of distinct records with documents.
    fn records(&self) -> usize {
        self.hashes().collect::<HashSet<u64>>().len()
    }

    /// Returns the hash of each document's record.
    fn hashes(&self) -> impl Iterator<Item = u64> + '_ {
        (0..self.documents.len()).map(|document| self.documents.entry(document).origin.record)
    }

    /// Takes a fraction of the documents out, by a hash of each record.
    fn hold_out(&mut self, fraction: f64) -> Result<Self, DataError> {
        let (documents, held_out) = self.documents.split(fraction, &self.dropped)?;
        self.documents = documents;
        let (inputs, location) =
            (self.inputs.clone(), "held out of the training data by a hash of each record".to_owned());
        Ok(Self { documents: held_out, dropped: Vec::new(), sources: Vec::new(), inputs, location, cache: None })
    }
}

impl DataSets {
    /// Returns whether any training data is rendered with the chat template.
    pub fn has_chats(&self, tokenizer: &Tokenizer) -> bool {
        let is_chat = |input: &Input| {
            let format = input.options.record_format;
            matches!(
                format,
                RecordFormat::Chat
                    | RecordFormat::Sharegpt
                    | RecordFormat::Alpaca
                    | RecordFormat::Preference
                    | RecordFormat::Prompt
            )
        };
        tokenizer.chat_template().is_ok() && self.train.inputs.iter().any(is_chat)
    }

    /// Returns sentences about the data, to print before a run.
    pub fn notes(&self) -> Vec<String> {
        let mut notes: Vec<String> =
            self.train.sources.iter().map(|source| format!("training data: {source}")).collect();
        notes.push(self.train.location.clone());
        let Some(held_out) = &self.held_out else { return notes };
        let ReadSet { documents, sources, .. } = held_out;
        notes.extend(sources.iter().map(|source| format!("held-out data: {source}")));
        let records: HashSet<u64> = held_out.hashes().collect();
        let both = self.train.hashes().filter(|record| records.contains(record)).collect::<HashSet<u64>>().len();
        notes.extend((both > 0 && both * TRAINED >= records.len()).then(|| {
            let of = counted(records.len(), "held-out record");
            let advice = "the held-out loss will not show overfitting; take other records, or data.eval_fraction";
            format!("WARNING: {both} of {of} are in the training data too: {advice}")
        }));
        if sources.is_empty() {
            let tokens: usize = (0..documents.len()).map(|index| documents.entry(index).tokens as usize).sum();
            let (examples, tokens) = (counted(documents.len(), "example"), counted(tokens, "token"));
            notes.push(format!("held out of it: {examples}, {tokens}"));
        }
        notes
    }
}

struct Reader<'a> {
    config: &'a RunConfig,
    tokenizer: &'a Tokenizer,
    pipeline: Pipeline,
}

impl<'a> Reader<'a> {
    fn set(&self, sources: &[SourceConfig], order: Mix) -> Result<ReadSet, DataError> {
        let corpus = self.corpus(sources, order)?;
        let (tokenized, location, cache) = self.tokenized(&corpus)?;
        let input = |(source, encoder): (&Source, &Encoder<'_>)| Input {
            source: source.clone(),
            options: encoder.options().clone(),
        };
        let inputs = corpus.mixture.sources().iter().zip(&corpus.encoders).map(input).collect();
        let found = corpus.mixture.sources().iter().zip(&corpus.encoders).zip(tokenized.diagnoses);
        let report = |((source, encoder), diagnosis): ((&Source, &Encoder<'_>), Diagnosis)| SourceReport {
            name: source.spec().path.clone(),
            file_format: to_name(&source.format()),
            record_format: to_name(&encoder.options().record_format),
            remarks: remarks(source, encoder, &diagnosis, self.config),
            diagnosis,
        };
        let sources = found.map(report).collect();
        let (documents, dropped) = (DocumentSet::all(Arc::new(tokenized.store)), tokenized.dropped);
        Ok(ReadSet { documents, dropped, sources, inputs, location, cache })
    }

    fn corpus(&self, sources: &[SourceConfig], order: Mix) -> Result<Corpus<'a>, DataError> {
        let (hub, config) = (Hub::from_environment(), self.config);
        let found: Vec<Source> = sources.iter().map(|source| source.spec().resolve(&hub)).collect::<Result<_, _>>()?;
        let mixture = Mixture::new(found, order, config.data.mix_until, config.data_seed())?;
        let options = sources.iter().map(|source| self.options(source)).collect();
        let mut corpus = Corpus::new(self.tokenizer, mixture, options)?;
        corpus.pipeline = self.pipeline;
        corpus.max_bad_share = config.data.max_bad_share;
        Ok(corpus)
    }

    fn options(&self, source: &SourceConfig) -> EncodeOptions {
        let config = self.config;
        let record_format = match (&config.preference, &config.grpo) {
            (Some(_), _) => RecordFormat::Preference,
            (None, Some(_)) => RecordFormat::Prompt,
            (None, None) => source.format,
        };
        let of_answer = config.grpo.as_ref().map_or(0, |grpo| grpo.max_completion_length);
        EncodeOptions {
            record_format,
            fields: source.field_names().expect("the names were checked when the recipe was read"),
            train_on: config.train_on(),
            roles_to_train: config.data.roles_to_train.clone(),
            train_end_of_turn: config.data.train_end_of_turn,
            overflow: config.data.overflow,
            ..EncodeOptions::new(config.max_seq_len() - of_answer)
        }
    }

    /// Returns the tokens, from the cache or tokenized now, with a sentence about where they are and the folder of the cache.
    fn tokenized(&self, corpus: &Corpus<'_>) -> Result<(Tokenized, String, Option<PathBuf>), DataError> {
        let bytes = corpus.mixture.bytes();
        let cache = match &self.config.data.cache {
            Some(folder) => Ok(TokenCache::in_folder(folder)),
            None if bytes <= SMALL_BYTES => {
                return Ok((corpus.in_memory()?, "tokenized now, kept in memory".to_owned(), None));
            }
            None => TokenCache::in_default_folder(),
        };
        match cache.map_err(DataError::from).and_then(|cache| cached(corpus, &cache)) {
            Err(DataError::Cache(problem @ (CacheError::NoFolder | CacheError::Io { .. })))
                if bytes <= MEMORY_BYTES =>
            {
                Ok((corpus.in_memory()?, format!("tokenized now, kept in memory for this run: {problem}"), None))
            }
            result => result,
        }
    }
}

/// Returns what a user may not expect about how a source is read.
fn remarks(source: &Source, encoder: &Encoder<'_>, diagnosis: &Diagnosis, config: &RunConfig) -> Vec<String> {
    let mut remarks = Vec::new();
    let evaluated: Vec<Option<String>> = config.data.held_out_sources().into_iter().map(|other| other.split).collect();
    let mut others = source.unread_splits().to_vec();
    others.retain(|split| !evaluated.contains(&Some(split.clone())));
    if !others.is_empty() {
        let others = others.join(", ");
        remarks.push(format!("the split train was read; {others} is there too, choose another with split = \"...\""));
    }
    let (options, usual) = (encoder.options(), Fields::default());
    let fields = &options.fields;
    if options.record_format == RecordFormat::Alpaca && fields.output != usual.output {
        remarks.push(format!(
            "the columns {:?} and {:?} are a question and its answer",
            fields.instruction, fields.output
        ));
    }
    if source.format() == FileFormat::Text && begins_as_json(source) {
        let remedy = "name the file .jsonl, or set data.file_format = \"jsonl\"";
        remarks.push(format!("the text is JSON, and it is trained on as it stands; to read it as records, {remedy}"));
    }
    let has_template = encoder.tokenizer().chat_template().is_ok();
    if options.record_format == RecordFormat::Preference && diagnosis.chats == 0 {
        let remedy = match has_template && fields.instruction == usual.instruction {
            true => format!("; for turns of a chat, map the prompt: fields = {{ instruction = {:?} }}", fields.prompt),
            false => String::new(),
        };
        remarks.push(format!("prompts and answers are joined without the chat template{remedy}"));
    }
    if options.record_format == RecordFormat::PromptCompletion && has_template && diagnosis.chats == 0 {
        let remedy = "for turns of a chat, map them: fields = { instruction = \"prompt\", output = \"completion\" }, format = \"alpaca\"";
        remarks.push(format!("prompt and completion are joined without the chat template; {remedy}"));
    }
    let share = diagnosis.cut_share();
    // A larger share is warned of, with the same remedy.
    if share > NOTABLE_CUT && diagnosis.loss_warning().is_none() {
        let lines = match (options.record_format, source.format()) {
            (RecordFormat::Text, FileFormat::Text) => ", text_unit = \"line\" if each line is a document",
            _ => "",
        };
        let (percent, limit) = (100.0 * share, options.max_seq_len);
        let remedy = match options.record_format {
            RecordFormat::Preference => "raise max_seq_len, which both answers of a pair share".to_owned(),
            _ => format!("set data.overflow = \"split\"{lines}, or raise max_seq_len"),
        };
        remarks.push(format!("{percent:.1} % of the tokens are lost to max_seq_len = {limit}: {remedy}"));
    }
    remarks
}

/// Returns whether the first line of a text is an object of JSON.
fn begins_as_json(source: &Source) -> bool {
    let first = source.first_record().ok().flatten();
    let line = first.and_then(|record| record.fields.get("text")?.as_str()?.lines().next().map(str::to_owned));
    line.is_some_and(|line| line.starts_with('{') && serde_json::from_str::<serde_json::Value>(&line).is_ok())
}

fn cached(corpus: &Corpus<'_>, cache: &TokenCache) -> Result<(Tokenized, String, Option<PathBuf>), DataError> {
    let tokenized = corpus.cached(cache)?;
    let how = if tokenized.is_new { "tokenized now, stored" } else { "tokens of an earlier run, found" };
    let note = tokenized.note.as_ref().map_or_else(String::new, |note| format!("; {note}"));
    let location = format!("{how} in {}{note}", cache.folder().display());
    Ok((tokenized, location, Some(cache.folder().to_owned())))
}
