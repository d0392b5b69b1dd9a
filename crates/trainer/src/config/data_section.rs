//! `[data]`: every key about what to train and evaluate on. The doc comments here are the descriptions in
//! docs/config.schema.json.
//!
//! Values have the types of the data crate. Not supported: keys for the tokenizer itself, which is the model folder's.

use std::collections::BTreeMap;

use firebrick_data::{
    Fields, FileFormat, Mix, MixUntil, OverflowPolicy, RecordFormat, SourceSpec, TextDocument, TrainOn,
};
use schemars::JsonSchema;
use serde::de::{Error, IntoDeserializer};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use crate::config::names::from_name;

/// `[data]`: what to train and evaluate on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DataConfig {
    /// What to train on, relative to the folder you run from: a file (JSONL, JSON, CSV, TSV, text, Parquet, Arrow; also
    /// .gz and .zst), a pattern such as "data/*.jsonl", a folder, or a Hub dataset "owner/name". Several: `sources`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub path: String,
    /// What to evaluate on, named as `path`. Default: absent.
    pub eval_path: Option<String>,
    /// Fraction of the training data that is held out to evaluate on, between 0 and 1, chosen by a hash of each
    /// record: the same records whatever the tokenizer, template and lengths. Default: absent.
    pub eval_fraction: Option<f64>,
    /// What the records of `path` and `eval_path` are: "chat" (`messages`), "text" (`text`), "alpaca" (also pairs such as
    /// `question` and `answer`), "sharegpt", "prompt_completion", "pretokenized", "preference" (with `[preference]`), or "auto": detected from the first record.
    /// Default "auto".
    #[serde(default, deserialize_with = "record_format")]
    pub format: RecordFormat,
    /// File format of `path` and `eval_path`, where names do not show it: "jsonl", "json", "csv", "tsv", "text", "parquet" or
    /// "arrow". Default: absent, detected from the files' names.
    pub file_format: Option<FileFormat>,
    /// Split of `path`, where it is a Hub dataset or a folder laid out like one. Default: absent, "train".
    pub split: Option<String>,
    /// Split of `eval_path`. Default: absent, "train".
    pub eval_split: Option<String>,
    /// Configuration (subset) of a Hub dataset. Default: absent.
    pub config: Option<String>,
    /// Branch, tag or commit of the Hub dataset `path`. Default: absent, "main".
    pub revision: Option<String>,
    /// Key of a JSON document that holds the list of records. Default: absent.
    pub field: Option<String>,
    /// Only these columns are read. Default: absent, all.
    pub columns: Option<Vec<String>>,
    /// What is one document of a text file: the whole "file" or each "line". Default "file".
    #[serde(default)]
    pub text_unit: TextDocument,
    /// At most this many records of `path`, from the beginning. Default: absent, all.
    pub limit: Option<u64>,
    /// Which tokens count in the loss: what the "assistant" writes, only its "last" answer, or "all"; messages that have a
    /// flag of their own (`train`, `training`, `trained`, or a `weight` of 0 or 1) follow it. "flags": only messages whose
    /// flag is true. Default: "assistant", and "all" for plain text.
    pub train_on: Option<TrainOn>,
    /// The roles whose messages count in the loss. Default ["assistant"].
    #[serde(default = "assistant")]
    pub roles_to_train: Vec<String>,
    /// Train the token that ends the assistant's turn, so that the model learns to stop. Default true.
    #[serde(default = "yes")]
    pub train_end_of_turn: bool,
    /// What happens to documents longer than `max_seq_len`: "truncate", "split" into several, or "drop". All are counted.
    /// Default: absent, plain text and token ids are split, conversations are truncated.
    pub overflow: Option<OverflowPolicy>,
    /// Maximum fraction of a source's records that may be untrainable (refused by the chat template, nothing to train, ...)
    /// or lose a part to the template (tools, a message, ...); a run with more is refused, fewer are counted and reported.
    /// Default 0.1.
    #[serde(default = "default_max_bad_share")]
    pub max_bad_share: f64,
    /// Chat template to use instead of the model's default: a file, the name of one of the tokenizer's templates, or a
    /// built-in one: "chatml", "llama3", "gemma", "phi3", "zephyr", "alpaca". Default: absent.
    pub chat_template: Option<String>,
    /// Tokens to add to the model's tokenizer, as in ["<tool_call>", "</tool_call>"]: each is one id wherever its text occurs. Embedding and
    /// head get rows for them, which start at the mean of the others; with adapters only these rows of the tables train. Default: none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub new_tokens: Vec<String>,
    /// The same for special tokens, which are left out of decoded text as the ends of turns are. Default: none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub new_special_tokens: Vec<String>,
    /// System message of conversations that have none, and of prompts. Default: absent.
    pub system_prompt: Option<String>,
    /// Shuffle the rows in each epoch; false keeps the order of the data. Default true.
    #[serde(default = "yes")]
    pub shuffle: bool,
    /// Seed of the order of rows and of mixtures by weight. Default: absent, `seed`.
    pub data_seed: Option<u64>,
    /// Rows are padded to a multiple of this many tokens. Default: absent, packed rows have `max_seq_len` tokens, others a
    /// multiple of 16.
    pub pad_to_multiple_of: Option<usize>,
    /// Threads that tokenize, and that build batches. Default: absent, the plan decides both from the machine's cores and the
    /// backend.
    pub workers: Option<usize>,
    /// Folder that stores tokenized data. Default: absent, data of up to 8 MB is tokenized by each run, larger data is stored in
    /// `FIREBRICK_CACHE` or else in the user's cache folder.
    pub cache: Option<String>,
    /// How several sources are mixed: "concatenate" (one after the other), "size" (each row once, spread evenly) or
    /// "weight" (sampled by the sources' `weight`). Batches are shuffled in any case. Default "concatenate".
    #[serde(default)]
    pub mix: Mix,
    /// When a mixture by weight ends: when the "first" source has no more records, when "all" have been read (smaller ones
    /// repeat), or "never" before every record was used once. Default "first".
    #[serde(default)]
    pub mix_until: MixUntil,
    /// Variables of the chat template, as in `chat_template_kwargs = { enable_thinking = false }`; a record's own take
    /// precedence. Default: none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub chat_template_kwargs: BTreeMap<String, Value>,
    /// Names of the records' keys where they are not the usual ones, as in `fields = { text = "body" }`: text, messages,
    /// role, content, tools, system, prompt, completion, instruction, input, output, chosen, rejected, input_ids, labels. Default: none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub fields: BTreeMap<String, String>,
    /// What the records' roles are called in chat templates, as in `roles = { bot = "assistant" }`. Default: none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub roles: BTreeMap<String, String>,
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
    /// What the records are, as `data.format`. Default "auto".
    #[serde(default, alias = "shape", deserialize_with = "record_format")]
    pub format: RecordFormat,
    /// The file format, as `data.file_format`. Default: absent, detected from the files' names.
    pub file_format: Option<FileFormat>,
    /// Split of a Hub dataset or of a folder laid out like one. Default: absent, "train".
    pub split: Option<String>,
    /// Configuration (subset) of a Hub dataset. Default: absent.
    pub config: Option<String>,
    /// Branch, tag or commit of a Hub dataset. Default: absent, "main".
    pub revision: Option<String>,
    /// Key of a JSON document that holds the list of records. Default: absent.
    pub field: Option<String>,
    /// Only these columns are read. Default: absent, all.
    pub columns: Option<Vec<String>>,
    /// What is one document of a text file: the whole "file" or each "line". Default "file".
    #[serde(default)]
    pub text_unit: TextDocument,
    /// At most this many records, from the beginning. Default: absent, all.
    pub limit: Option<u64>,
    /// Share in a mixture by weight. Default: absent, 1.
    pub weight: Option<f64>,
    /// Names of this source's keys where they are not the usual ones, as in `fields = { text = "body" }`: text, messages,
    /// role, content, tools, system, prompt, completion, instruction, input, output, chosen, rejected, input_ids, labels. Default: none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub fields: BTreeMap<String, String>,
    /// What this source's roles are called in chat templates, as in `roles = { bot = "assistant" }`. Default: none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub roles: BTreeMap<String, String>,
}

