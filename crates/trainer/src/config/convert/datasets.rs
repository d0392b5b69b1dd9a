//! Data sets of other trainers: axolotl's `datasets`, LLaMA-Factory's names with their dataset_info.json, TRL's name of a Hub dataset.
//!
//! Trade-off: a name that no dataset_info.json explains is taken for a file of that name in its folder.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value as Json;
use toml::{Table, Value};

use super::Outcome::{Left, NotNeeded, Set, Source};
use super::kind::Trainer;
use super::rules::{nothing_does, text_of};
use super::{Draft, Outcome, Setting, is_decisive, values};

/// LLaMA-Factory's columns of records as instructions, with ours.
const COLUMNS: [(&str, &str); 9] = [
    ("prompt", "instruction"),
    ("query", "input"),
    ("response", "output"),
    ("system", "system"),
    ("messages", "messages"),
    ("tools", "tools"),
    ("chosen", "chosen"),
    ("rejected", "rejected"),
    ("history", "history"),
];
/// The folder of LLaMA-Factory's data.
const DATASET_DIR: &str = "data";

/// Returns what becomes of a setting about data; `None` for any other.
pub(super) fn outcome(setting: &Setting, all: &[Setting], draft: &mut Draft, file: &Path) -> Option<Outcome> {
    let (set, is_pairs) = match &*setting.path {
        "datasets" | "pretraining_dataset" => (0, is_pairs(all)),
        "test_datasets" => (1, is_pairs(all)),
        "dataset" | "dataset_name" | "train_dataset" => return Some(by_name(setting, all, draft, file, 0)),
        "eval_dataset" | "val_dataset" => return Some(by_name(setting, all, draft, file, 1)),
        "dataset_test_split" => return Some(test_split(setting.value.as_str(), all)),
        "dataset_dir" | "dataset_config" | "dataset_split" | "max_samples" | "dataset_train_split" => {
            return Some(NotNeeded("it is in the data's own keys".to_owned()));
        }
        _ => return None,
    };
    if let (Some(path), "pretraining_dataset") = (setting.value.as_str(), &*setting.path) {
        let source = Table::from_iter([("path".to_owned(), path.into()), ("format".to_owned(), "text".into())]);
        draft.add_source(set, source, setting);
        return Some(Source);
    }
    let Some(list) = setting.value.as_array() else { return Some(Left("a list of data sets was expected".to_owned())) };
    let entries: Vec<&Table> = list.iter().filter_map(Value::as_table).collect();
    if entries.len() < list.len() {
        return Some(Left("every data set is a mapping with a path; write the others as [[data.sources]]".to_owned()));
    }
    for entry in &entries {
        let mut source = of_axolotl(entry, &entries, setting, is_pairs, draft);
        if setting.path == "pretraining_dataset" {
            source.insert("format".to_owned(), "text".into());
        }
        draft.add_source(set, source, setting);
    }
    Some(Source)
}

/// Returns the split that is evaluated on: TRL's, of the data set that it trains on.
pub(super) fn test_split(split: Option<&str>, all: &[Setting]) -> Outcome {
    let (Some(path), Some(split)) = (all.iter().find(|other| other.path == "dataset_name"), split) else {
        return Left("write data.eval_path and data.eval_split".to_owned());
    };
    Set(vec![("data.eval_path".to_owned(), path.value.clone()), ("data.eval_split".to_owned(), split.into())])
}

fn is_pairs(all: &[Setting]) -> bool {
    let is_method = |setting: &&Setting| matches!(setting.name(), "rl" | "stage" | "rlhf_type");
    all.iter().filter(is_method).any(|setting| matches!(setting.value.as_str(), Some("dpo" | "orpo" | "ipo")))
}

fn one(key: &str, value: impl Into<Value>) -> Table {
    Table::from_iter([(key.to_owned(), value.into())])
}

