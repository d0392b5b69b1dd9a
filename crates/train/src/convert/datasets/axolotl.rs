//! Data sets of axolotl: a list of mappings, each a source.

use toml::{Table, Value};

use super::insert_names;
use crate::convert::draft::{Draft, is_decisive};
use crate::convert::kind::Trainer;
use crate::convert::setting::Outcome::{self, Left, NotNeeded, Set};
use crate::convert::setting::{Setting, nothing_does};
use crate::convert::values;

/// Returns a source of axolotl's list; what is a key for all sources goes into the draft if `entries` agree. `of`: " of pairs", " of prompts", or
/// nothing.
pub(super) fn source(entry: &Table, entries: &[&Table], setting: &Setting, of: &str, draft: &mut Draft) -> Table {
    let mut source = Table::new();
    for (key, value) in entry {
        let at = Setting { path: format!("{}.{key}", setting.path), value: value.clone(), line: setting.line };
        if let (Some((name, _)), "split") = (value.as_str().and_then(|text| text.split_once('[')), &**key) {
            source.insert(key.clone(), name.into());
        }
        let is_common = entries.iter().all(|other| other.get(key) == Some(value));
        match of_entry(key, &at, entry, of) {
            Set(keys) if keys.iter().any(|(key, _)| key.starts_with("data.")) && !is_common => {
                let reason = format!("a key for all sources here, and they differ: {}", keys[keys.len() - 1].0);
                if keys.iter().any(|(key, _)| is_decisive(key)) {
                    draft.incomplete.get_or_insert(format!("{}: {reason}", at.path));
                }
                draft.left.push(at.remark(reason));
                source.extend(keys.into_iter().filter(|(key, _)| !key.starts_with("data.")));
            }
            Set(keys) => {
                let (common, own): (Vec<_>, Vec<_>) = keys.into_iter().partition(|(key, _)| key.starts_with("data."));
                match common.is_empty() {
                    true => draft.carry(&at, &own[0].0),
                    false => draft.take(&at, Set(common)),
                }
                for (key, value) in own {
                    match (source.get_mut(&key).and_then(Value::as_table_mut), value) {
                        (Some(known), Value::Table(more)) => known.extend(more),
                        (_, value) => drop(source.insert(key, value)),
                    }
                }
            }
            other => draft.take(&at, other),
        }
    }
    name_fields(&mut source);
    source
}

/// Returns what becomes of a key of a data set of axolotl's; keys without a section are those of the source.
fn of_entry(key: &str, at: &Setting, entry: &Table, of: &str) -> Outcome {
    let value = &at.value;
    let text = value.as_str().unwrap_or_default();
    let is_format = |name: &str| matches!(name, "json" | "csv" | "parquet" | "text" | "arrow");
    let is_flag = |name: &str| matches!(name, "train" | "training" | "trained" | "weight");
    let put = |key: &str, value: Value| Set(vec![(key.to_owned(), value)]);
    match key {
        "path" if is_format(text) && entry.contains_key("data_files") => NotNeeded("data_files name them".to_owned()),
        "path" => put("path", text.into()),
        "data_files" => match (value.as_str(), entry.get("path").and_then(Value::as_str)) {
            (Some(file), Some(path)) if is_format(path) => put("path", file.into()),
            _ => {
                Left("name the files of a Hub dataset as its config, or download them and name them as path".to_owned())
            }
        },
        "type" if value.is_table() => Left("a form of its own: map its columns by fields".to_owned()),
        "split" => split(text),
        // Only the flags of messages count.
        "roles_to_train"
            if value.as_array().is_some_and(Vec::is_empty)
                && entry.get("message_field_training").and_then(Value::as_str).is_some_and(is_flag) =>
        {
            put("data.train_on", "flags".into())
        }
        "message_property_mappings" => put("fields", value.clone()),
        "roles" => put("roles", roles(value).into()),
        _ => {
            let name = format!("datasets.{key}{}", if key == "type" { of } else { "" });
            values::named(Trainer::Axolotl, &name, value).unwrap_or_else(|| nothing_does(value))
        }
    }
}

/// Returns a split, of which the first records may be meant.
fn split(text: &str) -> Outcome {
    let (name, part) = text.split_once('[').unwrap_or((text, ""));
    let first = part.strip_prefix(':').and_then(|part| part.strip_suffix(']')?.parse().ok());
    match (part, first) {
        ("", _) => Set(vec![("split".to_owned(), name.into())]),
        (_, Some(first)) => Set(vec![("split".to_owned(), name.into()), ("limit".to_owned(), Value::Integer(first))]),
        _ => Left("a part of a split: write limit = N for the first records".to_owned()),
    }
}

/// Returns our role for each of theirs, from theirs for each of ours.
fn roles(value: &Value) -> Table {
    let mut roles = Table::new();
    for (ours, theirs) in value.as_table().into_iter().flatten() {
        let names = theirs.as_array().into_iter().flatten().filter_map(Value::as_str);
        roles.extend(names.filter(|name| name != ours).map(|name| (name.to_owned(), ours.clone().into())));
    }
    roles
}

/// Removes names of columns that are the usual ones, and names conversations in ShareGPT's form.
fn name_fields(source: &mut Table) {
    let take = |source: &mut Table, key: &str| match source.remove(key) {
        Some(Value::Table(table)) => table,
        _ => Table::new(),
    };
    let (mut fields, mut roles) = (take(source, "fields"), take(source, "roles"));
    let is = |name: &str, value: &str| fields.get(name).and_then(Value::as_str) == Some(value);
    if is("role", "from") && is("content", "value") && source.get("format").and_then(Value::as_str) == Some("chat") {
        source.insert("format".to_owned(), "sharegpt".into());
        let usual: &[&str] =
            if is("messages", "conversations") { &["role", "content", "messages"] } else { &["role", "content"] };
        usual.iter().for_each(|name| drop(fields.remove(*name)));
        for name in ["human", "gpt"] {
            roles.remove(name);
        }
    } else {
        fields.retain(|name, value| value.as_str() != Some(name));
    }
    insert_names(source, fields, roles);
}
