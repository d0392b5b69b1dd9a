//! A decision and its reason, and what a resumed run does with it.
//!
//! Trade-off: reasons are sentences, built even if they are not printed: a plan is resolved once per run.

use serde::Serialize;

/// A decision and its reason.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Chosen<T> {
    /// The decision.
    pub value: T,
    /// The reason.
    pub reason: String,
}

impl<T> Chosen<T> {
    /// Creates a decision with its reason.
    pub fn new(value: T, reason: impl Into<String>) -> Self {
        Self { value, reason: reason.into() }
    }

    /// Creates a decision from a value that the recipe states and that has no default.
    pub fn recipe(value: T) -> Self {
        Self::new(value, "the recipe")
    }

    /// Creates a decision from the value of a key; the reason says whether it differs from the default.
    pub fn key(value: T, default: &T) -> Self
    where
        T: PartialEq,
    {
        let reason = if value == *default { "the default" } else { "the recipe" };
        Self::new(value, reason)
    }
}

/// What the decision of a resumed run has to do with that of the run that it continues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnResume {
    /// They are the same.
    Identifies,
    /// It may be another one.
    MayChange,
}

/// A decision's name in `plan.toml`, and the recipe's key of it.
pub type KeyRow = (&'static str, &'static str, OnResume);
