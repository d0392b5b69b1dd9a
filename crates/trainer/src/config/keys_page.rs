//! `docs/recipe.md`, the page of every key of a recipe: from the schema, with the names that other trainers have for each.
//!
//! Trade-off: a test builds and compares it, so no program carries it; it is written again with UPDATE_GOLDEN=1.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::config::other_names::{self, Answer};
use crate::config::schema::{properties, reference, schema};

const HEAD: &str = "\
# Every key of a recipe

A recipe is a TOML or YAML file; every command takes `--set section.key=value` over it. Only `model`, and `data.path` or
`[[data.sources]]`, must be there, and `mode` or the section that says it. An editor that reads JSON schemas completes and
checks recipes with [config.schema.json](config.schema.json) (`firebrick schema`). \"Elsewhere\" lists the names that
axolotl, TRL, transformers, PEFT, LLaMA-Factory, Unsloth, mlx-lm and others have for a key; typed in a recipe, each is
answered with the key here. This page is made from the schema.
";
const COLUMNS: usize = 118;

/// Names of other trainers, by the key that they are here.
type Elsewhere = BTreeMap<&'static str, Vec<&'static str>>;

fn page() -> String {
    let (schema, mut elsewhere) = (schema(), Elsewhere::new());
    for (name, answer) in other_names::names() {
        if let Answer::Key(path, _) | Answer::Section(path) = answer {
            elsewhere.entry(path).or_default().push(name);
        }
    }
    let mut page = HEAD.to_owned();
    write_section(&mut page, "The top of the file", "", &schema, &schema, &elsewhere);
    for (name, value) in properties(&schema) {
        let section = reference(value).and_then(|pointer| schema.pointer(pointer));
        if let Some(section) = section.filter(|section| section.get("properties").is_some()) {
            write_section(&mut page, &format!("`[{name}]`"), name, section, &schema, &elsewhere);
        }
    }
    let source = schema.pointer("/$defs/SourceConfig").expect("sources are a part of the schema");
    write_section(
        &mut page,
        "`[[data.sources]]` and `[[data.eval_sources]]`",
        "data.sources",
        source,
        &schema,
        &elsewhere,
    );
    page
}

fn write_section(page: &mut String, title: &str, name: &str, of: &Value, schema: &Value, elsewhere: &Elsewhere) {
    let about = if name.is_empty() { "" } else { of["description"].as_str().unwrap_or_default() };
    write!(page, "\n## {title}\n\n").expect("a text takes any text");
    page.push_str(&wrapped(about, "", ""));
    if let Some(names) = elsewhere.get(name) {
        page.push_str(&wrapped(&format!("Elsewhere: {}.", listed(names)), "", ""));
    }
    if !about.is_empty() || elsewhere.contains_key(name) {
        page.push('\n');
    }
    for (key, value) in properties(of) {
        let section = reference(value).and_then(|pointer| schema.pointer(pointer));
        if name.is_empty() && section.is_some_and(|section| section.get("properties").is_some()) {
            continue;
        }
        let path = if name.is_empty() { key.to_owned() } else { format!("{name}.{key}") };
        let names = elsewhere.get(path.as_str()).map(|names| format!(" Elsewhere: {}.", listed(names)));
        let text = value["description"].as_str().unwrap_or_default();
        let text = format!("**`{key}`**: {text}{}", names.unwrap_or_default());
        page.push_str(&wrapped(&text, "- ", "  "));
    }
}

fn listed(names: &[&str]) -> String {
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

/// Breaks a text into lines; a word is never broken.
fn wrapped(text: &str, first: &str, next: &str) -> String {
    let (mut lines, mut line) = (String::new(), first.to_owned());
    for word in text.split_whitespace() {
        if line.len() + 1 + word.len() > COLUMNS && line.trim() != first.trim() {
            lines.push_str(line.trim_end());
            lines.push('\n');
            next.clone_into(&mut line);
        }
        if !line.ends_with(' ') && !line.is_empty() {
            line.push(' ');
        }
        line.push_str(word);
    }
    if text.is_empty() { String::new() } else { lines + &line + "\n" }
}

/// Writes the page instead of comparing it if UPDATE_GOLDEN=1.
#[test]
fn the_page_of_keys_is_that_of_the_schema() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/recipe.md");
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        fs::write(&path, page()).unwrap();
    }
    let kept = fs::read_to_string(&path).unwrap_or_default();
    assert!(kept == page(), "run this test once with UPDATE_GOLDEN=1 to write {}", path.display());
}