impl DataConfig {
    /// Whether the tokenizer gets tokens that the model's folder does not have.
    #[must_use]
    pub fn adds_tokens(&self) -> bool {
        !self.new_tokens.is_empty() || !self.new_special_tokens.is_empty()
    }

    /// The training sources: those of `sources`, or the one of `path`.
    #[must_use]
    pub fn training_sources(&self) -> Vec<SourceConfig> {
        if !self.sources.is_empty() {
            return self.sources.clone();
        }
        vec![SourceConfig { split: self.split.clone(), limit: self.limit, ..self.at(&self.path) }]
    }

    /// The sources of a separate held-out set; none if there is no such set.
    #[must_use]
    pub fn held_out_sources(&self) -> Vec<SourceConfig> {
        match &self.eval_path {
            Some(path) => vec![SourceConfig { split: self.eval_split.clone(), ..self.at(path) }],
            None => self.eval_sources.clone(),
        }
    }

    /// As [`SourceConfig::field_names`], for `path` and `eval_path`.
    ///
    /// # Errors
    /// As [`SourceConfig::field_names`].
    pub fn field_names(&self) -> Result<Fields, String> {
        self.at("").field_names()
    }

    /// What applies to both `path` and `eval_path`.
    fn at(&self, path: &str) -> SourceConfig {
        SourceConfig {
            path: path.to_owned(),
            format: self.format,
            file_format: self.file_format,
            config: self.config.clone(),
            revision: self.revision.clone().filter(|_| path == self.path),
            field: self.field.clone(),
            columns: self.columns.clone(),
            text_unit: self.text_unit,
            fields: self.fields.clone(),
            roles: self.roles.clone(),
            ..SourceConfig::default()
        }
    }
}

impl SourceConfig {
    /// The source as the data crate describes it.
    #[must_use]
    pub fn spec(&self) -> SourceSpec {
        SourceSpec {
            path: self.path.clone(),
            file_format: self.file_format,
            split: self.split.clone(),
            config: self.config.clone(),
            revision: self.revision.clone(),
            field: self.field.clone(),
            columns: self.columns.clone(),
            text_unit: self.text_unit,
            limit: self.limit,
            weight: self.weight,
        }
    }

    /// The names of the record's keys.
    ///
    /// # Errors
    /// A sentence about a name that is not one of [`Fields`]'.
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

fn yes() -> bool {
    true
}

fn assistant() -> Vec<String> {
    vec!["assistant".to_owned()]
}

/// A record format; the error about a file format names its key.
fn record_format<'de, D: Deserializer<'de>>(deserializer: D) -> Result<RecordFormat, D::Error> {
    let name = String::deserialize(deserializer)?;
    let parse = |name: &str| RecordFormat::deserialize(IntoDeserializer::<D::Error>::into_deserializer(name));
    parse(&name).map_err(|error| match from_name::<FileFormat>(&name) {
        Ok(_) => D::Error::custom(format!(
            "{name:?} is a file format: write file_format = {name:?}; format says what the records are"
        )),
        Err(_) => error,
    })
}

fn default_max_bad_share() -> f64 {
    0.1
}
