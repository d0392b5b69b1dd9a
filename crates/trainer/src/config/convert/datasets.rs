//! Data sets of other trainers: axolotl's `datasets`, LLaMA-Factory's names with their dataset_info.json, TRL's name of a Hub dataset.
//!
//! Trade-off: a name that no dataset_info.json explains is taken for a file of that name in its folder.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value as Json;
use toml::{Table, Value};

use super::Outcome::{Left, NotNeeded, Set};
use super::{Draft, Outcome, Setting};

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
        "eval_dataset" => return Some(by_name(setting, all, draft, file, 1)),
        "dataset_test_split" => {
            let (Some(path), Some(split)) = (
                all.iter().find(|other| other.path == "dataset_name").map(|other| other.value.clone()),
                setting.value.as_str(),
            ) else {
                return Some(Left("write data.eval_path and data.eval_split".to_owned()));
            };
            return Some(Set(vec![("data.eval_path".to_owned(), path), ("data.eval_split".to_owned(), split.into())]));
        }
        "dataset_dir" | "dataset_config" | "dataset_split" | "max_samples" | "dataset_train_split" => {
            return Some(NotNeeded("it is in the data's own keys".to_owned()));
        }
        _ => return None,
    };
    if let (Some(path), "pretraining_dataset") = (setting.value.as_str(), &*setting.path) {
        draft.sources[set]
            .push(Table::from_iter([("path".to_owned(), path.into()), ("format".to_owned(), "text".into())]));
        return Some(Set(Vec::new()));
    }
    let Some(list) = setting.value.as_array() else { return Some(Left("a list of data sets was expected".to_owned())) };
    for entry in list {
        match entry {
            Value::Table(entry) => {
                let source = of_axolotl(entry, setting, is_pairs, draft);
                draft.sources[set].push(source);
            }
            other => draft.sources[set].push(one("path", other.clone())),
        }
    }
    Some(Set(Vec::new()))
}

fn is_pairs(all: &[Setting]) -> bool {
    let is_method = |setting: &&Setting| matches!(setting.name(), "rl" | "stage" | "rlhf_type");
    all.iter().filter(is_method).any(|setting| matches!(setting.value.as_str(), Some("dpo" | "orpo" | "ipo")))
}

fn one(key: &str, value: impl Into<Value>) -> Table {
    Table::from_iter([(key.to_owned(), value.into())])
}

/// Returns a source of axolotl's list.
fn of_axolotl(entry: &Table, setting: &Setting, is_pairs: bool, draft: &mut Draft) -> Table {
    let mut source = Table::new();
    let (mut fields, mut roles) = (Table::new(), Table::new());
    for (key, value) in entry {
        let text = value.as_str().unwrap_or_default();
        let mut put = |name: &str, value: Value| {
            source.insert(name.to_owned(), value);
            None
        };
        let reason: Option<&str> = match &**key {
            "path" if text == "json" && entry.contains_key("data_files") => None,
            "path" => put("path", text.into()),
            "data_files" => match (value.as_str(), entry.get("path").and_then(Value::as_str)) {
                (Some(file), Some("json" | "csv" | "parquet" | "text")) => put("path", file.into()),
                _ => Some("name the files of a Hub dataset as its config, or download them and name them as path"),
            },
            "type" if value.is_table() => Some("a form of its own: map its columns by fields"),
            "type" => match format(text, is_pairs) {
                Some(format) => put("format", format.into()),
                None => Some("not a form of records here: see data.format, and data.fields for other names of columns"),
            },
            "split" => {
                let part = text.split_once('[');
                put("split", part.map_or(text, |(name, _)| name).into());
                let first = part.and_then(|(_, part)| part.strip_prefix(':')?.strip_suffix(']')?.parse::<i64>().ok());
                if let Some(first) = first {
                    put("limit", first.into());
                }
                let is_lost = part.is_some() && first.is_none();
                is_lost.then_some("a part of a split: write limit = N for the first records")
            }
            "name" => put("config", text.into()),
            "revision" => put("revision", text.into()),
            "field_chosen" | "field_rejected" => {
                fields.insert(key.trim_start_matches("field_").to_owned(), text.into());
                None
            }
            "field" | "text_column" => {
                fields.insert("text".to_owned(), text.into());
                None
            }
            "field_messages" => {
                fields.insert("messages".to_owned(), text.into());
                None
            }
            "message_field_role" | "message_field_content" => {
                fields.insert(key.trim_start_matches("message_field_").to_owned(), text.into());
                None
            }
            "message_property_mappings" => {
                let mapped = value.as_table().into_iter().flatten();
                fields.extend(mapped.map(|(key, value)| (key.clone(), value.clone())));
                None
            }
            "roles" => {
                for (ours, theirs) in value.as_table().into_iter().flatten() {
                    let names = theirs.as_array().into_iter().flatten().filter_map(Value::as_str);
                    roles.extend(names.filter(|name| name != ours).map(|name| (name.to_owned(), ours.clone().into())));
                }
                None
            }
            "roles_to_train" if *value == Value::Array(vec!["assistant".into()]) => None,
            "roles_to_train" => Some("write data.roles_to_train, for all sources together"),
            "train_on_eos" if matches!(text, "turn" | "all" | "last") => None,
            "train_on_eos" => Some("write data.train_end_of_turn = false, for all sources together"),
            "message_field_training" if matches!(text, "train" | "training") => None,
            "message_field_training" => Some("a message's own flag is called train, training, trained or weight here"),
            "drop_system_message" if value.as_bool() == Some(false) => None,
            "chat_template" if text.starts_with("tokenizer_default") => None,
            "chat_template" => Some("write data.chat_template, for all sources together"),
            "ds_type" | "trust_remote_code" | "streaming" => None,
            _ => Some("nothing here does this"),
        };
        let at = Setting { path: format!("{}.{key}", setting.path), value: value.clone(), line: setting.line };
        match reason {
            None => draft.of_sources += 1,
            Some(reason) => draft.left.push(at.remark(reason)),
        }
    }
    name_fields(&mut source, fields, roles);
    source
}

