//! Rows per forward and backward pass, or "auto", which the plan decides: `train.micro_batch_size`.
//!
//! Trade-off: serde and JSON schema are written by hand, so that a message names both forms.

use std::borrow::Cow;
use std::fmt;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{Error as DeError, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::config::section::{Number, Value};

const AUTO: &str = "auto";

/// The rows of a micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MicroBatchSize {
    /// The fastest that fits.
    Auto,
    /// This many.
    Rows(usize),
}

impl MicroBatchSize {
    /// Returns the rows that the recipe gives; 1 where the plan decides.
    pub fn rows(self) -> usize {
        match self {
            Self::Auto => 1,
            Self::Rows(rows) => rows,
        }
    }
}

/// Has the limits of its number.
impl Value for MicroBatchSize {
    fn number(self) -> Option<Number> {
        match self {
            Self::Auto => None,
            Self::Rows(rows) => rows.number(),
        }
    }
}

impl Serialize for MicroBatchSize {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Auto => serializer.serialize_str(AUTO),
            Self::Rows(rows) => serializer.serialize_u64(*rows as u64),
        }
    }
}

impl<'de> Deserialize<'de> for MicroBatchSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Rows)
    }
}

struct Rows;

impl Visitor<'_> for Rows {
    type Value = MicroBatchSize;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("\"auto\" or a number of rows")
    }

    fn visit_str<E: DeError>(self, text: &str) -> Result<MicroBatchSize, E> {
        match text {
            AUTO => Ok(MicroBatchSize::Auto),
            _ => Err(E::invalid_value(Unexpected::Str(text), &self)),
        }
    }

    fn visit_i64<E: DeError>(self, rows: i64) -> Result<MicroBatchSize, E> {
        usize::try_from(rows).map(MicroBatchSize::Rows).map_err(|_| E::invalid_value(Unexpected::Signed(rows), &self))
    }

    fn visit_u64<E: DeError>(self, rows: u64) -> Result<MicroBatchSize, E> {
        usize::try_from(rows).map(MicroBatchSize::Rows).map_err(|_| E::invalid_value(Unexpected::Unsigned(rows), &self))
    }
}

impl JsonSchema for MicroBatchSize {
    fn schema_name() -> Cow<'static, str> {
        "MicroBatchSize".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "anyOf": [{ "type": "string", "enum": [AUTO] }, { "type": "integer", "minimum": 1 }] })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_auto_or_rows_and_reads_back_as_itself() {
        let read = |json: &str| serde_json::from_str::<MicroBatchSize>(json).map_err(|error| error.to_string());
        for size in [MicroBatchSize::Auto, MicroBatchSize::Rows(1), MicroBatchSize::Rows(24)] {
            assert_eq!(read(&serde_json::to_string(&size).unwrap()), Ok(size));
        }
        for wrong in ["\"all\"", "-1", "2.5"] {
            assert!(read(wrong).unwrap_err().contains("\"auto\" or a number of rows"), "{wrong}");
        }
    }
}
