//! `[data]`: what to train and evaluate on. The doc comments here are the descriptions in docs/config.schema.json.
//!
//! Not supported: another tokenizer than that of the model folder. Trade-off: files are not opened here; whether they exist, and
//! what they contain, is found when they are read.

use std::collections::BTreeMap;

use firebrick_data::{Fields, Mix, MixUntil, OverflowPolicy, RecordFormat, TrainOn};
use serde_json::Value;

use crate::config::data_source::{SourceConfig, section_of_a_source};
use crate::config::section::{Rule, SEED, TOKENS, Whole, rule, rules};
use crate::config::{Auto, RunConfig, Share, to_name};

/// Threads that tokenize, or build batches: each takes about 0.2 MB.
const THREADS: u64 = 1 << 10;

section_of_a_source! {
    /// `[data]`: what to train and evaluate on.
    pub struct DataConfig in "data." {
        /// What to evaluate on, named as `path` and described by the same keys, except for `split` and `limit`. Default: absent.
        eval_path: Option<String> = None;
        /// Fraction of the training data that is held out to evaluate on, between 0 and 1, chosen by a hash of each
        /// record: the same records whatever the tokenizer, template and lengths. "auto": a tenth, at most about 200 records, and none of
        /// fewer than 20. Default: absent.
        eval_fraction: Option<Auto<Share>> = None;
        /// Split of `eval_path`. Default: absent, "train".
        eval_split: Option<String> = None;
        /// Which tokens count in the loss: what the "assistant" writes, only its "last" answer, or "all"; messages that have a
        /// flag of their own (`train`, `training`, `trained`, or a `weight` of 0 or 1) follow it. "flags": only messages whose
        /// flag is true. Default: "assistant", and "all" for plain text.
        train_on: Option<TrainOn> = None;
        /// The roles whose messages count in the loss. Default ["assistant"].
        roles_to_train: Vec<String> = vec!["assistant".to_owned()];
        /// Train the token that ends the assistant's turn, so that the model learns to stop. Default true.
        train_end_of_turn: bool = true;
        /// What happens to documents longer than `max_seq_len`: "truncate", "split" into several, or "drop". All are counted.
        /// Default: absent, plain text and token ids are split, conversations are truncated.
        overflow: Option<OverflowPolicy> = None;
        /// Maximum fraction of a source's records that may be untrainable (refused by the chat template, nothing to train, ...)
        /// or lose a part to the template (tools, a message, ...); a run with more is refused, fewer are counted and reported.
        /// Default 0.1.
        max_bad_share: f64 = 0.1;
        /// Chat template to use instead of the model's default: a file, the name of one of the tokenizer's templates, or a
        /// built-in one: "chatml", "llama3", "gemma", "phi3", "zephyr", "alpaca". Default: absent.
        chat_template: Option<String> = None;
        /// Tokens to add to the model's tokenizer, as in ["<tool_call>", "</tool_call>"]: each is one id wherever its text occurs. Embedding and
        /// head get rows for them, which start at the mean of the others; with adapters only these rows of the tables train. Default: none.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        new_tokens: Vec<String> = Vec::new();
        /// The same for special tokens, which are left out of decoded text as the ends of turns are. Default: none.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        new_special_tokens: Vec<String> = Vec::new();
        /// The token that ends texts, instead of the tokenizer's own: plain text ends with it, chat templates get it, generation stops at it, and
        /// what is saved names it. A special token of the tokenizer or of `new_special_tokens`. Default: absent, the tokenizer's own.
        eos_token: Option<String> = None;
        /// The token that fills rows, instead of the tokenizer's own, in training and in what is saved. Default: absent, the tokenizer's own.
        pad_token: Option<String> = None;
        /// System message of conversations that have none, and of prompts. Default: absent.
        system_prompt: Option<String> = None;
        /// Shuffle the rows in each epoch; false keeps the order of the data. Default true.
        shuffle: bool = true;
        /// Seed of the order of rows and of mixtures by weight. Default: absent, `seed`.
        data_seed: Option<u64> = None, Whole(0, SEED);
        /// Rows are padded to a multiple of this many tokens. Default: absent, packed rows have `max_seq_len` tokens, others a
        /// multiple of 16.
        pad_to_multiple_of: Option<usize> = None, Whole(1, TOKENS);
        /// Threads that tokenize, and that build batches. Default: absent, the plan decides both from the machine's cores and the
        /// backend.
        workers: Option<usize> = None, Whole(1, THREADS);
        /// Folder that stores tokenized data. Default: absent, data of up to 8 MB is tokenized by each run, larger data is stored in
        /// `FIREBRICK_CACHE` or else in the user's cache folder.
        cache: Option<String> = None;
        /// How several sources are mixed: "concatenate" (one after the other), "size" (each row once, spread evenly) or
        /// "weight" (sampled by the sources' `weight`). Batches are shuffled in any case. Default "concatenate".
        mix: Mix = Mix::Concatenate;
        /// When a mixture by weight ends: when the "first" source has no more records, when "all" have been read (smaller ones
        /// repeat), or "never" before every record was used once. Default "first".
        mix_until: MixUntil = MixUntil::First;
        /// Variables of the chat template, as in `chat_template_kwargs = { enable_thinking = false }`; a record's own take
        /// precedence. Default: none.
        #[serde(skip_serializing_if = "BTreeMap::is_empty")]
        chat_template_kwargs: BTreeMap<String, Value> = BTreeMap::new();
        /// Several sources, as `[[data.sources]]` tables, instead of `path`. Default: none.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        sources: Vec<SourceConfig> = Vec::new();
        /// Several sources to evaluate on, as `[[data.eval_sources]]` tables, instead of `eval_path`. Default: none.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        eval_sources: Vec<SourceConfig> = Vec::new();
    }
}

