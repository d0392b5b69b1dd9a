//! How much of something stays on the device, in GiB, or "auto", which the plan decides: `train.optimizer_device_gib` and
//! `train.kept_weights_gib`.
//!
//! Trade-off: serde and JSON schema are written by hand, so that a message names both forms.

use std::borrow::Cow;
use std::fmt;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{Error as DeError, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::config::section::FACTOR;

const AUTO: &str = "auto";

/// How much of something stays on the device if the rest can be fetched or computed again.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum DeviceBudget {
    /// As much as fits.
    #[default]
    Auto,
    /// At most this many GiB.
    Gib(f64),
}

impl Serialize for DeviceBudget {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Auto => serializer.serialize_str(AUTO),
            Self::Gib(gib) => serializer.serialize_f64(*gib),
        }
    }
}

impl<'de> Deserialize<'de> for DeviceBudget {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Budget)
    }
}

struct Budget;

impl Visitor<'_> for Budget {
    type Value = DeviceBudget;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("\"auto\" or a number of GiB")
    }

    fn visit_str<E: DeError>(self, text: &str) -> Result<DeviceBudget, E> {
        match text {
            AUTO => Ok(DeviceBudget::Auto),
            _ => Err(E::invalid_value(Unexpected::Str(text), &self)),
        }
    }

    fn visit_f64<E: DeError>(self, gib: f64) -> Result<DeviceBudget, E> {
        match gib {
            gib if (0.0..=FACTOR).contains(&gib) => Ok(DeviceBudget::Gib(gib)),
            _ => Err(E::invalid_value(Unexpected::Float(gib), &"0 GiB or more")),
        }
    }

    fn visit_i64<E: DeError>(self, gib: i64) -> Result<DeviceBudget, E> {
        self.visit_f64(gib as f64)
    }

    fn visit_u64<E: DeError>(self, gib: u64) -> Result<DeviceBudget, E> {
        self.visit_f64(gib as f64)
    }
}

impl JsonSchema for DeviceBudget {
    fn schema_name() -> Cow<'static, str> {
        "DeviceBudget".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "anyOf": [{ "type": "string", "enum": [AUTO] }, { "type": "number", "minimum": 0 }] })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> Result<DeviceBudget, String> {
        serde_json::from_str(json).map_err(|error| error.to_string())
    }

    #[test]
    fn a_budget_is_auto_or_gib_and_reads_back_as_itself() {
        for budget in [DeviceBudget::Auto, DeviceBudget::Gib(0.0), DeviceBudget::Gib(2.5)] {
            assert_eq!(read(&serde_json::to_string(&budget).unwrap()), Ok(budget));
        }
        assert_eq!(read("3"), Ok(DeviceBudget::Gib(3.0)));
        assert!(read("\"all\"").unwrap_err().contains("\"auto\" or a number of GiB"));
        assert!(read("-1").unwrap_err().contains("0 GiB or more"));
    }
}
