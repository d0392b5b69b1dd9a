//! A source of data: the keys that describe one, which `[data]` and each table of `[[data.sources]]` have.
//!
//! Values have the types of the data crate. Trade-off: in `[data]` the keys describe `path`, and `eval_path` too as far as they apply to it.

use std::collections::BTreeMap;

use firebrick_data::{Fields, FileFormat, Mix, RecordFormat, SourceSpec};
use serde::de::{Error, IntoDeserializer};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

use crate::config::from_name;
use crate::config::section::{AboveZero, Rule, rule};

/// Defines a section with the keys of a source, followed by its own keys.
macro_rules! section_of_a_source {
    ($(#[$about:meta])* pub struct $name:ident in $prefix:literal { $($own:tt)* }) => {
        $crate::config::section::section! {
            $(#[$about])*
            pub struct $name in $prefix {
                /// What to read, relative to the folder you run from: a file (JSONL, JSON, CSV, TSV, text, Parquet, Arrow; also
                /// .gz and .zst), a pattern such as "data/*.jsonl", a folder, or a Hub dataset "owner/name".
                #[serde(skip_serializing_if = "String::is_empty")]
                path: String = String::new();
                /// What the records are: "chat" (`messages`), "text" (`text`), "alpaca" (also pairs such as `question` and `answer`),
                /// "alpaca_prompt" (the same keys in the Alpaca project's own prompt, whatever the chat template), "sharegpt",
                /// "prompt_completion", "pretokenized", "preference" (with `[preference]`), or "auto": detected from the first record.
                /// Default "auto".
                #[serde(deserialize_with = "crate::config::data_source::record_format")]
                format: firebrick_data::RecordFormat = firebrick_data::RecordFormat::Auto;
                /// File format where names do not show it: "jsonl", "json", "csv", "tsv", "text", "parquet" or "arrow". Default:
                /// absent, detected from the files' names.
                file_format: Option<firebrick_data::FileFormat> = None;
                /// Split of a Hub dataset or of a folder laid out like one. Default: absent, "train".
                split: Option<String> = None;
                /// Configuration (subset) of a Hub dataset. Default: absent.
                config: Option<String> = None;
                /// Branch, tag or commit of a Hub dataset. Default: absent, "main".
                revision: Option<String> = None;
                /// Key of a JSON document that holds the list of records. Default: absent.
                field: Option<String> = None;
                /// Only these columns are read. Default: absent, all.
                columns: Option<Vec<String>> = None;
                /// What is one document of a text file: the whole "file" or each "line". Default "file".
                text_unit: firebrick_data::TextDocument = firebrick_data::TextDocument::File;
                /// At most this many records, from the beginning. Default: absent, all.
                limit: Option<u64> = None, $crate::config::section::Whole(0, $crate::config::section::COUNT);
                /// Names of the records' keys where they are not the usual ones, as in `fields = { text = "body" }`: text, messages,
                /// role, content, tools, system, prompt, completion, instruction, input, output, chosen, rejected, input_ids, labels.
                /// Default: none.
                #[serde(skip_serializing_if = "std::collections::BTreeMap::is_empty")]
                fields: std::collections::BTreeMap<String, String> = std::collections::BTreeMap::new();
                /// What the records' roles are called in chat templates, as in `roles = { bot = "assistant" }`. Default: none.
                #[serde(skip_serializing_if = "std::collections::BTreeMap::is_empty")]
                roles: std::collections::BTreeMap<String, String> = std::collections::BTreeMap::new();
                $($own)*
            }
        }
    };
}
pub(super) use section_of_a_source;

section_of_a_source! {
    /// `[[data.sources]]`: one of several sources.
    pub struct SourceConfig in "" {
        /// Share in a mixture by weight. Default: absent, 1.
        weight: Option<f64> = None, AboveZero(1e12);
        /// In `[[data.eval_sources]]`: the set of this source, which is packed and evaluated by itself; its loss is `eval_NAME_loss`, next to
        /// `eval_loss` of all sets together. Default: absent.
        name: Option<String> = None;
    }
}

impl SourceConfig {
    /// Returns the source as the data crate describes it.
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

    /// Returns the names of the record's keys.
    ///
    /// # Errors
    /// A sentence about a name that is not one of [`Fields`]'.
    pub fn field_names(&self) -> Result<Fields, String> {
        let texts = |map: &BTreeMap<String, String>| -> Map<String, Value> {
            map.iter().map(|(ours, theirs)| (ours.clone(), Value::from(theirs.as_str()))).collect()
        };
        let mut map = texts(&self.fields);
        if map.contains_key("roles") {
            return Err("roles are mapped by the key `roles`, not in `fields`".to_owned());
        }
        map.insert("roles".to_owned(), texts(&self.roles).into());
        serde_json::from_value(Value::Object(map)).map_err(|error| error.to_string())
    }

    /// Returns the keys whose value differs from the default.
    pub(super) fn described(&self) -> Vec<String> {
        let keys = |source: &Self| match serde_json::to_value(source) {
            Ok(Value::Object(keys)) => keys,
            other => unreachable!("a source of plain fields is a JSON object: {other:?}"),
        };
        let plain = keys(&Self::default());
        keys(self).into_iter().filter(|(key, value)| plain.get(key) != Some(value)).map(|(key, _)| key).collect()
    }

    /// Returns the rules of one source of a list; messages name the source by its number in the list.
    pub(super) fn rules(&self, key: &'static str, index: usize, mix: Mix) -> Vec<Rule> {
        let of_source = |holds, problem: &str, help| rule(holds, key, format!("source {}: {problem}", index + 1), help);
        let fields = self.field_names().err();
        let limits = self.limits().into_iter().filter_map(|limited| {
            let (problem, help) = limited.broken()?;
            Some(of_source(false, &format!("{} {problem}", limited.key), help))
        });
        let rules = [
            of_source(
                !self.path.trim().is_empty(),
                "path is empty",
                "write a file, a pattern, a folder or a Hub dataset",
            ),
            of_source(
                fields.is_none(),
                &format!("fields: {}", fields.unwrap_or_default()),
                "write our name first and then the source's, as in fields = { text = \"body\" }",
            ),
            of_source(self.limit != Some(0), "limit is 0", "leave the source out, or the limit"),
            of_source(
                self.weight.is_none() || mix == Mix::Weight,
                "weight has an effect only where training sources are mixed by weight",
                "remove it, or write data.mix = \"weight\"",
            ),
        ];
        limits.chain(rules).collect()
    }

    /// Returns the rule about `name`: only sets that are evaluated have one, and it becomes part of the name of a number.
    pub(super) fn name_rule(&self, key: &'static str, is_evaluated: bool, is_of_pairs: bool) -> Vec<Rule> {
        let Some(name) = &self.name else { return Vec::new() };
        let is_plain = |character: char| character.is_ascii_alphanumeric() || "_-.".contains(character);
        let of_name = |holds, problem: &str, help| rule(holds, key, format!("name = {name:?} {problem}"), help);
        vec![
            of_name(
                is_evaluated,
                "has an effect only where a set is evaluated",
                "remove it, or write it in data.eval_sources",
            ),
            of_name(!is_of_pairs, "names a set, and pairs of answers are evaluated as one", "remove it"),
            of_name(
                !name.is_empty() && name.chars().all(is_plain),
                "cannot be part of eval_NAME_loss",
                "write letters, digits, \"_\", \"-\" and \".\" only",
            ),
        ]
    }
}

/// Reads a record format. If the value is a file format, the error names the key for that.
pub(super) fn record_format<'de, D: Deserializer<'de>>(deserializer: D) -> Result<RecordFormat, D::Error> {
    let name = String::deserialize(deserializer)?;
    let parse = |name: &str| RecordFormat::deserialize(IntoDeserializer::<D::Error>::into_deserializer(name));
    parse(&name).map_err(|error| match from_name::<FileFormat>(&name) {
        Ok(_) => D::Error::custom(format!(
            "{name:?} is a file format: write file_format = {name:?}; format says what the records are"
        )),
        Err(_) => error,
    })
}
