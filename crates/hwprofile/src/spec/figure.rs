//! A figure of the specification table, together with where it is from.
//!
//! A figure that was not found in a document has another origin than one that was, so a plan can say on what it rests.
//! Trade-off: a document is named once for several figures; pages and lines are not.

use serde::Serialize;

/// A document with figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Source {
    /// Its title and year.
    pub title: &'static str,
    /// Where it can be read.
    pub url: &'static str,
    /// Whose words these are.
    pub voice: Voice,
}

/// Whose words a document has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Voice {
    /// The maker's own document.
    Maker,
    /// Somebody's account of the maker's document, which was read instead of it.
    Account,
    /// Somebody's measurement.
    Measurement,
}

/// Where a figure is from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// It is in this document, as printed.
    Document(&'static Source),
    /// It is half of what this document prints, which counts 2:4 sparsity. Rates alone are printed so.
    Halved(&'static Source),
    /// It follows from figures in this document.
    Derived {
        /// The document.
        from: &'static Source,
        /// The arithmetic, in words.
        how: &'static str,
    },
    /// No document was found that states it: an assumption to check before anything rests on it.
    Unverified {
        /// What it is taken from instead.
        why: &'static str,
    },
}

/// A number and where it is from. Its unit is that of the field that holds it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Figure {
    /// The number.
    pub value: f64,
    /// Where it is from.
    pub origin: Origin,
}

impl Figure {
    /// A figure that a document states.
    pub(super) const fn of(value: f64, source: &'static Source) -> Self {
        Self { value, origin: Origin::Document(source) }
    }

    /// A dense rate, half of the one with sparsity that a document states.
    pub(super) const fn halved(value: f64, source: &'static Source) -> Self {
        Self { value, origin: Origin::Halved(source) }
    }

    /// A figure that follows from a document.
    pub(crate) const fn derived(value: f64, from: &'static Source, how: &'static str) -> Self {
        Self { value, origin: Origin::Derived { from, how } }
    }

    /// A figure that no document was found for.
    pub(super) const fn unverified(value: f64, why: &'static str) -> Self {
        Self { value, origin: Origin::Unverified { why } }
    }

    /// Whether a document states it, or what it follows from.
    pub fn is_verified(&self) -> bool {
        !matches!(self.origin, Origin::Unverified { .. })
    }

    /// Where it is from, in a few words.
    pub fn source(&self) -> String {
        match self.origin {
            Origin::Document(source) => source.title.to_owned(),
            Origin::Halved(source) => format!("{}; halved: printed with sparsity", source.title),
            Origin::Derived { from, how } => format!("{how}; {}", from.title),
            Origin::Unverified { why } => format!("not verified: {why}"),
        }
    }
}