/// Returns the form of records of a type of axolotl's.
fn format(text: &str, is_pairs: bool) -> Option<&'static str> {
    let kind = text.split(['.', ':']).next().unwrap_or_default();
    match kind {
        _ if is_pairs => Some("preference"),
        "chat_template" => Some("chat"),
        "alpaca" => Some("alpaca"),
        "sharegpt" => Some("sharegpt"),
        "completion" | "pretrain" => Some("text"),
        _ => None,
    }
}

/// Adds names of columns, unless they are those of conversations in ShareGPT's form.
fn name_fields(source: &mut Table, mut fields: Table, mut roles: Table) {
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
        for name in ["role", "content", "messages", "chosen", "rejected"] {
            if fields.get(name).and_then(Value::as_str) == Some(name) {
                fields.remove(name);
            }
        }
    }
    for (key, table) in [("fields", fields), ("roles", roles)] {
        if !table.is_empty() {
            source.insert(key.to_owned(), table.into());
        }
    }
}

/// Adds data sets that are named: those of a dataset_info.json, else files and Hub datasets.
fn by_name(setting: &Setting, all: &[Setting], draft: &mut Draft, file: &Path, set: usize) -> Outcome {
    let text_of = |name: &str| all.iter().find(|other| other.path == name).and_then(|other| other.value.as_str());
    let names: Vec<String> = match &setting.value {
        Value::String(text) => text.split(',').map(|name| name.trim().to_owned()).collect(),
        Value::Array(list) => list.iter().filter_map(Value::as_str).map(str::to_owned).collect(),
        _ => return Left("write data.path, or [[data.sources]]".to_owned()),
    };
    let folder = text_of("dataset_dir").unwrap_or(DATASET_DIR);
    let is_llama_factory = all.iter().any(|other| matches!(&*other.path, "stage" | "finetuning_type" | "template"));
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
            None => one("path", name),
        };
        for (theirs, ours) in
            [("dataset_config", "config"), ("dataset_split", "split"), ("dataset_train_split", "split")]
        {
            if let Some(value) = text_of(theirs) {
                source.insert(ours.to_owned(), value.into());
            }
        }
        if is_pairs(all) {
            source.insert("format".to_owned(), "preference".into());
        }
        if let Some(limit) = limit {
            source.insert("limit".to_owned(), limit.into());
        }
        draft.sources[set].push(source);
    }
    draft.of_sources += 1;
    Set(Vec::new())
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
    for (key, table) in [("fields", fields), ("roles", roles)] {
        if !table.is_empty() {
            source.insert(key.to_owned(), table.into());
        }
    }
    source
}

/// Says that records are plain text where the other trainer's stage does.
pub(super) fn complete(all: &[Setting], draft: &mut Draft) {
    let is_plain = all.iter().any(|setting| setting.path == "stage" && setting.value.as_str() == Some("pt"));
    for source in draft.sources.iter_mut().flatten().filter(|_| is_plain) {
        source.insert("format".to_owned(), "text".into());
    }
}
