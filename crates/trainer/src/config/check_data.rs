//! What `[data]` must not contain.
//!
//! Trade-off: files are not looked at. Whether they exist, and what they hold, is found when they are read.

use firebrick_data::{Mix, MixUntil, RecordFormat, TextDocument, TrainOn};

use crate::config::bounds::COUNT;
use crate::config::data_section::SourceConfig;
use crate::config::error::ConfigError;
use crate::config::names::to_name;
use crate::config::recipe::RunConfig;
use crate::config::rule::{Rule, at_least, rule};
use crate::config::source::Source;

/// Refuses a recipe that names no data at all.
pub(super) fn refuse_missing(config: &RunConfig, source: &Source<'_>) -> Result<(), ConfigError> {
    if !config.data.path.is_empty() || !config.data.sources.is_empty() || source.is_typed("data.path") {
        return Ok(());
    }
    let help = "add `path = \"train.jsonl\"`: the file, folder or Hub dataset to train on, or [[data.sources]] tables";
    Err(ConfigError::Missing { place: source.place("data"), key: "data.path".to_owned(), help: help.to_owned() })
}

/// The rules of `[data]`.
pub(super) fn rules(config: &RunConfig) -> Vec<Rule> {
    let data = &config.data;
    let mut rules = vec![
        rule(
            !data.path.is_empty() || !data.sources.is_empty(),
            "data.path",
            "is empty",
            "write the file, folder or Hub dataset to train on",
        ),
        rule(
            data.eval_path.as_deref() != Some(""),
            "data.eval_path",
            "is empty",
            "write what to evaluate on, or leave the key out",
        ),
        at_least("data.workers", data.workers.unwrap_or(1) as u64, 1),
        at_least("data.pad_to_multiple_of", data.pad_to_multiple_of.unwrap_or(1) as u64, 1),
        rule(
            (0.0..=1.0).contains(&data.max_bad_share),
            "data.max_bad_share",
            format!("must be from 0 to 1, got {}", data.max_bad_share),
            "write for example 0.1",
        ),
        rule(
            data.eval_fraction.is_none_or(|fraction| fraction > 0.0 && fraction < 1.0),
            "data.eval_fraction",
            "must be above 0 and below 1",
            "write for example 0.05",
        ),
        rule(
            data.chat_template.as_deref() != Some(""),
            "data.chat_template",
            "is empty",
            "write a file, or the name of one of the tokenizer's templates, or leave the key out",
        ),
        rule(
            data.field_names().is_ok(),
            "data.fields",
            data.field_names().err().unwrap_or_default(),
            "write our name first and then the data's, as in fields = { text = \"body\" }",
        ),
        rule(data.limit != Some(0), "data.limit", "is 0", "write how many records to take, or leave the key out"),
        rule(
            !data.roles_to_train.is_empty(),
            "data.roles_to_train",
            "is empty: nothing would be trained",
            "write for example [\"assistant\"]",
        ),
        rule(data.cache.as_deref() != Some(""), "data.cache", "is empty", "write a folder, or leave the key out"),
    ];
    rules.extend(agreements(config));
    for (key, sources) in [("data.sources", &data.sources), ("data.eval_sources", &data.eval_sources)] {
        let mix = if key == "data.sources" { data.mix } else { Mix::Concatenate };
        rules.extend(sources.iter().enumerate().flat_map(|(index, source)| of_source(key, index, source, mix)));
    }
    rules
}

/// Keys that only mean something together with others.
fn agreements(config: &RunConfig) -> Vec<Rule> {
    let data = &config.data;
    let plain_text =
        data.format == RecordFormat::Text && data.train_on.is_some_and(|train_on| train_on != TrainOn::All);
    let one_path = data.sources.is_empty() || data.eval_path.is_some();
    let of_path = [
        ("data.format", data.format != RecordFormat::Auto),
        ("data.file_format", data.file_format.is_some()),
        ("data.split", data.split.is_some()),
        ("data.config", data.config.is_some()),
        ("data.revision", data.revision.is_some()),
        ("data.field", data.field.is_some()),
        ("data.columns", data.columns.is_some()),
        ("data.text_unit", data.text_unit != TextDocument::File),
        ("data.limit", data.limit.is_some()),
        ("data.fields", !data.fields.is_empty()),
        ("data.roles", !data.roles.is_empty()),
    ];
    let of_path = of_path.into_iter().map(|(key, is_set)| {
        let problem = "describes data.path, and there are data.sources instead";
        rule(!is_set || one_path, key, problem, "write it into each source")
    });
    let rules = vec![
        rule(
            !plain_text,
            "data.train_on",
            "plain text has no messages to choose from",
            "write \"all\", or format = \"chat\"",
        ),
        rule(
            data.train_end_of_turn || config.train_on() != TrainOn::All,
            "data.train_end_of_turn",
            "every token counts in the loss, the ends of turns too",
            "remove it, or write train_on = \"assistant\"",
        ),
        rule(
            data.roles_to_train == ["assistant"] || !matches!(config.train_on(), TrainOn::All | TrainOn::Flags),
            "data.roles_to_train",
            format!("has no effect where train_on is {:?}", to_name(&config.train_on())),
            "remove it, or write train_on = \"assistant\"",
        ),
        rule(
            data.eval_split.is_none() || data.eval_path.is_some(),
            "data.eval_split",
            "is the split of data.eval_path, which is absent",
            "write eval_path too",
        ),
        rule(
            data.mix == Mix::Concatenate || data.sources.len() > 1,
            "data.mix",
            "there are not several data.sources to mix",
            "remove it, or name the sources as [[data.sources]] tables",
        ),
        rule(
            data.mix_until == MixUntil::First || data.mix == Mix::Weight,
            "data.mix_until",
            "only a mixture by weight ends before every record was used once",
            "remove it, or write mix = \"weight\"",
        ),
    ];
    rules.into_iter().chain(of_path).collect()
}

/// The rules of one source, which messages name by its number in the list.
fn of_source(key: &'static str, index: usize, source: &SourceConfig, mix: Mix) -> Vec<Rule> {
    let number = index + 1;
    let names = source.field_names();
    let weight = source.weight.unwrap_or(1.0);
    vec![
        rule(
            !source.path.trim().is_empty(),
            key,
            format!("source {number}: path is empty"),
            "write a file, a pattern, a folder or a Hub dataset",
        ),
        rule(
            names.is_ok(),
            key,
            format!("source {number}: fields: {}", names.err().unwrap_or_default()),
            "write our name first and then the source's, as in fields = { text = \"body\" }",
        ),
        rule(
            source.limit != Some(0),
            key,
            format!("source {number}: limit is 0"),
            "leave the source out, or the limit",
        ),
        rule(
            source.limit.is_none_or(|limit| limit <= COUNT),
            key,
            format!("source {number}: limit must be at most {COUNT}"),
            "leave the limit out",
        ),
        rule(
            weight.is_finite() && weight > 0.0,
            key,
            format!("source {number}: weight must be above 0, got {weight}"),
            "leave the source out instead",
        ),
        rule(
            source.weight.is_none() || mix == Mix::Weight,
            key,
            format!("source {number}: weight has an effect only where training sources are mixed by weight"),
            "remove it, or write data.mix = \"weight\"",
        ),
    ]
}
