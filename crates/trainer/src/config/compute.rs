//! Values of `compute`: the format of activations, and the format that the GEMMs of the layers multiply if it is another one. Its older names
//! `train.bf16` and `bnb_4bit.compute_dtype` must agree with it.
//!
//! Not supported: storage formats such as "nf4"; nothing is computed in them.

use std::fmt;

use firebrick_precision::FloatType;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as DeError};

use crate::config::RunConfig;
use crate::config::section::{Rule, rule};
use crate::config::source::Source;

/// The number format that a run computes in, as a recipe names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compute {
    /// Everything in one format.
    Plain(FloatType),
    /// GEMMs of the layers multiply E4M3; everything else is bfloat16.
    Fp8,
    /// The fastest format of the device, as far as that was measured; the plan decides.
    Auto,
}

const NAMES: [&str; 5] = [FloatType::F32.name(), FloatType::Bf16.name(), FloatType::F16.name(), "fp8", "auto"];
/// Every name that a recipe may write, for the schema.
const ALL_NAMES: [&str; 10] = ["float32", "bfloat16", "float16", "f32", "fp32", "bf16", "f16", "fp16", "fp8", "auto"];

impl Compute {
    /// Returns the format of activations and of all that is not a GEMM of a layer. [`Compute::Auto`] takes bfloat16 where the device has it.
    pub fn activations(self) -> FloatType {
        match self {
            Self::Plain(format) => format,
            Self::Fp8 | Self::Auto => FloatType::Bf16,
        }
    }

    /// Returns the name in recipes.
    pub fn name(self) -> &'static str {
        match self {
            Self::Plain(format) => format.name(),
            Self::Fp8 => "fp8",
            Self::Auto => "auto",
        }
    }
}

impl fmt::Display for Compute {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// Parses a name, for command lines.
///
/// # Errors
/// A sentence with the allowed names.
pub fn parse(name: &str) -> Result<Compute, String> {
    if let Some(compute) = [Compute::Fp8, Compute::Auto].into_iter().find(|compute| compute.name() == name) {
        return Ok(compute);
    }
    name.parse().map(Compute::Plain).map_err(|_| format!("'{name}' is not one of {}", NAMES.join(", ")))
}

/// Parses the name of a format of activations.
///
/// # Errors
/// A sentence with the allowed names.
pub fn parse_format(name: &str) -> Result<FloatType, String> {
    name.parse().map_err(|_| format!("'{name}' is not one of {}", NAMES[..3].join(", ")))
}

impl Serialize for Compute {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for Compute {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        parse(&name).map_err(|_| D::Error::unknown_variant(&name, &NAMES))
    }
}

impl JsonSchema for Compute {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Compute".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "string", "enum": ALL_NAMES })
    }
}

impl RunConfig {
    /// Returns what the recipe computes in, by whichever key names it.
    pub fn compute(&self) -> Compute {
        match (self.compute.or(self.compute_dtype()), self.train.bf16) {
            (Some(compute), _) => compute,
            (None, Some(false)) => Compute::Plain(FloatType::F32),
            (None, _) => Compute::Plain(FloatType::Bf16),
        }
    }

    fn compute_dtype(&self) -> Option<Compute> {
        self.bnb_4bit.as_ref()?.compute_dtype.map(Compute::Plain)
    }
}

/// Checks that the keys that name the format agree.
pub(super) fn agreement(config: &RunConfig, source: &Source<'_>) -> Option<Rule> {
    let activations = config.compute().activations();
    let named = |key: &'static str, compute: Option<Compute>| {
        compute.map(|compute| (key, format!("{key} = \"{compute}\""), compute.activations() == activations))
    };
    let bf16 = |bf16: bool| ("train.bf16", format!("train.bf16 = {bf16}"), bf16 == (activations == FloatType::Bf16));
    // In the order in which `RunConfig::compute` reads them.
    let said = [
        named("compute", config.compute),
        named("bnb_4bit.compute_dtype", config.compute_dtype()),
        config.train.bf16.map(bf16),
    ];
    let (agrees, contradicts): (Vec<_>, Vec<_>) = said.into_iter().flatten().partition(|(.., agrees)| *agrees);
    let ((wrong, ..), (other, written, _)) = (contradicts.first()?, agrees.first()?);
    let problem = format!("contradicts {written} ({})", source.place(other));
    let help = "a run computes in one number format: write `compute` and remove the older keys";
    Some(rule(false, *wrong, problem, help))
}

/// Reads `bnb_4bit.compute_dtype`, which names only the format of activations.
pub(super) fn deserialize_format<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<FloatType>, D::Error> {
    let name = String::deserialize(deserializer)?;
    parse_format(&name).map(Some).map_err(|_| D::Error::unknown_variant(&name, &NAMES[..3]))
}

pub(super) fn format_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "enum": ALL_NAMES[..8] })
}

#[cfg(test)]
mod tests {
    use firebrick_precision::QuantFormat;

    use super::*;

    #[test]
    fn every_name_of_the_schema_is_accepted_and_storage_formats_are_not() {
        assert!(ALL_NAMES.iter().all(|name| parse(name).is_ok()));
        let plain = |format| Ok(Compute::Plain(format));
        assert_eq!(
            (parse("fp16"), parse("bf16"), parse("f32")),
            (plain(FloatType::F16), plain(FloatType::Bf16), plain(FloatType::F32))
        );
        for format in QuantFormat::ALL {
            // A stored base may be in fp8 too, but that is a storage format: the rest is bfloat16.
            assert_eq!(parse(format.name()).is_ok(), format == QuantFormat::Fp8, "{format}");
        }
        assert_eq!(parse("nf4").unwrap_err(), "'nf4' is not one of float32, bfloat16, float16, fp8, auto");
        assert_eq!(parse_format("fp8").unwrap_err(), "'fp8' is not one of float32, bfloat16, float16");
    }

    #[test]
    fn fp8_is_a_format_of_gemms_and_the_rest_is_bfloat16() {
        let fp8 = parse("fp8").unwrap();
        assert_eq!(fp8.activations(), FloatType::Bf16);
        assert_eq!(serde_json::to_string(&[fp8, Compute::Auto]).unwrap(), "[\"fp8\",\"auto\"]");
    }
}
