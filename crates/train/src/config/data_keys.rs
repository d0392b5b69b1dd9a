//! `[data]`: every key about what to train and evaluate on. The doc comments here are the descriptions in
//! docs/config.schema.json.
//!
//! Words of recipes become types of the data crate here, so that the rest of this crate knows one vocabulary. Gives up
//! keys for the tokenizer itself: it is the model folder's.

use std::collections::BTreeMap;

use firebrick_data::{Exhausted, Fields, Format, MixOrder, Overflow, Shape, SourceSpec, TextUnit};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// `[data]`: what to train and evaluate on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DataConfig {
    /// What to train on, relative to the folder you run from: a file (JSONL, JSON, CSV, TSV, text, Parquet, Arrow; also
    /// .gz and .zst), a pattern such as "data/*.jsonl", a folder, or a Hub dataset "owner/name". Several: `sources`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub path: String,
    /// What to evaluate on, named as `path`. Default: absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eval_path: Option<String>,
    /// Part of the training data that is held out to evaluate on, between 0 and 1, chosen by a hash of the content.
    /// Default: absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eval_fraction: Option<f64>,
    /// What the rows of `path` and `eval_path` are: "chat" (`messages`), "text" (`text`), "alpaca", "sharegpt",
    /// "prompt_completion", "pretokenized", or "auto": told from the first row. Default "auto".
    #[serde(default)]
    pub format: DataFormat,
    /// Which tokens count in the loss: what the "assistant" says, only its "last" answer, or "all", where messages that
    /// carry a flag of their own (`train`, `training`, `trained`, or a `weight` of 0 or 1) are believed; or "flags": only
    /// messages whose flag says yes. Default: "assistant", and "all" for plain text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub train_on: Option<TrainOn>,
    /// Train the token that ends the assistant's turn, so that the model learns to stop. Default true.
    #[serde(default = "yes")]
    pub train_end_of_turn: bool,
    /// What becomes of documents longer than `max_seq_len`: "truncate", "split" into several, or "drop". All are counted.
    /// Default "truncate".
    #[serde(default)]
    pub overflow: OverflowPolicy,
    /// The largest part of a source's rows that may be untrainable (refused by the chat template, nothing to train, ...);
    /// a run with more is refused, with fewer they are counted and told. Default 0.1.
    #[serde(default = "default_max_bad_share")]
    pub max_bad_share: f64,
    /// Chat template to use instead of the model's default: a file, or the name of one of the tokenizer's templates.
    /// Default: absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chat_template: Option<String>,
    /// Rows are padded to a multiple of so many tokens. Default: absent, packed rows have `max_seq_len` tokens, others a
    /// multiple of 16.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pad_to_multiple_of: Option<usize>,
    /// Threads that tokenise, and that make batches. Default: absent, the plan decides both from the machine's cores and the
    /// backend.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workers: Option<usize>,
    /// Folder that keeps tokenised data. Default: absent, data of up to 8 MB is tokenised anew, larger data kept in
    /// `FIREBRICK_CACHE` or else in the user's cache folder.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<String>,
    /// How several sources are mixed: "concatenate" (one after the other), "size" (each row once, spread evenly) or
    /// "weight" (drawn by the sources' `weight`). Batches are shuffled in any case. Default "concatenate".
    #[serde(default)]
    pub mix: Mix,
    /// When a mixture by weight ends: once the "first" source has no more rows, once "all" have been read (smaller ones
    /// repeat), or "never" before every row came once. Default "first".
    #[serde(default)]
    pub mix_until: MixUntil,
    /// Several sources, as `[[data.sources]]` tables, instead of `path`. Default: none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sources: Vec<SourceConfig>,
    /// Several sources to evaluate on, as `[[data.eval_sources]]` tables, instead of `eval_path`. Default: none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub eval_sources: Vec<SourceConfig>,
}

/// `[[data.sources]]`: one of several sources.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SourceConfig {
    /// A file, a pattern, a folder or a Hub dataset, as `data.path`.
    pub path: String,
    /// The file format, where names do not show it. Default: absent, told from the files' names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<FileFormat>,
    /// What the rows are, as `data.format`. Default "auto".
    #[serde(default)]
    pub shape: DataFormat,
    /// Split of a Hub dataset or of a folder laid out like one. Default: absent, "train".
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub split: Option<String>,
    /// Configuration (subset) of a Hub dataset. Default: absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config: Option<String>,
    /// Branch, tag or commit of a Hub dataset. Default: absent, "main".
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision: Option<String>,
    /// Key of a JSON document that holds the list of rows. Default: absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub field: Option<String>,
    /// Only these columns are read. Default: absent, all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub columns: Option<Vec<String>>,
    /// What is one document of a text file: the whole "file" or each "line". Default "file".
    #[serde(default)]
    pub text_unit: TextDocument,
    /// At most this many rows, from the beginning. Default: absent, all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
    /// Share in a mixture by weight. Default: absent, 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<f64>,
    /// Names of this source's keys where they are not the usual ones, as in `fields = { text = "body" }`: text, messages,
    /// role, content, tools, system, prompt, completion, instruction, input, output, input_ids, labels. Default: none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub fields: BTreeMap<String, String>,
    /// What this source's roles are called in chat templates, as in `roles = { bot = "assistant" }`. Default: none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub roles: BTreeMap<String, String>,
}

/// `data.format` and `shape` of a source: what rows hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DataFormat {
    /// Told from the first row.
    #[default]
    Auto,
    /// `messages`, as OpenAI writes them.
    Chat,
    /// `text`.
    Text,
    /// `conversations` of `from` and `value`.
    Sharegpt,
    /// `instruction`, `input` and `output`.
    Alpaca,
    /// `prompt` and `completion`.
    PromptCompletion,
    /// `input_ids` with `labels` or a mask.
    Pretokenized,
}

