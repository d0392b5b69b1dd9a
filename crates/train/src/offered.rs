//! Values of an option that shells complete, next to a parser with a message of its own.

use std::ffi::OsStr;

use clap::builder::{PossibleValue, TypedValueParser};
use clap::{Arg, Command, Error};

/// A parser, and the values that it offers.
#[derive(Clone)]
pub(crate) struct Offered<T> {
    pub(crate) values: Vec<&'static str>,
    /// Reads one of them, or any other form.
    pub(crate) parse: fn(&str) -> Result<T, String>,
}

impl<T: Clone + Send + Sync + 'static> TypedValueParser for Offered<T> {
    type Value = T;

    fn parse_ref(&self, command: &Command, argument: Option<&Arg>, value: &OsStr) -> Result<T, Error> {
        self.parse.parse_ref(command, argument, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(self.values.iter().map(|value| PossibleValue::new(*value))))
    }
}
