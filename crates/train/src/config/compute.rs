//! The number formats that `compute` and its older name `bnb_4bit.compute_dtype` accept.
//!
//! Not supported: storage formats such as "nf4"; nothing is computed in them.

use firebrick_precision::Format;
use schemars::{Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, de::Error as DeError};

/// The formats that a run may compute in.
const FORMATS: [Format; 3] = [Format::F32, Format::Bf16, Format::F16];
/// Their names, for messages.
const NAMES: [&str; 3] = [Format::F32.name(), Format::Bf16.name(), Format::F16.name()];
/// Every name that a recipe may write for them, for the schema.
const ALL_NAMES: [&str; 8] = ["float32", "bfloat16", "float16", "f32", "fp32", "bf16", "f16", "fp16"];

/// The format with this name, for command lines.
///
/// # Errors
/// A sentence with the allowed names.
pub fn parse(name: &str) -> Result<Format, String> {
    let format = name.parse().ok().filter(|format| FORMATS.contains(format));
    format.ok_or_else(|| format!("'{name}' is not one of {}", NAMES.join(", ")))
}

pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Format>, D::Error> {
    let name = String::deserialize(deserializer)?;
    parse(&name).map(Some).map_err(|_| D::Error::unknown_variant(&name, &NAMES))
}

pub(super) fn schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "enum": ALL_NAMES })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_of_the_schema_is_a_compute_format_and_storage_formats_are_none() {
        assert!(ALL_NAMES.iter().all(|name| parse(name).is_ok()));
        assert_eq!((parse("fp16"), parse("bf16"), parse("f32")), (Ok(Format::F16), Ok(Format::Bf16), Ok(Format::F32)));
        for format in Format::ALL {
            assert_eq!(parse(format.name()).is_ok(), FORMATS.contains(&format), "{format}");
        }
        assert_eq!(parse("nf4").unwrap_err(), "'nf4' is not one of float32, bfloat16, float16");
    }
}