/// `data.train_on`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TrainOn {
    /// Only what the assistant says counts in the loss.
    Assistant,
    /// Only what the assistant says after the user's last message counts in the loss.
    Last,
    /// Every token counts in the loss.
    All,
    /// Only messages whose own flag says yes count in the loss.
    Flags,
}

/// `data.overflow`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OverflowPolicy {
    /// The end is cut off.
    #[default]
    Truncate,
    /// Several documents are made of it.
    Split,
    /// It is left out.
    Drop,
}

/// `data.mix`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Mix {
    /// One source after the other.
    #[default]
    Concatenate,
    /// Every row once, spread evenly.
    Size,
    /// Drawn by weight.
    Weight,
}

/// `data.mix_until`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MixUntil {
    /// Until a source has no more rows.
    #[default]
    First,
    /// Until every source was read once; smaller ones repeat.
    All,
    /// Until every row came once.
    Never,
}

/// `format` of a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum FileFormat {
    /// A JSON object a line.
    Jsonl,
    /// A JSON list, or an object with one.
    Json,
    /// Comma-separated, with a header row.
    Csv,
    /// Tab-separated, with a header row.
    Tsv,
    /// Plain text.
    Text,
    /// Apache Parquet.
    Parquet,
    /// Apache Arrow IPC.
    Arrow,
}

/// `text_unit` of a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TextDocument {
    /// A file is a document.
    #[default]
    File,
    /// A line is a document.
    Line,
}

impl DataConfig {
    /// The training sources: those of `sources`, or the one of `path`.
    #[must_use]
    pub fn training_sources(&self) -> Vec<SourceConfig> {
        if self.sources.is_empty() { vec![self.at(&self.path)] } else { self.sources.clone() }
    }

    /// The sources of a held-out set of its own; none where there is no such set.
    #[must_use]
    pub fn held_out_sources(&self) -> Vec<SourceConfig> {
        match &self.eval_path {
            Some(path) => vec![self.at(path)],
            None => self.eval_sources.clone(),
        }
    }

    fn at(&self, path: &str) -> SourceConfig {
        SourceConfig { path: path.to_owned(), shape: self.format, ..SourceConfig::default() }
    }
}

impl SourceConfig {
    /// What the data crate finds and reads.
    #[must_use]
    pub fn spec(&self) -> SourceSpec {
        SourceSpec {
            path: self.path.clone(),
            format: self.format.map(Into::into),
            split: self.split.clone(),
            config: self.config.clone(),
            revision: self.revision.clone(),
            field: self.field.clone(),
            columns: self.columns.clone(),
            text_unit: match self.text_unit {
                TextDocument::File => TextUnit::File,
                TextDocument::Line => TextUnit::Line,
            },
            limit: self.limit,
            weight: self.weight,
        }
    }

    /// The names of keys. `Err` says which name means nothing.
    ///
    /// # Errors
    /// A name that is none of [`Fields`]'.
    pub fn field_names(&self) -> Result<Fields, String> {
        let mut map: Map<String, Value> =
            self.fields.iter().map(|(ours, theirs)| (ours.clone(), Value::from(theirs.as_str()))).collect();
        if map.contains_key("roles") {
            return Err("roles are mapped by the key `roles`, not in `fields`".to_owned());
        }
        map.insert("roles".to_owned(), self.roles.iter().map(|(a, b)| (a.clone(), Value::from(b.as_str()))).collect());
        serde_json::from_value(Value::Object(map)).map_err(|error| error.to_string())
    }
}

impl From<FileFormat> for Format {
    fn from(format: FileFormat) -> Self {
        match format {
            FileFormat::Jsonl => Self::Jsonl,
            FileFormat::Json => Self::Json,
            FileFormat::Csv => Self::Csv,
            FileFormat::Tsv => Self::Tsv,
            FileFormat::Text => Self::Text,
            FileFormat::Parquet => Self::Parquet,
            FileFormat::Arrow => Self::Arrow,
        }
    }
}

impl From<DataFormat> for Shape {
    fn from(format: DataFormat) -> Self {
        match format {
            DataFormat::Auto => Self::Auto,
            DataFormat::Chat => Self::Messages,
            DataFormat::Text => Self::Text,
            DataFormat::Sharegpt => Self::Sharegpt,
            DataFormat::Alpaca => Self::Alpaca,
            DataFormat::PromptCompletion => Self::PromptCompletion,
            DataFormat::Pretokenized => Self::Pretokenized,
        }
    }
}

impl From<TrainOn> for firebrick_data::TrainOn {
    fn from(train_on: TrainOn) -> Self {
        match train_on {
            TrainOn::Assistant => Self::Assistant,
            TrainOn::Last => Self::LastTurn,
            TrainOn::All => Self::All,
            TrainOn::Flags => Self::Flags,
        }
    }
}

impl From<OverflowPolicy> for Overflow {
    fn from(policy: OverflowPolicy) -> Self {
        match policy {
            OverflowPolicy::Truncate => Self::Truncate,
            OverflowPolicy::Split => Self::Split,
            OverflowPolicy::Drop => Self::Drop,
        }
    }
}

impl From<Mix> for MixOrder {
    fn from(mix: Mix) -> Self {
        match mix {
            Mix::Concatenate => Self::Concatenate,
            Mix::Size => Self::Size,
            Mix::Weight => Self::Weight,
        }
    }
}

impl From<MixUntil> for Exhausted {
    fn from(until: MixUntil) -> Self {
        match until {
            MixUntil::First => Self::First,
            MixUntil::All => Self::All,
            MixUntil::Never => Self::Never,
        }
    }
}

fn yes() -> bool {
    true
}

fn default_max_bad_share() -> f64 {
    0.1
}
