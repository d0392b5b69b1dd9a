//! What the values of keys become that have few of them, and what a trainer does where a key is absent: `values.toml`.

use std::sync::LazyLock;

use toml::{Table, Value};

use super::kind::Trainer;
use super::setting::{Outcome, Setting};

/// The table, where every name has an entry of its own.
static TABLE: LazyLock<Table> = LazyLock::new(|| {
    let mut table: Table = include_str!("values.toml").parse().expect("a test has read the table");
    for (_, section) in table.iter_mut() {
        let Some(entries) = section.as_table_mut() else { continue };
        let named = |(names, value): (&String, &Value)| {
            names.split(", ").map(move |name| (name.to_owned(), value.clone())).collect::<Vec<_>>()
        };
        *entries = entries.iter().flat_map(named).collect();
    }
    table
});

/// Returns what `values.toml` says of a setting under its path, or under that of the mapping it is in.
pub(super) fn of_path(trainer: Trainer, setting: &Setting) -> Option<Outcome> {
    let (parent, _) = setting.path.rsplit_once('.')?;
    named(trainer, &setting.path, &setting.value).or_else(|| named(trainer, &format!("{parent}.*"), &setting.value))
}

/// Returns what `values.toml` says of a value under a name; `None` if the name is not there.
pub(super) fn named(trainer: Trainer, name: &str, value: &Value) -> Option<Outcome> {
    in_section(&format!("{trainer:?}"), name, value).or_else(|| in_section("any", name, value))
}

/// Does the same in one section.
pub(super) fn in_section(section: &str, name: &str, value: &Value) -> Option<Outcome> {
    let values = TABLE.get(section)?.get(name)?.as_table()?;
    // A text without quotes, anything else as TOML writes it.
    let key = match value {
        Value::String(text) => text.clone(),
        Value::Float(number) if number.fract() == 0.0 => format!("{number:.0}"),
        other => other.to_string(),
    };
    let result = values.get(&key).or_else(|| values.get("*"));
    Some(match result {
        Some(Value::Table(keys)) => Outcome::Set(keys.clone().into_iter().collect()),
        Some(Value::String(text)) => match text.split_once(' ') {
            Some(("-", why)) => Outcome::Left(why.to_owned()),
            Some(("!", why)) => Outcome::Method(why.to_owned()),
            // A name of a column goes into the table of those.
            Some(("=", key)) => Outcome::Set(vec![match key.split_once("fields.") {
                Some((before, name)) => {
                    (format!("{before}fields"), Table::from_iter([(name.to_owned(), value.clone())]).into())
                }
                None => (key.to_owned(), plain_number(value)),
            }]),
            _ => Outcome::NotNeeded(text.clone()),
        },
        _ => {
            let known: Vec<&str> = values.keys().map(String::as_str).collect();
            Outcome::Left(format!("nothing here does this; what has a counterpart is {}", known.join(", ")))
        }
    })
}

/// Returns the keys and values of a trainer in a table of defaults.
pub(super) fn defaults(table: &str, trainer: Trainer) -> impl Iterator<Item = (&'static String, &'static Value)> {
    TABLE.get(table).and_then(|all| all.get(format!("{trainer:?}"))?.as_table()).into_iter().flatten()
}

/// Returns a number that was written as a text as a number.
pub(super) fn plain_number(value: &Value) -> Value {
    let Value::String(text) = value else { return value.clone() };
    let whole = text.parse().map(Value::Integer);
    whole.or_else(|_| text.parse().map(Value::Float)).unwrap_or_else(|_: std::num::ParseFloatError| value.clone())
}