/// Returns a source of axolotl's list; what is a key for all sources goes into the draft if `entries` agree.
fn of_axolotl(entry: &Table, entries: &[&Table], setting: &Setting, is_pairs: bool, draft: &mut Draft) -> Table {
    let mut source = Table::new();
    for (key, value) in entry {
        let at = Setting { path: format!("{}.{key}", setting.path), value: value.clone(), line: setting.line };
        if let (Some((name, _)), "split") = (value.as_str().and_then(|text| text.split_once('[')), &**key) {
            source.insert(key.clone(), name.into());
        }
        let is_common = entries.iter().all(|other| other.get(key) == Some(value));
        match of_entry(key, &at, entry, is_pairs) {
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
                    true => draft.also_carried.push((at.line, at.path.clone(), own[0].0.clone())),
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
fn of_entry(key: &str, at: &Setting, entry: &Table, is_pairs: bool) -> Outcome {
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
        "split" => {
            let (name, part) = text.split_once('[').unwrap_or((text, ""));
            let first = part.strip_prefix(':').and_then(|part| part.strip_suffix(']')?.parse().ok());
            match (part, first) {
                ("", _) => put("split", name.into()),
                (_, Some(first)) => {
                    Set(vec![("split".to_owned(), name.into()), ("limit".to_owned(), Value::Integer(first))])
                }
                _ => Left("a part of a split: write limit = N for the first records".to_owned()),
            }
        }
        // Only the flags of messages count.
        "roles_to_train"
            if value.as_array().is_some_and(Vec::is_empty)
                && entry.get("message_field_training").and_then(Value::as_str).is_some_and(is_flag) =>
        {
            put("data.train_on", "flags".into())
        }
        "message_property_mappings" => put("fields", value.clone()),
        "roles" => {
            let mut roles = Table::new();
            for (ours, theirs) in value.as_table().into_iter().flatten() {
                let names = theirs.as_array().into_iter().flatten().filter_map(Value::as_str);
                roles.extend(names.filter(|name| name != ours).map(|name| (name.to_owned(), ours.clone().into())));
            }
            put("roles", roles.into())
        }
        _ => {
            let name = if key == "type" && is_pairs { "datasets.type of pairs" } else { &format!("datasets.{key}") };
            values::named(Trainer::Axolotl, name, value).unwrap_or_else(|| nothing_does(value))
        }
    }
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

/// Names the columns of a source and the roles of its messages, where they are not the usual ones.
fn insert_names(source: &mut Table, fields: Table, roles: Table) {
    for (key, table) in [("fields", fields), ("roles", roles)] {
        if !table.is_empty() {
            source.insert(key.to_owned(), table.into());
        }
    }
}

/// Adds data sets that are named: those of a dataset_info.json, else files and Hub datasets.
fn by_name(setting: &Setting, all: &[Setting], draft: &mut Draft, file: &Path, set: usize) -> Outcome {
    let names: Vec<String> = match &setting.value {
        Value::String(text) => text.split(',').map(|name| name.trim().to_owned()).collect(),
        Value::Array(list) if list.iter().all(Value::is_str) => {
            list.iter().filter_map(Value::as_str).map(str::to_owned).collect()
        }
        _ => return Left("write data.path, or [[data.sources]]".to_owned()),
    };
    let folder = text_of(all, "dataset_dir").unwrap_or(DATASET_DIR);
    let is_llama_factory = draft.trainer == Trainer::LlamaFactory;
    let info = is_llama_factory.then(|| dataset_info(folder, file)).flatten();
    let limit = all.iter().find(|other| other.path == "max_samples").and_then(|other| other.value.as_integer());
    for name in names {
        let (name, first) =
            name.split_once('#').map_or((&*name, None), |(name, first)| (name, first.parse::<i64>().ok()));
        let limit = first.or(limit);
        let known = info.as_ref().and_then(|(folder, info)| Some((folder, info.get(name)?)));
        let mut source = match known {
            Some((folder, entry)) => of_llama_factory(entry, folder),
            None if is_llama_factory && !name.contains('/') => {
                draft.notes.push(format!("{name}: no dataset_info.json explains it; check its path and format."));
                one("path", format!("{folder}/{name}.json"))
            }
            None => match name.split_once(':').filter(|_| draft.trainer == Trainer::Swift) {
                Some((path, subset)) => {
                    Table::from_iter([("path".to_owned(), path.into()), ("config".to_owned(), subset.into())])
                }
                None => one("path", name),
            },
        };
        for (theirs, ours) in
            [("dataset_config", "config"), ("dataset_split", "split"), ("dataset_train_split", "split")]
        {
            if let Some(value) = text_of(all, theirs) {
                source.insert(ours.to_owned(), value.into());
            }
        }
        if is_pairs(all) {
            source.insert("format".to_owned(), "preference".into());
        }
        if let Some(limit) = limit {
            source.insert("limit".to_owned(), limit.into());
        }
        draft.add_source(set, source, setting);
    }
    Source
}

/// Finds dataset_info.json in the folder of the data, seen from here or from a folder above the configuration. Returns the folder with it.
fn dataset_info(folder: &str, file: &Path) -> Option<(PathBuf, Json)> {
    let seen_from = std::iter::once(Path::new("")).chain(file.ancestors().skip(1));
    let mut folders = seen_from.map(|above| above.join(folder));
    folders.find_map(|folder| {
        let text = fs::read_to_string(folder.join("dataset_info.json")).ok()?;
        Some((folder, serde_json::from_str(&text).ok()?))
    })
}

/// Returns a source of LLaMA-Factory's dataset_info.json.
fn of_llama_factory(entry: &Json, folder: &Path) -> Table {
    let text = |key: &str| entry.get(key).and_then(Json::as_str);
    let mut source = match (text("file_name"), text("hf_hub_url")) {
        (Some(file), _) => one("path", folder.join(file).to_string_lossy().into_owned()),
        (None, Some(id)) => one("path", id),
        (None, None) => Table::new(),
    };
    for (theirs, ours) in [("subset", "config"), ("split", "split")] {
        if let Some(value) = text(theirs) {
            source.insert(ours.to_owned(), value.into());
        }
    }
    let tag = |name: &str| entry.get("tags").and_then(|tags| tags.get(name)).and_then(Json::as_str);
    let is_chat = tag("role_tag") == Some("role") && tag("content_tag") == Some("content");
    let format = match (entry.get("ranking").and_then(Json::as_bool), text("formatting")) {
        (Some(true), _) => "preference",
        (_, Some("sharegpt")) if is_chat => "chat",
        (_, Some("sharegpt")) => "sharegpt",
        _ => "alpaca",
    };
    source.insert("format".to_owned(), format.into());
    let mut fields = Table::new();
    for (theirs, ours) in COLUMNS {
        let column = entry.get("columns").and_then(|columns| columns.get(theirs)).and_then(Json::as_str);
        let is_usual =
            |column: &str| column == ours || (ours == "messages" && format == "sharegpt" && column == "conversations");
        if let Some(column) = column.filter(|column| !is_usual(column)) {
            let ours = if format == "preference" && ours == "messages" { "prompt" } else { ours };
            fields.insert(ours.to_owned(), column.into());
        }
    }
    // Tags are the names of a message's keys and of its roles.
    let usual = if format == "chat" { ["role", "content"] } else { ["from", "value"] };
    for ((theirs, ours), usual) in [("role_tag", "role"), ("content_tag", "content")].into_iter().zip(usual) {
        if let Some(name) = tag(theirs).filter(|name| *name != usual) {
            fields.insert(ours.to_owned(), name.into());
        }
    }
    let known = ["human", "user", "gpt", "assistant", "system"];
    let names = [("user_tag", "user"), ("assistant_tag", "assistant"), ("system_tag", "system")];
    let other =
        |(theirs, ours): (&str, &str)| Some((tag(theirs).filter(|name| !known.contains(name))?, ours.to_owned()));
    let roles: Table = names.into_iter().filter_map(other).map(|(name, ours)| (name.to_owned(), ours.into())).collect();
    insert_names(&mut source, fields, roles);
    source
}

/// Says that records are plain text where the other trainer's stage does.
pub(super) fn complete(all: &[Setting], draft: &mut Draft) {
    let is_plain = all.iter().any(|setting| setting.path == "stage" && setting.value.as_str() == Some("pt"));
    for source in draft.sources.iter_mut().flatten().filter(|_| is_plain) {
        source.insert("format".to_owned(), "text".into());
    }
}
