//! Data sets of LLaMA-Factory: names that a dataset_info.json explains.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value as Json;
use toml::Table;

use super::{insert_names, one};

/// LLaMA-Factory's columns of records, with our names where they differ.
const COLUMNS: &str = "prompt=instruction query=input response=output system messages tools chosen rejected history";

/// Finds dataset_info.json in the folder of the data, seen from here or from a folder above the configuration. Returns the folder with it.
pub(super) fn dataset_info(folder: &str, file: &Path) -> Option<(PathBuf, Json)> {
    let seen_from = std::iter::once(Path::new("")).chain(file.ancestors().skip(1));
    let mut folders = seen_from.map(|above| above.join(folder));
    folders.find_map(|folder| {
        let text = fs::read_to_string(folder.join("dataset_info.json")).ok()?;
        Some((folder, serde_json::from_str(&text).ok()?))
    })
}

/// Returns a source of LLaMA-Factory's dataset_info.json.
pub(super) fn source(entry: &Json, folder: &Path) -> Table {
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
    for column in COLUMNS.split(' ') {
        let (theirs, ours) = column.split_once('=').unwrap_or((column, column));
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
