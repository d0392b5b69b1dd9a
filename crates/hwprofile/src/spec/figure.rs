//! A figure of the table of accelerators, with its origin.
//!
//! A figure from a document has another origin than one without, so a plan can say on what it rests. In `accelerators.json` it has a `value` and one
//! of: `source`, the document that states it, or with `how` the document that it follows from and the arithmetic; `halved`, the document that prints
//! it with sparsity; `unverified`, the reason for a value without a document. `sources.json` lists the documents, read in 2026.
//! Trade-off: data sheets are PDF files behind forms, so many were read in a third party's account; `Voice` says so. Pages and lines are not named.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use serde::{Deserialize, Serialize};

/// A document with figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// Its title and year.
    pub title: &'static str,
    /// Its address.
    pub url: &'static str,
    /// Whose words these are.
    pub voice: Voice,
}

/// The documents by their keys in the table.
static SOURCES: LazyLock<BTreeMap<String, Source>> = LazyLock::new(|| {
    // Invariant: the file is part of the program, and a test reads it.
    serde_json::from_str(include_str!("sources.json")).expect("sources.json has documents")
});

/// Whose words a document has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Voice {
    /// The maker's own document.
    Maker,
    /// A third party's account of the maker's document, which was read instead of it.
    Account,
    /// Somebody's measurement.
    Measurement,
}

/// Origin of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// It is in this document, as printed.
    Document(&'static Source),
    /// Half of the value in this document, which counts 2:4 sparsity. Only rates are printed so.
    Halved(&'static Source),
    /// It follows from figures in this document.
    Derived {
        /// The document.
        from: &'static Source,
        /// The arithmetic, in words.
        how: &'static str,
    },
    /// No document was found: an assumption to check before anything rests on it.
    Unverified {
        /// The reason for the value.
        why: &'static str,
    },
}

/// A number and its origin. Its unit is that of the field.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "WrittenFigure")]
pub struct Figure {
    /// The number.
    pub value: f64,
    /// Its origin.
    pub origin: Origin,
}

/// A figure as in `accelerators.json`: documents by their keys in `sources.json`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenFigure {
    value: f64,
    source: Option<String>,
    halved: Option<String>,
    how: Option<String>,
    unverified: Option<String>,
}

impl TryFrom<WrittenFigure> for Figure {
    type Error = String;

    fn try_from(written: WrittenFigure) -> Result<Self, String> {
        let WrittenFigure { value, source, halved, how, unverified } = written;
        let document = |key: &str| SOURCES.get(key).ok_or_else(|| format!("`{key}` is not in sources.json"));
        let origin = match (source, halved, how, unverified) {
            (Some(key), None, None, None) => Origin::Document(document(&key)?),
            (None, Some(key), None, None) => Origin::Halved(document(&key)?),
            (Some(key), None, Some(how), None) => Origin::Derived { from: document(&key)?, how: how.leak() },
            (None, None, None, Some(why)) => Origin::Unverified { why: why.leak() },
            _ => return Err(format!("{value} needs `source`, `source` and `how`, `halved` or `unverified`")),
        };
        Ok(Self { value, origin })
    }
}

impl Figure {
    /// Creates a figure that follows from a document.
    pub(crate) const fn derived(value: f64, from: &'static Source, how: &'static str) -> Self {
        Self { value, origin: Origin::Derived { from, how } }
    }

    /// Returns whether a document states it, or states what it follows from.
    pub fn is_verified(&self) -> bool {
        !matches!(self.origin, Origin::Unverified { .. })
    }

    /// Describes its origin in a few words.
    pub fn source(&self) -> String {
        match self.origin {
            Origin::Document(source) => source.title.to_owned(),
            Origin::Halved(source) => format!("{}; halved: printed with sparsity", source.title),
            Origin::Derived { from, how } => format!("{how}; {}", from.title),
            Origin::Unverified { why } => format!("not verified: {why}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_source_is_read_and_named_by_the_table() {
        assert_eq!(SOURCES.len(), 51);
        let table = include_str!("accelerators.json");
        for key in SOURCES.keys() {
            assert!(table.contains(&format!("\"{key}\"")), "{key} is named by no figure");
        }
    }

    #[test]
    fn a_figure_has_one_origin_and_a_known_document() {
        let read = |json: &str| serde_json::from_str::<Figure>(json).map_err(|error| error.to_string());
        assert!(read(r#"{ "value": 1.0, "source": "overview" }"#).is_ok());
        for (wrong, why) in [
            (r#"{ "value": 1.0 }"#, "needs `source`"),
            (r#"{ "value": 1.0, "source": "overview", "halved": "overview" }"#, "needs `source`"),
            (r#"{ "value": 1.0, "source": "nowhere" }"#, "`nowhere` is not in sources.json"),
        ] {
            assert!(read(wrong).unwrap_err().contains(why), "{wrong}");
        }
    }
}
