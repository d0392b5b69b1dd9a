//! Writes a converted recipe: sections in their order, the older name after each key, and what did not carry over as comments.
//!
//! Not supported: comments of the configuration.

use std::path::Path;

use firebrick_hub::without_secrets;
use toml::{Table, Value};

use super::draft::Draft;
use super::setting::{Remark, of_value};

/// Sections in the order in which recipes are written.
const SECTIONS: [&str; 12] =
    ["", "bnb_4bit", "lora", "preference", "grpo", "data", "train", "eval", "checkpoint", "best", "mlflow", "wandb"];

impl Draft {
    /// Returns the recipe, and the line of each key in it.
    pub(super) fn text(&self, file: &Path) -> (String, Vec<(usize, String)>) {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        let mut lines = vec![format!("# Made from {name}. What did not carry over is at the end.")];
        lines.extend(self.notes.iter().map(|note| format!("# {}", without_secrets(note).replace('\n', " "))));
        let mut places = Vec::new();
        for section in SECTIONS {
            let of_section = self.keys.iter().filter(|(key, ..)| home(key) == section);
            let keys: Vec<_> = of_section.collect();
            if keys.is_empty() && section != "data" {
                continue;
            }
            lines.push(String::new());
            if !section.is_empty() {
                lines.push(format!("[{section}]"));
            }
            for (key, value, from) in keys {
                let key_name = key.rsplit('.').next().unwrap_or(key);
                // A section that means something by its presence.
                if key == section {
                    places.push((lines.len(), key.clone()));
                    continue;
                }
                let is_new_name = from.name() != key_name;
                let is_new_value = from.value != *value && !matches!(from.value, Value::Array(_) | Value::Table(_));
                let note = match (is_new_name, is_new_value) {
                    (false, false) => String::new(),
                    (true, false) => format!("  # {}", from.path),
                    (_, true) => format!("  # {}: {}", from.path, from.shown()),
                };
                lines.push(format!("{key_name} = {}{note}", of_value(value)));
                places.push((lines.len(), key.clone()));
            }
            if section == "data" {
                self.write_sources(&mut lines);
            }
        }
        remarks("Needs nothing here:", &self.not_needed, &mut lines);
        remarks("Has no counterpart here:", &self.left, &mut lines);
        (lines.join("\n") + "\n", places)
    }

    /// Writes the data: the keys of one source, or a table for each of several.
    fn write_sources(&self, lines: &mut Vec<String>) {
        for (sources, name) in self.sources.iter().zip(["sources", "eval_sources"]) {
            if let ([source], "sources") = (&sources[..], name) {
                lines.extend(of_table(source));
                continue;
            }
            for source in sources {
                lines.extend([String::new(), format!("[[data.{name}]]")]);
                lines.extend(of_table(source));
            }
        }
    }
}

/// Returns the section of a key: its own name for one that is there by its presence.
fn home(key: &str) -> &str {
    match key.split_once('.') {
        Some((section, _)) => section,
        None if SECTIONS.contains(&key) => key,
        None => "",
    }
}

fn of_table(table: &Table) -> impl Iterator<Item = String> {
    table.iter().map(|(key, value)| format!("{key} = {}", of_value(value)))
}

fn remarks(title: &str, remarks: &[Remark], lines: &mut Vec<String>) {
    if remarks.is_empty() {
        return;
    }
    lines.extend([String::new(), format!("# {title}")]);
    for Remark { line, setting, reason } in remarks {
        let reason = reason.split_whitespace().collect::<Vec<_>>().join(" ");
        lines.push(format!("#   line {line}, {}: {reason}", setting.replace('\n', " ")));
    }
}