impl DataConfig {
    /// Returns whether the tokenizer gets tokens that the model's folder does not have.
    pub fn adds_tokens(&self) -> bool {
        !self.new_tokens.is_empty() || !self.new_special_tokens.is_empty()
    }

    /// Returns the training sources: those of `sources`, or the one of `path`.
    pub fn training_sources(&self) -> Vec<SourceConfig> {
        if self.sources.is_empty() { vec![self.own_source()] } else { self.sources.clone() }
    }

    /// Returns the sources of a separate held-out set; none if there is no such set.
    pub fn held_out_sources(&self) -> Vec<SourceConfig> {
        let Some(path) = &self.eval_path else { return self.eval_sources.clone() };
        let revision = self.revision.clone().filter(|_| *path == self.path);
        let (path, split) = (path.clone(), self.eval_split.clone());
        vec![SourceConfig { path, split, revision, limit: None, ..self.own_source() }]
    }

    /// Returns the names of the record's keys for `path` and `eval_path`, as [`SourceConfig::field_names`] does for a source.
    pub fn field_names(&self) -> Result<Fields, String> {
        self.own_source().field_names()
    }

    /// Returns `path` as a source, described by the keys next to it.
    fn own_source(&self) -> SourceConfig {
        SourceConfig {
            path: self.path.clone(),
            format: self.format,
            file_format: self.file_format,
            split: self.split.clone(),
            config: self.config.clone(),
            revision: self.revision.clone(),
            field: self.field.clone(),
            columns: self.columns.clone(),
            text_unit: self.text_unit,
            limit: self.limit,
            fields: self.fields.clone(),
            roles: self.roles.clone(),
            name: None,
            weight: None,
        }
    }
}

impl RunConfig {
    /// Returns which tokens count in the loss.
    pub fn train_on(&self) -> TrainOn {
        match (self.data.train_on, self.data.format) {
            (Some(train_on), _) => train_on,
            (None, RecordFormat::Text) => TrainOn::All,
            (None, _) => TrainOn::Assistant,
        }
    }

    /// Returns the seed of the order of rows and of mixtures.
    pub fn data_seed(&self) -> u64 {
        self.data.data_seed.unwrap_or(self.seed)
    }

    /// Returns whether there is data to evaluate on.
    pub fn has_eval_data(&self) -> bool {
        let data = &self.data;
        data.eval_path.is_some() || data.eval_fraction.is_some() || !data.eval_sources.is_empty()
    }
}

