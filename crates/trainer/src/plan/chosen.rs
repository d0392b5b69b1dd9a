//! A decision together with its reason.
//!
//! Trade-off: reasons are sentences, built even when no one prints them; a plan is resolved once per run.

use serde::Serialize;

/// A decision and why it was made.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Chosen<T> {
    /// The decision.
    pub value: T,
    /// Why.
    pub reason: String,
}

impl<T> Chosen<T> {
    /// A decision and its reason.
    pub fn new(value: T, reason: impl Into<String>) -> Self {
        Self { value, reason: reason.into() }
    }

    /// A value that the recipe states, where it has no default of its own.
    pub fn recipe(value: T) -> Self {
        Self::new(value, "the recipe")
    }

    /// The value of a key; the reason says whether it is anything but what the key would be without the recipe.
    pub fn key(value: T, default: &T) -> Self
    where
        T: PartialEq,
    {
        let reason = if value == *default { "the default" } else { "the recipe" };
        Self::new(value, reason)
    }
}
