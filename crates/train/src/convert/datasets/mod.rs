//! Data sets of other trainers: axolotl's `datasets`, LLaMA-Factory's names with their dataset_info.json, TRL's name of a Hub dataset.
//!
//! Trade-off: a name that no dataset_info.json explains is taken for a file of that name in its folder.

mod axolotl;
mod llama_factory;

use std::path::Path;

use toml::{Table, Value};

use super::draft::Draft;
use super::kind::{Trainer, is_grpo};
use super::setting::Outcome::{self, Left, Set, Source};
use super::setting::{Setting, needless, number, text_of};

/// The folder of LLaMA-Factory's data.
const DATASET_DIR: &str = "data";

/// Returns what becomes of a setting about data; `None` for any other.
pub(super) fn outcome(setting: &Setting, all: &[Setting], draft: &mut Draft, file: &Path) -> Option<Outcome> {
    let set = match &*setting.path {
        "datasets" | "pretraining_dataset" => 0,
        "test_datasets" => 1,
        "dataset" | "dataset_name" | "train_dataset" => return Some(by_name(setting, all, draft, file, 0)),
        "eval_dataset" | "val_dataset" => return Some(by_name(setting, all, draft, file, 1)),
        "data" if draft.trainer == Trainer::MlxLm => return Some(parts(setting.value.as_str()?)),
        "dataset_test_split" => return Some(test_split(setting.value.as_str(), all)),
        "dataset_dir" | "dataset_config" | "dataset_split" | "max_samples" | "dataset_train_split" => {
            return needless("it is in the data's own keys");
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
    let of = match (is_pairs(all), is_grpo(all, draft.trainer)) {
        (true, _) => " of pairs",
        (_, true) => " of prompts",
        _ => "",
    };
    for entry in &entries {
        let mut source = axolotl::source(entry, &entries, setting, of, draft);
        if setting.path == "pretraining_dataset" {
            source.insert("format".to_owned(), "text".into());
        }
        draft.add_source(set, source, setting);
    }
    Some(Source)
}

/// Returns the parts of a data set of mlx-lm: files of a folder, or splits of a Hub dataset.
fn parts(name: &str) -> Outcome {
    let is_of_hub = name.matches('/').count() == 1 && !name.starts_with(['.', '/']) && !Path::new(name).is_dir();
    let file = |part: &str| Value::from(if is_of_hub { name.to_owned() } else { format!("{name}/{part}.jsonl") });
    let split = is_of_hub.then(|| ("data.eval_split", Value::from("valid")));
    let keys = [("data.path", file("train")), ("data.eval_path", file("valid"))].into_iter().chain(split);
    Set(keys.map(|(key, value)| (key.to_owned(), value)).collect())
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
    let is_explained = draft.trainer == Trainer::LlamaFactory;
    let info = is_explained.then(|| llama_factory::dataset_info(folder, file)).flatten();
    let limit = all.iter().find(|other| other.path == "max_samples").and_then(|other| other.value.as_integer());
    for name in names {
        let (name, first) =
            name.split_once('#').map_or((&*name, None), |(name, first)| (name, first.parse::<i64>().ok()));
        let limit = first.or(limit);
        let known = info.as_ref().and_then(|(folder, info)| Some((folder, info.get(name)?)));
        let mut source = match known {
            Some((folder, entry)) => llama_factory::source(entry, folder),
            None => at_name(name, folder, draft),
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

/// Returns a source whose name is a file of `folder`, a path, or an id of the Hub.
fn at_name(name: &str, folder: &str, draft: &mut Draft) -> Table {
    if draft.trainer == Trainer::LlamaFactory && !name.contains('/') {
        draft.notes.push(format!("{name}: no dataset_info.json explains it; check its path and format."));
        return one("path", format!("{folder}/{name}.json"));
    }
    match name.split_once(':').filter(|_| draft.trainer == Trainer::Swift) {
        Some((path, subset)) => {
            Table::from_iter([("path".to_owned(), path.into()), ("config".to_owned(), subset.into())])
        }
        None => one("path", name),
    }
}

/// Returns whether anything is held out. TRL has the split `test` whenever it evaluates.
pub(super) fn is_evaluated(all: &[Setting], trainer: Trainer) -> bool {
    let strategy = |name| text_of(all, name).is_some_and(|strategy| strategy != "no");
    let splits = trainer == Trainer::Trl && (strategy("eval_strategy") || strategy("evaluation_strategy"));
    splits
        || all.iter().any(|other| match other.name() {
            "val_set_size" | "val_size" | "test_split_size" | "split_dataset_ratio" => {
                number(&other.value).is_some_and(|size| size > 0.0)
            }
            name => matches!(name, "test_datasets" | "eval_dataset" | "dataset_test_split" | "val_dataset"),
        })
}

/// Says that records are plain text where the other trainer's stage does.
pub(super) fn complete(all: &[Setting], draft: &mut Draft) {
    let is_plain = all.iter().any(|setting| setting.path == "stage" && setting.value.as_str() == Some("pt"));
    for source in draft.sources.iter_mut().flatten().filter(|_| is_plain) {
        source.insert("format".to_owned(), "text".into());
    }
}