pub(super) fn rules(config: &RunConfig) -> Vec<Rule> {
    let data = &config.data;
    let mut rules = rules! {
        "data.path": !data.path.is_empty() || !data.sources.is_empty(),
            "is empty" => "write the file, folder or Hub dataset to train on";
        "data.eval_path": data.eval_path.as_deref() != Some(""),
            "is empty" => "write what to evaluate on, or leave the key out";
        "data.max_bad_share": (0.0..=1.0).contains(&data.max_bad_share),
            format!("must be from 0 to 1, got {}", data.max_bad_share) => "write for example 0.1";
        "data.eval_fraction": data.eval_fraction.and_then(Auto::given).is_none_or(|Share(fraction)| fraction > 0.0 && fraction < 1.0),
            "must be above 0 and below 1" => "write for example 0.05, or \"auto\"";
        "data.chat_template": data.chat_template.as_deref() != Some(""),
            "is empty" => "write a file, or the name of one of the tokenizer's templates, or leave the key out";
        "data.eos_token": data.eos_token.as_deref() != Some(""),
            "is empty" => "write a special token of the tokenizer, or leave the key out";
        "data.pad_token": data.pad_token.as_deref() != Some(""),
            "is empty" => "write a special token of the tokenizer, or leave the key out";
        "data.fields": data.field_names().is_ok(),
            data.field_names().err().unwrap_or_default() =>
            "write our name first and then the data's, as in fields = { text = \"body\" }";
        "data.limit": data.limit != Some(0),
            "is 0" => "write how many records to take, or leave the key out";
        "data.roles_to_train": !data.roles_to_train.is_empty(),
            "is empty: nothing would be trained" => "write for example [\"assistant\"]";
        "data.cache": data.cache.as_deref() != Some(""),
            "is empty" => "write a folder, or leave the key out";
    };
    rules.extend(agreements(config));
    for (key, sources) in [("data.sources", &data.sources), ("data.eval_sources", &data.eval_sources)] {
        let mix = if key == "data.sources" { data.mix } else { Mix::Concatenate };
        rules.extend(sources.iter().enumerate().flat_map(|(index, source)| source.rules(key, index, mix)));
        let (is_evaluated, is_of_pairs) = (key == "data.eval_sources", config.preference.is_some());
        rules.extend(sources.iter().flat_map(|source| source.name_rule(key, is_evaluated, is_of_pairs)));
    }
    rules
}

/// Returns the rules of keys that need other keys.
fn agreements(config: &RunConfig) -> Vec<Rule> {
    let data = &config.data;
    let has_roles = !matches!(config.train_on(), TrainOn::All | TrainOn::Flags);
    let plain_text =
        data.format == RecordFormat::Text && data.train_on.is_some_and(|train_on| train_on != TrainOn::All);
    let of_path =
        if data.sources.is_empty() || data.eval_path.is_some() { vec![] } else { data.own_source().described() };
    let of_path = of_path.into_iter().map(|key| {
        let problem = "describes data.path, and there are data.sources instead";
        rule(false, format!("data.{key}"), problem, "write it into each source")
    });
    let rules = rules! {
        "data.train_on": !plain_text,
            "plain text has no messages to choose from" => "write \"all\", or format = \"chat\"";
        "data.train_end_of_turn": data.train_end_of_turn || config.train_on() != TrainOn::All,
            "every token counts in the loss, the ends of turns too" => "remove it, or write train_on = \"assistant\"";
        "data.roles_to_train": data.roles_to_train == ["assistant"] || has_roles,
            format!("has no effect where train_on is {:?}", to_name(&config.train_on())) =>
            "remove it, or write train_on = \"assistant\"";
        "data.eval_split": data.eval_split.is_none() || data.eval_path.is_some(),
            "is the split of data.eval_path, which is absent" => "write eval_path too";
        "data.mix": data.mix == Mix::Concatenate || data.sources.len() > 1,
            "there are not several data.sources to mix" => "remove it, or name the sources as [[data.sources]] tables";
        "data.mix_until": data.mix_until == MixUntil::First || data.mix == Mix::Weight,
            "only a mixture by weight ends before every record was used once" => "remove it, or write mix = \"weight\"";
    };
    rules.into_iter().chain(of_path).collect()
}
