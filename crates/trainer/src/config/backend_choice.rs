//! `backend`: a backend by name, or "auto", which the plan decides.
//!
//! Trade-off: serde, clap and JSON schema are written by hand, so that "auto" is a name like the others.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use firebrick_kernels::BackendKind;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::Error as DeError;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

const AUTO: &str = "auto";
/// Every name of a [`BackendChoice`] in recipes.
const NAMES: [&str; 5] =
    [AUTO, BackendKind::Cuda.name(), BackendKind::Wgpu.name(), BackendKind::Candle.name(), BackendKind::Flex.name()];

/// The backend that a recipe or a command line requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BackendChoice {
    /// The plan decides.
    #[default]
    Auto,
    /// The backend with this name.
    Named(BackendKind),
}

impl fmt::Display for BackendChoice {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Auto => AUTO,
            Self::Named(backend) => backend.name(),
        })
    }
}

impl FromStr for BackendChoice {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            AUTO => Ok(Self::Auto),
            _ => name.parse().map(Self::Named).map_err(|_| format!("'{name}' is not one of {}", NAMES.join(", "))),
        }
    }
}

impl Serialize for BackendChoice {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for BackendChoice {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        name.parse().map_err(|_| D::Error::unknown_variant(&name, &NAMES))
    }
}

impl JsonSchema for BackendChoice {
    fn schema_name() -> Cow<'static, str> {
        "BackendChoice".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "string", "enum": NAMES })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_reads_back_as_itself() {
        for name in NAMES {
            assert_eq!(name.parse::<BackendChoice>().unwrap().to_string(), name);
        }
        assert!("tpu".parse::<BackendChoice>().unwrap_err().contains("candle, flex"));
    }
}
